"""The longest beginning of a token sequence whose KV entries are there in every group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.memory.content_index import KnownBlock
from octavo.memory.prefix_cache import PrefixCache
from octavo.memory.prefix_chain import PrefixChain


@dataclass(slots=True, eq=False)
class PrefixMatch:
    """The KV entries that are there already for the beginning of a token sequence."""

    #: KV entries found; always fewer than the tokens asked about, so that one is left to compute.
    num_tokens: int
    #: Tokens asked about.
    num_queried: int
    #: For each group the blocks found, in order, on the device or the host; None for one that a window does not reach.
    #: ``num_full`` of them agree whole; if there is one more, only its first tokens do.
    hits: list[list[KnownBlock | None]]
    num_full: int
    chain: PrefixChain


def find_match(caches: Sequence[PrefixCache], token_ids: list[int], chain: PrefixChain) -> PrefixMatch:
    """Finds the longest beginning of ``token_ids``, without its last token, in the caches of all groups."""
    size, usable = chain.block_size, len(token_ids) - 1
    hits = [caches[0].find_prefix(chain, min(usable // size, len(chain)))]
    end = len(hits[0])
    if len(caches) > 1:
        hits, end = _agree(caches, chain, end)
    start = end * size
    content = chain.content(token_ids, start, min(start + size, usable))
    partial, count = caches[0].find_partial(chain, end, content)
    if partial is not None:
        same = [partial, *(cache.find(partial.digest) for cache in caches[1:])]
        if None in same:
            count = 0
        else:
            for found, hit in zip(hits, same, strict=True):
                found.append(hit)
    return PrefixMatch(start + count, len(token_ids), hits, end, chain)


def _agree(caches: Sequence[PrefixCache], chain: PrefixChain, end: int) -> tuple[list[list[KnownBlock | None]], int]:
    """The longest prefix of at most ``end`` blocks in all caches. A shorter one may need other blocks of a window."""
    while True:
        hits = [cache.find_prefix(chain, end) for cache in caches]
        shortest = min(map(len, hits))
        if shortest == end:
            return hits, end
        end = shortest
