"""An admission hashes and matches its whole prompt on the scheduler's thread, so both must stay short."""

import random
from array import array
from statistics import median
from time import thread_time

import numpy as np
import pytest

from hisparse_sgl.radix.page_hash import page_hashes
from hisparse_sgl.radix.tree import PrefixTree

NUM_TOKENS = 100_000
PAGE_SIZE = 64
LIMIT_SECONDS = 0.005


@pytest.mark.parametrize("convert", [list, np.array, lambda t: array("i", t)], ids=["list", "numpy", "array"])
def test_match_of_100k_tokens_stays_under_5_ms(convert) -> None:
    rng = random.Random(0)
    tokens = convert([rng.randrange(150_000) for _ in range(NUM_TOKENS)])
    resident = [page % 2 for page in range(NUM_TOKENS // PAGE_SIZE + 1)]
    tree = PrefixTree(PAGE_SIZE, is_resident=lambda page: resident[page] != 0)
    node = tree.root
    for page, page_hash in enumerate(page_hashes(tokens, PAGE_SIZE), start=1):
        node = tree.insert(node, page_hash, page).node
    # A busy machine slows some rounds; a slow implementation slows them all.
    rounds = [_median_seconds(tree, tokens) for _ in range(7)]
    assert min(rounds) < LIMIT_SECONDS, [f"{seconds * 1e3:.2f} ms" for seconds in rounds]


def _median_seconds(tree: PrefixTree, tokens) -> float:
    """Median time of this thread alone, so that other processes count only through the shared caches."""
    seconds = []
    for _ in range(9):
        start = thread_time()
        found = tree.match(page_hashes(tokens, PAGE_SIZE))
        seconds.append(thread_time() - start)
        assert len(found.pages) == NUM_TOKENS // PAGE_SIZE
    return median(seconds)
