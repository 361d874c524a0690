"""Equal prompts share pages, but none where a key, a salt or an adapter divides them."""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

import pytest
from drive import Script
from engine import PAGE
from scenarios import HYBRID
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

PROMPT = array("q", [2 + i * i % 40 for i in range(4 * PAGE + 10)])
SPACES: dict[str, dict[str, str]] = {
    "none": {},
    "key a": {"extra_key": "a"},
    "key b": {"extra_key": "b"},
    "salt": {"cache_salt": "s"},
    "salt and key a": {"cache_salt": "s", "extra_key": "a"},
    "adapter": {"lora_id": "lora-1"},
    "adapter and key a": {"lora_id": "lora-1", "extra_key": "a"},
}


def ask(drive: Script, name: str) -> Generator[None, None, int]:
    """Send the prompt and wait until its pages are in the tree; returns the cached tokens that it found."""
    # The text of the harness is another one for each name, so rows of another one are seen.
    request = drive.traffic.send(list(PROMPT), name, 5)
    request.extra_key = None
    for field, value in SPACES[name].items():
        setattr(request, field, value)
    drive.outgoing.append(request)
    yield
    while drive.is_live(request.rid):
        yield
    for _ in range(5):
        yield
    return drive.forwards.cached[request.rid]


def pages_of(tree: Any, name: str) -> list[int]:
    """Host pages that a prompt of that name finds in the tree."""
    fields = SPACES[name]
    key = fields.get("extra_key", "") + fields.get("lora_id", "") or None
    found = tree.match_prefix(
        MatchPrefixParams(key=RadixKey(PROMPT, key, cache_salt=fields.get("cache_salt")))
    )
    slots = tree.tree_core.collect_full_device_indices(found.last_device_node, tree.root_node_handle(key))
    return (slots[: found.device_prefix_len : PAGE] // PAGE).tolist()


@pytest.mark.parametrize("core", ["rust", "python"])
def test_spaces_share_no_pages(core: str) -> None:
    held: dict[str, list[int]] = {}

    def script(drive: Script) -> Iterator[None]:
        tree = drive.scheduler.tree_cache
        for again in (False, True):
            for name in SPACES:
                cached = yield from ask(drive, name)
                assert cached == (4 * PAGE if again else 0), f"{name} found {cached} tokens"
        held.update({name: pages_of(tree, name) for name in SPACES})

    Script(replace(HYBRID, tokens=60 * PAGE, core=core, copy_rate=1.0), script).run()
    assert [len(pages) for pages in held.values()] == [4] * len(SPACES)
    assert len({page for pages in held.values() for page in pages}) == 4 * len(SPACES)


def test_rows_of_another_space_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle of the test above: with one space for all, a request reads rows that are not its own."""
    monkeypatch.setitem(SPACES, "key b", SPACES["key a"])

    def script(drive: Script) -> Iterator[None]:
        for name in ("key a", "key b"):
            yield from ask(drive, name)

    with pytest.raises(AssertionError, match="matches 256 tokens, the tree has 0"):
        Script(replace(HYBRID, tokens=60 * PAGE, copy_rate=1.0), script).run()
