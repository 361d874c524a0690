"""What hurt the plugin once: odd requests, and traps that lie in a GPU's order of work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drive import Script
from engine import PAGE, Engine
from launching import validate, write_model
from scenarios import HYBRID
from sglang.srt.environ import envs

from hisparse_sgl.config import MAX_CONTEXT
from hisparse_sgl.integrations.sglang.coordinator import Coordinator
from hisparse_sgl.integrations.sglang.options import Options
from hisparse_sgl.integrations.sglang.validation import REFUSALS


def two_requests_of_one_id(drive: Script) -> Iterator[None]:
    """As two tokenizer workers may send them: each of these only knows its own."""
    rid = drive.send(3 * PAGE, 20)
    first, client = drive.outgoing[-1], drive.traffic.live[rid]
    drive.outgoing.append(first)
    yield
    while drive.is_live(rid):
        yield
    client.said = []
    del drive.forwards.cached[rid]
    drive.traffic.live[rid] = client
    while drive.is_live(rid):
        yield


@pytest.mark.parametrize("overlap", [True, False])
def test_a_second_request_of_an_id_waits_for_the_first(overlap: bool) -> None:
    assert Script(replace(HYBRID, overlap=overlap), two_requests_of_one_id).run()["prefill steps"] == 2


def nobody_is_displaced(drive: Script) -> Iterator[None]:
    """The batch is full of a request of the same priority; room for the other would cost it a hot region."""
    running = drive.send(8 * PAGE, 40)
    yield
    while not drive.has_started(running):
        yield
    waiting = drive.send(8 * PAGE, 1)
    for request in drive.outgoing:
        request.priority = 0
    for _ in range(30):
        yield
        assert drive.is_live(running) and not drive.has_started(waiting)
        hot = [r.hot_pages for r in drive.scheduler.hisparse_coordinator.lifecycle.requests.values()]
        assert not any(hot), "a running request was given a hot region for nothing"
    while drive.is_live(waiting):
        yield


def test_a_full_batch_gives_no_hot_regions_to_make_room() -> None:
    settings = replace(HYBRID, tokens=14 * PAGE, priorities=True, max_requests=1, copy_rate=1.0)
    Script(settings, nobody_is_displaced).run()


def test_a_prompt_that_never_fits_the_device_is_refused_on_arrival() -> None:
    """Also where no tokens are generated, and the allocator is not asked."""
    engine = Engine(replace(HYBRID, tokens=10 * PAGE), seed=0)
    try:
        scheduler: Any = engine.scheduler
        longest = scheduler.hisparse_coordinator.lifecycle.longest_request
        assert longest < scheduler.max_total_num_tokens
        assert scheduler.max_req_input_len == longest
        assert scheduler.get_init_info()["max_req_input_len"] == longest
    finally:
        engine.close()


def test_a_context_beyond_the_kernels_is_served_up_to_their_limit() -> None:
    """SGLang's rows are a few tokens longer than the context of the model."""
    assert config_of(context=1000).context_len == 1004
    assert config_of(context=MAX_CONTEXT).context_len == MAX_CONTEXT


def test_a_batch_may_be_padded_to_a_multiple_of_the_ranks() -> None:
    """Some MoE backends need that; SGLang captures graphs of 8 rows then, though 4 requests run at most."""
    assert [config_of(requests=4, ranks=ranks).max_requests for ranks in (1, 2, 8)] == [5, 6, 8]


def config_of(context: int = 1000, requests: int = 4, ranks: int = 1) -> Any:
    """The configuration that the coordinator makes of SGLang's sizes."""
    coordinator: Any = object.__new__(Coordinator)
    table = torch.empty((requests + 1, context + 4), device="meta")
    coordinator.mem_pool_device = SimpleNamespace(page_size=PAGE, num_pages=40)
    coordinator.token_to_kv_pool_allocator = SimpleNamespace(size_full=2 * MAX_CONTEXT)
    coordinator.req_to_token_pool = SimpleNamespace(req_to_token=table)
    coordinator.options = Options(max_hot_requests=1)
    coordinator.tp_world_size = ranks
    return coordinator._config(48, 2 * PAGE, None)


@pytest.mark.parametrize("overlap", [True, False])
def test_poison_runs_behind_the_forward_in_flight(monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    log: list[object] = []

    class Pool:
        class buffer:
            is_cuda, device = True, "cuda"

        def poison_pages(self, pages: list[int]) -> None:
            log.append(pages)

    class Current:
        def wait_stream(self, stream: object) -> None:
            log.append(stream)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Current())
    coordinator: Any = object.__new__(Coordinator)
    coordinator.device_pool = Pool()
    coordinator.forward_stream = "forward" if overlap else None
    coordinator._poison([3])
    assert log == (["forward", [3]] if overlap else [[3]])


@pytest.mark.usefixtures("plugin")
def test_our_tree_is_refused_without_hisparse(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"--radix-cache-backend is hisparse.*--enable-hisparse"):
        validate(write_model(tmp_path, "glm"), radix_cache_backend="hisparse")


@pytest.mark.usefixtures("plugin")
def test_the_check_for_leaks_while_busy_is_refused(tmp_path: Any) -> None:
    model = write_model(tmp_path, "glm")
    with envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY.override(1):
        with pytest.raises(ValueError, match="SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY is 1"):
            validate(model, enable_hisparse=True)
        validate(model)


def test_moe_backends_that_decode_as_they_prefill_are_refused() -> None:
    (refusal,) = (refusal for refusal in REFUSALS if refusal.flag == "--moe-a2a-backend")
    for backend, replicas, found in (("pplx", 2, "pplx"), ("pplx", 1, None), ("deepep_v2", 2, None)):
        assert refusal.found(SimpleNamespace(moe_a2a_backend=backend, attn_dp_size=replicas)) == found
    with envs.SGLANG_DEEPEP_V2_FORCE_MAX_LEN.override(True):
        assert refusal.found(SimpleNamespace(moe_a2a_backend="deepep_v2", attn_dp_size=2)) == "deepep_v2"
