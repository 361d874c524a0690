"""The torch-free part of the SGLang plugin, without SGLang."""

from __future__ import annotations

import subprocess
import sys

from hisparse_sgl.config import HiSparseConfig
from hisparse_sgl.integrations.sglang.lifecycle import Lifecycle
from hisparse_sgl.metrics import Counters
from hisparse_sgl.transfer_queue import Completion, PageCopy

PAGE = 4


class NoTransfers:
    """A transfer queue whose copies never end."""

    def __init__(self) -> None:
        self.started = 0

    def mirror(self, slots: list[int], rows: list[int]) -> int:
        self.started += 1
        return self.started

    def spill(self, pages: list[PageCopy]) -> int:
        return self.mirror([], [])

    def restore(self, pages: list[PageCopy]) -> int:
        return self.mirror([], [])

    def poll(self) -> list[Completion]:
        return []

    def wait(self) -> list[Completion]:
        return []


def lifecycle(window: int | None) -> Lifecycle:
    config = HiSparseConfig(
        top_k=4, context_len=64, host_pages=64, device_pages=48, max_requests=8, admission_window=window
    )
    return Lifecycle(config, PAGE, NoTransfers(), Counters())


def test_the_admission_window_holds_prompts_back_until_others_are_prefilled() -> None:
    life = lifecycle(window=40)
    assert life.has_room([], 60), "one prompt is always let in"
    first = life.admit("a", None, [], 24)
    assert life.has_room([], 16) and not life.has_room([], 17)
    life.bind(first, 1)
    life.extend(first, 24)
    life.settle([(first, 24)])
    assert life.has_room([], 17), "the first prompt is prefilled"
    life.check_integrity()


def test_without_a_window_the_device_decides() -> None:
    life = lifecycle(window=None)
    life.admit("a", None, [], 24)
    assert life.has_room([], 64)
    life.check_integrity()


def test_it_imports_neither_torch_nor_sglang() -> None:
    code = (
        "import sys, hisparse_sgl.integrations.sglang.lifecycle; "
        "sys.exit(bool({'torch', 'sglang'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
