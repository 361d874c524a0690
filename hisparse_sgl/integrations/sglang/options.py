"""The JSON of ``--hisparse-config``: SGLang's four fields and those of this plugin."""

from __future__ import annotations

import json
from difflib import get_close_matches
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hisparse_sgl.config import MAX_HOT_ROWS

PAGE_SIZE = 64
"""Tokens a page; the only size that SGLang's DSA pools have on CUDA."""

Count = Annotated[int, Field(ge=1)]


class Options(BaseModel):
    """Checked options, made by ``parse``. Its errors name the field, its value, the limit and the fix."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    top_k: Annotated[Count, Field(description="Rows a query selects, where the model does not say.")] = 2048
    device_buffer_size: Annotated[
        int | None,
        Field(
            ge=PAGE_SIZE,
            le=MAX_HOT_ROWS,
            multiple_of=PAGE_SIZE,
            description="Rows of one hot region; null means twice `top_k`, in whole pages.",
        ),
    ] = None
    host_to_device_ratio: Annotated[
        Count, Field(le=1024, description="Size of the host pool, in sizes of the device pool.")
    ] = 2
    swap_in_block_size: Annotated[
        Count, Field(le=1024, description="Threads a block of SGLang's kernel; checked, not used by ours.")
    ] = 960
    eager_host_mirror: Annotated[
        bool, Field(description="Copy the rows of each step to the host at its end, not page by page.")
    ] = False
    max_spill_pages: Annotated[
        Count | None, Field(description="Most pages one step may start to spill; null means one context.")
    ] = None
    admission_window: Annotated[
        Count | None,
        Field(
            description="Most prompt tokens admitted and not yet prefilled; null sets no limit of its own."
        ),
    ] = None
    audit_every: Annotated[
        int, Field(ge=0, description="Compare device with host bytes every so many steps; 0 is off.")
    ] = 0
    kernels: Annotated[
        Literal["auto", "triton", "reference", "interpreter"],
        Field(description="Kernel implementation; auto picks by device."),
    ] = "auto"
    poison: Annotated[
        bool, Field(description="Fill device pages with NaN bytes when they are handed out. For tests.")
    ] = False
    max_hot_requests: Annotated[
        Count | None,
        Field(description="Most hot regions; null means those whose state takes 5 % of the device pool."),
    ] = None
    resident_graphs: Annotated[
        bool,
        Field(description="Capture each decode graph a second time, for steps whose rows are all resident."),
    ] = False

    @classmethod
    def parse(cls, json_text: str | None) -> Options:
        """Options of a ``--hisparse-config`` value; None and an empty string mean all defaults."""
        try:
            given = json.loads(json_text) if json_text else {}
        except json.JSONDecodeError as error:
            raise ValueError(
                f"--hisparse-config is {json_text!r}, the limit is a JSON object ({error}): quote it as "
                """'{"host_to_device_ratio": 5}'"""
            ) from None
        if not isinstance(given, dict):
            raise ValueError(
                f"--hisparse-config is {json_text!r}, the limit is a JSON object: write "
                """'{"host_to_device_ratio": 5}'"""
            )
        _refuse_unknown(given, list(cls.model_fields))
        try:
            options = cls.model_validate(given)
        except ValidationError as error:
            raise ValueError("; ".join(_explain(entry) for entry in error.errors())) from None
        _check_hot_rows(options.hot_rows(options.top_k), options.top_k, "top_k")
        return options

    def hot_rows(self, top_k: int) -> int:
        """Rows of a hot region for a model that selects ``top_k`` rows."""
        return self.device_buffer_size or -(-2 * top_k // PAGE_SIZE) * PAGE_SIZE

    def check_model(self, index_topk: int) -> None:
        """Raise where the hot region is too small, or cannot be made large enough, for the model's top-k."""
        _check_hot_rows(self.hot_rows(index_topk), index_topk, "index_topk of the model")


def _refuse_unknown(given: dict[str, object], known: list[str]) -> None:
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.0)
            raise ValueError(
                f"--hisparse-config has {name!r}: {given[name]!r}, the limit is the fields "
                f"{', '.join(known)}: did you mean {near[0]!r}?"
            )


def _explain(entry: object) -> str:
    """One error of pydantic in our words: field, value, limit, fix."""
    assert isinstance(entry, dict)
    field = ".".join(str(part) for part in entry["loc"])
    reason = str(entry["msg"]).replace("Input should be", "must be")
    return f"{field} of --hisparse-config is {entry['input']!r}, the limit: {reason}. Correct {field}"


def _check_hot_rows(rows: int, top_k: int, name: str) -> None:
    if rows < top_k:
        raise ValueError(
            f"device_buffer_size of --hisparse-config is {rows}, the limit is {name} = {top_k}: one step "
            f"selects as many. Set it to at least {-(-top_k // PAGE_SIZE) * PAGE_SIZE}, better twice that"
        )
    if rows > MAX_HOT_ROWS:
        raise ValueError(
            f"top_k of --hisparse-config is {top_k}, the limit of a hot region is {MAX_HOT_ROWS} rows and "
            f"this asks for {rows}: lower top_k or set device_buffer_size"
        )
