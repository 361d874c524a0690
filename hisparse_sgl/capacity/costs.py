"""Bytes and pages that one request and one page of tokens take, on one rank of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from hisparse_sgl.capacity.inputs import Workload
from hisparse_sgl.capacity.model import COMPRESSOR, PAGE_ROWS, WINDOW, ModelShape
from hisparse_sgl.config import ACTIVE_TAIL_PAGES, MAX_HOT_ROWS
from hisparse_sgl.kernels.sizes import hot_state_bytes

SELECTED_ROW_STATE_BYTES = 12  # source slot, destination row and answer, int32 each


@dataclass(frozen=True)
class Costs:
    """What the sums of a plan are made of."""

    page_tokens: int
    page_rows_bytes: int  # rows, all layers: a host page and a device page take this much
    page_index_bytes: int  # indexer rows, all index layers
    page_other_bytes: int  # what else a page of tokens takes on the device: C128 rows, draft layer
    hot_rows: int
    hot_pages: int
    hot_region_bytes: int
    index_groups: int
    step_state_bytes: int  # plan and answer of one request, all index groups
    window_bytes: int  # of one request: pages of its sliding windows
    compressor_bytes: int  # of one request: keys and gates of windows that are not compressed yet
    context_pages: int
    step_row_bytes: int  # rows that one request selects in one step, all layers

    @classmethod
    def of(cls, model: ModelShape, workload: Workload) -> Costs:
        layout = model.layout(workload.kv_dtype)
        group = layout.host_group
        states = {state.name: state.bytes_per_request for state in layout.states}
        page = group.bytes_per_page()
        selected = workload.query_rows * model.top_k
        hot_rows = _hot_rows(workload.hot_rows, selected)
        hot_pages = hot_rows // PAGE_ROWS
        draft = model.draft_page_bytes(workload.kv_dtype) if workload.query_rows > 1 else 0
        groups = len(group.index_groups)
        return cls(
            page_tokens=model.page_tokens,
            page_rows_bytes=page.rows,
            page_index_bytes=page.index_rows,
            page_other_bytes=layout.device_page_bytes() - page.index_rows + draft,
            hot_rows=hot_rows,
            hot_pages=hot_pages,
            hot_region_bytes=hot_pages * page.rows,
            index_groups=groups,
            step_state_bytes=groups * SELECTED_ROW_STATE_BYTES * selected,
            window_bytes=states.get(WINDOW, 0),
            compressor_bytes=states.get(COMPRESSOR, 0),
            context_pages=-(-workload.context // model.page_tokens),
            step_row_bytes=selected * group.num_layers * group.row.row_bytes,
        )

    @property
    def page_device_bytes(self) -> int:
        """Device bytes that one host page costs."""
        return self.page_index_bytes + self.page_other_bytes

    @property
    def kept_bytes(self) -> int:
        """Device bytes that a request keeps besides its pages."""
        return self.window_bytes + self.compressor_bytes

    def hot_state_bytes(self, context_pages: int) -> int:
        """Hot state of one region, for contexts of that length."""
        return hot_state_bytes(self.hot_rows, context_pages * PAGE_ROWS, self.index_groups)

    def hot_regions(self, requests: int, device_pages: int) -> int:
        """Most hot regions at one time: as many as requests, and as fit on the device."""
        return min(requests, max(device_pages - 1, 0) // self.hot_pages)

    def state_bytes(self, requests: int, device_pages: int, context_pages: int) -> int:
        """Device bytes of what is kept for each region and each request, besides pages."""
        regions = self.hot_regions(requests, device_pages) * self.hot_state_bytes(context_pages)
        return regions + requests * (self.step_state_bytes + self.kept_bytes)

    def small_pages(self, context_pages: int) -> int:
        """Device pages of a request that reads through its hot region; a short one stays resident instead."""
        return min(context_pages, self.hot_pages + ACTIVE_TAIL_PAGES)

    def device_pages_needed(self, requests: int, context_pages: int) -> int:
        """Device pages with which ``requests`` can be admitted one by one, each giving up what it can.

        The null page; the newest prompt whole, beside one hot region; for each other request its small part
        and one page to grow into.
        """
        others = (requests - 1) * (self.small_pages(context_pages) + 1)
        return 1 + others + context_pages + self.hot_pages

    def device_bytes_needed(self, requests: int, context_pages: int) -> int:
        """Device bytes for ``requests`` of that context: pages, indexer rows of host slots, state."""
        device_pages = self.device_pages_needed(requests, context_pages)
        return (
            self.page_rows_bytes * device_pages
            + self.page_device_bytes * (1 + requests * context_pages)
            + self.state_bytes(requests, device_pages, context_pages)
        )


def _hot_rows(wanted: int | None, selected: int) -> int:
    twice = -(-2 * selected // PAGE_ROWS) * PAGE_ROWS
    rows = twice if wanted is None else wanted
    if rows < selected or rows % PAGE_ROWS or rows > MAX_HOT_ROWS:
        raise ValueError(
            f"--hot-rows is {rows}, it must be a multiple of {PAGE_ROWS} in {selected}..{MAX_HOT_ROWS} "
            f"(one step selects {selected} rows): use {min(twice, MAX_HOT_ROWS)} or lower --query-rows"
        )
    return rows
