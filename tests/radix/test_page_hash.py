from array import array
from hashlib import sha256

import numpy as np
import pytest

from hisparse_sgl.radix.page_hash import PageHasher, page_hashes, seed_digest

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def test_hash_is_the_documented_chain() -> None:
    first = sha256(seed_digest(4) + np.array(TOKENS[:4], "<i4").tobytes()).digest()
    second = sha256(first + np.array(TOKENS[4:8], "<i4").tobytes()).digest()
    assert page_hashes(TOKENS, 4) == [first, second]


@pytest.mark.parametrize(
    "convert",
    [
        tuple,
        lambda t: array("i", t),
        lambda t: array("q", t),
        lambda t: np.array(t, np.int32),
        lambda t: np.array(t, np.int64),
        lambda t: np.array(t, np.uint8),
        lambda t: np.array(t, ">i4"),
        lambda t: np.repeat(np.array(t), 2)[::2],
        lambda t: [np.int64(x) for x in t],
    ],
    ids=["tuple", "array_i", "array_q", "int32", "int64", "uint8", "big_endian", "strided", "numpy_scalars"],
)
def test_input_types_give_one_hash(convert) -> None:
    assert page_hashes(convert(TOKENS), 4) == page_hashes(TOKENS, 4)


@pytest.mark.parametrize("step", [1, 2, 3, 5, 10])
def test_incremental_equals_at_once(step: int) -> None:
    hasher = PageHasher(4, "tenant")
    for start in range(0, len(TOKENS), step):
        hasher.extend(TOKENS[start : start + step])
        hasher.check_integrity()
    assert hasher.hashes == page_hashes(TOKENS, 4, "tenant")
    assert hasher.num_tokens == len(TOKENS)
    assert hasher.page_tokens(1) == TOKENS[4:8]


@pytest.mark.parametrize("length", range(len(TOKENS) + 1))
def test_truncate_then_extend_equals_never_drafted(length: int) -> None:
    hasher = PageHasher(4)
    hasher.extend(TOKENS)
    hasher.truncate(length)
    hasher.check_integrity()
    assert hasher.hashes == page_hashes(TOKENS[:length], 4)
    hasher.extend([7] * 9)
    assert hasher.hashes == page_hashes(TOKENS[:length] + [7] * 9, 4)


def test_copy_is_independent() -> None:
    hasher = PageHasher(2)
    hasher.extend([1, 2, 3])
    twin = hasher.copy()
    hasher.truncate(0)
    hasher.extend([9, 9])
    twin.extend([4])
    assert twin.hashes == page_hashes([1, 2, 3, 4], 2)
    assert hasher.hashes == page_hashes([9, 9], 2)


def test_a_page_hash_names_the_whole_prefix() -> None:
    assert page_hashes([1, 2, 5, 6], 2)[1] != page_hashes([3, 4, 5, 6], 2)[1]


def test_extra_keys_and_page_sizes_never_meet() -> None:
    keys = [
        None,
        "",
        b"",
        0,
        "0",
        1,
        (),
        "ab",
        b"ab",
        ("ab",),
        ("a", "b"),
        ("a", ("b",)),
        (("a", "b"),),
        (None,),
    ]
    keys += [("a", None), (1, 2), (12,), ("a\x00b",), ("ls", "b"), (b"a", "b")]
    digests = [page_hashes([1, 2], 2, key)[0] for key in keys] + [seed_digest(2), seed_digest(4)]
    assert len(set(digests)) == len(digests)
    assert seed_digest(2, ("a", "b")) == seed_digest(2, ["a", "b"])


@pytest.mark.parametrize("bad", [2**31, -(2**31) - 1, 2**70, 1.5, None, "x"])
def test_bad_token_is_refused_and_changes_nothing(bad) -> None:
    hasher = PageHasher(2)
    hasher.extend([1, 2, 3])
    before = (hasher.hashes.copy(), hasher.num_tokens)
    with pytest.raises(ValueError, match="token id"):
        hasher.extend([5, bad, 6])
    assert (hasher.hashes, hasher.num_tokens) == before
    hasher.check_integrity()


@pytest.mark.parametrize(
    "bad",
    [
        np.array([1, 2**31]),
        np.array([-(2**31) - 1]),
        np.array([2**63], np.uint64),
        np.array([1.0]),
        np.zeros((2, 2), np.int32),
        array("d", [1.0]),
        b"abcd",
        "abcd",
    ],
    ids=["large", "small", "uint64", "float", "two_dims", "array_d", "bytes", "str"],
)
def test_bad_container_is_refused(bad) -> None:
    with pytest.raises(ValueError, match="token"):
        page_hashes(bad, 2)


def test_int32_limits_are_allowed() -> None:
    limits = [-(2**31), 2**31 - 1]
    assert page_hashes(limits, 2) == page_hashes(np.array(limits), 2)


@pytest.mark.parametrize("empty", [[], (), np.array([], np.int64), array("i")])
def test_no_tokens(empty) -> None:
    assert page_hashes(empty, 4) == []


def test_errors_name_field_value_and_limit() -> None:
    with pytest.raises(ValueError, match=r"page_size=0 must be at least 1"):
        PageHasher(0)
    with pytest.raises(ValueError, match=r"num_tokens=3 must be in 0\.\.2"):
        hasher = PageHasher(2)
        hasher.extend([1, 2])
        hasher.truncate(3)
    with pytest.raises(ValueError, match=r"extra_key=1\.5 has type float"):
        PageHasher(2, ("a", 1.5))


def test_check_integrity_sees_a_wrong_hash() -> None:
    hasher = PageHasher(2)
    hasher.extend([1, 2, 3, 4])
    hasher.hashes[1] = hasher.hashes[0]
    with pytest.raises(RuntimeError, match="page 1"):
        hasher.check_integrity()
