"""Names for the content of full blocks: a chain of digests, so that a block's name covers all that is before it too."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

_DIGEST_BYTES = 16


class FeatureSpan(NamedTuple):
    """Tokens whose embeddings come from an input other than text, such as an image or a piece of audio."""

    offset: int
    length: int
    #: Names the content of the input, and all else that decides its embeddings.
    key: bytes

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.offset + self.length


class PrefixChain:
    """The digests of a token sequence's full blocks.

    ``digests[0]`` stands for the empty prefix and depends on the context alone: on what decides the content of every
    block, such as a salt and an adapter (of several parts the caller makes one unambiguous name). ``digests[i + 1]``
    names block ``i`` and is computed from its tokens, the features that they are part of, and ``digests[i]``, the name
    of its parent. The hash is a cryptographic one: a prompt cannot be made up to hit blocks of other content.
    """

    __slots__ = ("block_size", "digests", "features")

    def __init__(self, context: str | bytes, block_size: int, features: Sequence[FeatureSpan] = ()) -> None:
        """``features`` are in the order of their offsets and do not overlap."""
        self.block_size = block_size
        self.features = features
        name = context if isinstance(context, bytes) else context.encode("utf-8", "surrogatepass")
        self.digests = [blake2b(name, digest_size=_DIGEST_BYTES).digest()]

    def __len__(self) -> int:
        """Blocks that have a name so far."""
        return len(self.digests) - 1

    def extend(self, token_ids: list[int], num_blocks: int) -> None:
        """Names the blocks up to ``num_blocks``; costs one hash for each that has no name yet."""
        digests, size, features = self.digests, self.block_size, self.features
        for start in range(len(self) * size, num_blocks * size, size):
            content = array("q", token_ids[start : start + size]).tobytes()
            if features:
                content += self._feature_bytes(start)
            digests.append(blake2b(digests[-1] + content, digest_size=_DIGEST_BYTES).digest())

    def first(self, num_blocks: int) -> PrefixChain:
        """A chain of its own that names at most the first ``num_blocks`` blocks."""
        chain = PrefixChain.__new__(PrefixChain)
        chain.block_size = self.block_size
        chain.features = self.features
        chain.digests = self.digests[: num_blocks + 1]
        return chain

    def content(self, token_ids: list[int], start: int, stop: int) -> Sequence[object]:
        """What positions ``start`` to ``stop`` (of one block) hold, to be compared with those of another block.

        The token ids; a token of a feature is equal only to the same token of a feature with the same key.
        """
        tokens = token_ids[start:stop]
        if not self.features:
            return tokens
        content: list[object] = list(tokens)
        for feature in self._overlapping(start, stop):
            for position in range(max(start, feature.offset), min(stop, feature.end)):
                place = position - feature.offset
                content[position - start] = (token_ids[position], feature.key, feature.length, place)
        return content

    def _feature_bytes(self, start: int) -> bytes:
        """Keys and places of the features in the block that begins at ``start``; one byte string for each meaning."""
        return b"".join(
            array("q", (f.offset - start, f.length, len(f.key))).tobytes() + f.key
            for f in self._overlapping(start, start + self.block_size)
        )

    def _overlapping(self, start: int, stop: int) -> Sequence[FeatureSpan]:
        first = bisect_right(self.features, start, key=lambda f: f.end)
        last = bisect_left(self.features, stop, lo=first, key=lambda f: f.offset)
        return self.features[first:last]
