"""Dumps of failed steps: a recording for ``octavo view``, whose header tells the failure and what led to it.

``Journal`` keeps what the scheduler was given since it was last idle, or since a checkpoint; ``StepDumper`` writes it
when a step fails, with the plan, the queues and the blocks; ``read_dump`` reads it, for ``octavo simulate --replay``.
No text is in a dump, and token ids only with ``step_dumps=tokens``: prompts are told by their length, and by how far
they begin alike.
"""

from __future__ import annotations

import logging
import os
import platform
import time
import traceback
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import octavo
from octavo.config.kv_spec import GroupBlocks
from octavo.core.errors import ConfigError
from octavo.core.plan import EngineCoreOutputs, StepPlan
from octavo.core.request import Beam, EngineCoreRequest, Generate, SequenceStatus
from octavo.core.stats import (
    FORMAT,
    VERSION,
    EngineEvent,
    RecordingHeader,
    ReplicaRow,
    StepRecord,
    StepStats,
    read_recording,
)
from octavo.engine.core import ViewRecorder, state_of, step_record
from octavo.loader.files import cache_dir
from octavo.memory.block_pool import NO_BLOCK
from octavo.scheduler.groups import suspend
from octavo.scheduler.isolation import describe

if TYPE_CHECKING:
    from octavo.engine.core import EngineCore
    from octavo.scheduler.scheduler import Scheduler

logger = logging.getLogger("octavo")

#: Dumps that are kept in the folder, and least seconds between two of a process.
NUM_DUMPS, INTERVAL = 16, 5.0
#: Most bytes of a dump; beyond, it has no sequences, and then no journal.
MAX_DUMP_BYTES = 8 << 20
MAX_TRACEBACK = 16_000
#: Sequences in all plans of a journal after which its older half is dropped.
_MOST_SCHEDULED = 1 << 16


class Added(msgspec.Struct, tag="add", array_like=True):
    """A request for the scheduler."""

    at: float
    group_id: int
    num_tokens: int
    #: (first, count): numbers for the prompt's tokens; prompts have equal numbers as far as they begin alike.
    prompt: list[tuple[int, int]]
    #: "generate", "beam" or "pool"; sequences, and the limit of each.
    kind: str
    n: int
    max_tokens: int | None
    arrival: float
    priority: float = 0
    #: A number for each user.
    user: int = 0
    #: Tokens generated before: (index, count).
    progress: list[tuple[int, int]] = []
    #: At a checkpoint: "running", "waiting" or "swapped".
    status: str = ""
    #: Prompt tokens that the prefix cache had when it was admitted.
    num_cached: int = 0


class Ended(msgspec.Struct, tag="end", array_like=True):
    """An abort (``index`` is None), or the end of one sequence by a stop string."""

    group_id: int
    index: int | None = None


class Planned(msgspec.Struct, tag="plan", array_like=True):
    """A plan; ``tokens``: those to compute of each sequence, by group, in the order of the plan."""

    step: int
    at: float
    tokens: list[tuple[int, list[int]]]


class Received(msgspec.Struct, tag="result", array_like=True):
    """The result of a step: what differs from one token for each sequence that samples."""

    step: int
    at: float
    #: (group, index, tokens, finish reason).
    sequences: list[tuple[int, int, int, str | None]] = []
    #: (group, finish reason).
    groups: list[tuple[int, str]] = []


Event = Added | Ended | Planned | Received


class DumpedSequence(msgspec.Struct):
    group_id: int
    seq_id: int
    index: int
    status: str
    num_prompt_tokens: int
    num_tokens: int
    num_computed: int
    #: By KV group: block ids, and how many tables refer to each.
    tables: list[list[int]]
    references: list[list[int]]
    token_ids: list[int] | None = None


class StepFailure(msgspec.Struct):
    """What the header of a dump tells."""

    step: int
    error: str
    traceback: str
    versions: dict[str, str]
    options: dict[str, Any]
    max_model_len: int
    block_size: int
    groups: list[GroupBlocks]
    max_in_flight: int
    #: Lengths and counts in the place of tokens, tasks and payloads.
    plan: dict[str, Any]
    #: Of the plan's arrays: [tokens], [sequences] and so on.
    inputs: dict[str, Any]
    sequences: list[DumpedSequence] = []
    #: Whether the journal begins when the scheduler was idle; else at a checkpoint of the open requests.
    from_idle: bool = True
    journal: list[Event] = []

    def lines(self) -> list[str]:
        """The failure in words, for a terminal."""
        counts = f"{self.inputs.get('tokens', 0)} tokens of {self.inputs.get('sequences', 0)} sequences"
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return [f"step {self.step} failed: {self.error}", f"{counts}; {versions}", "", self.traceback.rstrip(), ""]


class DumpHeader(RecordingHeader):
    failure: StepFailure | None = None


class Journal:
    """What the scheduler was given and what it planned, since it was idle or since a checkpoint. Bounded.

    Events are kept as the objects that they are about, and made plain when a dump is written.
    """

    def __init__(self) -> None:
        #: Events before the last checkpoint, and from it on; it is a row of "open" events.
        self._before: list[tuple[Any, ...]] = []
        self._events: list[tuple[Any, ...]] = []
        self._is_valid = self._from_idle = False
        #: Sequences in the plans since the last checkpoint, and 16 for each plan.
        self._num_scheduled = 0
        self._seq_ids: list[int] = []
        self._groups: list[int] = []

    def forget(self) -> None:
        """After a failure: nothing is kept until the next checkpoint."""
        self._before, self._events, self._is_valid = [], [], False

    def added(self, request: EngineCoreRequest, *, is_idle: bool) -> None:
        if is_idle:
            self._before, self._events, self._num_scheduled = [], [], 0
            self._is_valid = self._from_idle = True
        if self._is_valid:
            self._events.append(("add", time.monotonic(), request))

    def ended(self, group_id: int, index: int | None = None) -> None:
        if self._is_valid:
            self._events.append(("end", group_id, index))

    def before_plan(self, scheduler: Scheduler) -> None:
        """Makes a checkpoint if there is none, or many plans were made since the last; forgets what is before two."""
        if self._is_valid and self._num_scheduled < _MOST_SCHEDULED // 2:
            return
        self._from_idle = self._from_idle and self._is_valid and not self._before
        self._before, self._is_valid, self._num_scheduled = self._events, True, 0
        queues, now = scheduler.queues, time.monotonic()
        others = (group for group in queues.groups.values() if group.status is not SequenceStatus.RUNNING)
        requests = [(suspend(group), group.status.value) for group in (*queues.running, *others)]
        self._events = [("open", now, request, status) for request, status in requests if request is not None]

    def planned(self, plan: StepPlan, scheduler: Scheduler) -> None:
        if not self._is_valid:
            return
        if plan.seq_ids != self._seq_ids:
            sequences = scheduler.queues.sequences
            self._seq_ids, self._groups = plan.seq_ids, [sequences[i].group.group_id for i in plan.seq_ids]
        self._num_scheduled += len(self._seq_ids) + 16
        self._events.append(("plan", time.monotonic(), plan.step, self._groups, plan.num_tokens))

    def received(self, step: int, outputs: EngineCoreOutputs) -> None:
        if self._is_valid:
            self._events.append(
                ("result", time.monotonic(), step, outputs.sequences, outputs.groups, outputs.admissions)
            )

    def events(self, cached: dict[int, int]) -> tuple[bool, list[Event]]:
        """Whether the first finds the scheduler idle, and all events; ``cached``: of groups not reported yet."""
        numbers, reported = _Numbers(), dict[int, int]()
        events: list[Event] = []
        for kind, *rest in (*self._before, *(e for e in self._events if not self._before or e[0] != "open")):
            match kind:
                case "add":
                    events.append(numbers.added(*rest))
                case "open":
                    at, request, status = rest
                    events.append(msgspec.structs.replace(numbers.added(at, request), status=status))
                case "end":
                    events.append(Ended(*rest))
                case "plan":
                    at, step, groups, counts = rest
                    tokens: dict[int, list[int]] = {}
                    for group_id, count in zip(groups, counts, strict=True):
                        tokens.setdefault(group_id, []).append(count)
                    events.append(Planned(step, at, list(tokens.items())))
                case _:
                    at, step, sequences, ends, admissions = rest
                    for stats in admissions:  # the first one is that of the whole prompt
                        reported.setdefault(stats.group_id, stats.num_cached_tokens)
                    told = [(s.group_id, s.index, len(s.token_ids), s.finish_reason) for s in sequences]
                    events.append(Received(step, at, told, [(g.group_id, g.finish_reason) for g in ends]))
        for event in events:
            if isinstance(event, Added):
                event.num_cached = reported.get(event.group_id, cached.get(event.group_id, 0))
        return self._from_idle, events


class _Numbers:
    """Numbers in the place of names and contents: equal ones for equal users, and for equal beginnings of prompts."""

    def __init__(self) -> None:
        self._users: dict[str, int] = {"": 0}
        #: By the number before it, or the context of a prompt, and the token.
        self._tokens: dict[tuple[Any, int], int] = {}

    def added(self, at: float, request: EngineCoreRequest) -> Added:
        task, runs = request.task, list[tuple[int, int]]()
        before: Any = request.cache_context
        for token in request.prompt_token_ids:
            number = self._tokens.setdefault((before, token), len(self._tokens))
            if runs and number == before + 1:
                runs[-1] = runs[-1][0], runs[-1][1] + 1
            else:
                runs.append((number, 1))
            before = number
        options, progress = request.options, request.progress
        return Added(
            at=at,
            group_id=request.group_id,
            num_tokens=len(request.prompt_token_ids),
            prompt=runs,
            kind="beam" if isinstance(task, Beam) else "generate" if isinstance(task, Generate) else "pool",
            n=task.num_sequences,
            max_tokens=task.max_tokens if task.samples else 0,
            arrival=request.arrival_time,
            priority=options.priority,
            user=self._users.setdefault(options.user, len(self._users)),
            progress=[] if progress is None else [(c.index, len(c.token_ids)) for c in progress.completions],
        )


class StepDumper(Journal):
    """Dumps the failed steps of one engine core, into ``dumps`` of the cache's folder; old ones are removed."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__()
        self._core = weakref.proxy(core)
        self.folder = cache_dir() / "dumps"
        #: Times and statistics of the last steps, if they are kept.
        self.steps: deque[tuple[float, StepStats]] = deque()
        self._last = -INTERVAL

    def failed(self, plan: StepPlan, error: Exception) -> None:
        """Writes a dump, unless the last one was written a moment ago; whatever fails is logged and not raised."""
        now = time.monotonic()
        if now - self._last < INTERVAL:
            self.forget()
            return
        self._last = now
        try:
            data = self._encode(plan, error)
            self.folder.mkdir(parents=True, exist_ok=True)
            stamp = time.strftime("%Y%m%d-%H%M%S")
            path = self.folder / f"step-{stamp}-{os.getpid()}-{plan.step}.jsonl"
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
                stream.write(data)
            for old in sorted(self.folder.glob("step-*.jsonl"), key=lambda file: file.name)[:-NUM_DUMPS]:
                old.unlink(missing_ok=True)
        except Exception:
            logger.exception("the failed step %d could not be dumped", plan.step)
        else:
            logger.error("step %d is dumped: octavo view %s", plan.step, path)
        self.forget()

    def _encode(self, plan: StepPlan, error: Exception) -> bytes:
        core = self._core
        failure = self._failure(plan, error)
        header = DumpHeader(FORMAT, VERSION, f"step {plan.step} failed: {failure.error[:200]}", failure)
        # The scheduler may be what has failed: it is not asked.
        view = ViewRecorder(core.scheduler, steps=self.steps, obstacle=lambda: "").view(fresh=True)
        view.steps.append(self._record(plan, view.at))
        event = EngineEvent(time.time(), [ReplicaRow(core.replica, "failed", len(view.groups), 0)], [view])
        shown = msgspec.json.encode(event)
        for drop in ((), ("sequences",), ("sequences", "journal"), ("sequences", "journal", "plan", "inputs")):
            for name in drop:
                setattr(failure, name, type(getattr(failure, name))())
            data = b"%b\n%b\n" % (msgspec.json.encode(header), shown)
            if len(data) <= MAX_DUMP_BYTES:
                break
        return data

    def _record(self, plan: StepPlan, at: float) -> StepRecord:
        counts = self._core.scheduler.counts()
        decodes = sum(count == 1 for count in plan.num_tokens)
        fields = *state_of(counts), 0.0, 0.0, 0.0, 0.0, plan.total_tokens - decodes, decodes, self._core.replica
        return step_record(at, msgspec.structs.replace(StepStats(*fields), steps=plan.step))

    def _failure(self, plan: StepPlan, error: Exception) -> StepFailure:
        core = self._core
        sequences = list(self._sequences(plan))
        cached = {group.group_id: group.totals.num_cached_tokens for group in core.scheduler.queues.groups.values()}
        from_idle, journal = self.events(cached)
        return StepFailure(
            step=plan.step,
            error=describe(error),
            traceback="".join(traceback.format_exception(error))[-MAX_TRACEBACK:],
            versions={
                "octavo": octavo.__version__,
                "python": platform.python_version(),
                "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            },
            options=core.options.model_dump(mode="json", exclude_defaults=True),
            max_model_len=core.max_model_len,
            block_size=core.blocks.block_size,
            groups=core.startup.groups,
            max_in_flight=core.max_in_flight,
            plan=_plain(plan, with_tokens=core.options.step_dumps == "tokens"),
            inputs={
                "tokens": plan.total_tokens,
                "sequences": len(plan.seq_ids),
                "query_lens": plan.num_tokens,
                "context_lens": [s.num_computed for s in sequences[: len(plan.seq_ids)]],
                "drafts": sum(map(len, plan.drafts.values())) + sum(plan.num_drafts.values()),
            },
            sequences=sequences,
            from_idle=from_idle,
            journal=journal,
        )

    def _sequences(self, plan: StepPlan) -> Iterator[DumpedSequence]:
        """Those of the plan in its order, then the others."""
        core, with_tokens = self._core, self._core.options.step_dumps == "tokens"
        by_id = core.scheduler.queues.sequences
        for seq_id in dict.fromkeys((*plan.seq_ids, *by_id)):
            if (seq := by_id.get(seq_id)) is None:
                continue
            tables = [core.blocks.table(seq_id, group.number) for group in core.blocks.groups]
            yield DumpedSequence(
                group_id=seq.group.group_id,
                seq_id=seq_id,
                index=seq.index,
                status=seq.status.value,
                num_prompt_tokens=seq.num_prompt_tokens,
                num_tokens=len(seq.token_ids),
                num_computed=seq.num_computed,
                tables=tables,
                references=[
                    [0 if block == NO_BLOCK else group.device.references(block) for block in table]
                    for group, table in zip(core.blocks.groups, tables, strict=True)
                ],
                token_ids=list(seq.token_ids) if with_tokens else None,
            )


def _plain(plan: StepPlan, *, with_tokens: bool) -> dict[str, Any]:
    """The plan with the numbers of its tokens in their place, and without what requests ask for."""
    plain: dict[str, Any] = msgspec.to_builtins(plan, str_keys=True)
    plain["new"] = [
        {
            "seq_id": new.seq_id,
            "num_tokens": len(new.token_ids),
            "num_prompt_tokens": new.num_prompt_tokens,
            "num_computed": new.num_computed,
            "task": type(new.task).__name__,
            "has_adapter": new.adapter is not None,
            "context": new.context,
            "features": len(new.features),
        }
        for new in plan.new
    ]
    plain["contexts"] = [[context.context_id, context.num_tokens] for context in plan.contexts]
    plain["prepare"] = [preparation.kind for preparation in plan.prepare]
    plain["drop"], plain["place"] = len(plan.drop), [slot for slot, _ in plan.place]
    if not with_tokens:
        plain["new_tokens"] = {seq_id: len(tokens) for seq_id, tokens in plan.new_tokens.items()}
        plain["drafts"] = {seq_id: len(tokens) for seq_id, tokens in plan.drafts.items()}
    return plain


def dump_failed_steps(core: EngineCore) -> StepDumper | None:
    """Makes a core dump its failed steps, unless its options say no."""
    if core.options.step_dumps == "none":
        return None
    dumper = core.journal = StepDumper(core)
    return dumper


def read_failure(recording: bytes) -> StepFailure | None:
    """What a recording tells of a failed step; None if it is no dump of one, or damaged."""
    try:
        return msgspec.json.decode(recording.partition(b"\n")[0], type=DumpHeader).failure
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None


def read_dump(path: Path) -> StepFailure:
    """Raises ConfigError for other files."""
    failure = read_failure(read_recording(path))
    if failure is None:
        raise ConfigError(f"{path} is no dump of a failed step: engines write such into the folder {cache_dir()}/dumps")
    return failure
