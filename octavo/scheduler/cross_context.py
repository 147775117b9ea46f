"""What the sequences of a group attend to beside their own tokens: the output of an encoder, in blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from octavo.core.request import EngineCoreRequest
from octavo.memory.block_manager import BlockManager
from octavo.memory.prefix_cache import PrefixMatch
from octavo.memory.prefix_chain import PrefixChain


@dataclass(slots=True, eq=False)
class CrossContext:
    """The blocks of one encoder input. The block manager knows them under an id of its own, as it knows a sequence's.

    They are computed at once, and never written again. In the prefix cache a block is named by the content of the
    whole input and its index: all of them are found, or none is of use. The last one may be partly filled, and is
    cached as a full one: how many tokens there are is part of the content.
    """

    context_id: int
    num_tokens: int
    #: Of its prepared input.
    key: str
    #: What names its blocks.
    name: str
    #: Whether its keys and values are in its blocks, or will be when the steps in flight are done.
    is_computed: bool = False
    on_workers: bool = False
    #: Digests of its blocks; computed at the first look-up.
    chain: PrefixChain | None = None

    @classmethod
    def of(cls, request: EngineCoreRequest, ids: Iterator[int]) -> CrossContext | None:
        """That of a request, with an id of its own; None if it has none."""
        given = request.encoder_input
        if given is None:
            return None
        return cls(next(ids), given.num_tokens, given.key, f"context of {request.cache_context}")

    def blocks_needed(self, blocks: BlockManager) -> int:
        """Blocks that it needs in addition to those that it holds: all, or none."""
        return max(0, blocks.blocks_for(self.num_tokens) - blocks.num_entries(self.context_id))

    def find(self, blocks: BlockManager) -> PrefixMatch | None:
        """All of its blocks, if the prefix cache has them."""
        if not blocks.prefixes.enabled:
            return None
        tokens = self._tokens(blocks)
        if self.chain is None:
            self.chain = blocks.prefixes.chain(tokens, self.name)
        match = blocks.prefixes.match(tokens, self.chain)
        return match if match.num_full == blocks.blocks_for(self.num_tokens) else None

    def nothing_found(self, blocks: BlockManager) -> PrefixMatch:
        """As the result of a look-up, where not all of its blocks are there."""
        tokens = self._tokens(blocks)
        chain = self.chain or blocks.prefixes.chain(tokens, self.name)
        return PrefixMatch(0, len(tokens), [[] for _ in blocks.groups], 0, chain)

    def register(self, blocks: BlockManager) -> None:
        """Offers its blocks to the prefix cache, once they are computed."""
        tokens = self._tokens(blocks)
        blocks.prefixes.register(self.context_id, tokens, len(tokens) - 1, self.name)

    def _tokens(self, blocks: BlockManager) -> list[int]:
        """What stands for its content in full blocks, and one more, as a match leaves the last token out."""
        return [0] * (blocks.blocks_for(self.num_tokens) * blocks.block_size + 1)
