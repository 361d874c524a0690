"""The faults that the engine benchmark seeds: real bytes change, and comparing rows shows it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from by_hand import LAYERS, ByHand
from drive import Drive
from engine import PAGE, Engine
from forwards import WrongRow
from scenarios import SCENARIOS
from test_contract_coordinator import SETTINGS, TOP_K, Step, hot, resident

from benchmarks.engine import faults
from hisparse_sgl.integrations.sglang.coordinator import Coordinator
from hisparse_sgl.integrations.sglang.kv_pool import KVPool

WRAPPED = (
    (Coordinator, "before_forward"),
    (Coordinator, "swap_in_selected_pages"),
    (KVPool, "set_mla_kv_buffer"),
    (KVPool, "set_kv_buffer"),
)
LAYER = faults.LAYER
OTHERS = [layer for layer in LAYERS if layer != LAYER]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The methods are wrapped, twice asked; no fault is set."""
    for owner, name in WRAPPED:
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back afterwards
    for name, value in faults.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    faults.register()
    faults.register()
    return tmp_path


@pytest.fixture
def hand(folder: Path) -> Iterator[ByHand]:
    engine = Engine(SETTINGS, seed=0)
    yield ByHand(engine)
    engine.close()


def wrong_positions(hand: ByHand, req: Any, layer: int) -> list[int]:
    """Positions of a resident request whose row on the device is not what was written for them."""
    slots = hand.slots(req)
    held = hand.held(hand.pool.translate_loc_to_hisparse_device(slots), layer)
    return (held != hand.expected(slots, layer)).any(-1).nonzero().flatten().tolist()


def all_right(hand: ByHand, req: Any, layers: Any = LAYERS) -> bool:
    return not any(wrong_positions(hand, req, layer) for layer in layers)


def audit(hand: ByHand, req: Any) -> int:
    """Device rows of the request that differ from the host's, once all copies are through."""
    hand.land()
    hand.coordinator.before_forward()
    return hand.coordinator.audit.check(hand.life.requests[req.rid])


def test_zero_row_clears_one_row_of_a_request_also_on_the_host(hand: ByHand, folder: Path) -> None:
    before = hand.prefill(2 * PAGE)
    faults.set_fault(folder, "zero_row")
    req = hand.prefill(2 * PAGE + 5)
    hand.forward(hand.decode([before, req]))
    faults.set_fault(folder, None)
    after = hand.prefill(2 * PAGE)
    assert wrong_positions(hand, req, LAYER) == [faults.TOKEN]
    row = hand.pool.translate_loc_to_hisparse_device(hand.slots(req)[[faults.TOKEN]])
    assert not hand.held(row, LAYER).any()
    assert all_right(hand, req, OTHERS) and all_right(hand, before) and all_right(hand, after)
    assert audit(hand, req) == 0
    page = hand.coordinator.host_pool.buffer[LAYER].view(hand.life.config.host_pages, PAGE, -1)
    assert not page[hand.life.requests[req.rid].pages[0], faults.TOKEN].any()


def test_shift_layer_writes_each_row_one_token_on(hand: ByHand, folder: Path) -> None:
    before = hand.prefill(PAGE)
    faults.set_fault(folder, "shift_layer")
    req = hand.prefill(2 * PAGE + 5)
    faults.set_fault(folder, None)
    after = hand.prefill(PAGE)
    slots = hand.slots(req)
    held = hand.held(hand.pool.translate_loc_to_hisparse_device(slots), LAYER)
    assert torch.equal(held, hand.expected(slots.roll(1), LAYER))
    assert all_right(hand, req, OTHERS) and all_right(hand, before) and all_right(hand, after)
    assert audit(hand, req) == 0


def wrong_entries(hand: ByHand, step: Step, reqs: list[Any], layer: int) -> list[list[int]]:
    """By request, entries of the top-k whose device row holds another row than that of the position there."""
    found = step.swap_in(layer)
    wrong = []
    for i, req in enumerate(reqs):
        entries = (step.top_k[i] >= 0).nonzero().flatten()
        slots = hand.slots(req)[step.top_k[i][entries].long()]
        differs = (hand.held(found[i][entries], layer) != hand.expected(slots, layer)).any(-1)
        wrong.append(entries[differs].tolist())
    return wrong


def count_wrong(hand: ByHand, step: Step, reqs: list[Any]) -> list[list[int]]:
    """By layer and request, how many entries of the top-k read another row."""
    return [[len(wrong) for wrong in wrong_entries(hand, step, reqs, layer)] for layer in LAYERS]


@pytest.mark.parametrize("make", [resident, hot])
def test_swap_hot_rows_exchanges_a_selected_row_with_one_that_is_not(
    hand: ByHand, folder: Path, make: Any
) -> None:
    reqs, step = [make(hand), hand.prefill(TOP_K)], Step(hand)
    step.fill(reqs, seed=1)
    step.top_k[1] = torch.arange(TOP_K, dtype=torch.int32)  # nothing of the second one is left out
    right = count_wrong(hand, step, reqs)
    now = [faults.row_bytes(hand.pool, layer) for layer in LAYERS]
    before = [rows.clone() for rows in now]
    faults.set_fault(folder, "swap_hot_rows")
    wrong = count_wrong(hand, step, reqs)
    again = count_wrong(hand, step, reqs)
    assert right == [[0, 0] for _ in LAYERS]
    assert wrong == again == [[int(layer == LAYER), 0] for layer in LAYERS]
    changed = [(now[layer] != before[layer]).any(1).nonzero() for layer in LAYERS]
    assert [len(rows) for rows in changed] == [2 * (layer == LAYER) for layer in LAYERS]
    a, b = changed[LAYER].flatten().tolist()
    assert torch.equal(now[LAYER][[a, b]], before[LAYER][[b, a]])
    selected = step.swap_in(LAYER)[0].tolist()
    assert [a in selected, b in selected].count(True) == 1
    faults.set_fault(folder, None)
    assert count_wrong(hand, step, reqs) == wrong, "what was exchanged stays so"


def test_swap_hot_rows_takes_hot_rows_where_it_can(hand: ByHand, folder: Path, caplog: Any) -> None:
    req = hot(hand)
    faults.set_fault(folder, "swap_hot_rows")
    step = Step(hand)
    for seed in (1, 2, 3):  # the first selection leaves no hot row unselected
        step.fill([req], seed)
        found = [step.swap_in(layer) for layer in LAYERS]
    assert found
    exchanges = [record.args for record in caplog.records if "exchanged" in record.msg]
    assert [num_hot for *_, num_hot in exchanges] == [1, 2]
    pages = {row // PAGE for row in exchanges[-1][2]}
    assert pages <= set(hand.life.requests[req.rid].hot_pages)
    assert audit(hand, req) > 0


@pytest.mark.parametrize("name", [None, *faults.FAULTS])
def test_a_scheduler_with_a_fault_is_found_out(folder: Path, name: str | None) -> None:
    faults.set_fault(folder, name)
    drive = Drive(*SCENARIOS["tight device"], seed=1, steps=100)
    if name is None:
        assert drive.run()["hot_hits"] > 0
    else:
        with pytest.raises(WrongRow, match=f"layer {LAYER}, "):
            drive.run()


def test_rows_are_bytes_in_every_layout() -> None:
    for dtype, width in ((torch.bfloat16, 576), (torch.uint8, 656), (torch.float8_e4m3fn, 576)):
        pool = SimpleNamespace(rows=torch.zeros((2, 3, 1, width), dtype=torch.uint8).to(dtype))
        faults.row_bytes(pool, 1)[2] = 1
        where = pool.rows.view(torch.uint8).view(2, 3, -1).nonzero()
        assert len(where) == width * dtype.itemsize
        assert (where[:, 0] == 1).all() and (where[:, 1] == 2).all()


def test_set_fault_refuses_what_is_no_fault(tmp_path: Path) -> None:
    faults.environment(tmp_path)
    faults.set_fault(tmp_path, "zero_row")
    with pytest.raises(ValueError, match=r"fault is 'zero_rows', the limit is None or one of zero_row"):
        faults.set_fault(tmp_path, "zero_rows")
    toggle = faults.Toggle(Path(faults.environment(tmp_path)[faults.VARIABLE]))
    assert toggle.read() is None, "a new environment has no fault"
    for name in (*faults.FAULTS, None, "zero_row"):
        faults.set_fault(tmp_path, name)
        assert toggle.read() == name
    toggle.path.unlink()
    assert toggle.read() is None


SPAWN = f"""
import json, multiprocessing, sys

def serve(pipe):
    sys.path.append({str(Path(__file__).parent)!r})
    import conftest  # operators of torchvision
    from importlib.metadata import entry_points
    from sglang.srt.managers import hisparse_coordinator
    from sglang.srt.plugins import load_plugins
    load_plugins()
    from hisparse_sgl.integrations.sglang.kv_pool import KVPool
    pipe.send({{
        "names": [entry.name for entry in entry_points(group="sglang.srt.plugins")],
        "coordinator": hisparse_coordinator.HiSparseCoordinator.__module__,
        "wrapped": [
            getattr(method, "__wrapped__", None) is not None
            for method in (KVPool.set_mla_kv_buffer, hisparse_coordinator.HiSparseCoordinator.before_forward)
        ],
    }})

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,))
    process.start()
    theirs.close()
    print(json.dumps(ours.recv()))
    process.join()
"""


def test_a_spawned_process_loads_the_faults_beside_the_plugin(tmp_path: Path) -> None:
    script, root = tmp_path / "spawn.py", Path(faults.__file__).resolve().parents[2]
    script.write_text(SPAWN)
    added = faults.environment(tmp_path / "faults")
    plugin = tmp_path / "plugin" / "hisparse_sgl-0.1.0.dist-info"  # a second one counts only if none is there
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: hisparse-sgl\nVersion: 0.1.0\n")
    (plugin / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nhisparse = hisparse_sgl.integrations.sglang:register\n"
    )
    path = [added["PYTHONPATH"], str(root), str(plugin.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        env={**os.environ, **added, "PYTHONPATH": os.pathsep.join(path), "HISPARSE_SGL": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert sorted(found["names"]) == ["faults", "hisparse"]
    assert found["coordinator"] == "hisparse_sgl.integrations.sglang.coordinator"
    assert found["wrapped"] == [True, True]
