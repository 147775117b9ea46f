"""An index of the blocks of one pool by the digest of their content."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice

import msgspec

from octavo.core.untracked import untracked
from octavo.memory.block_pool import BlockPool
from octavo.memory.prefix_chain import Content, positions

#: Children of a block that are compared in the search for a partial match; bounds the cost of a popular parent.
_MAX_COMPARED_CHILDREN = 8


class KnownBlock(msgspec.Struct, eq=False, gc=False):
    """A block in the prefix cache, with the digests of its content and of the block before it (``parent``).

    It is full, or the last one of a shared prefix: then ``content`` is shorter, and it is nobody's parent.

    There is one for every block of a full cache, so the garbage collector is not to visit them: nothing that it refers
    to refers to it.
    """

    pool: BlockPool
    block: int
    digest: bytes
    parent: bytes
    #: ``PrefixChain.content`` of its positions.
    content: Content
    #: Its siblings in the index, the blocks with the same parent: the one added before it, and the one after it. They
    #: are in a ring: after the newest comes the oldest.
    older: int = -1
    newer: int = -1

    def copy_in(self, pool: BlockPool, block: int) -> KnownBlock:
        """The same content in another block."""
        return KnownBlock(pool, block, self.digest, self.parent, self.content)


def _by_digest() -> list[dict[bytes, KnownBlock]]:
    """A dictionary by digest, in parts by its first byte: one of 90,000 entries takes 6 ms whenever it grows."""
    return [{} for _ in range(256)]


class ContentIndex:
    """Finds the cached blocks of one pool by digest, and the children of a digest.

    Invariant: the pool keeps exactly the blocks that are in the index, and no two of them have the same digest.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        #: By block id, less the pool's first one.
        self._by_block: list[KnownBlock | None] = untracked([None] * pool.num_blocks)
        self._by_digest = _by_digest()
        #: The newest child of each digest. A child may stay after its parent is evicted, and is found again once the
        #: parent is added.
        self._newest_child = _by_digest()
        #: The pinned children of each digest, which are always compared.
        self._pinned: dict[bytes, list[KnownBlock]] = {}

    def find(self, digest: bytes) -> KnownBlock | None:
        """The block with this digest."""
        return self._by_digest[digest[0]].get(digest)

    def add(self, entry: KnownBlock) -> None:
        """Adds a used block, unless its digest or the block itself is in the index already."""
        pool, block, digest, parent = self._pool, entry.block, entry.digest, entry.parent
        by_digest = self._by_digest[digest[0]]
        if digest in by_digest or not pool.keep(block):
            return
        self._by_block[block - pool.first] = by_digest[digest] = entry
        newest_child = self._newest_child[parent[0]]
        newest = newest_child.get(parent)
        entry.older = entry.newer = block
        if newest is not None:
            entry.older, entry.newer = newest.block, newest.newer
            self._entry(newest.newer).older = newest.newer = block
        newest_child[parent] = entry

    def forget(self, block: int) -> KnownBlock:
        """Removes a block; it becomes free if it has no references."""
        entry = self._entry(block)
        newest_child = self._newest_child[entry.parent[0]]
        if entry.older == block:
            del newest_child[entry.parent]
        else:
            older = self._entry(entry.older)
            older.newer, self._entry(entry.newer).older = entry.newer, entry.older
            if newest_child[entry.parent] is entry:
                newest_child[entry.parent] = older
        self._by_block[block - self._pool.first] = None
        del self._by_digest[entry.digest[0]][entry.digest]
        self._pool.forget(block)
        return entry

    def _entry(self, block: int) -> KnownBlock:
        entry = self._by_block[block - self._pool.first]
        assert entry is not None, f"block {block} is not in the index"
        return entry

    def _children(self, parent: bytes, *, oldest_first: bool = False) -> Iterator[KnownBlock]:
        """The blocks with this parent, the newest first or the oldest."""
        newest = self._newest_child[parent[0]].get(parent)
        if newest is None:
            return
        child = first = self._entry(newest.newer) if oldest_first else newest
        while True:
            yield child
            child = self._entry(child.newer if oldest_first else child.older)
            if child is first:
                return

    def evict(self) -> KnownBlock:
        """Removes the least recently used block without references, or the last of its descendants without any.

        A descendant is of no use without its parents, which come before it in every look-up.
        """
        entry: KnownBlock | None = self._entry(self._pool.least_recently_used())
        while entry is not None:
            last = entry
            children = self._children(last.digest, oldest_first=True)
            entry = next((child for child in children if self._pool.references(child.block) == 0), None)
        return self.forget(last.block)

    def find_partial(
        self, parent: bytes, content: Sequence[object], suits: Callable[[bytes], bool]
    ) -> tuple[KnownBlock | None, int]:
        """The child of ``parent`` with the longest common prefix with ``content``, and its length in tokens.

        Only pinned and recent children whose digest ``suits`` are compared.
        """
        best, longest = None, 0
        recent = islice(self._children(parent), _MAX_COMPARED_CHILDREN)
        for child in chain(self._pinned.get(parent, ()), recent):
            count = common_prefix(positions(child.content), content)
            if count > longest and suits(child.digest):
                best, longest = child, count
        return best, longest

    def pin(self, block: int) -> None:
        """``BlockPool.pin`` of a block of the index."""
        if not self._pool.is_pinned(block):
            entry = self._entry(block)
            self._pinned.setdefault(entry.parent, []).append(entry)
        self._pool.pin((block,))

    def unpin(self, blocks: Sequence[int]) -> None:
        """Ends one ``pin`` of each."""
        self._pool.unpin(blocks)
        for block in blocks:
            if not self._pool.is_pinned(block):
                entry = self._entry(block)
                self._pinned[entry.parent].remove(entry)
                if not self._pinned[entry.parent]:
                    del self._pinned[entry.parent]

    def clear(self) -> None:
        """Removes all blocks that are not pinned."""
        for entry in self._by_block:
            if entry is not None and not self._pool.is_pinned(entry.block):
                self.forget(entry.block)


def common_prefix(left: Sequence[object], right: Sequence[object]) -> int:
    """Elements at the beginning that are equal."""
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count
