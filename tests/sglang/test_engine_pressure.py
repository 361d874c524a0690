"""The pressed pass of benchmarks/engine, played on SGLang's scheduler at a twentieth of its size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from engine import PAGE
from scenarios import HYBRID
from scripted import OVERLAP, ask, decoding, play, steps

from benchmarks.engine.settings import ENGINES

# `tight` has 407 pages, a prompt of 313, others of 250 and hot regions of 64; here 17, 12, 9 and 2.
TIGHT = replace(HYBRID, tokens=17 * PAGE, ratio=ENGINES["tight"].ratio or 0, chunk=4 * PAGE, copy_rate=0.5)
PROMPT = [2 + i * i % 40 for i in range(12 * PAGE)]
OTHERS = [[3 + i * i * k % 41 for i in range(9 * PAGE)] for k in (1, 2)]
NEW_TOKENS = 48


def counts(drive: Any) -> dict[str, int]:
    return {m.name: m.value for m in drive.scheduler.hisparse_coordinator.metrics(exact=True)}


@OVERLAP
@pytest.mark.parametrize("press", [False, True])
def test_a_prompt_that_decodes_alone_misses_when_it_is_pressed(overlap: bool, press: bool) -> None:
    batches: list[int] = []
    seen: dict[str, int] = {}

    def script(drive: Any) -> Iterator[None]:
        runner = drive.scheduler.tp_worker.model_runner
        launch = runner.forwards.launch

        def watch(batch: Any) -> None:
            if batch.forward_mode.is_decode():
                batches.append(batch.batch_size)
            launch(batch)

        runner.forwards.launch = watch
        rid = ask(drive, PROMPT, NEW_TOKENS)
        yield from decoding(drive, rid)
        others = [ask(drive, tokens, 1) for tokens in OTHERS] if press else []
        yield from steps(drive, rid, *others)
        seen.update(counts(drive))
        again = ask(drive, PROMPT, 1)
        yield from steps(drive, again)
        seen["restored"] = counts(drive)["hisparse:pages_restored_total"]

    play(replace(TIGHT, overlap=overlap), script)
    misses = seen["hisparse:hot_lookups_total"] - seen["hisparse:hot_hits_total"]
    assert (misses > 0) == (seen["hisparse:pages_reused_total"] > 0) == press
    assert seen["hisparse:pages_unpinned_total"] > 0 and seen["hisparse:retractions_total"] == 0
    assert (seen["restored"] > 0) == press
    # Steps that overlap may have a prompt in one step that has ended with its first token.
    assert max(batches) == 1 if not (press and overlap) else set(batches) <= {1, 2, 3}
