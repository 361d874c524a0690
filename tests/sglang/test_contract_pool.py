"""What SGLang expects of its device pool.

| contract | test |
|---|---|
| ``set_mla_kv_buffer`` | ``test_set_mla_kv_buffer_*``, ``test_padding_*`` |
| ``translate_loc_to_hisparse_device`` | ``test_translate_*`` |
| ``kv_buffer``, ``get_key_buffer`` | ``test_buffers_*`` |
| indexer rows by slot | ``test_indexer.py`` |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from by_hand import LAYERS, ByHand
from engine import PAGE, Engine
from scenarios import HYBRID
from sglang.srt.mem_cache import hisparse_memory_pool

PAGES = 20


@pytest.fixture
def hand() -> Iterator[ByHand]:
    engine = Engine(replace(HYBRID, tokens=PAGES * PAGE), seed=0)
    yield ByHand(engine)
    engine.close()


def test_set_mla_kv_buffer_writes_the_device_rows_of_slots_in_every_layer(hand: ByHand) -> None:
    req = hand.prefill(PAGE + 10)
    slots = hand.slots(req)
    rows = hand.pool.translate_loc_to_hisparse_device(slots)
    memory = hand.pool.rows.view(torch.int16)  # not floats: poison is not equal to itself
    before = memory.clone()
    for layer in LAYERS:
        assert torch.equal(hand.held(rows, layer), hand.expected(slots, layer))
        hand.write(slots.flip(0)[:5], layer)
    assert torch.equal(memory, before)


def test_padding_goes_to_page_0(hand: ByHand) -> None:
    slots = hand.slots(hand.prefill(3))
    memory = hand.pool.rows.view(torch.int16)[:, PAGE:]
    before = memory.clone()
    lost = int(hand.life.config.host_pages - 1) * PAGE  # its page is not in use
    for layer in LAYERS:
        hand.write(torch.tensor([0, int(slots[0]), 0, lost]), layer)
    assert torch.equal(memory, before)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_translate_takes_lists_and_page_tables_and_keeps_minus_1(hand: ByHand, dtype: torch.dtype) -> None:
    slots = hand.slots(hand.prefill(2 * PAGE)).to(dtype)
    rows = hand.pool.translate_loc_to_hisparse_device(slots)
    assert rows.dtype == torch.int32 and (rows >= PAGE).all()
    table = torch.stack([slots, torch.where(slots % 3 == 0, -1, slots)])
    expected = torch.stack([rows, torch.where(slots % 3 == 0, -1, rows)])
    assert torch.equal(hand.pool.translate_loc_to_hisparse_device(table), expected)
    lost = torch.tensor([(hand.life.config.host_pages - 1) * PAGE], dtype=dtype)
    assert hand.pool.translate_loc_to_hisparse_device(lost).tolist() == [-1]


def test_buffers_in_bf16(hand: ByHand) -> None:
    assert len(hand.pool.kv_buffer) == len(LAYERS)
    for layer in LAYERS:
        buffer = hand.pool.kv_buffer[layer]
        assert buffer.shape == ((PAGES + 1) * PAGE, 1, 48) and buffer.dtype == torch.bfloat16
        assert buffer.is_contiguous() and hand.pool.get_key_buffer(layer).data_ptr() == buffer.data_ptr()


@pytest.mark.usefixtures("hand")
def test_buffers_in_fp8() -> None:
    pool: Any = hisparse_memory_pool.HiSparseDSATokenToKVPool(
        size=2 * PAGE, page_size=PAGE, kv_lora_rank=512, dtype=torch.float8_e4m3fn, qk_rope_head_dim=64,
        layer_num=2, device="cpu", index_head_dim=128, enable_memory_saver=False, kv_cache_dim=656,
    )  # fmt: skip
    assert [buffer.shape for buffer in pool.kv_buffer] == [(3 * PAGE, 1, 656)] * 2
    assert pool.kv_buffer[0].dtype == torch.uint8 and pool.row_bytes == 656
    assert pool.layout(None).host_group.row.row_bytes == 656
