"""Prefixes whose blocks stay in the prefix cache until they are released."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.memory.kv_group import AllocStatus, BlocksNeeded, KVGroup
from octavo.memory.sequence_prefixes import SequencePrefixes


class PinnedPrefixes:
    """Owns the pins of shared prefixes (Kwon et al. 2023, section 4.4): by name, their blocks in each KV group.

    A pinned block is found like any block of the prefix cache, the last one even if it is partly filled: a sequence
    that shares that one writes into a copy. It is never evicted or written, stays when the cache is reset, and counts
    as pinned alone, whether sequences share it or not. In a group with an attention window, these are the blocks in the
    window at the end of the full ones, and the last: only a prompt with the whole prefix finds them.
    """

    def __init__(self, groups: Sequence[KVGroup], prefixes: SequencePrefixes) -> None:
        self._groups, self._prefixes = groups, prefixes
        self._blocks: dict[str, list[list[int]]] = {}

    @property
    def capacity(self) -> str:
        """How many blocks sequences can have, in words."""
        if not self._groups:
            return "none"
        first = self._groups[0]
        beside = f" beside the {first.device.num_pinned} of shared prefixes" if self._blocks else ""
        return f"{first.num_unpinned} blocks{beside}"

    def add(
        self, name: str, seq_id: int, token_ids: list[int], context: str | bytes, beside: BlocksNeeded
    ) -> AllocStatus:
        """Pins the blocks of a sequence that has computed these tokens and no others, until ``remove``.

        Returns:
            LATER if the prefix cache was reset or blocks were lost since the sequence began, NEVER if a sequence with
            the demand ``beside`` would not fit beside the pinned blocks; nothing is pinned then.

        Raises:
            ValueError: the name is taken.
        """
        chain = self._prefixes.chain(token_ids, context)
        chain.extend(token_ids, -(-len(token_ids) // chain.block_size))  # with the last block, however far it is filled
        may_register = self._prefixes.may_register(seq_id)
        if not (may_register and all(group.can_pin(chain, seq_id, len(token_ids)) for group in self._groups)):
            return AllocStatus.LATER
        if name in self._blocks:
            raise ValueError(f"a prefix {name!r} is pinned already")
        self._blocks[name] = [group.pin(chain, seq_id, token_ids) for group in self._groups]
        if all(group.could_hold(beside, num_seqs=1) for group in self._groups):
            return AllocStatus.OK
        self.remove(name)
        return AllocStatus.NEVER

    def remove(self, name: str) -> None:
        """Releases a prefix: its blocks are cached as any others. Nothing happens if there is none of this name."""
        for group, blocks in zip(self._groups, self._blocks.pop(name, ()), strict=False):
            group.cache.on_device.unpin(blocks)

    def clear(self) -> None:
        """Releases all prefixes."""
        for name in list(self._blocks):
            self.remove(name)
