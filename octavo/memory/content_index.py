"""An index of the blocks of one pool by the digest of their content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from octavo.memory.block_pool import BlockPool

#: Children of a block that are compared in the search for a partial match; bounds the cost of a popular parent.
_MAX_COMPARED_CHILDREN = 8


@dataclass(slots=True, eq=False)
class KnownBlock:
    """A full block in the prefix cache, with the digests of its content and of the block before it (``parent``)."""

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
    """Finds the cached blocks of one pool by digest, and the children of a digest.

    Invariant: the pool keeps exactly the blocks that are in the index, and no two of them have the same digest.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._by_digest: dict[bytes, KnownBlock] = {}
        self._by_block: dict[int, KnownBlock] = {}
        #: Oldest first. A child may stay after its parent is evicted, and is found again once the parent is added.
        self._children: dict[bytes, dict[bytes, KnownBlock]] = {}

    def find(self, digest: bytes) -> KnownBlock | None:
        """The block with this digest."""
        return self._by_digest.get(digest)

    def add(self, known: KnownBlock) -> None:
        """Adds a used block, unless its digest or the block itself is in the index already."""
        if known.digest in self._by_digest or known.block in self._by_block:
            return
        self._pool.keep(known.block)
        self._by_digest[known.digest] = self._by_block[known.block] = known
        self._children.setdefault(known.parent, {})[known.digest] = known

    def forget(self, block: int) -> KnownBlock:
        """Removes a block; it becomes free if it has no references."""
        known = self._by_block.pop(block)
        del self._by_digest[known.digest]
        siblings = self._children[known.parent]
        del siblings[known.digest]
        if not siblings:
            del self._children[known.parent]
        self._pool.forget(block)
        return known

    def evict(self) -> KnownBlock:
        """Removes the least recently used block without references, or the last of its descendants without any.

        A descendant is of no use without its parents, which come before it in every look-up.
        """
        known = self._by_block[self._pool.least_recently_used()]
        while (child := self._unreferenced_child(known.digest)) is not None:
            known = child
        return self.forget(known.block)

    def _unreferenced_child(self, digest: bytes) -> KnownBlock | None:
        for child in self._children.get(digest, {}).values():
            if self._pool.references(child.block) == 0:
                return child
        return None

    def find_partial(self, parent: bytes, content: Sequence[object]) -> tuple[KnownBlock | None, int]:
        """The recent child of ``parent`` with the longest common prefix with ``content``, and its length in tokens."""
        best, longest = None, 0
        children = self._children.get(parent)
        if children is not None:
            for child in islice(reversed(children.values()), _MAX_COMPARED_CHILDREN):
                count = common_prefix(child.content, content)
                if count > longest:
                    best, longest = child, count
        return best, longest

    def clear(self) -> None:
        """Removes all blocks that are not pinned."""
        for block in list(self._by_block):
            if not self._pool.is_pinned(block):
                self.forget(block)


def common_prefix(left: Sequence[object], right: Sequence[object]) -> int:
    """Elements at the beginning that are equal."""
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count
