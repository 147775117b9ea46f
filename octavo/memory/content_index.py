"""Which blocks of one pool hold content that is known by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from octavo.memory.block_pool import BlockPool

#: How many children of a block are looked at for one that begins alike; keeps a popular parent cheap.
_CHILDREN_LOOKED_AT = 8


@dataclass(slots=True, eq=False)
class KnownBlock:
    """A full block whose content has a name; ``parent`` names the block before it."""

    pool: BlockPool
    block: int
    digest: bytes
    parent: bytes
    #: ``PrefixChain.content`` of its positions.
    content: Sequence[object]

    def copy_in(self, pool: BlockPool, block: int) -> KnownBlock:
        """The same content in another block."""
        return KnownBlock(pool, block, self.digest, self.parent, self.content)


class ContentIndex:
    """Finds the known blocks of one pool by digest, and the children of a digest.

    Invariant: the pool keeps exactly the blocks that are in the index, and no digest is there twice.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._by_digest: dict[bytes, KnownBlock] = {}
        self._by_block: dict[int, KnownBlock] = {}
        #: Oldest first. A child may outlive its parent here, and is found again when the parent comes back.
        self._children: dict[bytes, dict[bytes, KnownBlock]] = {}

    def find(self, digest: bytes) -> KnownBlock | None:
        """The block that holds this content."""
        return self._by_digest.get(digest)

    def add(self, known: KnownBlock) -> None:
        """Makes a used block known, unless the same content is, or the block is known already."""
        if known.digest in self._by_digest or known.block in self._by_block:
            return
        self._pool.keep(known.block)
        self._by_digest[known.digest] = self._by_block[known.block] = known
        self._children.setdefault(known.parent, {})[known.digest] = known

    def forget(self, block: int) -> KnownBlock:
        """Takes a known block out; if nobody holds it, it is free now."""
        known = self._by_block.pop(block)
        del self._by_digest[known.digest]
        siblings = self._children[known.parent]
        del siblings[known.digest]
        if not siblings:
            del self._children[known.parent]
        self._pool.forget(block)
        return known

    def evict(self) -> KnownBlock:
        """Forgets the coldest content that nobody holds; of a chain the deepest: it is found only with its parents."""
        known = self._by_block[self._pool.coldest()]
        while (child := self._unheld_child(known.digest)) is not None:
            known = child
        return self.forget(known.block)

    def _unheld_child(self, digest: bytes) -> KnownBlock | None:
        for child in self._children.get(digest, {}).values():
            if self._pool.references(child.block) == 0:
                return child
        return None

    def most_alike(self, parent: bytes, content: Sequence[object]) -> tuple[KnownBlock | None, int]:
        """Of the latest children of ``parent`` the one that agrees longest with this content, and how many agree."""
        best, most = None, 0
        children = self._children.get(parent)
        if children is not None:
            for child in islice(reversed(children.values()), _CHILDREN_LOOKED_AT):
                count = common_prefix(child.content, content)
                if count > most:
                    best, most = child, count
        return best, most

    def clear(self) -> None:
        """Forgets everything."""
        for block in list(self._by_block):
            self.forget(block)


def common_prefix(left: Sequence[object], right: Sequence[object]) -> int:
    """Length of the common beginning."""
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count
