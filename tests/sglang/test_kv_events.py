"""KV events follow the tree: stored when pages are published, removed when they are evicted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import engine
import pytest
from drive import Drive
from engine import PAGE
from memory import tree_pages
from scenarios import BUSY, CONVERSATIONS, HYBRID, SCENARIOS
from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisherFactory,
)
from sglang.srt.server_args import ServerArgs


class Recorder:
    """Stands for the socket: the blocks that a router knows, checked with each batch of events.

    A block may be held more than once, because SGLang leaves ``extra_key`` out of its hash.
    """

    def __init__(self, **config: Any) -> None:
        self.held: Counter[int] = Counter()
        self.seen: Counter[str] = Counter()

    def publish(self, batch: Any) -> None:
        for event in batch.events:
            self.seen[type(event).__name__] += 1
            if isinstance(event, AllBlocksCleared):
                self.held.clear()
            elif isinstance(event, BlockStored):
                self._store(event)
            else:
                assert isinstance(event, BlockRemoved)
                self.held.subtract(event.block_hashes)
                assert min(self.held.values()) >= 0, "a block was removed and not stored"
                self.held = +self.held

    def _store(self, event: BlockStored) -> None:
        assert event.block_size == PAGE and len(event.token_ids) == PAGE * len(event.block_hashes)
        assert event.parent_block_hash is None or event.parent_block_hash in self.held
        self.held.update(event.block_hashes)
        self.seen["pages stored"] += len(event.block_hashes)


@pytest.fixture(autouse=True)
def with_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EventPublisherFactory._registry, "recorder", Recorder)
    config = '{"publisher": "recorder"}'
    monkeypatch.setattr(engine, "ServerArgs", partial(ServerArgs, kv_events_config=config))


@pytest.mark.parametrize("core", ["rust", "python"])
@pytest.mark.parametrize(("scenario", "load"), [("tight host", CONVERSATIONS), ("retractions", BUSY)])
def test_a_router_knows_the_pages_of_the_tree(core: str, scenario: str, load: Any) -> None:
    drive = Drive(replace(SCENARIOS[scenario][0], core=core), replace(load, flush=0.01), seed=5, steps=250)
    scheduler: Any = drive.scheduler
    recorder = scheduler.kv_events_publisher.kv_event_publisher
    counted: list[int] = []
    check = drive.check

    def check_events() -> None:
        check()
        scheduler.kv_events_publisher.publish_kv_events()
        pages = len(tree_pages(scheduler.tree_cache))
        held = recorder.held.total()
        assert held == pages, f"{held} blocks reported, the tree has {pages}"
        counted.append(pages)

    drive.check = check_events  # type: ignore[method-assign]
    drive.run()
    assert max(counted) > 10 and recorder.seen["pages stored"] > 50, recorder.seen
    assert recorder.seen["BlockRemoved"] and recorder.seen["AllBlocksCleared"], recorder.seen


def test_a_page_that_is_not_durable_is_not_reported() -> None:
    """No copy lands: requests end, their pages wait, a router hears of none."""
    settings = replace(HYBRID, tokens=30 * PAGE, copy_rate=0.0)
    drive = Drive(settings, replace(BUSY, flush=0.0, most_live=2), seed=1, steps=30)
    scheduler: Any = drive.scheduler
    recorder = scheduler.kv_events_publisher.kv_event_publisher
    waiting = 0
    step = drive.step

    def step_events() -> list[Any]:
        nonlocal waiting
        sent = step()
        waiting = max(waiting, len(scheduler.tree_cache.detached))
        scheduler.kv_events_publisher.publish_kv_events()
        assert drive.num_steps > 30 or not recorder.held
        return sent

    scheduler.channels.inbox = step_events
    drive.run()
    assert waiting > 0
