"""Chained SHA-256 names of token pages."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from hashlib import sha256

import numpy as np

TOKEN_BYTES = 4
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1

ExtraKey = str | bytes | int | Sequence["ExtraKey"] | None
TokenIds = Sequence[int] | np.ndarray | array


def page_hashes(token_ids: TokenIds, page_size: int, extra_key: ExtraKey = None) -> list[bytes]:
    """Return the 32-byte hash of every complete page of `token_ids`; a last partial page has none."""
    hasher = PageHasher(page_size, extra_key)
    hasher.extend(token_ids)
    return hasher.hashes


def seed_digest(page_size: int, extra_key: ExtraKey = None) -> bytes:
    """Return the digest that stands before page 0.

    It covers the page size and the extra key (LoRA id, tenant salt), so prefixes of different tenants
    never meet. Every part is encoded with its type and length: `("a", "b")`, `("ab",)` and `"ab"` differ.
    """
    return sha256(b"hisparse_sgl.page" + page_size.to_bytes(8, "little") + _encode(extra_key)).digest()


class PageHasher:
    """Hashes the pages of one request as its tokens arrive.

    `hashes[i]` is sha256(hash of page i-1 | token ids of page i as little-endian int32), so one hash names
    the whole prefix up to the end of its page.
    """

    __slots__ = ("_seed", "_tokens", "hashes", "page_size")

    def __init__(self, page_size: int, extra_key: ExtraKey = None) -> None:
        if page_size < 1:
            raise ValueError(f"page_size={page_size} must be at least 1; give the page size of the KV pool")
        self.page_size = page_size
        self.hashes: list[bytes] = []
        self._seed = seed_digest(page_size, extra_key)
        self._tokens = bytearray()

    @property
    def num_tokens(self) -> int:
        """Tokens fed so far, the unfinished page included."""
        return len(self._tokens) // TOKEN_BYTES

    def extend(self, token_ids: TokenIds) -> None:
        """Append tokens (1-D, integers inside int32) and hash every page that they complete.

        Raises ValueError for anything else; the state is unchanged then.
        """
        self._tokens += _token_bytes(token_ids)
        tokens, hashes = self._tokens, self.hashes
        width = self.page_size * TOKEN_BYTES
        digest = hashes[-1] if hashes else self._seed
        for start in range(len(hashes) * width, len(tokens) - width + 1, width):
            digest = sha256(digest + tokens[start : start + width]).digest()
            hashes.append(digest)

    def truncate(self, num_tokens: int) -> None:
        """Forget every token from position `num_tokens` on (rejected drafts, a shorter retry).

        Any length works: all tokens are kept, 4 bytes each, so the page that becomes unfinished again
        still has its first tokens.
        """
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(
                f"num_tokens={num_tokens} must be in 0..{self.num_tokens}, the tokens fed so far"
            )
        del self._tokens[num_tokens * TOKEN_BYTES :]
        del self.hashes[num_tokens // self.page_size :]

    def page_tokens(self, page_index: int) -> list[int]:
        """Return the token ids of the complete page number `page_index`."""
        width = self.page_size * TOKEN_BYTES
        start = page_index * width
        return list(struct.unpack_from(f"<{self.page_size}i", self._tokens, start))

    def copy(self) -> PageHasher:
        """Return an independent hasher in the same state."""
        twin = PageHasher.__new__(PageHasher)
        twin.page_size = self.page_size
        twin.hashes = self.hashes.copy()
        twin._seed = self._seed
        twin._tokens = self._tokens.copy()
        return twin

    def check_integrity(self) -> None:
        """Raise RuntimeError when the hashes are not those of the tokens kept."""
        width = self.page_size * TOKEN_BYTES
        if len(self.hashes) != len(self._tokens) // width:
            raise RuntimeError(f"{len(self.hashes)} hashes for {len(self._tokens) // width} complete pages")
        digest = self._seed
        for i, known in enumerate(self.hashes):
            digest = sha256(digest + self._tokens[i * width : (i + 1) * width]).digest()
            if digest != known:
                raise RuntimeError(
                    f"page {i} is named {known.hex()[:16]}, its tokens give {digest.hex()[:16]}"
                )


def _encode(key: ExtraKey) -> bytes:
    if key is None:
        return b"n"
    if isinstance(key, str):
        raw = key.encode("utf-8", "surrogatepass")
        return b"s" + len(raw).to_bytes(8, "little") + raw
    if isinstance(key, bytes | bytearray):
        return b"b" + len(key).to_bytes(8, "little") + key
    if isinstance(key, int):
        raw = str(int(key)).encode()
        return b"i" + len(raw).to_bytes(8, "little") + raw
    if isinstance(key, Sequence):
        return b"l" + len(key).to_bytes(8, "little") + b"".join(_encode(item) for item in key)
    raise ValueError(
        f"extra_key={key!r} has type {type(key).__name__}; use str, bytes, int, None or a sequence of them"
    )


def _token_bytes(token_ids: TokenIds) -> bytes:
    if isinstance(token_ids, str | bytes | bytearray):
        raise ValueError(f"token_ids is {type(token_ids).__name__}; give integers, not text or raw bytes")
    if isinstance(token_ids, np.ndarray | array):
        return _array_bytes(np.asarray(token_ids))
    try:
        # struct is the fastest of array(), np.array(), np.fromiter() and struct.pack() for a long list,
        # and like array() it refuses floats.
        return struct.pack(f"<{len(token_ids)}i", *token_ids)
    except struct.error as error:
        bad = next((t for t in token_ids if not _is_int32(t)), None)
        raise _refused(bad) from error


def _array_bytes(tokens: np.ndarray) -> bytes:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(f"token_ids is a {tokens.ndim}-D array of {tokens.dtype}; give a 1-D integer array")
    if not np.can_cast(tokens.dtype, np.int32) and tokens.size:
        for bound in (int(tokens.min()), int(tokens.max())):
            if not _is_int32(bound):
                raise _refused(bound)
    return tokens.astype("<i4", copy=False).tobytes()


def _is_int32(token: object) -> bool:
    return hasattr(token, "__index__") and INT32_MIN <= token.__index__() <= INT32_MAX  # type: ignore[attr-defined]


def _refused(token: object) -> ValueError:
    return ValueError(
        f"token id {token!r} is not an integer in {INT32_MIN}..{INT32_MAX}; map it into int32 first"
    )
