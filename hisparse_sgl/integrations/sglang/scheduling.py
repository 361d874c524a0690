"""What is wrapped around methods of SGLang's scheduler and model runner, to act beside our coordinator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hisparse_sgl.integrations.sglang.adder import adder_class


def is_ours(coordinator: Any) -> bool:
    return getattr(coordinator, "hisparse_sgl", False)


def init_model_worker(original: Callable[..., Any], scheduler: Any) -> Any:
    """The size of the pool is that of our allocator, whose tokens are the host's. SGLang takes it from the
    device pool, and divides by it in statistics, load reports, event metrics and server info.

    A prompt must fit the device as well. SGLang asks the allocator only where tokens are generated: an
    embedding request that is too long would wait for ever, and all others behind it."""
    output = original(scheduler)
    runner = scheduler.tp_worker.model_runner
    coordinator = runner.hisparse_coordinator
    if is_ours(coordinator):
        scheduler.max_total_num_tokens = runner.token_to_kv_pool_allocator.size_full
        longest = coordinator.lifecycle.longest_request
        scheduler.max_req_input_len = min(scheduler.max_req_input_len, longest)
    return output


def get_next_batch_to_run(
    original: Callable[..., Any], scheduler: Any, running_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Look after copies first. A prefill joins the running batch as without HiSparse: nothing is staged."""
    coordinator = scheduler.hisparse_coordinator
    if not is_ours(coordinator):
        return original(scheduler, running_batch, *args, **kwargs)
    coordinator.collect()
    if coordinator.admission.may_have_room(scheduler.waiting_queue):
        running_batch.batch_is_full = False
    scheduler.enable_hisparse = False
    try:
        return original(scheduler, running_batch, *args, **kwargs)
    finally:
        scheduler.enable_hisparse = True


def get_prefill_adder_class(original: Callable[..., Any], scheduler: Any) -> Any:
    base = original(scheduler)
    return adder_class(base) if is_ours(scheduler.hisparse_coordinator) else base


def prepare_for_decode(original: Callable[..., Any], batch: Any) -> Any:
    """Slots and device pages of a decode step, by request: SGLang's allocator only sees lengths."""
    if is_ours(batch.hisparse_coordinator):
        batch.hisparse_coordinator.prepare_decode(batch.reqs)
    return original(batch)


def forward_raw(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """On the forward's stream: bring the tables up to date before, mirror the new rows behind."""
    coordinator = runner.hisparse_coordinator
    if not is_ours(coordinator):
        return original(runner, *args, **kwargs)
    coordinator.before_forward()
    output = original(runner, *args, **kwargs)
    coordinator.after_forward()
    return output
