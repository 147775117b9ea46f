"""Chooses the replica of a data-parallel engine that serves a request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from octavo.core.config import EngineConfig
from octavo.memory.prefix_chain import PrefixChain

Routing = Literal["prefix", "least_loaded", "round_robin"]

#: Blocks whose replica is remembered, of each replica: 20 million tokens in blocks of 16.
MAX_BLOCKS = 1 << 20
#: A prefix is looked for in this many blocks of a prompt at most, so that long prompts do not hold up the event loop.
_LONGEST_PREFIX = 2048


@dataclass
class RoutedReplica:
    """What is known of one replica."""

    #: Tokens of its open requests that are still to be computed, as far as that is known.
    outstanding: int = 0
    #: Digests of the blocks of prompts that it was given, least recently used first.
    blocks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def cached(self, digests: Sequence[bytes]) -> int:
        """How many of a prompt's first blocks it was given before."""
        return next((i for i, digest in enumerate(digests) if digest not in self.blocks), len(digests))

    def remember(self, digests: Sequence[bytes], most: int) -> None:
        """It is given these blocks; the ``most`` that it was given last are kept."""
        # Last block first: when room is short the ends of prompts go before their beginnings.
        for digest in reversed(digests):
            self.blocks[digest] = None
            self.blocks.move_to_end(digest)
        while len(self.blocks) > most:
            self.blocks.popitem(last=False)


class Router:
    """Owns what is known of each replica: its outstanding tokens, and the prefixes that its cache probably holds.

    "prefix": the replica with the fewest tokens to compute if it got the request, of which a prefix that it was given
    before need not be computed again. "least_loaded": that with the fewest outstanding tokens. "round_robin": the next.
    """

    def __init__(
        self, replicas: int, block_size: int, routing: Routing = "prefix", max_blocks: int = MAX_BLOCKS
    ) -> None:
        """``block_size``: tokens of a block of the replicas' prefix caches; ``max_blocks``: remembered of each."""
        self._replicas = [RoutedReplica() for _ in range(replicas)]
        self._block_size = block_size
        self._routing = routing
        self._max_blocks = max_blocks
        self._next = 0

    def choose(
        self, prompt: list[int], work: int, context: str | bytes = "", among: Sequence[int] | None = None
    ) -> int:
        """The replica for a request, which counts as given to it.

        Args:
            prompt: its token ids.
            work: tokens that it takes to compute, prompt and expected output.
            context: what its blocks depend on besides their tokens, such as a salt or an adapter.
            among: the replicas that can serve it, at least one; None: all.
        """
        usable = range(len(self._replicas)) if among is None else among
        if self._routing == "prefix":
            chain = PrefixChain(context, self._block_size)
            chain.extend(prompt, min(len(prompt) // self._block_size, _LONGEST_PREFIX))
            digests = chain.digests[1:]
            cost = {
                i: self._replicas[i].outstanding - self._replicas[i].cached(digests) * self._block_size for i in usable
            }
            chosen = min(usable, key=lambda i: (cost[i], (i - self._next) % len(self._replicas)))
            self._replicas[chosen].remember(digests, self._max_blocks)
        elif self._routing == "least_loaded":
            turns = {i: (i - self._next) % len(self._replicas) for i in usable}
            chosen = min(usable, key=lambda i: (self._replicas[i].outstanding, turns[i]))
        else:
            chosen = next((i for i in usable if i >= self._next), usable[0])
        self._next = (chosen + 1) % len(self._replicas)
        self._replicas[chosen].outstanding += work
        return chosen

    def release(self, replica: int, work: int) -> None:
        """Tokens of a request are computed, or the request has ended."""
        self._replicas[replica].outstanding -= work

    def forget_prefixes(self) -> None:
        """The prefix caches were reset."""
        for replica in self._replicas:
            replica.blocks.clear()

    def restart(self, replica: int) -> None:
        """The replica has ended, and with it its cache and all that it was given."""
        self._replicas[replica] = RoutedReplica()


def router_of(config: EngineConfig) -> Router:
    """The router of an engine's replicas.

    Prompts are remembered only where that can decide something: among several replicas that have prefix caches.
    """
    routing, size = config.data_parallel_routing, config.data_parallel_size
    if routing == "prefix" and (size == 1 or not config.enable_prefix_caching):
        routing = "least_loaded"
    return Router(size, config.block_size, routing)
