"""What SGLang expects of its prefix cache.

| contract | test |
|---|---|
| ``match_prefix`` leaves one token to compute | ``test_a_match_leaves_one_token_to_compute`` |
| ``extra_key``, ``cache_salt``, adapters | ``test_namespaces.py`` |
| a match is the longest prefix that the tree holds | every run of ``drive.py`` checks it |
| no host hits, ``init_load_back`` has nothing to do | ``test_no_match_is_a_host_hit`` |
| ``path_device_indices``, ``prefix_device_indices`` | ``test_device_indices_*`` |
| ``lock``, ``unlock``, ``inc_lock_ref``, ``dec_lock_ref`` | ``test_lock_and_unlock_*`` |
| ``evictable_size``, ``protected_size``, ``total_size`` | ``test_lock_and_unlock_*`` |
| ``evict`` | ``test_evict_*`` |
| ``checkpoint`` of a running request | ``test_a_checkpoint_publishes_nothing_that_is_not_durable`` |
| ``checkpoint`` of one that ends | ``test_a_request_that_ends_with_copies_in_flight_*`` |
| ``skip_radix_cache_insert`` | ``test_a_request_that_is_barred_from_the_tree_*`` |
| ``on_release``, ``free_kv_row`` | ``test_on_release_*`` |
| ``reset`` | ``test_reset_*`` |
| ``supports_prefix_sharing``, ``--disable-radix-cache`` | ``test_without_a_prefix_cache`` |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from by_hand import ByHand, key_of
from engine import PAGE, Engine
from memory import tree_pages
from scenarios import HYBRID
from scripted import decoding, play, steps, words
from sglang.srt.managers.io_struct import AbortReq, ContinueGenerationReqInput, PauseGenerationReqInput
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams

NO_COPIES = replace(HYBRID, tokens=20 * PAGE, ratio=3, copy_rate=0.0)
PROMPT = words(4 * PAGE)
CORES = pytest.mark.parametrize("core", ["rust", "python"])


@pytest.fixture(params=["rust", "python"])
def hand(request: pytest.FixtureRequest) -> Iterator[ByHand]:
    engine = Engine(replace(NO_COPIES, core=request.param), seed=0)
    yield ByHand(engine)
    engine.close()


def match(hand: ByHand, tokens: list[int]) -> Any:
    return hand.tree.match_prefix(MatchPrefixParams(key=key_of(tokens)))


def test_no_match_is_a_host_hit(hand: ByHand) -> None:
    """Also where a page is in host memory alone: the coordinator restores it, not the tree."""
    hand.publish(PROMPT)
    other = hand.prefill(20 * PAGE)
    found = match(hand, PROMPT)
    assert not any(hand.life.leases.device_page_of(page) for page in tree_pages(hand.tree).tolist())
    assert (found.device_prefix_len, found.host_hit_length) == (4 * PAGE, 0)
    assert found.best_match_node == found.last_device_node == found.last_host_node
    hand.release(other)


def test_device_indices_are_the_slots_of_the_path_where_the_table_is(hand: ByHand) -> None:
    slots = hand.publish(PROMPT)
    found = match(hand, [*PROMPT[: 3 * PAGE], *[50] * PAGE])
    assert found.device_prefix_len == 3 * PAGE
    path = hand.tree.path_device_indices(found.last_device_node)
    assert torch.equal(path, slots[: 3 * PAGE]) and path.dtype == torch.int64
    req = SimpleNamespace(rid="r", last_node=found.last_device_node, prefix_len=2 * PAGE, extra_key=None)
    prefix = hand.tree.prefix_device_indices(req)
    assert torch.equal(prefix, slots[: 2 * PAGE])
    assert path.device == prefix.device == hand.tree.req_to_token_pool.req_to_token.device
    assert hand.tree.prefix_pages(req) == (slots[: 2 * PAGE : PAGE] // PAGE).tolist()


def test_an_admission_walks_its_prefix_once(hand: ByHand, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = hand.publish(PROMPT)
    node = match(hand, PROMPT).last_device_node
    reqs = [
        SimpleNamespace(
            rid=rid, last_node=node, prefix_len=3 * PAGE, extra_key=None, full_untruncated_fill_ids=PROMPT
        )
        for rid in ("a", "b")
    ]
    walked: list[Any] = []
    walk = type(hand.tree).prefix_pages
    monkeypatch.setattr(
        type(hand.tree), "prefix_pages", lambda self, req: walked.append(req) or walk(self, req)
    )
    lock = hand.tree.lock(node)
    assert hand.coordinator.admission.has_room(reqs[0])
    hand.coordinator.admission.admit(reqs[0])
    assert hand.life.requests["a"].pages == (slots[: 3 * PAGE : PAGE] // PAGE).tolist()
    assert hand.coordinator.admission.has_room(reqs[1]) and walked == reqs
    with pytest.raises(AssertionError):
        hand.coordinator.admission.admit(reqs[0])  # of whom the answer is not
    hand.life.forget("a")
    hand.tree.unlock(lock)


def size_of(tree: Any) -> int:
    """Tokens of the tree; SGLang counts those of other components beside them."""
    return tree.total_size()[0]


def sizes(tree: Any) -> tuple[int, int]:
    assert size_of(tree) == tree.evictable_size() + tree.protected_size()
    return tree.evictable_size() // PAGE, tree.protected_size() // PAGE


def test_lock_and_unlock_move_tokens_between_evictable_and_protected(hand: ByHand) -> None:
    hand.publish(PROMPT)
    tree, node = hand.tree, match(hand, PROMPT[: 3 * PAGE]).last_device_node
    assert sizes(tree) == (4, 0)
    one, two = tree.lock(node), tree.lock(node)
    assert sizes(tree) == (1, 3)
    tree.unlock(one)
    assert sizes(tree) == (1, 3)
    tree.evict(EvictParams(num_tokens=100 * PAGE))
    assert sizes(tree) == (0, 3)
    tree.unlock(two)
    assert sizes(tree) == (3, 0)
    tree.unlock(None)


def test_evict_frees_host_pages_with_their_device_copies(hand: ByHand) -> None:
    hand.publish(PROMPT)
    free = hand.allocator.available_size()
    evicted = hand.tree.evict(EvictParams(num_tokens=PAGE)).num_tokens_evicted
    assert evicted >= PAGE
    assert hand.allocator.available_size() == free + evicted
    hand.tree.evict(EvictParams(num_tokens=100 * PAGE))
    assert sizes(hand.tree) == (0, 0)
    assert hand.allocator.available_size() == hand.allocator.size_full
    assert hand.life.leases.pool.num_truly_free == 20
    hand.coordinator.check_integrity()


def test_reset_forgets_prefixes_locks_and_publications(hand: ByHand) -> None:
    hand.publish(PROMPT)
    hand.tree.lock(match(hand, PROMPT).last_device_node)
    hand.tree.open["a"] = (None, 0)
    hand.tree.detached.append(object())
    hand.tree.reset()
    assert sizes(hand.tree) == (0, 0) and not hand.tree.is_waiting
    assert match(hand, PROMPT).device_prefix_len == 0


def test_without_a_prefix_cache() -> None:
    engine = Engine(replace(NO_COPIES, radix=False), seed=0)
    scheduler: Any = engine.scheduler
    try:
        tree = scheduler.tree_cache
        assert not tree.supports_prefix_sharing()
        assert tree.match_prefix(MatchPrefixParams(key=key_of(PROMPT))).device_prefix_len == 0
        assert scheduler.token_to_kv_pool_allocator.evict_to_free_tokens(tree, 10**9) is None
    finally:
        engine.close()


@CORES
def test_a_match_leaves_one_token_to_compute(core: str) -> None:
    def script(drive: Any) -> Iterator[None]:
        found = []
        for _ in range(2):
            drive.outgoing.append(drive.traffic.send(PROMPT, None, 2))
            rid = drive.outgoing[-1].rid
            yield from steps(drive, rid)
            found.append(drive.forwards.cached[rid])
        assert found == [0, 3 * PAGE]

    play(replace(NO_COPIES, core=core, copy_rate=1.0), script)


@CORES
def test_a_checkpoint_publishes_nothing_that_is_not_durable(core: str) -> None:
    """``drive.py`` asks after each step whether all pages of the tree are durable."""

    def script(drive: Any) -> Iterator[None]:
        tree, transfers = drive.scheduler.tree_cache, drive.scheduler.hisparse_coordinator.transfers
        rid = drive.send(4 * PAGE + 10, 3 * PAGE)
        yield from decoding(drive, rid)
        for _ in range(5):
            assert size_of(tree) == 0
            yield
        transfers.rate = 1.0
        for _ in range(30):
            yield
        assert drive.is_live(rid) and tree.protected_size() == 4 * PAGE
        yield from steps(drive, rid)

    play(replace(NO_COPIES, core=core), script)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_that_ends_with_copies_in_flight_is_published_when_they_are_through(overlap: bool) -> None:
    def script(drive: Any) -> Iterator[None]:
        tree, coordinator = drive.scheduler.tree_cache, drive.scheduler.hisparse_coordinator
        rid = drive.send(4 * PAGE + 10, 3)
        yield from steps(drive, rid)
        assert size_of(tree) == 0 and len(tree.detached) == 1 and not coordinator.lifecycle.requests
        coordinator.transfers.rate = 1.0
        for _ in range(30):
            yield
        assert tree.evictable_size() == 4 * PAGE and not tree.detached

    assert play(replace(NO_COPIES, overlap=overlap), script)["detached_publications"] == 1


@pytest.mark.parametrize("barred", [False, True])
def test_a_request_that_is_barred_from_the_tree_is_not_published_by_a_retraction(barred: bool) -> None:
    """Nor by a checkpoint or its end. SGLang bars a prompt with embeddings of its own."""

    def script(drive: Any) -> Iterator[None]:
        tree, coordinator = drive.scheduler.tree_cache, drive.scheduler.hisparse_coordinator
        rid = drive.send(4 * PAGE + 10, 2 * PAGE)
        yield
        while rid not in coordinator.lifecycle.requests:
            yield
        coordinator.lifecycle.requests[rid].req.skip_radix_cache_insert = barred
        yield from decoding(drive, rid)
        for _ in range(20):
            yield
        drive.outgoing.append(PauseGenerationReqInput(mode="retract"))
        yield
        yield
        assert coordinator.counters.retractions == 1 and not coordinator.lifecycle.requests
        assert size_of(tree) == (0 if barred else 4 * PAGE)
        drive.outgoing.append(ContinueGenerationReqInput(torch_empty_cache=False))
        yield from steps(drive, rid)

    play(replace(NO_COPIES, copy_rate=1.0), script)


def test_on_release_forgets_a_request_with_all_that_it_owned() -> None:
    def script(drive: Any) -> Iterator[None]:
        tree, life = drive.scheduler.tree_cache, drive.scheduler.hisparse_coordinator.lifecycle
        rid = drive.send(4 * PAGE + 10, 3 * PAGE)
        yield from decoding(drive, rid)
        assert rid in life.requests and rid in tree.open
        drive.traffic.live[rid].aborted = True
        drive.outgoing.append(AbortReq(rid=rid))
        yield from steps(drive, rid)
        yield
        held = (life.requests, life.rows, tree.open, tree.detached, life.residency.promised_host)
        assert not any(held), held
        assert life.allocator.num_free + len({p for f in life.pages.flights.values() for p in f.pages}) == 60

    play(NO_COPIES, script)
