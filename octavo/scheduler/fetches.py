"""Fetches from the KV stores: a waiting group whose prefix may be stored waits for it, if that beats computing it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from octavo.core.plan import Fetch, StepPlan, StepResult
from octavo.core.request import SequenceStatus
from octavo.core.stats import StoreStats
from octavo.memory.block_manager import BlockManager
from octavo.memory.kv_group import KVGroup
from octavo.memory.prefix_cache import PrefixChain, PrefixMatch, first_block_read
from octavo.memory.stored import StoredBlocks
from octavo.scheduler.groups import SequenceGroup

#: Fetches of one prefix at once: the second is read while the first is placed.
_AHEAD = 2
#: Seconds for which a block that the stores lacked is not asked for again, and how many of these are remembered.
_ABSENT_SECONDS, _MAX_ABSENT = 1.0, 4096


class FetchCost:
    """What fetches cost, as observed."""

    def __init__(self) -> None:
        #: Seconds of a fetched block, and of a fetch that finds nothing; None until observed.
        self.seconds_per_block: float | None = None
        self.seconds_of_miss: float | None = None
        self._blocks = self._seconds = 0.0

    def observe(self, num_blocks: int, seconds: float) -> None:
        if num_blocks:
            self._blocks, self._seconds = 0.8 * self._blocks + num_blocks, 0.8 * self._seconds + seconds
            self.seconds_per_block = self._seconds / self._blocks
        else:
            before = seconds if self.seconds_of_miss is None else self.seconds_of_miss
            self.seconds_of_miss = 0.8 * before + 0.2 * seconds

    def is_cheaper(self, num_blocks: int, num_tokens: int, seconds_per_token: float | None) -> bool:
        """Whether to fetch the blocks rather than to compute the tokens; True as far as costs are unknown.

        Each time that computing is cheaper, the observations count less, so that fetching is tried again at last.
        """
        seconds = (self.seconds_of_miss or 0.0) + num_blocks * (self.seconds_per_block or 0.0)
        if seconds_per_token is None or seconds < num_tokens * seconds_per_token:
            return True
        self._seconds *= 0.95
        if self.seconds_per_block is not None:
            self.seconds_per_block *= 0.95
        if self.seconds_of_miss is not None:
            self.seconds_of_miss *= 0.95
        return False

    def share(self, tokens_per_block: float, seconds_per_token: float | None) -> float | None:
        """Time to fetch a token as a share of that to compute it, at most 1; None until both are observed."""
        if self.seconds_per_block is None or not seconds_per_token:
            return None
        return min(1.0, self.seconds_per_block / (tokens_per_block * seconds_per_token))


@dataclass(slots=True, eq=False)
class _Begun:
    """A fetch that a plan has begun."""

    fetch_id: int
    #: (KV group, index in the chain).
    blocks: list[tuple[int, int]]
    num_bytes: int
    #: Leading blocks that the workers have; None until reported.
    num_found: int | None = None


@dataclass(slots=True, eq=False)
class PrefixFetch:
    """The prefix of one group, which comes from the stores in several fetches.

    First come the blocks of the KV groups without a window, from the first missing one on; then, when the end of what
    the stores have is known, those in the windows of the token after it. Without any such group those of the first
    group come from the start, and the ones that the token after each fetch reads are kept.

    With recurrent states, the prefix ends where they have a checkpoint at the end of one of their blocks: the last one
    before the end of what the stores have, or, as long as they lack that, the one before.
    """

    group: SequenceGroup
    chain: PrefixChain
    token_ids: list[int]
    #: The next block to ask for, and the end of the blocks to ask for: at first of all that a match may have.
    index: int
    end: int
    #: Blocks that the prefix cache has of all KV groups.
    num_matched: int
    #: Blocks before it were found in the stores or in the cache.
    found_end: int
    #: When it began, or the last fetch was reported.
    since: float
    begun: deque[_Begun] = field(default_factory=deque)
    #: The blocks in windows that are still to be asked for; None until the end is known.
    in_windows: deque[tuple[int, int]] | None = None
    #: Groups that wait for the same blocks.
    followers: list[SequenceGroup] = field(default_factory=list)

    @property
    def awaits_report(self) -> bool:
        return any(fetch.num_found is None for fetch in self.begun)


class Fetches:
    """Owns the groups that wait for the stores, and the fetches under way.

    A group is looked at when it is the first that may be admitted and there is room for it. If the next block of its
    prompt is in the cache of neither device nor host, and fetching the rest is expected to take less time than
    computing it, the group is *held*: it waits without blocks, and others pass it (``GroupQueue``). Fetched blocks are
    placed into the prefix cache, while the group would still be admitted. When nothing more comes the group is released
    and admitted like any other, with what the prefix cache has then; a lost fetch means only that more is computed. A
    group whose next block another one waits for follows that one.

    It is looked at once, and again after a preemption. If no report comes within ``StoreLimits.patience``, all held
    groups are released, and there are no fetches for a while.
    """

    def __init__(
        self, blocks: BlockManager, stored: StoredBlocks, seconds_per_token: Callable[[], float | None]
    ) -> None:
        """``seconds_per_token``: the observed cost of computing a prompt."""
        self._blocks, self._stored, self._seconds_per_token = blocks, stored, seconds_per_token
        self.limits, self.cost, self.stats = stored.limits, FetchCost(), StoreStats()
        groups = blocks.groups
        #: The groups of which every block is fetched, and the others.
        self._whole = [group for group in groups if group.window is None] or groups[:1]
        #: States come first: where they end decides what windows there are.
        self._windowed = sorted((g for g in groups if g not in self._whole), key=lambda group: not group.has_states)
        #: Blocks between two checkpoints of states beside other groups; None without such states.
        self._distance = next((group.ratio for group in self._windowed if group.has_states), None)
        #: By group id, in the order in which they began to be held.
        self._prefixes: dict[int, PrefixFetch] = {}
        #: By id, those that were not reported.
        self._unreported: dict[int, tuple[PrefixFetch, _Begun]] = {}
        #: By digest: when a block was missing in the stores.
        self._absent: dict[bytes, float] = {}
        self._paused_until = 0.0
        self._ids = itertools.count()
        #: For the next plan.
        self._fetch: list[Fetch] = []
        self._drop: list[int] = []
        #: (step, ids): drops of plans whose results are not known.
        self._dropped: deque[tuple[int, list[int]]] = deque()
        self._match: Callable[[SequenceGroup], PrefixMatch | None] = lambda group: None
        self._fits: Callable[[SequenceGroup], bool] = lambda group: True
        self._requeue: Callable[[SequenceGroup], None] = lambda group: None

    def connect(
        self,
        match: Callable[[SequenceGroup], PrefixMatch | None],
        fits: Callable[[SequenceGroup], bool],
        requeue: Callable[[SequenceGroup], None],
    ) -> None:
        """``match``: its cached prefix; ``fits``: whether there is room for it; ``requeue``: after ``is_held`` changed.

        Called again after all groups were taken out.
        """
        self._match, self._fits, self._requeue = match, fits, requeue

    @property
    def num_unreported(self) -> int:
        return len(self._unreported)

    @property
    def has_drops(self) -> bool:
        return bool(self._drop)

    def hold(self, group: SequenceGroup, now: float) -> bool:
        """Looks at the first group that may be admitted; whether it waits for the stores from now on."""
        if group.looked_up or group.status is not SequenceStatus.WAITING or now < self._paused_until:
            return False
        if group.urgent or group.cross is not None or group.request.task.needs_all_tokens:
            group.looked_up = True
            return False
        if not self._fits(group):
            return False  # looked at again
        match = self._match(group)
        group.looked_up = True
        if match is None:
            return False
        chain, token_ids = match.chain, group.seqs[0].token_ids
        end = len(chain)
        if self._distance is not None:
            end = self._last_checkpoint(min(end, (len(token_ids) - 1) // chain.block_size))
        start = self._first_missing(chain, match.num_full, end)
        if start >= end and (match.num_full >= end or not self._windowed):
            return False
        if start < end:
            digest = chain.digests[start + 1]
            leader = self._leader(start, digest)
            if leader is not None and leader.group.is_held:
                leader.followers.append(group)
                self._set_held(group, True)
                return True
            if leader is not None:  # there is no room for its blocks at present
                group.looked_up = False
                return False
            asked, is_new = self._absent.get(digest), self._stored.knows(self._whole[0].number, digest)
            if asked is not None and now < asked + _ABSENT_SECONDS and not is_new:
                return False
        behind = sum(len(fetch.blocks) for _, fetch in self._unreported.values())
        num_blocks, num_tokens = (end - start) * len(self._whole), (end - match.num_full) * chain.block_size
        if not self.cost.is_cheaper(behind + num_blocks, num_tokens, self._seconds_per_token()):
            self.stats.computed += 1
            return False
        prefix = PrefixFetch(group, chain, token_ids, start, end, match.num_full, start, now)
        self._prefixes[group.group_id] = prefix
        self.stats.fetches += 1
        self._set_held(group, True)
        self._begin(now)
        return True

    def _leader(self, index: int, digest: bytes) -> PrefixFetch | None:
        """The prefix under way that this block of a chain is to come with."""
        leaders = (p for p in self._prefixes.values() if p.found_end <= index < p.end)
        return next((p for p in leaders if p.chain.digests[index + 1] == digest), None)

    def _first_missing(self, chain: PrefixChain, start: int, end: int) -> int:
        """The first block from ``start`` to ``end`` that a group of which every block is fetched has not cached."""
        while start < end and all(group.cache.find(chain.digests[start + 1]) for group in self._whole):
            start += 1
        return start

    def _last_checkpoint(self, end: int) -> int:
        """The blocks up to the last checkpoint of states within the first ``end`` blocks."""
        return end - end % (self._distance or 1)

    def _set_held(self, group: SequenceGroup, held: bool) -> None:
        group.is_held = held
        self.stats.waiting += 1 if held else -1
        self._requeue(group)

    # Fetches that begin.

    def _begin(self, now: float) -> None:
        """Begins fetches as far as the limits allow, for prefixes in the order in which they are waited for."""
        limits, groups = self.limits, self._blocks.groups
        begun = [fetch for prefix in self._prefixes.values() for fetch in prefix.begun]
        count, num_bytes = len(begun), sum(fetch.num_bytes for fetch in begun)
        for prefix in self._prefixes.values():
            while (
                count < (limits.max_fetches if num_bytes >= limits.fetch_bytes else limits.max_small_fetches)
                and len(prefix.begun) < _AHEAD
                and (blocks := self._next_blocks(prefix))
            ):
                fetch = _Begun(next(self._ids), blocks, sum(groups[number].block_bytes for number, _ in blocks))
                count, num_bytes = count + 1, num_bytes + fetch.num_bytes
                if not prefix.begun:
                    prefix.since = now
                prefix.begun.append(fetch)
                self._unreported[fetch.fetch_id] = prefix, fetch
                named = [(number, prefix.chain.digests[index + 1]) for number, index in blocks]
                self._fetch.append(Fetch(fetch.fetch_id, named))

    def _next_blocks(self, prefix: PrefixFetch) -> list[tuple[int, int]]:
        """The blocks that a fetch asks for next; none if it depends on the reports of others, or at the end."""
        blocks: list[tuple[int, int]] = []
        room, digests = self.limits.fetch_bytes, prefix.chain.digests
        while prefix.index < prefix.end and (room > 0 or not blocks):
            digest = digests[prefix.index + 1]
            missing = [group for group in self._whole if group.cache.find(digest) is None]
            blocks += [(group.number, prefix.index) for group in missing]
            room -= sum(group.block_bytes for group in missing)
            prefix.index += 1
        if blocks or prefix.begun:
            return blocks
        if prefix.in_windows is None:
            prefix.end = prefix.found_end = self._last_checkpoint(prefix.end)
            prefix.in_windows = deque(self._in_windows(prefix))
        while prefix.in_windows and (room > 0 or not blocks):
            blocks.append(prefix.in_windows.popleft())
            room -= self._blocks.groups[blocks[-1][0]].block_bytes
        return blocks

    def _in_windows(self, prefix: PrefixFetch) -> Iterator[tuple[int, int]]:
        """The missing blocks that the token after the found prefix reads in the groups with a window.

        None if the prefix cache has a longer one: with states it may end within their blocks.
        """
        digests, end = prefix.chain.digests, prefix.found_end
        if self._distance is not None and end <= prefix.num_matched:
            return
        for group in self._windowed:
            for index in range(self._first_read(prefix, group, end), end):
                if group.cache.find(digests[index + 1]) is None:
                    yield group.number, index

    def _first_read(self, prefix: PrefixFetch, group: KVGroup, end: int) -> int:
        """The first block that the first token computed after ``end`` blocks reads; the last token is computed."""
        size = prefix.chain.block_size
        full = min(end, (len(prefix.token_ids) - 1) // size)
        if group.has_states:
            return max(0, full // group.ratio * group.ratio - 1)
        return first_block_read(full * size, group.window, size)

    # Fetches that end.

    def update(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Notes what the workers report; fetches that were dropped meanwhile are ignored."""
        while self._dropped and self._dropped[0][0] <= plan.step:
            self._dropped.popleft()
        for fetch_id, num_found in result.fetched.items():
            reported = self._unreported.pop(fetch_id, None)
            if reported is not None:
                prefix, fetch = reported
                fetch.num_found, prefix.since = num_found, now
        self._stored.observe_written(result.written)
        for group, digest in reversed(result.not_stored):
            self._stored.take_back(group, digest)
        for num_blocks, seconds in result.fetch_times:
            self.cost.observe(num_blocks, seconds)
        if result.stores:
            self.stats.tiers = result.stores
            self._stored.observe_writes(result.stores)

    def place(self, now: float) -> bool:
        """Places what has come for groups that would be admitted; whether any block was.

        Running groups must have their blocks for the step that is planned.
        """
        num_fetched = self._stored.num_fetched
        for prefix in list(self._prefixes.values()):
            if self._prefixes.get(prefix.group.group_id) is not prefix:
                continue
            while prefix.begun and prefix.begun[0].num_found is not None:
                if prefix.begun[0].num_found and not self._make_room(prefix):
                    break
                self._place_first(prefix, now)
            if now - prefix.since > self.limits.patience:
                if prefix.awaits_report:
                    self._pause(now)
                    break
                if prefix.begun:  # there was no room for too long
                    self._end(prefix)
        self._begin(now)
        for prefix in [prefix for prefix in self._prefixes.values() if not prefix.begun]:
            if prefix.index >= prefix.end and prefix.in_windows is not None and not prefix.in_windows:
                self._end(prefix)
        return self._stored.num_fetched > num_fetched

    def _make_room(self, prefix: PrefixFetch) -> bool:
        """Whether the group would be admitted; if not, it takes its turn among the others until there is room.

        The cached part of the prefix counts as used now, so that fetched blocks do not evict it.
        """
        group = prefix.group
        if not self._fits(group):
            self._release(prefix)
            return False
        for kv_group in self._blocks.groups:
            last = prefix.found_end
            first = self._first_read(prefix, kv_group, last)
            for index in range(last - 1, first - 1, -1):
                entry = kv_group.cache.on_device.find(prefix.chain.digests[index + 1])
                if entry is not None:
                    kv_group.device.touch(entry.block)
        return True

    def _place_first(self, prefix: PrefixFetch, now: float) -> None:
        """Places the blocks of the first fetch, and drops it; after a missing block nothing else is of use."""
        fetch = prefix.begun.popleft()
        assert fetch.num_found is not None
        found = fetch.blocks[: fetch.num_found]
        self._drop.append(fetch.fetch_id)
        complete = len(found) == len(fetch.blocks)
        if prefix.in_windows is None:
            before = prefix.found_end
            prefix.found_end = fetch.blocks[-1][1] + 1 if complete else fetch.blocks[len(found)][1]
            self.stats.fetched_tokens += (prefix.found_end - before) * prefix.chain.block_size
        if not complete:
            number, index = fetch.blocks[len(found)]
            self._drop_begun(prefix)
            if prefix.in_windows is not None:
                prefix.in_windows.clear()
            if prefix.in_windows is not None and self._blocks.groups[number].has_states:  # the one before may be there
                prefix.found_end, found = self._last_checkpoint(prefix.found_end - 1), []
                prefix.in_windows.extend(self._in_windows(prefix))
            else:
                self._note_absent(prefix.chain.digests[index + 1], now)
            prefix.end = prefix.index = prefix.found_end
        for position, (number, index) in enumerate(found):
            group = self._blocks.groups[number]
            if prefix.in_windows is None and index < self._first_read(prefix, group, prefix.found_end):
                continue  # no token will read it
            source = fetch.fetch_id, position
            if not self._stored.place(number, prefix.chain, index, prefix.token_ids, source):
                self._drop_begun(prefix)
                prefix.end = prefix.index = index
                prefix.in_windows = deque()
                break

    def _note_absent(self, digest: bytes, now: float) -> None:
        self._absent.pop(digest, None)
        self._absent[digest] = now
        if len(self._absent) > _MAX_ABSENT:
            del self._absent[next(iter(self._absent))]

    def _drop_begun(self, prefix: PrefixFetch) -> None:
        for fetch in prefix.begun:
            self._unreported.pop(fetch.fetch_id, None)
            self._drop.append(fetch.fetch_id)
        prefix.begun.clear()

    def _release(self, prefix: PrefixFetch) -> None:
        """Its groups take their turns among the others; those that follow are looked at again."""
        if prefix.group.is_held:
            self._set_held(prefix.group, False)
        followers, prefix.followers = prefix.followers, []
        for group in followers:
            group.looked_up = False
            self._set_held(group, False)

    def _end(self, prefix: PrefixFetch) -> None:
        self._drop_begun(prefix)
        del self._prefixes[prefix.group.group_id]
        self._release(prefix)

    def _pause(self, now: float) -> None:
        self._paused_until = now + self.limits.pause
        self.stats.timeouts += 1
        self.release_all()

    def leave(self, group: SequenceGroup) -> None:
        """Called when a group ceases to wait: it is admitted, or has ended."""
        prefix = self._prefixes.get(group.group_id)
        if group.is_held:
            group.is_held = False
            self.stats.waiting -= 1
        if prefix is not None and prefix.group is group:
            self._end(prefix)
            return
        for other in self._prefixes.values():
            if group in other.followers:
                other.followers.remove(group)

    def release_all(self) -> None:
        """Drops all fetches; the groups that wait for them are computed."""
        for prefix in list(self._prefixes.values()):
            self._end(prefix)
        self._absent.clear()

    def forget_all(self) -> None:
        """Drops all fetches after a failure: the groups are gone, and plans may not have come to the workers."""
        for prefix in self._prefixes.values():
            self._drop_begun(prefix)
        self._prefixes.clear()
        self.stats.waiting = 0
        # Known to have ended by none; dropping it once more does no harm.
        self._drop += [fetch_id for _, ids in self._dropped for fetch_id in ids]
        self._dropped.clear()

    def counts(self) -> StoreStats:
        stored = self._stored
        self.stats.stored_blocks, self.stats.lost_blocks = stored.num_written, stored.num_lost
        self.stats.queued_blocks = stored.num_queued
        tokens_per_block = self._blocks.block_size / len(self._whole)
        self.stats.fetch_share = self.cost.share(tokens_per_block, self._seconds_per_token())
        return msgspec.structs.replace(self.stats)

    def add_to(self, plan: StepPlan) -> None:
        dropped = set(self._drop)
        plan.fetch = [fetch for fetch in self._fetch if fetch.fetch_id not in dropped]
        plan.drop_fetches = self._drop
        if self._drop:
            self._dropped.append((plan.step, self._drop))
        self._fetch, self._drop = [], []
