"""Statistics of the scheduler, and of a step of the engine core."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from octavo.core.errors import ConfigError
from octavo.core.files import read_bounded

S = TypeVar("S", bound=msgspec.Struct)


class GroupState(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The blocks of one KV group now; see ``SchedulerState``."""

    #: Attention window of its layers, in tokens; None: they keep all.
    window: int | None
    used: int
    cached: int
    free: int
    pinned: int
    host_used: int

    @property
    def counts(self) -> tuple[int, int, int, int, int]:
        """The numbers, in their order."""
        return self.used, self.cached, self.free, self.pinned, self.host_used

    @property
    def available(self) -> int:
        """Blocks that can be allocated: free and cached."""
        return self.free + self.cached

    @property
    def usage(self) -> float:
        """Share of its blocks that are in use or pinned."""
        held = self.used + self.pinned
        return held / max(1, held + self.cached + self.free)


class AdapterStats(msgspec.Struct, array_like=True, gc=False):
    """Adapters now, and totals since the engine started; LoRA and prompt adapters together."""

    # Now:
    in_slots: int = 0
    #: In host memory, those in slots included.
    in_host: int = 0
    loading: int = 0
    # Totals:
    #: Loads that were begun, and those of them that failed.
    loads: int = 0
    failed_loads: int = 0
    #: Adapters that lost their slot, or their place in host memory, to others.
    slot_evictions: int = 0
    host_evictions: int = 0
    #: Admissions of requests whose adapter had its slot, and of those whose adapter was given one.
    slot_hits: int = 0
    slot_misses: int = 0
    #: Seconds in which steps gave adapters their slots or waited for one, in all and the longest of a step.
    seconds: float = 0.0
    longest_seconds: float = 0.0


class GrammarStats(msgspec.Struct):
    """What compiling the grammars of requests has come to; forms that were known do not count."""

    compiled: int = 0
    refused: int = 0
    #: Of processor time.
    seconds: float = 0.0
    #: Requests whose form is being compiled, or waits for it.
    waiting: int = 0


class SpeculationStats(msgspec.Struct, array_like=True):
    """Totals of speculative decoding since the engine started."""

    #: Times that a sequence had draft tokens in a step.
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    #: Of the drafts, how many were accepted up to their first token, their second, ...
    accepted_per_position: list[int] = []
    #: Sequences for which the drafter failed.
    failures: int = 0


class SchedulerState(msgspec.Struct, gc=False):
    """The queues and blocks now, and totals since the engine started."""

    #: Total of steps.
    steps: int = 0
    # Requests and blocks now:
    num_waiting: int = 0
    num_running: int = 0
    num_swapped: int = 0
    # Of all KV groups together:
    blocks_used: int = 0
    #: In use by no sequence, kept for prompts that begin alike.
    blocks_cached: int = 0
    blocks_free: int = 0
    #: Of shared prefixes, in use or not; not counted among those in use.
    blocks_pinned: int = 0
    host_blocks_used: int = 0
    # Totals:
    preemptions_by_recompute: int = 0
    preemptions_by_swap: int = 0
    #: Tokens whose KV entries were given up by preemption.
    recomputed_tokens: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    #: Prompt tokens looked up in the prefix cache, and found there.
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    #: Blocks of each KV group now, if there are several.
    groups: list[GroupState] = []
    #: If adapters are enabled.
    adapters: AdapterStats | None = None
    #: If drafts are made.
    speculation: SpeculationStats | None = None

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks in use or pinned, of the group that has the largest: that one is full first."""
        whole = GroupState(None, self.blocks_used, self.blocks_cached, self.blocks_free, self.blocks_pinned, 0)
        return max(group.usage for group in self.groups or [whole])

    @property
    def num_blocks(self) -> int:
        """KV cache blocks in all."""
        return self.blocks_used + self.blocks_cached + self.blocks_free + self.blocks_pinned


class SchedulerStats(SchedulerState, gc=False):
    """A state of the queues and blocks, and totals up to it."""

    #: Totals of tokens that were computed.
    prefill_tokens: int = 0
    decode_tokens: int = 0
    #: Slots of used blocks that hold no token, now.
    empty_slots: int = 0


class StepStats(SchedulerState, frozen=True, array_like=True, gc=False):  # type: ignore[misc]  # msgspec allows it
    """One step, and the state after it: what a ``StatLogger`` gets.

    Also sent without a step (``steps`` is as before, times and tokens are 0) when an abort has emptied the engine.
    """

    #: Seconds of this step: schedule, execute, update.
    seconds: float = 0.0
    #: Of them, inside the worker, and there inside kernels (measured with ``time_kernels``; 0 without).
    worker_seconds: float = 0.0
    kernel_seconds: float = 0.0
    #: Seconds between the end of the step before and the start of this one, if there was work to do meanwhile:
    #: outputs encoded and sent, messages received.
    between_seconds: float = 0.0
    #: Tokens computed in this step.
    prefill_tokens: int = 0
    decode_tokens: int = 0
    #: Number of the engine core, of several behind one server.
    replica: int = 0


#: Fields of ``SchedulerStats`` that are no totals.
_NOW = (
    *("num_waiting", "num_running", "num_swapped", "host_blocks_used", "empty_slots"),
    *("blocks_used", "blocks_cached", "blocks_free", "blocks_pinned"),
)


def sum_stats(replicas: list[SchedulerStats]) -> SchedulerStats:
    """The statistics of several engine cores together."""
    total = _sum(replicas)
    total.groups = [sum_groups(groups) for groups in zip(*(replica.groups for replica in replicas), strict=True)]
    adapters = [replica.adapters for replica in replicas if replica.adapters is not None]
    if adapters:
        total.adapters = _sum(adapters)
        total.adapters.longest_seconds = max(replica.longest_seconds for replica in adapters)
    speculation = [replica.speculation for replica in replicas if replica.speculation is not None]
    if speculation:
        total.speculation = _sum(speculation)
        positions = zip(*(replica.accepted_per_position for replica in speculation), strict=True)
        total.speculation.accepted_per_position = [*map(sum, positions)]
    return total


def ended_stats(stats: SchedulerStats) -> SchedulerStats:
    """The statistics of an engine core that has ended: the totals, and nothing that there is now."""
    ended = msgspec.structs.replace(stats, **dict.fromkeys(_NOW, 0))
    ended.groups = [GroupState(group.window, 0, 0, 0, 0, 0) for group in stats.groups]
    if stats.adapters is not None:
        ended.adapters = msgspec.structs.replace(stats.adapters, in_slots=0, in_host=0, loading=0)
    return ended


def _sum(parts: Sequence[S]) -> S:
    """The sums of the fields that are numbers; the others have their defaults."""
    total = type(parts[0])()
    for name in total.__struct_fields__:
        if isinstance(getattr(total, name), (int, float)):
            setattr(total, name, sum(getattr(part, name) for part in parts))
    return total


def sum_groups(groups: Sequence[GroupState]) -> GroupState:
    """The blocks of several groups together."""
    if not groups:
        return GroupState(None, 0, 0, 0, 0, 0)
    return GroupState(groups[0].window, *map(sum, zip(*(group.counts for group in groups), strict=True)))


# Figures of an engine as a program reads them: ``LLM.get_metrics``.


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure with its name and unit in one, as in ``octavo_decode_tokens``."""

    name: str
    value: int
    description: str


class Counter(Metric):
    """A total since the engine started; it never falls."""

    __slots__ = ()


class Gauge(Metric):
    """A figure as it is now."""

    __slots__ = ()


#: (kind, name without prefix, field of ``SchedulerStats``, description)
_TABLE = (
    (Gauge, "requests_running", "num_running", "Requests that run."),
    (Gauge, "requests_waiting", "num_waiting", "Requests that wait for their first step, or to be computed again."),
    (Gauge, "requests_swapped", "num_swapped", "Requests whose blocks are in host memory."),
    (Gauge, "kv_cache_blocks_used", "blocks_used", "KV cache blocks that requests hold."),
    (Gauge, "kv_cache_blocks_cached", "blocks_cached", "Blocks kept for prompts that begin alike."),
    (Gauge, "kv_cache_blocks_pinned", "blocks_pinned", "Blocks that hold shared prefixes."),
    (Gauge, "kv_cache_blocks_free", "blocks_free", "Blocks that hold nothing."),
    (Gauge, "kv_cache_host_used_blocks", "host_blocks_used", "Host memory blocks that hold swapped KV."),
    (Counter, "steps", "steps", "Steps of the engine."),
    (Counter, "prefill_tokens", "prefill_tokens", "Prompt tokens computed; recomputed ones again."),
    (Counter, "decode_tokens", "decode_tokens", "Tokens of output computed; of drafts, those accepted."),
    (Counter, "prefix_cache_queried_tokens", "prefix_queried_tokens", "Prompt tokens looked up in the prefix cache."),
    (Counter, "prefix_cache_hit_tokens", "prefix_hit_tokens", "Prompt tokens found in the prefix cache."),
    (Counter, "preemptions_by_recompute", "preemptions_by_recompute", "Requests set back to be computed again."),
    (Counter, "preemptions_by_swap", "preemptions_by_swap", "Requests whose blocks were moved to host memory."),
    (Counter, "recomputed_tokens", "recomputed_tokens", "Tokens whose KV entries were given up by preemption."),
    (Counter, "swapped_out_blocks", "swapped_out_blocks", "Blocks moved to host memory."),
    (Counter, "swapped_in_blocks", "swapped_in_blocks", "Blocks moved back."),
)

#: (name, field of ``SpeculationStats``, description)
_SPECULATION = (
    ("drafts", "drafts", "Drafts that were verified."),
    ("draft_tokens", "draft_tokens", "Tokens of drafts."),
    ("accepted_tokens", "accepted_tokens", "Tokens of drafts that were accepted."),
)


def metrics_of(stats: SchedulerStats) -> list[Metric]:
    """The statistics as a list of named figures."""
    metrics: list[Metric] = [kind(f"octavo_{name}", getattr(stats, field), text) for kind, name, field, text in _TABLE]
    if stats.speculation is not None:
        for name, field, text in _SPECULATION:
            metrics.append(Counter(f"octavo_spec_decode_num_{name}", getattr(stats.speculation, field), text))
    return metrics


# What somebody who watches an engine sees of it: its blocks, its queues, its last steps, and what has changed.

#: Steps of which an engine keeps records.
NUM_STEPS = 1000
#: Groups of each queue in a view, the first ones; their number is in its counts.
MAX_GROUPS = 128
#: Changes in a view, the last ones; see ``EngineView.num_changes``.
MAX_CHANGES = 128
#: Adapters in slots that a view names, at most, those with most running requests first; and names of each.
MAX_ADAPTER_SLOTS = 64
MAX_ADAPTER_NAMES = 4
#: Requests that a view names, at most, and characters of an id or a name; a longer one is cut.
MAX_REQUEST_IDS = 512
MAX_ID_LENGTH = 128
#: A map of more blocks, or of more runs, is sent in bins.
MAX_EXACT_BLOCKS = 8192
MAX_RUNS = 4096
NUM_BINS = 2048
#: Of ``BlockRun``: no group has the block, and the group's number is not known.
NOBODY = -1


class BlockState(enum.IntEnum):
    """What a block is: the same cases as in ``/metrics``, where ``SHARED`` ones count as used."""

    FREE = 0
    CACHED = 1
    USED = 2
    #: Used, in several block tables.
    SHARED = 3
    PINNED = 4


class BlockRun(msgspec.Struct, array_like=True, gc=False):
    """Blocks with consecutive ids that are alike, and neighbours in the block table of one sequence, if any has them.

    Of its block ``i`` the first token is at ``start + i * direction * block_size``.
    """

    count: int
    state: int
    #: Block tables that have each of them; moves in flight count, too.
    references: int
    #: The group whose sequence has them, the first of several; ``NOBODY``: none.
    group_id: int
    #: Position in its sequence of the first token of the first of them.
    start: int
    #: 1 or -1: the table has them in the order of their ids, or in the opposite one; 0 if there is one, or no table.
    direction: int


class BlockMap(msgspec.Struct):
    """All blocks of one pool, in the order of their ids: as runs, or in bins where there are too many."""

    #: Number of the KV group.
    group: int
    on_host: bool
    block_size: int
    #: Attention window of the group's layers, in tokens; None: they keep all.
    window: int | None
    #: Id of the first block.
    first: int
    num_blocks: int
    #: Blocks by ``BlockState``.
    counts: list[int]
    #: Empty if there are bins.
    runs: list[BlockRun] = []
    #: Blocks of each bin (the last has what is left), and how many of them are in each ``BlockState``.
    bin_size: int = 0
    bins: list[list[int]] = []


class GroupRow(msgspec.Struct, array_like=True, gc=False):
    """An unfinished group."""

    group_id: int
    status: Literal["waiting", "running", "swapped"]
    num_seqs: int
    prompt_tokens: int
    #: Of all its sequences.
    output_tokens: int
    #: With KV entries, over its sequences.
    computed_tokens: int
    #: Of the prompt, found in the prefix cache.
    cached_tokens: int
    #: Seconds since its arrival.
    age: float
    # How often it was preempted in each way, and what that has cost so far:
    recomputes: int
    recomputed_tokens: int
    swaps: int
    swapped_blocks: int
    #: The group that it was preempted for the last time; None: the running ones lacked blocks, or it never was.
    preempted_for: int | None


class StepRecord(msgspec.Struct, array_like=True, gc=False):
    """One step, and the counts after it."""

    step: int
    #: Seconds on the engine's clock at its end.
    at: float
    seconds: float
    #: Of ``seconds``: in the worker, and there in kernels (0 where they are not timed).
    worker_seconds: float
    kernel_seconds: float
    #: Between the step before and this one, while there was work.
    between_seconds: float
    prefill_tokens: int
    decode_tokens: int
    num_running: int
    num_waiting: int
    num_swapped: int
    blocks_used: int
    blocks_cached: int
    blocks_free: int
    # Totals since the engine's start:
    preemptions: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int


class Change(msgspec.Struct, array_like=True, gc=False):
    """Something that happened to blocks or to a group."""

    kind: Literal["fork", "copy", "evict", "swap_out", "swap_in", "recompute", "swap"]
    step: int
    #: ``NOBODY`` where blocks of several groups are concerned.
    group_id: int
    #: Device blocks: those that were evicted, moved, or shared by a fork; of a copy its source and its target.
    blocks: list[int] = []
    #: Of a preemption: tokens to compute again, or blocks that were moved.
    cost: int = 0
    #: Of a preemption: the group that it was for; None: the running ones lacked blocks.
    preempted_for: int | None = None


class AdapterSlot(msgspec.Struct, array_like=True, gc=False):
    """A slot with an adapter in it."""

    slot: int
    #: Digest of the adapter's content.
    key: str
    #: Requests that run with it.
    num_running: int
    #: Those that requests may call it by; none: it was unloaded, or its name means another content now.
    names: list[str] = []


class EngineView(msgspec.Struct):
    """One engine core between two steps."""

    replica: int
    #: Seconds on the engine's clock.
    at: float
    token_budget: int
    max_num_seqs: int
    state: SchedulerState
    blocks: list[BlockMap]
    groups: list[GroupRow]
    #: Those since the view before.
    steps: list[StepRecord]
    changes: list[Change]
    #: Changes since the view before; ``changes`` are the last of them.
    num_changes: int
    #: Blocks evicted since the engine's start.
    evicted_blocks: int
    #: Seconds that it took to make this view.
    cost: float = 0.0
    #: How many there are is in ``state``.
    adapters: list[AdapterSlot] = []
    #: By group: the ids by which clients and logs know the open requests that the view mentions. Of a simulation: none.
    request_ids: dict[int, str] = {}


class ReplicaRow(msgspec.Struct):
    """A place for an engine core."""

    number: int
    status: str
    open_requests: int
    restarts: int


class Histogram(msgspec.Struct):
    """Observations since the start by upper bound of their bucket; the last bucket, without a bound, has the rest."""

    name: str
    bounds: list[float]
    counts: list[int]


class EngineEvent(msgspec.Struct):
    """One update of everything that is behind a front end."""

    #: Seconds since 1970; of a simulation those on its clock.
    time: float
    replicas: list[ReplicaRow]
    views: list[EngineView]
    #: Seconds to the first token, between tokens and of requests.
    latencies: list[Histogram] = []
    #: Whether the views have all steps that are known: those before are to be forgotten.
    whole: bool = False


# Recordings of engines: files of the events that ``/engine/events`` streams, one JSON value a line after a header.

FORMAT = "octavo-recording"
VERSION = 1
#: Larger files are refused; each line, too.
MAX_BYTES = 256 << 20
MAX_LINE_BYTES = 8 << 20
#: Further events are left out by who writes a recording, and refused by who reads one.
MAX_EVENTS = 4000


class RecordingHeader(msgspec.Struct):
    """The first line."""

    format: str
    version: int
    #: What was recorded, in words.
    title: str = ""


def write_recording(path: Path, title: str, events: Iterable[EngineEvent]) -> None:
    """Writes a file.

    Raises:
        ConfigError: it cannot be written.
    """
    encode = msgspec.json.encode
    try:
        with path.open("wb") as stream:
            for line in (RecordingHeader(FORMAT, VERSION, title), *events):
                stream.write(encode(line) + b"\n")
    except OSError as e:
        raise ConfigError(f"cannot write the recording {path}: {e.strerror}") from None


def read_recording(path: Path) -> bytes:
    """The bytes of a file, each line of which is what it must be.

    Raises:
        ConfigError: it cannot be read, is no recording, or is too large.
    """
    data = read_bounded(path, MAX_BYTES)
    header, *lines = data.splitlines() or [b""]
    _check_header(path, header)
    if len(lines) > MAX_EVENTS:
        raise ConfigError(f"the recording {path} has {len(lines)} events; at most {MAX_EVENTS} are read")
    decoder = msgspec.json.Decoder(EngineEvent)
    for number, line in enumerate(lines, start=2):
        if len(line) > MAX_LINE_BYTES:
            raise ConfigError(f"line {number} of the recording {path} is longer than {MAX_LINE_BYTES} bytes")
        try:
            decoder.decode(line)
        except (msgspec.DecodeError, msgspec.ValidationError) as e:
            raise ConfigError(f"line {number} of the recording {path} is no event of an engine: {e}") from None
    return data


def _check_header(path: Path, line: bytes) -> None:
    try:
        header = msgspec.json.decode(line, type=RecordingHeader)
    except (msgspec.DecodeError, msgspec.ValidationError):
        header = RecordingHeader("", VERSION)
    if header.format != FORMAT:
        raise ConfigError(f"{path} is no recording of an engine: its first line must name the format {FORMAT!r}")
    if header.version != VERSION:
        raise ConfigError(f"the recording {path} has version {header.version}; this program reads {VERSION}")
