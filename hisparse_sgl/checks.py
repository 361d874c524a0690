"""Checks of arguments that users pass; each raises ``ValueError`` before anything changes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import index

import numpy as np
import torch

from hisparse_sgl.kernels.backend import check_tensor
from hisparse_sgl.radix.page_hash import TokenIds

SLOT_DTYPES = (torch.int32, torch.int64)


def whole(field: str, value: object) -> int:
    """``value`` as an int: Python's, numpy's and one-element integer tensors are fine, floats are not."""
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(
            f"{field} is {value!r}, the limit is a whole number: convert it with int()"
        ) from None


def request_id(rid: object) -> str:
    """``rid`` itself, if it is a string."""
    if not isinstance(rid, str):
        raise ValueError(f"rid is {rid!r}, the limit is a string: use str(rid)")
    return rid


def check_rids(rids: Sequence[str]) -> None:
    """Raise unless ``rids`` names each request of a batch once."""
    if isinstance(rids, str):
        raise ValueError(f"rids is {rids!r}, the limit is a list of request ids: use [{rids!r}]")
    if len(set(rids)) != len(rids):
        raise ValueError(f"rids {list(rids)} name a request twice: name each once")


def tokens(token_ids: object) -> TokenIds:
    """``token_ids`` as what the page hashes take: a sequence or an array, on the CPU."""
    if isinstance(token_ids, torch.Tensor):
        return token_ids.cpu().numpy()
    if not isinstance(token_ids, Sequence | np.ndarray | array):
        raise ValueError(
            f"token_ids is {type(token_ids).__name__}, the limit is a list, array or tensor of integers: "
            "convert it with list()"
        )
    return token_ids


def check_slots(slots: torch.Tensor, num_slots: int) -> None:
    """Raise unless ``slots`` is int [n] and, where looking costs no synchronisation, inside the host pool."""
    check_tensor("slots", slots, SLOT_DTYPES, (None,))
    if slots.device.type == "cpu":
        outside = slots[(slots < 0) | (slots >= num_slots)].tolist()
        if outside:
            raise ValueError(
                f"slots has {outside}, the limit is 0..{num_slots - 1}: pass slots that extend returned"
            )


def check_positions(positions: torch.Tensor, batch: int, top_k: int) -> None:
    """Raise unless ``positions`` is [batch, 1..top_k]."""
    if positions.ndim != 2 or positions.shape[0] != batch or not 1 <= positions.shape[1] <= top_k:
        raise ValueError(
            f"positions has shape {tuple(positions.shape)}, it must be [{batch}, 1..{top_k}]: one row a "
            "query row of begin_step's batch, at most top_k columns"
        )


def row_bytes(rows: torch.Tensor, num_slots: int, width: int) -> torch.Tensor:
    """``rows`` as uint8 [num_slots, width]; raises where it has another number of rows or bytes a row."""
    data = rows
    if rows.ndim == 2:
        count, columns = rows.shape
        # A view to bytes needs a last stride of 1; a dimension of size 1 may have any, and is contiguous.
        flat = rows.contiguous().as_strided((rows.numel(),), (1,))
        data = flat.view(torch.uint8).view(count, columns * rows.dtype.itemsize)
    if data.shape != (num_slots, width):
        raise ValueError(
            f"rows has shape {tuple(rows.shape)} of {rows.dtype}, the limit is {num_slots} rows of {width} "
            "bytes: pass one whole row for each slot"
        )
    return data
