"""Statistics of an engine: totals, steps, metrics, views for monitoring, and recordings of views."""

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
    """Blocks of one KV group now; see ``SchedulerState``."""

    #: Attention window in tokens; None: the whole context.
    window: int | None
    used: int
    cached: int
    free: int
    pinned: int
    host_used: int

    @property
    def counts(self) -> tuple[int, int, int, int, int]:
        return self.used, self.cached, self.free, self.pinned, self.host_used

    @property
    def available(self) -> int:
        return self.free + self.cached

    @property
    def usage(self) -> float:
        return (self.used + self.pinned) / max(1, self.used + self.pinned + self.cached + self.free)


class AdapterStats(msgspec.Struct, array_like=True, gc=False):
    """LoRA and prompt adapters: numbers now, and totals since the start."""

    # Now:
    in_slots: int = 0
    #: Including those in slots.
    in_host: int = 0
    loading: int = 0
    # Totals:
    loads: int = 0
    failed_loads: int = 0
    slot_evictions: int = 0
    host_evictions: int = 0
    #: Admissions of requests whose adapter had a slot, or got one.
    slot_hits: int = 0
    slot_misses: int = 0
    #: Seconds of steps for filling slots and waiting for adapters: total, and maximum of a step.
    seconds: float = 0.0
    longest_seconds: float = 0.0


class GrammarStats(msgspec.Struct):
    """Totals of grammar compilation, without cached grammars."""

    compiled: int = 0
    refused: int = 0
    seconds: float = 0.0
    #: Requests that wait for their grammar now.
    waiting: int = 0


class SpeculationStats(msgspec.Struct, array_like=True):
    """Totals of speculative decoding since the start."""

    #: Steps of sequences with draft tokens.
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    #: Drafts accepted up to their first token, their second, ...
    accepted_per_position: list[int] = []
    #: Sequences for which the drafter failed.
    failures: int = 0


class SchedulerState(msgspec.Struct, gc=False):
    """Queues and blocks now, and totals since the start."""

    steps: int = 0
    # Requests and blocks now:
    num_waiting: int = 0
    num_running: int = 0
    num_swapped: int = 0
    # Sums over KV groups:
    blocks_used: int = 0
    #: In the prefix cache, used by no sequence.
    blocks_cached: int = 0
    blocks_free: int = 0
    #: Of shared prefixes; not among those in use.
    blocks_pinned: int = 0
    host_blocks_used: int = 0
    # Totals:
    preemptions_by_recompute: int = 0
    preemptions_by_swap: int = 0
    #: Tokens whose KV entries preemption dropped.
    recomputed_tokens: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    #: Prompt tokens looked up in the prefix cache, and hits.
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    #: By KV group, if there are several.
    groups: list[GroupState] = []
    adapters: AdapterStats | None = None
    speculation: SpeculationStats | None = None

    @property
    def kv_cache_usage(self) -> float:
        """Share of used and pinned blocks in the fullest group."""
        whole = GroupState(None, self.blocks_used, self.blocks_cached, self.blocks_free, self.blocks_pinned, 0)
        return max(group.usage for group in self.groups or [whole])

    @property
    def num_blocks(self) -> int:
        return self.blocks_used + self.blocks_cached + self.blocks_free + self.blocks_pinned


class SchedulerStats(SchedulerState, gc=False):
    """A state of the scheduler, with totals of computed tokens."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    #: Slots without a token in used blocks, now.
    empty_slots: int = 0


class StepStats(SchedulerState, frozen=True, array_like=True, gc=False):  # type: ignore[misc]  # msgspec allows it
    """One step, and the state after it, for a ``StatLogger``.

    Also sent without a step (``steps`` unchanged, times and tokens 0) when an abort has emptied the engine.
    """

    seconds: float = 0.0
    #: Parts of ``seconds``: in the worker, and there in kernels (0 without ``time_kernels``).
    worker_seconds: float = 0.0
    kernel_seconds: float = 0.0
    #: Seconds since the step before, for sending outputs and receiving messages; 0 after an idle time.
    between_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    replica: int = 0


#: Fields of ``SchedulerStats`` that are not totals.
_NOW = (
    *("num_waiting", "num_running", "num_swapped", "host_blocks_used", "empty_slots"),
    *("blocks_used", "blocks_cached", "blocks_free", "blocks_pinned"),
)


def sum_stats(replicas: list[SchedulerStats]) -> SchedulerStats:
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
    """The totals of an engine core that has ended."""
    ended = msgspec.structs.replace(stats, **dict.fromkeys(_NOW, 0))
    ended.groups = [GroupState(group.window, 0, 0, 0, 0, 0) for group in stats.groups]
    if stats.adapters is not None:
        ended.adapters = msgspec.structs.replace(stats.adapters, in_slots=0, in_host=0, loading=0)
    return ended


def _sum(parts: Sequence[S]) -> S:
    """Sums of the numeric fields; others have their defaults."""
    total = type(parts[0])()
    for name in total.__struct_fields__:
        if isinstance(getattr(total, name), (int, float)):
            setattr(total, name, sum(getattr(part, name) for part in parts))
    return total


def sum_groups(groups: Sequence[GroupState]) -> GroupState:
    sums = map(sum, zip(*(group.counts for group in groups), strict=True))
    return GroupState(groups[0].window, *sums) if groups else GroupState(None, 0, 0, 0, 0, 0)


# Metrics of ``LLM.get_metrics``.


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric; its name has the unit, as in ``octavo_decode_tokens``."""

    name: str
    value: int
    description: str


class Counter(Metric):
    """A total since the start."""

    __slots__ = ()


class Gauge(Metric):
    """A value now."""

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

_SPECULATION = {
    "drafts": "Drafts that were verified.",
    "draft_tokens": "Tokens of drafts.",
    "accepted_tokens": "Tokens of drafts that were accepted.",
}


def metrics_of(stats: SchedulerStats) -> list[Metric]:
    metrics: list[Metric] = [kind(f"octavo_{name}", getattr(stats, field), text) for kind, name, field, text in _TABLE]
    for name, text in _SPECULATION.items() if stats.speculation is not None else ():
        metrics.append(Counter(f"octavo_spec_decode_num_{name}", getattr(stats.speculation, name), text))
    return metrics


# Views of an engine, for monitoring: blocks, queues, last steps, and changes.

#: Step records that an engine keeps.
NUM_STEPS = 1000
#: First groups of each queue in a view.
MAX_GROUPS = 128
#: Last changes in a view; see ``EngineView.num_changes``.
MAX_CHANGES = 128
#: Maximum adapters in a view, those with most running requests first, and names of each.
MAX_ADAPTER_SLOTS = 64
MAX_ADAPTER_NAMES = 4
#: Maximum requests in a view, and characters of an id or a name, which is cut.
MAX_REQUEST_IDS = 512
MAX_ID_LENGTH = 128
#: A map with more blocks, or more runs, is sent in bins.
MAX_EXACT_BLOCKS = 8192
MAX_RUNS = 4096
NUM_BINS = 2048
#: Group id of a ``BlockRun`` or ``Change`` without a group.
NOBODY = -1


class BlockState(enum.IntEnum):
    """As in ``/metrics``, where ``SHARED`` blocks count as used."""

    FREE = 0
    CACHED = 1
    USED = 2
    SHARED = 3
    PINNED = 4


class BlockRun(msgspec.Struct, array_like=True, gc=False):
    """Equal blocks with consecutive ids; if used, neighbours in the block table of one sequence."""

    count: int
    state: int
    #: Block tables with each of them; moves in flight count, too.
    references: int
    #: The first group that uses them, or ``NOBODY``.
    group_id: int
    #: The first token of block ``i`` has the position ``start + i * direction * block_size``.
    start: int
    #: 1 or -1: order of ids in the table; 0 for a single block, or without a table.
    direction: int


class BlockMap(msgspec.Struct):
    """All blocks of one pool by id: as runs, or in bins if there are too many."""

    group: int
    on_host: bool
    block_size: int
    window: int | None
    first: int
    num_blocks: int
    #: Blocks by ``BlockState``.
    counts: list[int]
    runs: list[BlockRun] = []
    #: Blocks of a bin (the last may have fewer), and for each bin its blocks by ``BlockState``.
    bin_size: int = 0
    bins: list[list[int]] = []


class GroupRow(msgspec.Struct, array_like=True, gc=False):
    group_id: int
    status: Literal["waiting", "running", "swapped"]
    num_seqs: int
    prompt_tokens: int
    # Over its sequences:
    output_tokens: int
    computed_tokens: int
    #: Prompt tokens from the prefix cache.
    cached_tokens: int
    #: Seconds since arrival.
    age: float
    # Preemptions and their cost:
    recomputes: int
    recomputed_tokens: int
    swaps: int
    swapped_blocks: int
    #: The group that it was last preempted for; None: running groups lacked blocks, or it never was preempted.
    preempted_for: int | None


class StepRecord(msgspec.Struct, array_like=True, gc=False):
    step: int
    #: End, in seconds on the engine's clock.
    at: float
    # As in ``StepStats``:
    seconds: float
    worker_seconds: float
    kernel_seconds: float
    between_seconds: float
    prefill_tokens: int
    decode_tokens: int
    num_running: int
    num_waiting: int
    num_swapped: int
    blocks_used: int
    blocks_cached: int
    blocks_free: int
    # Totals:
    preemptions: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int


class Change(msgspec.Struct, array_like=True, gc=False):
    kind: Literal["fork", "copy", "evict", "swap_out", "swap_in", "recompute", "swap"]
    step: int
    #: ``NOBODY`` for blocks of several groups.
    group_id: int
    #: Device blocks: evicted, moved, or shared by a fork; source and target of a copy.
    blocks: list[int] = []
    #: Of a preemption: recomputed tokens, or moved blocks.
    cost: int = 0
    #: Of a preemption, as in ``GroupRow``.
    preempted_for: int | None = None


class AdapterSlot(msgspec.Struct, array_like=True, gc=False):
    slot: int
    #: Digest of the adapter's content.
    key: str
    num_running: int
    #: Names for requests; empty: it was unloaded, or its name means another content now.
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
    #: Since the view before.
    steps: list[StepRecord]
    changes: list[Change]
    #: Total since the view before; ``changes`` has the last ones.
    num_changes: int
    evicted_blocks: int
    cost: float = 0.0
    adapters: list[AdapterSlot] = []
    #: Ids of open requests by group; a simulation has none.
    request_ids: dict[int, str] = {}


class ReplicaRow(msgspec.Struct):
    number: int
    status: str
    open_requests: int
    restarts: int


class Histogram(msgspec.Struct):
    """Observations since the start; the last bucket has no upper bound."""

    name: str
    bounds: list[float]
    counts: list[int]


class EngineEvent(msgspec.Struct):
    """One update of all engine cores behind a front end."""

    #: Seconds since 1970; in a simulation, on its clock.
    time: float
    replicas: list[ReplicaRow]
    views: list[EngineView]
    #: Seconds to the first token, between tokens, and of requests.
    latencies: list[Histogram] = []
    #: Whether the views have all recorded steps, so that earlier ones can be forgotten.
    whole: bool = False


# Recordings: a header, then the events of ``/engine/events``, one JSON value a line.

FORMAT = "octavo-recording"
VERSION = 1
#: Maximum bytes of a file, and of a line.
MAX_BYTES = 256 << 20
MAX_LINE_BYTES = 8 << 20
#: Writers leave out further events; readers refuse them.
MAX_EVENTS = 4000


class RecordingHeader(msgspec.Struct):
    format: str
    version: int
    title: str = ""


def write_recording(path: Path, title: str, events: Iterable[EngineEvent]) -> None:
    """Raises ConfigError if the file cannot be written."""
    try:
        with path.open("wb") as stream:
            for line in (RecordingHeader(FORMAT, VERSION, title), *events):
                stream.write(msgspec.json.encode(line) + b"\n")
    except OSError as e:
        raise ConfigError(f"cannot write the recording {path}: {e.strerror}") from None


def read_recording(path: Path) -> bytes:
    """The bytes of a valid recording; raises ConfigError for other files."""
    data = read_bounded(path, MAX_BYTES)
    first, *lines = data.splitlines() or [b""]
    try:
        header = msgspec.json.decode(first, type=RecordingHeader)
    except (msgspec.DecodeError, msgspec.ValidationError):
        header = RecordingHeader("", VERSION)
    if header.format != FORMAT:
        raise ConfigError(f"{path} is no recording of an engine: its first line must name the format {FORMAT!r}")
    if header.version != VERSION:
        raise ConfigError(f"the recording {path} has version {header.version}; this program reads {VERSION}")
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
