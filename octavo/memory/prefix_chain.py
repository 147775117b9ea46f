"""Digests of full blocks, chained so that a block's digest covers all content before it."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import blake2b
from struct import Struct
from typing import NamedTuple

from octavo.core.untracked import untracked

#: A hash of 16 bytes, of nothing: a copy of it is made in less time than another one.
_EMPTY = blake2b(digest_size=16)
#: Values for the positions of a block; ``positions`` takes them apart.
Content = bytes | tuple[object, ...]


class FeatureSpan(NamedTuple):
    """Placeholder tokens whose embeddings come from another input, such as an image or audio."""

    offset: int
    length: int
    #: Identifies the input's content and everything else that its embeddings depend on.
    key: bytes

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.offset + self.length


class PrefixChain:
    """The digests of a token sequence's full blocks.

    ``digests[0]`` is that of the empty prefix and depends on the context alone: what all KV entries depend on, such as
    a salt and an adapter (the caller joins several parts unambiguously). ``digests[i + 1]`` is that of block ``i``,
    computed from its tokens, their features, and ``digests[i]``, that of its parent. The hash is cryptographic, so a
    prompt cannot be crafted to hit blocks of other content.
    """

    __slots__ = ("block_size", "digests", "features")

    def __init__(self, context: str | bytes, block_size: int, features: Sequence[FeatureSpan] = ()) -> None:
        """``features`` are sorted by offset and do not overlap."""
        self.block_size = block_size
        self.features = features
        name = context if isinstance(context, bytes) else context.encode("utf-8", "surrogatepass")
        self.digests = untracked([_digest(name)])

    def __len__(self) -> int:
        """Blocks with a digest."""
        return len(self.digests) - 1

    def extend(self, token_ids: list[int], num_blocks: int) -> None:
        """Computes the digests of the first ``num_blocks`` blocks; one hash for each that has none yet.

        The last one may be partly filled, of tokens without features: fewer bytes than of any full block are hashed.
        """
        size = self.block_size
        for start in range(len(self) * size, num_blocks * size, size):
            self.add(token_ids, self.content(token_ids, start, start + size))

    def add(self, token_ids: list[int], content: Content) -> None:
        """Computes the digest of the first block that has none yet, which has this content."""
        digests = self.digests
        if not isinstance(content, bytes):
            start = (len(digests) - 1) * self.block_size
            content = _packed(token_ids[start : start + self.block_size]) + self._feature_bytes(start)
        digests.append(_digest(digests[-1] + content))

    def first(self, num_blocks: int) -> PrefixChain:
        """A copy with at most the first ``num_blocks`` blocks."""
        chain = PrefixChain.__new__(PrefixChain)
        chain.block_size = self.block_size
        chain.features = self.features
        chain.digests = untracked(self.digests[: num_blocks + 1])
        return chain

    def content(self, token_ids: list[int], start: int, stop: int) -> Content:
        """Values for positions ``start`` to ``stop`` (of one block) that compare equal where their content is equal.

        These are the token ids, packed where there are no features: bytes take the least memory and no time of the
        garbage collector. A token of a feature equals only the same token of a feature with the same key.
        """
        tokens = token_ids[start:stop]
        if not self.features:
            return _packer(len(tokens))(*tokens)
        content: list[object] = list(tokens)
        for feature in self._overlapping(start, stop):
            for position in range(max(start, feature.offset), min(stop, feature.end)):
                content[position - start] = (
                    token_ids[position],
                    feature.key,
                    feature.length,
                    position - feature.offset,
                )
        return untracked(tuple(content))

    def _feature_bytes(self, start: int) -> bytes:
        """An unambiguous encoding of the keys and positions of the features in the block that begins at ``start``."""
        return b"".join(
            array("q", (f.offset - start, f.length, len(f.key))).tobytes() + f.key
            for f in self._overlapping(start, start + self.block_size)
        )

    def _overlapping(self, start: int, stop: int) -> Sequence[FeatureSpan]:
        first = bisect_right(self.features, start, key=lambda f: f.end)
        last = bisect_left(self.features, stop, lo=first, key=lambda f: f.offset)
        return self.features[first:last]


def _digest(content: bytes) -> bytes:
    blake = _EMPTY.copy()
    blake.update(content)
    return blake.digest()


@cache
def _packer(count: int) -> Callable[..., bytes]:
    return Struct(f"{count}i").pack


def _packed(token_ids: list[int]) -> bytes:
    """4 bytes for each token."""
    return _packer(len(token_ids))(*token_ids)


def positions(content: Content) -> Sequence[object]:
    """The values of each position."""
    return memoryview(content).cast("i") if isinstance(content, bytes) else content
