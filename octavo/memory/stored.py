"""What the KV stores get of the prefix cache, and what it gets of them (``StoredBlocks``)."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.memory.prefix_cache import KnownBlock, PrefixChain

if TYPE_CHECKING:
    from octavo.core.plan import StepPlan
    from octavo.core.stats import StoreTierStats
    from octavo.memory.kv_group import KVGroup


#: Written per second at least, however slow the stores are: they drop what they cannot take.
_LEAST_SECOND_BYTES = 1e6


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Limits of what plans ask of the KV stores. Bytes are in the unit of ``GroupBlocks.block_bytes``."""

    #: Written by one step: one block at least.
    step_bytes: int = 16 << 20
    #: Written per second, until the speed of the stores is known, and at once after a pause.
    second_bytes: float = 200e6
    burst_bytes: int = 48 << 20
    #: While sequences run, blocks are written that are evicted, and those that a prompt has found, which may take this
    #: share of a processor's time; None: all, as steps have other processors.
    busy_share: float | None = None
    #: Read by one fetch: one block of each KV group at least.
    fetch_bytes: int = 56 << 20
    #: Fetches whose blocks are not on the device yet; and while they have less than ``fetch_bytes`` together, at most
    #: ``max_small_fetches``.
    max_fetches: int = 4
    max_small_fetches: int = 32
    #: Seconds without a report of a fetch after which its prompt is computed.
    patience: float = 5.0
    #: Seconds without fetches after that.
    pause: float = 30.0
    #: Digests of stored blocks to remember.
    max_known: int = 1 << 17
    #: Whether results name the blocks that were written (``StepResult.written``).
    reports_written: bool = False


#: Processor seconds to copy and write a byte, until they are known.
_SECONDS_PER_BYTE = 2e-9


class StoredBlocks:
    """Owns the queue of blocks to write to the KV stores, and the digests of those that were written or read.

    A block is queued for writing when the prefix cache has registered it and the result of the step that computed it is
    known; so are the states of whole blocks (``StateCache``), not those at the ends of prompts and answers. Plans name
    queued blocks as fast as the stores write: evicted ones first, which the step that takes their place reads before,
    then those that a prompt has found since, then the others in their order. What is evicted faster is lost. Where
    steps and writes share processors (``StoreLimits.busy_share``), the others are written when nothing runs. Blocks
    read from the stores are written to the device by the next plan, and cached like computed ones.

    Invariant: a queued digest is in the prefix cache on the device, or will be skipped.
    """

    def __init__(self, groups: Sequence[KVGroup], limits: StoreLimits) -> None:
        self.limits = limits
        self._groups = groups
        self._known = [_RecentDigests(limits.max_known // max(1, len(groups))) for _ in groups]
        #: (KV group, digest), in the order of registration; those that are not in ``_queued`` any more are skipped.
        self._queue: deque[tuple[int, bytes]] = deque()
        self._queued: list[set[bytes]] = [set() for _ in groups]
        #: Of these, the ones that a prompt has found, in the order of their first finds.
        self._found: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        #: For the next plan: (device block, digest) evicted, and (fetch id, index of its block, device block).
        self._evicted: list[tuple[int, bytes]] = []
        #: Bytes that the next plan may still name, those that further plans may, and when they grew last.
        self._room, self._allowance, self._grown = limits.step_bytes, float(limits.burst_bytes), 0.0
        self._second_bytes = limits.second_bytes
        #: Bytes per second of blocks that are not evicted, while sequences run; and how many may be named now.
        self._busy_bytes = float("inf") if limits.busy_share is None else limits.busy_share / _SECONDS_PER_BYTE
        self._spare = float("inf")
        self._fetched: list[tuple[int, int, int]] = []
        #: (KV group, digest) of blocks that plans have named and no result has reported, with ``reports_written``.
        self._unwritten: set[tuple[int, bytes]] = set()
        #: Blocks named for writing, blocks evicted before, and blocks that came from the stores.
        self.num_written = self.num_lost = self.num_fetched = 0
        for group in groups:
            group.cache.stored = self, group.number

    @property
    def num_queued(self) -> int:
        return sum(map(len, self._queued))

    def knows(self, group: int, digest: bytes) -> bool:
        """Whether the block was written or read, and is remembered."""
        return digest in self._known[group]

    def add(self, group: int, digest: bytes) -> None:
        """Queues a block of the prefix cache, unless the stores have it."""
        if not self.knows(group, digest) and digest not in self._queued[group]:
            self._queued[group].add(digest)
            self._queue.append((group, digest))

    def note_found(self, group: int, digest: bytes) -> None:
        """A prompt begins with this block: it will likely be asked for again."""
        if digest in self._queued[group]:
            self._found[group, digest] = None

    def is_under_way(self, group: int, digest: bytes) -> bool:
        """Whether the block is queued, or with a worker that has not written it yet."""
        return digest in self._queued[group] or (group, digest) in self._unwritten

    def observe_written(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        self._unwritten.difference_update(blocks)

    def evict(self, group: int, entry: KnownBlock) -> None:
        """Called when the prefix cache gives away a device block: the next plan writes its content if it is queued."""
        if entry.digest not in self._queued[group]:
            return
        self._queued[group].remove(entry.digest)
        if self._room <= 0:
            self.num_lost += 1
            return
        self._take_room(group)
        self._evicted.append((entry.block, entry.digest))
        self._note_named(group, entry.digest)

    def place(self, group: int, chain: PrefixChain, index: int, token_ids: list[int], source: tuple[int, int]) -> bool:
        """Caches block ``index`` of a chain in a device block that the next plan writes.

        ``source``: the fetch, and the index of its block. No effect if the content is cached already, on the device or
        the host. False if no block is available.
        """
        owner, digest = self._groups[group], chain.digests[index + 1]
        if owner.cache.find(digest) is not None:
            return True
        if not owner.device.num_available:
            return False
        blocks = owner.cache.allocate(1)
        size = chain.block_size
        end = index * size + size
        if owner.checkpoints is not None:
            owner.checkpoints.add_checkpoint(chain, token_ids, end, blocks[0], None, in_answer=False)
        else:
            owner.cache.add(chain, index, blocks[0], chain.content(token_ids, index * size, end))
        owner.moves.receive(blocks[0])
        owner.device.release(blocks)
        self._fetched.append((*source, blocks[0]))
        self._known[group].add(digest)
        self.num_fetched += 1
        return True

    def take_back(self, group: int, digest: bytes) -> None:
        """A worker had no room for a block: it is the next to be named, while the prefix cache has it.

        Called once for each worker without room; only the first call counts.
        """
        if digest not in self._known[group]:
            return
        self._known[group].discard(digest)
        self._unwritten.discard((group, digest))
        self.num_written -= 1
        if digest not in self._queued[group] and self._groups[group].cache.on_device.find(digest) is not None:
            self._queued[group].add(digest)
            self._queue.appendleft((group, digest))

    def _note_named(self, group: int, digest: bytes) -> None:
        self._known[group].add(digest)
        if self.limits.reports_written:
            self._unwritten.add((group, digest))

    def _take_room(self, group: int) -> None:
        num_bytes = self._groups[group].block_bytes
        self._room -= num_bytes
        self._allowance -= num_bytes

    def observe_writes(self, tiers: Sequence[StoreTierStats]) -> None:
        """Adapts to the speed of the stores: workers have no room for what comes faster."""
        seconds = sum(tier.write_seconds / tier.bytes_written for tier in tiers if tier.bytes_written)
        if seconds:
            self._second_bytes = max(_LEAST_SECOND_BYTES, 0.9 / seconds)
        num_bytes = max((tier.bytes_written for tier in tiers), default=0)
        busy = sum(tier.processor_seconds for tier in tiers)
        if self.limits.busy_share is not None and num_bytes and busy:
            self._busy_bytes = self.limits.busy_share * num_bytes / busy

    def add_to(self, plan: StepPlan, now: float, *, is_busy: bool = False) -> None:
        """Names the blocks that the plan reads and writes for the stores; before its other moves are taken.

        ``now``: in seconds; bytes named per second are limited, to fewer while sequences run (``is_busy``).
        """
        plan.blocks_fetched, self._fetched = self._fetched, []
        named, self._evicted = self._evicted, []
        later: list[tuple[int, bytes]] = []
        limits, seconds = self.limits, now - self._grown
        self._spare = min(self._busy_bytes, self._spare + seconds * self._busy_bytes) if is_busy else float("inf")
        waits = is_busy and limits.busy_share is not None
        while (self._found or (self._queue and not waits)) and self._room > 0 and self._spare > 0:
            number, digest = self._found.popitem(last=False)[0] if self._found else self._queue.popleft()
            if digest not in self._queued[number]:
                continue
            group = self._groups[number]
            entry = group.cache.on_device.find(digest)
            if entry is not None and group.moves.is_target(entry.block):  # its content comes with this plan
                later.append((number, digest))
                continue
            self._queued[number].remove(digest)
            if entry is not None:
                named.append((entry.block, digest))
                self._note_named(number, digest)
                self._take_room(number)
                self._spare -= group.block_bytes
        self._queue.extendleft(reversed(later))
        plan.blocks_to_store = named
        self.num_written += len(named)
        self._allowance = min(limits.burst_bytes, self._allowance + seconds * self._second_bytes)
        self._grown = now
        self._room = min(limits.step_bytes, int(self._allowance))

    def clear(self) -> None:
        """Drops the queue and what the next plan would name: the prefix cache is emptied, or its content in doubt.

        What earlier plans have named counts as unknown, as their steps may have failed.
        """
        self._queue.clear()
        self._found.clear()
        self._unwritten.clear()
        for queued, known in zip(self._queued, self._known, strict=True):
            queued.clear()
            known.clear()
        self._evicted, self._fetched = [], []


class _RecentDigests:
    """A set of digests that forgets the older half when it is full."""

    def __init__(self, most: int) -> None:
        self._half = max(1, most // 2)
        self._recent, self._older = set[bytes](), set[bytes]()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._recent or digest in self._older

    def add(self, digest: bytes) -> None:
        if len(self._recent) >= self._half:
            self._older, self._recent = self._recent, set()
        self._recent.add(digest)

    def discard(self, digest: bytes) -> None:
        self._recent.discard(digest)
        self._older.discard(digest)

    def clear(self) -> None:
        self._recent, self._older = set(), set()
