"""Names for the content of full blocks: a chain of digests, so that a block's name covers all tokens before it too."""

from __future__ import annotations

from array import array
from hashlib import blake2b

_DIGEST_BYTES = 16


class PrefixChain:
    """The digests of a token sequence's full blocks.

    ``digests[0]`` stands for the empty prefix and depends on the salt alone; ``digests[i + 1]`` names block ``i`` and
    is computed from its tokens and ``digests[i]``, the name of its parent. The hash is a cryptographic one: a prompt
    cannot be made up to hit blocks of other content.
    """

    __slots__ = ("block_size", "digests")

    def __init__(self, salt: str, block_size: int) -> None:
        self.block_size = block_size
        self.digests = [blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()]

    def __len__(self) -> int:
        """Blocks that have a name so far."""
        return len(self.digests) - 1

    def extend(self, token_ids: list[int], num_blocks: int) -> None:
        """Names the blocks up to ``num_blocks``; costs one hash for each that has no name yet."""
        digests, size = self.digests, self.block_size
        for start in range(len(self) * size, num_blocks * size, size):
            tokens = array("q", token_ids[start : start + size]).tobytes()
            digests.append(blake2b(digests[-1] + tokens, digest_size=_DIGEST_BYTES).digest())

    def first(self, num_blocks: int) -> PrefixChain:
        """A chain of its own that names at most the first ``num_blocks`` blocks."""
        chain = PrefixChain.__new__(PrefixChain)
        chain.block_size = self.block_size
        chain.digests = self.digests[: num_blocks + 1]
        return chain
