"""Statistics of an engine: totals, steps, metrics, views for monitoring, and recordings of views."""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec

from octavo.core.errors import ConfigError
from octavo.core.files import read_bounded

S = TypeVar("S", bound=msgspec.Struct)


# A statistic is declared once, as an annotated field: ``/metrics``, ``LLM.get_metrics`` and the reference page are made
# of the declarations.


class Family(NamedTuple):
    """A metric of ``/metrics``, without the prefix ``octavo_``; the series of statistics that share it have labels."""

    name: str
    kind: Literal["gauge", "counter"]
    text: str
    labels: tuple[str, ...] = ()
    #: Whether it is a metric of ``LLM.get_metrics`` alone.
    is_offline: bool = False


class Statistic(NamedTuple):
    """A declared statistic."""

    family: Family
    #: Value of the family's last label.
    value: str
    text: str
    #: In ``LLM.get_metrics``, without the prefix ``octavo_``.
    name: str


def series(family: Family, value: str, text: str = "", name: str = "") -> Any:
    """The annotation of a statistic that is one of several series of a family."""
    declared = Statistic(family, value, text or family.text, name or f"{family.name}_{value}")
    return msgspec.Meta(extra={"statistic": declared})


def gauge(name: str, text: str) -> Any:
    """The annotation of a value now."""
    return msgspec.Meta(extra={"statistic": Statistic(Family(name, "gauge", text), "", text, name)})


def total(name: str, text: str, labels: tuple[str, ...] = (), *, is_offline: bool = False) -> Any:
    """The annotation of a total since the start; a list has one series for each entry, labelled by its index."""
    return msgspec.Meta(
        extra={"statistic": Statistic(Family(name, "counter", text, labels, is_offline), "", text, name)}
    )


@functools.cache
def statistics(kind: type[msgspec.Struct]) -> dict[str, Statistic]:
    """The declared statistics of a struct, by field."""
    return {
        field.name: meta.extra["statistic"]
        for field in msgspec.structs.fields(kind)
        for meta in getattr(field.type, "__metadata__", ())
    }


REQUESTS = Family("requests", "gauge", "Requests in the engine now, by state.", ("state",))
BLOCKS = Family("kv_cache_blocks", "gauge", "KV cache blocks now, by state.", ("state",))
#: Begins where layers have KV entries of different sizes.
GROUP_BLOCKS = Family(
    "kv_cache_group_blocks", "gauge",
    "KV cache blocks now, of each group of layers with equal KV entries, by state. window: tokens that its layers "
    "attend to; all: the whole context; states: a block is a recurrent state.", ("group", "window", "state"),
)  # fmt: skip
CAPACITY = Family("kv_cache_capacity_blocks", "gauge", "KV cache blocks in all.")
PREEMPTIONS = Family("preemptions", "counter", "Requests set back to make room, by kind.", ("kind",))
STEP_TOKENS = Family("step_tokens", "counter", "Tokens computed in steps, by phase; recomputed ones again.", ("phase",))
ADAPTERS = Family(
    "adapters", "gauge", "Adapters now: in slots on the device, in host memory, being loaded.", ("place",)
)
EVICTIONS = Family("adapter_evictions", "counter", "Adapters that lost their place to others.", ("place",))
GRAMMARS = Family("grammar_compilations", "counter", "Grammars compiled for the first time, by result.", ("result",))
ADMISSIONS = Family(
    "adapter_admissions", "counter",
    "Admissions of requests with an adapter: in its slot already (hit), or given one (miss).", ("slot",),
)  # fmt: skip


STORE_BLOCKS = Family(
    "kv_store_blocks", "counter",
    "Blocks of the KV stores, by tier and event: asked (looked for), found, written, dropped (not written as writes "
    "were behind), evicted, damaged (unusable, removed).", ("tier", "event"),
)  # fmt: skip
STORE_PROMPTS = Family(
    "kv_store_prompts", "counter",
    "Prompts whose rest was looked for in the KV stores, or computed as that was expected to be faster.", ("choice",),
)  # fmt: skip
STORE_BYTES = Family("kv_store_bytes", "counter", "Bytes read from the KV stores and written.", ("tier", "direction"))
STORE_SECONDS = Family(
    "kv_store_seconds", "counter", "Time of reading from the KV stores and of writing, beside the steps.",
    ("tier", "direction"),
)  # fmt: skip
STORE_SIZE = Family(
    "kv_store_size_bytes", "gauge", "What the KV stores hold of all engines, and their bounds; 0: unknown.",
    ("tier", "size"),
)  # fmt: skip
STORE_CALLS = Family("kv_store_calls", "counter", "Calls of the KV stores that failed.", ("tier", "result"))
STORE_UP = Family("kv_store_up", "gauge", "1 if a tier of the KV stores works, else 0.", ("tier",))


class StoreTierStats(msgspec.Struct, array_like=True):
    """One tier of the KV stores: totals of its worker since the start, and what it holds now."""

    #: "disk" or "shared".
    tier: str
    asked: Annotated[int, series(STORE_BLOCKS, "asked")] = 0
    found: Annotated[int, series(STORE_BLOCKS, "found")] = 0
    written: Annotated[int, series(STORE_BLOCKS, "written")] = 0
    dropped: Annotated[int, series(STORE_BLOCKS, "dropped")] = 0
    evicted: Annotated[int, series(STORE_BLOCKS, "evicted")] = 0
    damaged: Annotated[int, series(STORE_BLOCKS, "damaged")] = 0
    bytes_read: Annotated[int, series(STORE_BYTES, "read")] = 0
    bytes_written: Annotated[int, series(STORE_BYTES, "written")] = 0
    read_seconds: Annotated[float, series(STORE_SECONDS, "read")] = 0.0
    write_seconds: Annotated[float, series(STORE_SECONDS, "written")] = 0.0
    #: What all engines have stored, and the bound; 0: unknown.
    held_bytes: Annotated[int, series(STORE_SIZE, "held")] = 0
    max_bytes: Annotated[int, series(STORE_SIZE, "max")] = 0
    #: Calls that failed, and why the tier does not work now; empty: it does.
    errors: Annotated[int, series(STORE_CALLS, "failed")] = 0
    trouble: str = ""
    #: Processor time of writing; that of copying blocks out of the KV cache counts in the first tier.
    processor_seconds: float = 0.0


class StoreStats(msgspec.Struct, array_like=True):
    """What the scheduler asks of the KV stores: totals since the start, and numbers now."""

    fetches: Annotated[int, series(STORE_PROMPTS, "fetched")] = 0
    computed: Annotated[int, series(STORE_PROMPTS, "computed")] = 0
    timeouts: Annotated[
        int, total("kv_store_timeouts", "Times that prompts were computed as no block came from the KV stores.")
    ] = 0
    waiting: Annotated[int, gauge("kv_store_waiting_requests", "Requests that wait for blocks of the KV stores.")] = 0
    fetched_tokens: Annotated[int, total("kv_store_fetched_tokens", "Prompt tokens found in the KV stores.")] = 0
    stored_blocks: Annotated[int, total("kv_store_stored_blocks", "Blocks passed to the KV stores.")] = 0
    lost_blocks: Annotated[
        int, total("kv_store_lost_blocks", "Blocks evicted before they were passed to the KV stores.")
    ] = 0
    #: Blocks that wait to be passed to the stores.
    queued_blocks: Annotated[int, gauge("kv_store_queued_blocks", "Blocks to be passed to the KV stores.")] = 0
    #: As the first worker has last reported.
    tiers: list[StoreTierStats] = []
    #: Observed time to fetch a token, as a share of that to compute it, at most 1; None: unknown.
    fetch_share: float | None = None


class GroupState(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Blocks of one KV group now; see ``SchedulerState``."""

    #: Attention window in tokens; None: the whole context.
    window: int | None
    used: Annotated[int, series(GROUP_BLOCKS, "used")]
    cached: Annotated[int, series(GROUP_BLOCKS, "cached")]
    free: Annotated[int, series(GROUP_BLOCKS, "free")]
    pinned: Annotated[int, series(GROUP_BLOCKS, "pinned")]
    host_used: int
    #: Whether its blocks are recurrent states.
    has_states: bool = False

    @property
    def kind(self) -> str:
        """Value of the label ``window``."""
        if self.has_states:
            return "states"
        return "all" if self.window is None else str(self.window)

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

    in_slots: Annotated[int, series(ADAPTERS, "slot")] = 0
    #: Including those in slots.
    in_host: Annotated[int, series(ADAPTERS, "host")] = 0
    loading: Annotated[int, series(ADAPTERS, "loading")] = 0
    loads: Annotated[int, total("adapter_loads", "Loads of adapters from files.")] = 0
    failed_loads: Annotated[int, total("adapter_failed_loads", "Loads that failed.")] = 0
    slot_evictions: Annotated[int, series(EVICTIONS, "slot")] = 0
    host_evictions: Annotated[int, series(EVICTIONS, "host")] = 0
    slot_hits: Annotated[int, series(ADMISSIONS, "hit")] = 0
    slot_misses: Annotated[int, series(ADMISSIONS, "miss")] = 0
    seconds: Annotated[
        float, total("adapter_stall_seconds", "Time in which steps placed adapters or waited for one.")
    ] = 0.0
    longest_seconds: Annotated[
        float, gauge("adapter_longest_stall_seconds", "The longest of these times in one step.")
    ] = 0.0


HOLDINGS = Family(
    "prefix_cache_holdings_ended", "counter",
    "Prefixes that the prefix cache no longer holds for a client: their time had come (expired), an operator released "
    "them, or others took their share (displaced).", ("cause",),
)  # fmt: skip


class RetentionStats(msgspec.Struct, array_like=True, gc=False):
    """Prefixes that callers asked to keep: numbers now, and totals since the start."""

    held_blocks: Annotated[
        int, gauge("kv_cache_held_blocks", "Blocks, used or cached, that are evicted after all others.")
    ] = 0
    holdings: Annotated[int, gauge("prefix_cache_holdings", "Prefixes that are held.")] = 0
    expired: Annotated[int, series(HOLDINGS, "expired")] = 0
    released: Annotated[int, series(HOLDINGS, "released")] = 0
    displaced: Annotated[int, series(HOLDINGS, "displaced")] = 0


class GrammarStats(msgspec.Struct):
    """Totals of grammar compilation, without cached grammars."""

    compiled: Annotated[int, series(GRAMMARS, "compiled")] = 0
    refused: Annotated[int, series(GRAMMARS, "refused")] = 0
    seconds: Annotated[float, total("grammar_compile_seconds", "Processor time of compiling grammars.")] = 0.0
    waiting: Annotated[
        int, gauge("grammars_compiling", "Requests whose grammar is being compiled, or waits for it.")
    ] = 0


class SpeculationStats(msgspec.Struct, array_like=True):
    """Totals of speculative decoding since the start."""

    drafts: Annotated[int, total("spec_decode_num_drafts", "Drafts that were verified.")] = 0
    draft_tokens: Annotated[int, total("spec_decode_num_draft_tokens", "Tokens of drafts.")] = 0
    accepted_tokens: Annotated[
        int, total("spec_decode_num_accepted_tokens", "Tokens of drafts that were accepted.")
    ] = 0
    accepted_per_position: Annotated[
        list[int],
        total(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafts of which the token at this position was accepted.", ("position",),
        ),
    ] = []  # fmt: skip
    failures: Annotated[
        int, total("spec_decode_num_failures", "Completions that went on without drafts as the drafter failed.")
    ] = 0


class SchedulerState(msgspec.Struct, gc=False):
    """Queues and blocks now, and totals since the start."""

    steps: Annotated[int, total("steps", "Steps of the engine.", is_offline=True)] = 0
    num_waiting: Annotated[
        int, series(REQUESTS, "waiting", "Requests that wait for their first step, or to be computed again.")
    ] = 0
    num_running: Annotated[int, series(REQUESTS, "running", "Requests that run.")] = 0
    num_swapped: Annotated[int, series(REQUESTS, "swapped", "Requests whose blocks are in host memory.")] = 0
    # Sums over KV groups:
    blocks_used: Annotated[int, series(BLOCKS, "used", "KV cache blocks that requests hold.")] = 0
    #: In the prefix cache, used by no sequence.
    blocks_cached: Annotated[int, series(BLOCKS, "cached", "Blocks kept for prompts that begin alike.")] = 0
    blocks_free: Annotated[int, series(BLOCKS, "free", "Blocks that hold nothing.")] = 0
    #: Not among those in use.
    blocks_pinned: Annotated[int, series(BLOCKS, "pinned", "Blocks that hold shared prefixes.")] = 0
    host_blocks_used: Annotated[int, gauge("kv_cache_host_used_blocks", "Host memory blocks that hold swapped KV.")] = 0
    preemptions_by_recompute: Annotated[
        int,
        series(PREEMPTIONS, "recompute", "Requests set back to be computed again.", name="preemptions_by_recompute"),
    ] = 0
    preemptions_by_swap: Annotated[
        int, series(PREEMPTIONS, "swap", "Requests whose blocks were moved to host memory.", name="preemptions_by_swap")
    ] = 0
    recomputed_tokens: Annotated[
        int, total("recomputed_tokens", "Tokens whose KV entries were given up by preemption.", is_offline=True)
    ] = 0
    swapped_out_blocks: Annotated[int, total("swapped_out_blocks", "Blocks moved to host memory.", is_offline=True)] = 0
    swapped_in_blocks: Annotated[
        int, total("swapped_in_blocks", "Blocks moved back from host memory.", is_offline=True)
    ] = 0
    prefix_queried_tokens: Annotated[
        int, total("prefix_cache_queried_tokens", "Prompt tokens looked up in the prefix cache.")
    ] = 0
    prefix_hit_tokens: Annotated[int, total("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache.")] = 0
    #: By KV group, if there are several.
    groups: list[GroupState] = []
    adapters: AdapterStats | None = None
    speculation: SpeculationStats | None = None
    #: None: nobody asked for any.
    retention: RetentionStats | None = None
    stores: StoreStats | None = None

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

    prefill_tokens: Annotated[
        int, series(STEP_TOKENS, "prefill", "Prompt tokens computed; recomputed ones again.", name="prefill_tokens")
    ] = 0
    decode_tokens: Annotated[
        int,
        series(STEP_TOKENS, "decode", "Tokens of output computed; of drafts, those accepted.", name="decode_tokens"),
    ] = 0
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


def sum_stats(replicas: list[SchedulerStats]) -> SchedulerStats:
    total = _sum(replicas)
    total.groups = [sum_groups(groups) for groups in zip(*(replica.groups for replica in replicas), strict=True)]
    adapters = [replica.adapters for replica in replicas if replica.adapters is not None]
    if adapters:
        total.adapters = _sum(adapters)
        total.adapters.longest_seconds = max(replica.longest_seconds for replica in adapters)
    stores = [replica.stores for replica in replicas if replica.stores is not None]
    if stores:
        total.stores = _sum(stores)
        total.stores.tiers = [tier for replica in stores for tier in replica.tiers]
    retention = [replica.retention for replica in replicas if replica.retention is not None]
    if retention:
        total.retention = _sum(retention)
    speculation = [replica.speculation for replica in replicas if replica.speculation is not None]
    if speculation:
        total.speculation = _sum(speculation)
        positions = zip(*(replica.accepted_per_position for replica in speculation), strict=True)
        total.speculation.accepted_per_position = [*map(sum, positions)]
    return total


def ended_stats(stats: SchedulerStats) -> SchedulerStats:
    """The totals of an engine core that has ended."""
    now = [name for name, declared in statistics(SchedulerStats).items() if declared.family.kind == "gauge"]
    ended = msgspec.structs.replace(stats, **dict.fromkeys(now, 0), empty_slots=0)
    ended.groups = [GroupState(group.window, 0, 0, 0, 0, 0, group.has_states) for group in stats.groups]
    if stats.adapters is not None:
        ended.adapters = msgspec.structs.replace(stats.adapters, in_slots=0, in_host=0, loading=0)
    if stats.retention is not None:
        ended.retention = msgspec.structs.replace(stats.retention, held_blocks=0, holdings=0)
    return ended


def _sum(parts: Sequence[S]) -> S:
    """Sums of the numeric fields; others have their defaults."""
    total = type(parts[0])()
    for name in total.__struct_fields__:
        if isinstance(getattr(total, name), (int, float)):
            setattr(total, name, sum(getattr(part, name) for part in parts))
    return total


def sum_groups(groups: Sequence[GroupState]) -> GroupState:
    if not groups:
        return GroupState(None, 0, 0, 0, 0, 0)
    used, cached, free, pinned, host_used = map(sum, zip(*(group.counts for group in groups), strict=True))
    return GroupState(groups[0].window, used, cached, free, pinned, host_used, groups[0].has_states)


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


def metrics_of(stats: SchedulerStats) -> list[Metric]:
    return [
        (Gauge if declared.family.kind == "gauge" else Counter)(f"octavo_{declared.name}", value, declared.text)
        for part in (stats, stats.speculation, stats.stores)
        if part is not None
        for name, declared in statistics(type(part)).items()
        if isinstance(value := getattr(part, name), int)
    ]


# Views of an engine, for monitoring: blocks, queues, last steps, and changes.

#: Step records that an engine keeps.
NUM_STEPS = 1000
#: First groups of each queue in a view.
MAX_GROUPS = 128
#: Last changes in a view; see ``EngineView.num_changes``.
MAX_CHANGES = 128
#: Last events of lives in a view.
MAX_LIFE_EVENTS = 1024
#: Maximum adapters in a view, those with most running requests first, and names of each.
MAX_ADAPTER_SLOTS = 64
MAX_ADAPTER_NAMES = 4
#: Maximum requests in a view, and characters of an id or a name, which is cut.
MAX_REQUEST_IDS = 512
MAX_ID_LENGTH = 128
#: A map with more blocks, or more runs, is sent in bins.
MAX_EXACT_BLOCKS = 131_072
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
    #: Whether a block is the recurrent state after its tokens.
    has_states: bool = False


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
    #: Whether it waits for its prefix from the KV stores.
    is_fetching: bool = False
    #: Of a waiting or swapped group: "store" (``is_fetching``); the kind of a preparation that is not ready
    #: ("lora", "grammar", "image", ...); or what the first group in order waits for: "blocks", "sequences" (the limit
    #: of running ones), "prompts" (the limit of partly computed ones), "step" (the next one).
    waits_for: str = ""
    #: Device blocks that it holds; a shared one counts once.
    num_blocks: int = 0
    #: Whether it began at another engine core, or before a step that failed.
    is_resumed: bool = False


class LifeEvent(msgspec.Struct, array_like=True, gc=False):
    """One moment in the life of a group."""

    kind: Literal["admit", "prompt", "recompute", "swap", "end"]
    #: When the step was planned, or the group had ended, in seconds on the engine's clock.
    at: float
    step: int
    group_id: int
    #: admit: tokens of the first sequence that have KV entries, found in the prefix cache or kept; prompt: tokens of
    #: the chunk; recompute: tokens lost; swap: blocks moved; end: output tokens.
    amount: int = 0
    #: prompt: tokens that are left to compute; with 0 the group decodes from the next step on.
    left: int = 0
    #: admit: seconds on the engine's clock.
    arrival: float = 0.0
    #: admit: "" for the first time, or after "recompute", "swap" or "resume" (``GroupRow.is_resumed``); end: the finish
    #: reason.
    why: str = ""
    #: recompute, swap: as in ``GroupRow``.
    preempted_for: int | None = None


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
    #: Of an eviction: "room", the least recently used blocks made room for others; "ended", nobody asked to keep them
    #: any more; "held", all other blocks are in use. "disk" or "shared": how many blocks a KV store has evicted to keep
    #: its bound (``cost``). Of a swap in, "store": the blocks came from a KV store.
    why: str = ""


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
    #: Processor seconds that it took.
    cost: float = 0.0
    adapters: list[AdapterSlot] = []
    #: Ids of requests by group, open ones first; a simulation has none.
    request_ids: dict[int, str] = {}
    #: Since the view before, the last ones.
    lives: list[LifeEvent] = []


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
    """Further fields tell of a step that failed (``engine/step_dumps.py``)."""

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
