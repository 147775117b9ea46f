"""Which prefixes are held in the prefix cache, until when, and for whom (prompt caching with a time to live)."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import TYPE_CHECKING

from octavo.core.cache_hints import CacheHints
from octavo.core.stats import RetentionStats
from octavo.memory.prefix_cache import PrefixChain, first_block_read

if TYPE_CHECKING:
    from octavo.memory.kv_group import KVGroup

#: Who holds an operator's prefixes; no client has this name.
OPERATOR = "operator"
#: A client's share of the blocks that may be held.
_CLIENT_SHARE = 0.5
#: Most blocks that all clients hold, each counted once for each client, in blocks that may be held.
_MOST_CHARGES = 4
#: Prefixes of a client that are not held any more, whose last use is remembered.
_MAX_PAST = 256


@dataclass(slots=True, eq=False)
class _Holding:
    """A prefix that a client holds."""

    client: _Client
    name: str | bytes
    #: By KV group.
    digests: list[Sequence[bytes]]
    expires: float
    #: The client's request that used it last, and how many requests before the one before was; None: there is none.
    used: int
    gap: int | None

    def gives_way_to(self, newest: _Holding) -> bool:
        return self.gap is None or newest.gap is None or newest.used - self.used > newest.gap


@dataclass(slots=True, eq=False)
class _Client:
    name: str
    #: Counts its requests with hints.
    request: int = 0
    #: By the key of a conversation or the name of a pin, or else by the last digest; least recently used first.
    holdings: OrderedDict[str | bytes, _Holding] = field(default_factory=OrderedDict)
    #: By digest in the first group: its holdings. A block is charged to each client that holds it.
    charged: dict[bytes, int] = field(default_factory=dict)
    #: The request that used a prefix last which is not held any more, by its name, in the order in which they ended.
    past: OrderedDict[str | bytes, int] = field(default_factory=OrderedDict)

    def remember(self, name: str | bytes, used: int) -> None:
        self.past[name] = used
        if len(self.past) > _MAX_PAST:
            self.past.popitem(last=False)


class Retention:
    """Holds prefixes: their blocks are evicted after all others, on the device and on the host.

    A holding names content, not blocks: a block that is evicted and computed or fetched again is held again. It ends
    when its time has come, when it is released, or when the share is used up; blocks that nobody holds any more are
    evicted before all others, but those of a displaced holding were used as recently as any. A held block is never
    reserved: it counts as available, and no request waits for it.

    All clients may hold ``share`` of the first group's blocks, and one client half of that; if all together hold too
    much, the oldest holding of the client with the most blocks gives way. So whoever holds less than others keeps it,
    and others lose no more of the cache than the client's share.

    If a client asks for more than its share, its oldest holdings give way, first those that were used once. But to a
    prefix that comes back, of those that came back themselves only the ones that have not been used for more of the
    client's requests than lay between its own last two uses; it is held as far as there is room then. Under LRU, agents
    that take turns would displace each other, and each would find nothing: of a cyclic reference pattern, what is held
    is best kept (Belady 1966), until it has not come back when it should have (the recency against the reuse distance,
    as in LIRS: Jiang and Zhang 2002).

    In a group with an attention window the blocks in the window at the end of a prefix are held; of recurrent states,
    the last checkpoint up to there.
    """

    def __init__(self, groups: Sequence[KVGroup], block_size: int, share: float, *, enabled: bool = True) -> None:
        """``share``: of the device blocks; 0 or not ``enabled`` (without a prefix cache): nothing is held."""
        self._groups, self._block_size = groups, block_size
        self._limit = int(share * groups[0].device.num_blocks) if groups and enabled else 0
        self._client_limit = int(_CLIENT_SHARE * self._limit)
        #: By group and digest: the holdings of all clients.
        self._held: list[dict[bytes, int]] = [{} for _ in groups]
        for group, held in zip(groups, self._held, strict=True):
            group.cache.follow(held)
        self._clients: dict[str, _Client] = {}
        #: Times at which holdings may expire; one that was used since comes up again. Ended ones stay for a while.
        self._times: list[tuple[float, int, _Holding]] = []
        self._numbers = count()
        self._num_holdings = self._num_charges = 0
        self._ended = {"expired": 0, "released": 0, "displaced": 0}
        #: Whether the last block of a prompt is cached although it is partly filled.
        self._keeps_ends = any(group.has_states for group in groups)

    def obey(self, hints: CacheHints, client: str, chain: PrefixChain, tokens: list[int], end: int, now: float) -> int:
        """Holds the prefixes that a request asks for, from now on; returns how many tokens of the longest are held.

        ``chain``: of ``tokens``, of which the first ``end`` are the prompt. ``client``: whose share it takes.
        """
        if not self._limit:
            return 0
        self.expire(now)
        most = 0
        if (known := self._clients.get(client)) is not None:
            known.request += 1
        for number, mark in enumerate(hints.prefixes(end)):
            name = hints.pin or (f"key {hints.key}" if hints.key and not number else "")
            owner = OPERATOR if hints.pin else client
            most = max(most, self._hold(owner, name, chain, tokens, mark.num_tokens, now + mark.ttl))
        return most

    def _hold(self, owner: str, name: str, chain: PrefixChain, tokens: list[int], end: int, expires: float) -> int:
        client = self._clients.get(owner) or _Client(owner)
        room = self._client_limit
        if owner == OPERATOR:  # whose holdings never give way
            before = client.holdings.get(name)
            room = self._limit - len(client.charged) + (len(before.digests[0]) if before is not None else 0)
        num_blocks = min(end // self._block_size, room, len(chain))
        if num_blocks <= 0:
            return 0
        if num_blocks < end // self._block_size or not self._keeps_ends:
            end = num_blocks * self._block_size
        self._clients[owner] = client
        digests = self._digests(chain, tokens, end)
        key = name or chain.digests[num_blocks]
        before = client.holdings.get(key)
        earlier = self._earlier_turns(client, key, chain, num_blocks, expires)
        uses = [one.used for one in (*earlier, before) if one is not None]
        if client.past:
            uses += [client.past.pop(past) for past in (key, *chain.digests[1:num_blocks]) if past in client.past]
        gap = client.request - max(uses) if uses else None
        if before is not None and before.digests == digests:
            holding = before
            holding.expires, holding.used, holding.gap = max(before.expires, expires), client.request, gap
            client.holdings.move_to_end(key)
        else:
            holding = _Holding(client, key, digests, expires, client.request, gap)
            self._put(holding)
        for one in earlier:
            self._end(one)
        if owner != OPERATOR and len(client.charged) > self._client_limit:
            self._displace_for(holding)
            if len(client.charged) > self._client_limit:
                end = self._cut(holding, chain, tokens, end)
        self._keep_limit(client)
        return end if key in client.holdings else 0

    def _earlier_turns(
        self, client: _Client, key: str | bytes, chain: PrefixChain, num_blocks: int, expires: float
    ) -> list[_Holding]:
        """The holdings of prefixes of a prompt that are to be held no longer than it."""
        names = (name for name in islice(chain.digests, 1, num_blocks) if name != key)
        holdings = (client.holdings.get(name) for name in names)
        return [one for one in holdings if one is not None and one.expires <= expires]

    def _put(self, holding: _Holding) -> None:
        """Adds a holding, in place of one of the same name."""
        holdings = holding.client.holdings
        before = holdings.get(holding.name)
        self._add(holding)
        if before is not None:
            self._remove(before)
        holdings[holding.name] = holding
        holdings.move_to_end(holding.name)

    def _displace_for(self, newest: _Holding) -> None:
        """Ends others of its client that give way to the newest, until the share is kept."""
        client = newest.client
        for holding in sorted(client.holdings.values(), key=lambda one: one.gap is not None):
            if len(client.charged) <= self._client_limit:
                return
            if holding is not newest and holding.gives_way_to(newest):
                self._displace(holding)

    def _cut(self, holding: _Holding, chain: PrefixChain, tokens: list[int], end: int) -> int:
        """Shortens a holding of ``end`` tokens to what is left of its client's share; returns its tokens."""
        client, digests = holding.client, holding.digests[0]
        excess, kept = len(client.charged) - self._client_limit, len(digests)
        while excess > 0 and kept:
            kept -= 1
            excess -= client.charged[digests[kept]] == 1
        num_blocks = -(-end // self._block_size) - (len(digests) - kept)
        if num_blocks > 0:
            end = num_blocks * self._block_size
            shorter = self._digests(chain, tokens, end)
            holding = _Holding(client, holding.name, shorter, holding.expires, holding.used, holding.gap)
            self._put(holding)
        if num_blocks > 0 and len(client.charged) <= self._client_limit:
            return end
        client.remember(holding.name, holding.used)  # a window or a state is held as a whole
        self._end(holding)
        return 0

    def _digests(self, chain: PrefixChain, tokens: list[int], end: int) -> list[Sequence[bytes]]:
        """By group: the digests of the blocks that a prompt with these first ``end`` tokens needs."""
        full, digests = end // self._block_size, list[Sequence[bytes]]()
        ends = [chain.digest(tokens, end)] if end % self._block_size else []
        for group in self._groups:
            if group.has_states:
                first = max(0, full - group.ratio)
            else:
                first = first_block_read(full * self._block_size, group.window, self._block_size)
            digests.append([*chain.digests[first + 1 : full + 1], *ends])
        return digests

    def _keep_limit(self, newest: _Client) -> None:
        """Ends holdings until all clients together keep their share."""
        while len(self._held[0]) > self._limit or self._num_charges > _MOST_CHARGES * self._limit:
            others = [one for one in self._clients.values() if one.name != OPERATOR]
            if not others:
                return
            most = max(others, key=lambda one: (len(one.charged), one is newest))
            self._displace(next(iter(most.holdings.values())))

    def _displace(self, holding: _Holding) -> None:
        holding.client.remember(holding.name, holding.used)
        self._end(holding)
        self._ended["displaced"] += 1

    def release(self, name: str) -> None:
        """Ends the holding of an operator's prefix; its blocks are evicted before all others."""
        client = self._clients.get(OPERATOR)
        holding = None if client is None else client.holdings.get(name)
        if holding is not None:
            self._end(holding, evict_first=True)
            self._ended["released"] += 1

    def expire(self, now: float) -> None:
        """Ends the holdings whose time has come."""
        while self._times and self._times[0][0] <= now:
            _, number, holding = heapq.heappop(self._times)
            if holding.client.holdings.get(holding.name) is not holding:
                continue
            if holding.expires > now:
                heapq.heappush(self._times, (holding.expires, number, holding))
            else:
                self._end(holding, evict_first=True)
                self._ended["expired"] += 1

    def clear(self) -> None:
        """Ends all holdings."""
        for client in list(self._clients.values()):
            for holding in list(client.holdings.values()):
                self._end(holding)

    def _add(self, holding: _Holding) -> None:
        for group, held, digests in zip(self._groups, self._held, holding.digests, strict=True):
            for digest in digests:
                before = held.get(digest, 0)
                held[digest] = before + 1
                if not before:
                    group.cache.hold(digest)
        charged = holding.client.charged
        self._num_charges -= len(charged)
        for digest in holding.digests[0]:
            charged[digest] = charged.get(digest, 0) + 1
        self._num_charges += len(charged)
        self._num_holdings += 1
        heapq.heappush(self._times, (holding.expires, next(self._numbers), holding))
        if len(self._times) > 2 * self._num_holdings + 64:  # most have ended before their time
            self._times = [entry for entry in self._times if entry[2].client.holdings.get(entry[2].name) is entry[2]]
            self._times.append((holding.expires, next(self._numbers), holding))
            heapq.heapify(self._times)

    def _end(self, holding: _Holding, *, evict_first: bool = False) -> None:
        client = holding.client
        del client.holdings[holding.name]
        self._remove(holding, evict_first=evict_first)
        if not client.holdings:
            del self._clients[client.name]

    def _remove(self, holding: _Holding, *, evict_first: bool = False) -> None:
        for group, held, digests in zip(self._groups, self._held, holding.digests, strict=True):
            for digest in _ended(held, digests):
                group.cache.unhold(digest, evict_first=evict_first)
        charged = holding.client.charged
        self._num_charges -= sum(1 for _ in _ended(charged, holding.digests[0]))
        self._num_holdings -= 1
        holding.digests = []

    def stats(self) -> RetentionStats | None:
        """None if nothing was ever held."""
        if not (self._num_holdings or any(self._ended.values())):
            return None
        return RetentionStats(
            sum(group.device.num_held for group in self._groups),
            self._num_holdings,
            self._ended["expired"],
            self._ended["released"],
            self._ended["displaced"],
        )


def _ended(counts: dict[bytes, int], digests: Iterable[bytes]) -> Iterator[bytes]:
    """Counts each digest once less; the digests that nothing counts any more."""
    for digest in digests:
        left = counts[digest] - 1
        if left:
            counts[digest] = left
        else:
            del counts[digest]
            yield digest
