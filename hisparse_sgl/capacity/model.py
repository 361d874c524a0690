"""The part of a model that capacity depends on: its rows, indexer rows, layers and weights."""

from __future__ import annotations

from dataclasses import dataclass

from hisparse_sgl.kernels.rows import RowFormat
from hisparse_sgl.mem_pool.layout import CacheGroup, IndexGroup, KVLayout, StateGroup

PAGE_ROWS = 64
KV_DTYPES = ("fp8", "bf16")
QUANT_BLOCK = 128
SCALE_BYTES = 4
BF16_BYTES = 2
V4_ROW_PARTS = (576, 8)
V4_PAGE_ALIGN = 576
V4_HEAD_DIM = 512
V4_C128 = 128
# SGLang 0.5.23 keeps float32 keys and gates of a compressor: eight rows of both series for each page of a
# sliding window (C4 and its indexer), 128 rows of one series for each request (C128). Source:
# deepseek_v4_compress_state.py
STATE_BYTES = 4
C4_STATE_ROWS = 8
WINDOW, COMPRESSOR = "sliding window", "compressor state"

WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5625}
"""Bytes of one parameter. fp4 has a one-byte scale for 16 weights; the scales of fp8 are too few to count."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one model.

    ``num_layers`` counts the layers whose rows lie on the host: all of a DSA model, the C4 layers of DeepSeek
    V4. ``tokens_per_row`` tokens share a row there (4 for C4). ``c128_layers`` and the sliding window of
    ``window_layers`` layers exist in V4 only and stay on the device; ``layout`` has all of them by group.
    ``parameters`` is None where the config does not tell it, ``weights_dtype`` likewise.
    """

    name: str
    model_type: str
    max_context: int
    top_k: int
    num_layers: int
    index_groups: tuple[IndexGroup, ...]
    index_head_dim: int
    kv_lora_rank: int = 0
    rope_dim: int = 0
    num_heads: int | None = None
    tokens_per_row: int = 1
    c128_layers: int = 0
    window: int = 0
    window_layers: int = 0
    parameters: int | None = None
    weights_dtype: str | None = None

    @property
    def is_v4(self) -> bool:
        return self.model_type == "deepseek_v4"

    @property
    def page_tokens(self) -> int:
        """Tokens in a page: 64 for DSA, 256 for V4 (64 rows of 4 tokens)."""
        return PAGE_ROWS * self.tokens_per_row

    @property
    def index_row_bytes(self) -> int:
        """An fp8 indexer key with one float32 scale for each 128 numbers."""
        return self.index_head_dim + self.index_head_dim // QUANT_BLOCK * SCALE_BYTES

    def row_parts(self, kv_dtype: str) -> tuple[int, ...]:
        """Bytes of each part of a row. ``ValueError`` for a dtype that the model has no row format for."""
        if self.is_v4:
            if kv_dtype != "fp8":
                raise ValueError(
                    f"--kv-dtype is {kv_dtype}, {self.name} keeps its rows in fp8 with a bf16 part: use fp8"
                )
            return V4_ROW_PARTS
        if kv_dtype == "bf16":
            return (BF16_BYTES * (self.kv_lora_rank + self.rope_dim),)
        scales = self.kv_lora_rank // QUANT_BLOCK * SCALE_BYTES
        return (self.kv_lora_rank + scales + BF16_BYTES * self.rope_dim,)

    def cache_group(self, kv_dtype: str) -> CacheGroup:
        """The host-backed cache group, as the pool itself lays it out."""
        row = RowFormat.make(self.row_parts(kv_dtype), PAGE_ROWS, V4_PAGE_ALIGN if self.is_v4 else 1)
        name = "c4" if self.is_v4 else "kv"
        return CacheGroup(
            name, self.num_layers, row, self.index_groups, self.index_row_bytes, self.tokens_per_row
        )

    def layout(self, kv_dtype: str) -> KVLayout:
        """All groups: the host-backed one and, of V4, what lies beside it on the device."""
        groups = [self.cache_group(kv_dtype)]
        if self.c128_layers:
            row = RowFormat.make(V4_ROW_PARTS, self.page_tokens // V4_C128, V4_PAGE_ALIGN)
            groups.append(CacheGroup("c128", self.c128_layers, row, (), 0, V4_C128, host_backed=False))
        return KVLayout(tuple(groups), self.page_tokens, self._states() if self.is_v4 else ())

    def _states(self) -> tuple[StateGroup, ...]:
        """A request touches one page more than its window has; at a boundary the window alone is enough."""
        pages = -(-self.window // self.page_tokens)
        window = self.window_layers * RowFormat.make(V4_ROW_PARTS, self.page_tokens, V4_PAGE_ALIGN).page_bytes
        series = 2 * STATE_BYTES  # a key and a gate
        c4 = self.num_layers * C4_STATE_ROWS * 2 * series * (V4_HEAD_DIM + self.index_head_dim)
        c128 = self.c128_layers * V4_C128 * series * V4_HEAD_DIM
        return (
            StateGroup(WINDOW, (pages + 1) * window, pages * window),
            StateGroup(COMPRESSOR, (pages + 1) * c4 + c128, pages * c4),
        )

    def draft_page_bytes(self, kv_dtype: str) -> int:
        """Device bytes of one page of the draft layer, which keeps a row and an indexer row a token."""
        return PAGE_ROWS * (sum(self.row_parts(kv_dtype)) + self.index_row_bytes)

    def weight_bytes(self, dtype: str | None) -> int:
        """Bytes of all weights: ``parameters`` in ``dtype``, or in the dtype that the config names."""
        kind = dtype or self.weights_dtype
        if self.parameters is None:
            raise ValueError(
                f"the weights of {self.name} cannot be counted from its config: give --weights-gib"
            )
        if kind is None:
            raise ValueError(
                f"the config of {self.name} names no weight dtype that is known here "
                f"({', '.join(WEIGHT_BYTES)}): give --weights-dtype or --weights-gib"
            )
        return round(self.parameters * WEIGHT_BYTES[kind])
