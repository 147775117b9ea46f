"""A worker without a model, and the step loop around it, that check every plan of the scheduler.

A slot of a block holds the *print* of its token: a hash of that token and all before it, as a KV entry depends on them.
So content that is stale, overwritten or of another sequence is detected where it is read. A block of recurrent states
has one slot, with a ``StatePrint``.

The worker computes a step when it is submitted, as a device would that runs ahead of its host. Its host knows the
sampled tokens only when the step has been waited for, and until then nothing may ask it for their ids.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from octavo.config.options import SchedulerOptions
from octavo.core.plan import (
    EngineCoreOutputs,
    Fork,
    GroupOutput,
    NewSequence,
    PositionLogprobs,
    SequenceOutput,
    SequenceResult,
    StepPlan,
    StepResult,
)
from octavo.core.request import AnyTask, Beam, EngineCoreRequest, Feature, Generate, Hypothesis, Pool, SequenceStatus
from octavo.engine.core import StepLoop, _Failed
from octavo.executor.executor import Executor, PendingStep
from octavo.memory.block_manager import BlockManager
from octavo.memory.block_pool import NO_BLOCK
from octavo.memory.checkpoints import Checkpoint
from octavo.memory.kv_group import KVGroup
from octavo.memory.prefix_cache import ContentIndex, positions
from octavo.scheduler.groups import BeamSearch, Candidates, Sequence, SequenceGroup
from octavo.scheduler.image_time import ImageTime
from octavo.scheduler.isolation import PROBE
from octavo.scheduler.preparations import Preparations, PreparationState
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.state import SchedulingState
from octavo.scheduler.step import Step
from octavo.speculation.drafter import Drafter
from octavo.speculation.speculator import Speculator
from tests.scheduler.fake_preparations import FakePreparations
from tests.scheduler.fake_stores import FakeStores, WorkerStores

EOS = 0
#: Tokens that the fake model knows: the end, and a few others.
VOCABULARY = 12
_START = 17


def extend_print(before: int, token: int) -> int:
    """The print of a token that follows what has the print ``before``."""
    return hash((before, token))


def print_of(
    token_ids: list[int],
    adapter: str | None = None,
    encoder_key: str | None = None,
    features: SequenceOf[Feature] = (),
) -> int:
    """The print of the last token, computed with an adapter, over what an encoder has read, with features of images."""
    value = _start(adapter, encoder_key)
    for position, token in enumerate(token_ids):
        value = extend_print(value, embedded(token, position, features))
    return value


def embedded(token: int, position: int, features: SequenceOf[Feature]) -> int:
    """What is computed of a token: a number of its own for one that stands for a feature."""
    feature = next((f for f in features if f.offset <= position < f.offset + f.length), None)
    if feature is None:
        return token
    return hash((feature.key.decode().partition(",")[0], feature.first + position - feature.offset))


def _start(adapter: str | None, encoder_key: str | None = None) -> int:
    start = _START if adapter is None else hash((_START, adapter))
    return start if encoder_key is None else hash((start, encoder_key))


def context_prints(key: str, count: int) -> list[int]:
    """The prints of what an encoder makes of its input."""
    prints = [extend_print(hash(("context", key)), 0)]
    while len(prints) < count:
        prints.append(extend_print(prints[-1], 0))
    return prints


def prints_of(seq: Sequence) -> list[int]:
    """The print of each token of a sequence."""
    adapter, given, features = _keys(seq.group.request)
    prints = [_start(adapter, given)]
    for position, token in enumerate(seq.token_ids):
        prints.append(extend_print(prints[-1], embedded(token, position, features)))
    return prints[1:]


def sample(context: int, seed: int) -> int:
    """The token after this print; sometimes the stop token."""
    return _scramble((context, seed)) % VOCABULARY


def _scramble(values: tuple[int, int]) -> int:
    """Python's hash of small integers is too regular to draw from."""
    mixed = (hash(values) * 0x9E3779B97F4A7C15) & (2**64 - 1)
    return (mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9 % 2**64 >> 24


def candidates(context: int, count: int) -> Candidates:
    """The most likely tokens after this print, all different."""
    scores = sorted((-(1 + _scramble((context, -token - 1)) % 10_007) / 1000, token) for token in range(VOCABULARY))
    best = scores[::-1][:count]
    return Candidates([token for _, token in best], [score for score, _ in best])


def tokens_alone(request: EngineCoreRequest, index: int, max_model_len: int) -> list[int]:
    """The tokens of sequence ``index`` of a request, from the fake model alone."""
    tokens, task = list(request.prompt_token_ids), request.task
    assert isinstance(task, Generate)
    limit = max_model_len if task.max_tokens is None else min(len(tokens) + task.max_tokens, max_model_len)
    context = print_of(tokens, *_keys(request))
    while len(tokens) < limit:
        tokens.append(sample(context, task.seed + index))
        context = extend_print(context, tokens[-1])
        if tokens[-1] in task.stop_token_ids:
            break
    return tokens[len(request.prompt_token_ids) :]


def _keys(request: EngineCoreRequest) -> tuple[str | None, str | None, list[Feature]]:
    adapter, given = request.adapter, request.encoder_input
    return None if adapter is None else adapter.key, None if given is None else given.key, request.features


def hypotheses_alone(request: EngineCoreRequest, max_model_len: int, vocabulary: int = VOCABULARY) -> list[Hypothesis]:
    """The hypotheses of a beam search, from the fake model alone."""
    prompt, task = request.prompt_token_ids, request.task
    assert isinstance(task, Beam)
    search = BeamSearch(task.params, task.stop_token_ids, min(task.max_tokens, max_model_len - len(prompt)))
    count = min(task.num_candidates, vocabulary)
    beams: list[list[int]] = [[]]
    while True:
        step = search.step([candidates(print_of(prompt + b, *_keys(request)), count) for b in beams], beams)
        if step.done:
            return search.hypotheses()
        beams = [[*beams[parent], token] for parent, token in step.survivors]


class StatePrint(NamedTuple):
    """A state after the token at ``position``, which was no draft, and what later drafts would change in it."""

    position: int
    #: Of this token, and of the drafts behind it.
    prints: list[int]

    def after(self, position: int) -> int | None:
        """The print of the state after a token; None: it cannot be cut back so far, or has not come so far."""
        index = position - self.position
        return self.prints[index] if 0 <= index < len(self.prints) else None


@dataclass(frozen=True)
class GroupView:
    """What a worker knows of a KV group."""

    window: int | None
    #: Tokens of a block.
    size: int
    has_states: bool

    def slot(self, position: int) -> int:
        """The place of a token's print in its block."""
        return 0 if self.has_states else position % self.size

    def first_read(self, num_computed: int) -> int:
        """The first position that the next token reads."""
        return 0 if self.window is None else max(0, num_computed - self.window + 1)


@dataclass
class Row:
    """The worker's state of a sequence."""

    task: AnyTask
    seed: int
    tokens: list[int]
    #: The print of each token.
    prints: list[int]
    #: Its block table in each group.
    tables: list[list[int]]
    num_computed: int
    #: Of ``tokens``, those whose ids the host has.
    known: int
    #: Tokens at which the sequence ends.
    limit: int
    adapter: str | None = None
    #: Key of what an encoder has read, and the id of what it made of it.
    encoder_key: str | None = None
    context: int | None = None
    features: list[Feature] = field(default_factory=list)
    #: Tokens that must follow, which come back with a plan.
    forced: list[int] = field(default_factory=list)

    @property
    def appends(self) -> bool:
        """Whether it appends the tokens that it samples, or those of later plans."""
        return not isinstance(self.task, Beam)

    @property
    def known_in_full(self) -> bool:
        return self.known == len(self.tokens)

    def append(self, token: int) -> None:
        before = self.prints[-1] if self.prints else _start(self.adapter, self.encoder_key)
        self.prints.append(extend_print(before, embedded(token, len(self.tokens), self.features)))
        self.tokens.append(token)


@dataclass
class FakeContext:
    """The worker's state of what an encoder has made."""

    num_tokens: int
    key: str
    table: list[int] = field(default_factory=list)


class InjectedFailure(Exception):
    """The error that the worker was told to raise."""


class FakeStep:
    """A step in flight."""

    def __init__(self, worker: FakeWorker, plan: StepPlan) -> None:
        self.worker, self.plan = worker, plan
        self.result = StepResult(plan.step)
        self.failure: str = ""
        #: Rows that sampled.
        self.sampled: list[Row] = []

    def wait(self) -> StepResult:
        worker = self.worker
        with worker.breaking():
            assert worker.in_flight.pop(0) is self, "waited for out of order"
            for row in self.sampled:
                row.known += 1
            worker.on_wait(self.plan)
            if not self.failure:
                worker.last_known = self.plan.step
        if self.failure:
            raise InjectedFailure(self.failure)
        return self.result


class FakeWorker(Executor):
    """Executes plans over simulated block contents, strictly in the order of a plan's fields.

    A broken rule is in ``broken``: the step loop takes it for a step that failed.
    """

    def __init__(
        self,
        blocks: BlockManager,
        options: SchedulerOptions,
        max_model_len: int,
        preparations: FakePreparations,
    ) -> None:
        self.preparations = preparations
        self.max_model_len = max_model_len
        self.options = options
        self.max_in_flight = 2
        self.block_size = blocks.block_size
        self.groups = [GroupView(group.window, group.block_size, group.has_states) for group in blocks.groups]
        device, host = (sum(getattr(g, level).num_blocks for g in blocks.groups) for level in ("device", "host"))
        self.device: list[list[Any]] = [[None] * self.block_size for _ in range(device)]
        self.host: list[list[Any]] = [[None] * self.block_size for _ in range(host)]
        self.rows: dict[int, Row] = {}
        self.contexts: dict[int, FakeContext] = {}
        #: By id, of all contexts that ever were: what was read for them, as the scheduler has it.
        self.context_keys: dict[int, str] = {}
        #: How often an encoder has read something, and how often a context came without that.
        self.num_encoded = self.num_found = 0
        #: Rows as they were when they were forgotten.
        self.forgotten: dict[int, Row] = {}
        self.in_flight: list[FakeStep] = []
        self.on_submit: Callable[[StepPlan], None] = lambda plan: None
        self.on_wait: Callable[[StepPlan], None] = lambda plan: None
        self.broken: Exception | None = None
        #: What drafts of its own are like.
        self.drafting = random.Random(8)
        #: Tokens that it can name as candidates of a beam.
        self.vocabulary = VOCABULARY
        #: Where the next step is to fail: "before moving", when it is submitted, or "before computing", later.
        self.fail = ""
        self.has_failed = False
        #: If there are KV stores: its side of them, the steps that computed blocks, and the last whose result is known.
        self.stores: WorkerStores | None = None
        self.computed_by: dict[int, int] = {}
        self.last_known = 0
        #: Whether a step fails; called with each plan.
        self.fails_at: Callable[[StepPlan], bool] = lambda plan: False
        self.seconds_per_token = 1e-3
        self.seconds_per_step = 0.0
        self.seconds_per_move = 1e-3

    def start_workers(self) -> None: ...

    def collective_rpc(self, method: Any, args: Any = (), kwargs: Any = None, timeout: Any = None) -> list[Any]:
        raise NotImplementedError

    def check_health(self) -> None: ...

    def shutdown(self) -> None: ...

    @contextlib.contextmanager
    def breaking(self) -> Iterator[None]:
        try:
            yield
        except InjectedFailure:
            raise
        except Exception as e:
            self.broken = self.broken or e
            raise

    def submit(self, plan: StepPlan) -> PendingStep:
        fail, self.fail = self.fail or ("before computing" if self.fails_at(plan) else ""), ""
        with self.breaking():
            self.on_submit(plan)
            plan = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)
            assert len(self.in_flight) < self.max_in_flight, "too many steps in flight"
            step = FakeStep(self, plan)
            self._forget(plan)
            if fail == "before moving":
                self.has_failed = True
                self.preparations.lose_report()
                raise InjectedFailure(fail)
            if any(s.failure for s in self.in_flight):
                step.failure = "after one that failed"
            else:
                self._execute(step, fail)
            self.in_flight.append(step)
        return step

    def _forget(self, plan: StepPlan) -> None:
        for seq_id in plan.forget:
            if seq_id in self.context_keys:
                if seq_id in self.contexts or not self.has_failed:
                    del self.contexts[seq_id]
            elif seq_id in self.rows or not self.has_failed:
                self.forgotten[seq_id] = self.rows.pop(seq_id)

    def _execute(self, step: FakeStep, fail: str) -> None:
        plan = step.plan
        self._move(plan)
        fetches = self.stores is not None and bool(self.stores.fetching)
        self.preparations.apply(plan, fetches=fetches)
        for context in plan.contexts:
            assert context.context_id not in self.contexts
            key = self.context_keys[context.context_id]
            self.contexts[context.context_id] = FakeContext(context.num_tokens, key)
        assert len(self.contexts) <= self.options.max_num_seqs
        for new in plan.new:
            self._add(new)
        for fork in plan.forks:
            self._fork(fork)
        assert len(self.rows) <= self.options.max_num_seqs
        for seq_id, tokens in plan.new_tokens.items():
            row = self.rows[seq_id]
            assert not row.appends or row.forced, "a token that the worker has already"
            assert row.num_computed == len(row.tokens) - row.appends, "a token after one that is still to be computed"
            if row.forced:
                assert tokens == row.forced, "not the tokens that are forced"
                row.forced = []
            for token in tokens:
                row.append(token)
                row.known += 1
        for change in plan.table_changes:
            if change.seq_id in self.contexts:
                table = self.contexts[change.seq_id].table
            else:
                table = self.rows[change.seq_id].tables[change.group]
            assert change.blocks and change.index <= len(table), "a hole in a block table"
            assert all(0 <= block < len(self.device) for block in change.blocks)
            table[change.index : change.index + len(change.blocks)] = change.blocks
        if fail == "before computing":
            self.has_failed = True
            step.failure = fail
            self.preparations.lose_report()
            return
        if plan.num_drafts:
            plan = step.plan = self._draft(plan, step.result)
        self._encode(plan)
        forked_children = self._forked_children(plan)
        self._compute(plan, forked_children)
        self._sample(step, forked_children)
        self.preparations.report(step.result)
        if self.stores is not None:
            self.stores.report(plan, step.result)

    def _encode(self, plan: StepPlan) -> None:
        """Reads the inputs of new contexts, which writes their blocks; those that are found have theirs."""
        read = [context for context in plan.contexts if context.encode is not None]
        self.num_encoded += len(read)
        self.num_found += len(plan.contexts) - len(read)
        budget = self.options.encoder_budget
        assert len(read) <= 1 or sum(context.num_tokens for context in read) <= budget, "more than a step may read"
        for context in read:
            mine = self.contexts[context.context_id]
            assert context.encode == mine.key
            assert mine.key in self.preparations.prepared, "an input that is not prepared"
            others = [c.table for c in self.contexts.values() if c is not mine]
            others += [table for row in self.rows.values() for table in row.tables]
            assert not set(mine.table).intersection(*[[block for table in others for block in table]])
            prints = context_prints(mine.key, len(mine.table) * self.block_size)
            for index, block in enumerate(mine.table):
                self.device[block] = [*prints[index * self.block_size : (index + 1) * self.block_size]]

    def _check_contexts(self) -> None:
        """What every row attends to beside its own tokens is what its request's encoder has read."""
        for context in self.contexts.values():
            assert len(context.table) == -(-context.num_tokens // self.block_size)
            found = [value for block in context.table for value in self.device[block]][: context.num_tokens]
            assert found == context_prints(context.key, context.num_tokens), "another context"
        for row in self.rows.values():
            assert row.context is None or self.contexts[row.context].key == row.encoder_key

    def _draft(self, plan: StepPlan, result: StepResult) -> StepPlan:
        """Drafts as many tokens as are asked for, or fewer; none if its drafter fails."""
        assert not plan.num_drafts.keys() & plan.drafts.keys()
        num_tokens = dict(zip(plan.seq_ids, plan.num_tokens, strict=True))
        drafts = dict(plan.drafts)
        fails = self.drafting.random() < 0.1
        result.draft_error = "no idea" if fails else None
        for seq_id, most in plan.num_drafts.items():
            row = self.rows[seq_id]
            assert row.known_in_full and num_tokens[seq_id] == 1 + most
            context, tokens = row.prints[-1], []
            for _ in range(0 if fails else self.drafting.randrange(most + 1)):
                token = sample(context, row.seed)
                if self.drafting.random() < 0.3:
                    token = (token + 1) % VOCABULARY
                tokens.append(token)
                context = extend_print(context, token)
            num_tokens[seq_id] = 1 + len(tokens)
            if tokens:
                drafts[seq_id], result.num_drafts[seq_id] = tokens, len(tokens)
        result.draft_seconds = 1e-3
        return msgspec.structs.replace(plan, num_tokens=[*num_tokens.values()], drafts=drafts)

    def _move(self, plan: StepPlan) -> None:
        copied_from = {source for source, _ in plan.blocks_to_copy}
        targets = [t for _, t in plan.blocks_to_swap_in] + [t for _, t in plan.blocks_to_copy]
        targets += [t for _, _, t in plan.blocks_fetched]
        assert len(targets) == len(set(targets)), "a device block is the target of two moves"
        assert not copied_from & {t for _, t in plan.blocks_to_copy}, "a copy of a copy"
        host_targets = [t for _, t in plan.blocks_to_swap_out]
        assert len(host_targets) == len(set(host_targets)), "a host block is the target of two moves"
        if self.stores is not None:
            self.stores.write(plan, self.device, self.computed_by, self.last_known)
        for source, target in plan.blocks_to_swap_out:
            self.host[target] = list(self.device[source])
        for source, target in plan.blocks_to_swap_in:
            self.device[target] = list(self.host[source])
        if self.stores is not None:
            self.stores.begin(plan)
            self.stores.place(plan, self.device)
        for target in targets:
            self.computed_by.pop(target, None)
        for source, target in plan.blocks_to_copy:
            self.device[target] = list(self.device[source])

    def _add(self, new: NewSequence) -> None:
        assert new.seq_id not in self.rows
        assert new.num_computed < len(new.token_ids)
        before = self.forgotten.get(new.seq_id)
        if before is not None:
            assert before.known_in_full, "back before its last token is known"
            unsent = len(new.token_ids) - len(before.tokens)
            wanted = len(before.forced) if before.appends else min(unsent, 1)
            assert unsent == wanted, "back without one of its tokens"
        limit, task = self.max_model_len, new.task
        if not task.samples:
            limit = new.num_prompt_tokens + 1  # all of them are computed
        elif task.max_tokens is not None:
            limit = min(limit, new.num_prompt_tokens + task.max_tokens)
        if isinstance(task, Generate) and task.grammar is not None:
            assert task.grammar.key in self.preparations.prepared and not task.grammar.source
        tables: list[list[int]] = [[] for _ in self.groups]
        known = len(new.token_ids)
        seed = task.seed if isinstance(task, Generate) else 0
        encoder_key = None if new.context is None else self.contexts[new.context].key
        row = Row(task, seed, [], [], tables, new.num_computed, known, limit, new.adapter, encoder_key, new.context)
        row.features = new.features
        for token in new.token_ids:
            row.append(token)
        self.rows[new.seq_id] = row

    def _fork(self, fork: Fork) -> None:
        assert fork.child not in self.rows
        row = self.rows[fork.parent]
        assert row.known_in_full, "a copy of a token that is still to come"
        self.rows[fork.child] = Row(
            row.task,
            fork.seed,
            list(row.tokens),
            list(row.prints),
            [list(table) for table in row.tables],
            row.num_computed,
            row.known,
            row.limit,
            row.adapter,
            row.encoder_key,
            row.context,
            row.features,
        )

    def _forked_children(self, plan: StepPlan) -> dict[int, int]:
        scheduled = set(plan.seq_ids)
        return {f.child: f.parent for f in plan.forks if f.parent in scheduled and f.child not in scheduled}

    def _compute(self, plan: StepPlan, forked_children: dict[int, int]) -> None:
        assert len(set(plan.seq_ids)) == len(plan.seq_ids) == len(plan.num_tokens)
        assert plan.total_tokens <= self.options.token_budget
        assert 0 not in plan.num_tokens, "something of each"
        rows = sum(1 + len(plan.drafts.get(seq_id, ())) for seq_id in plan.seq_ids) + len(forked_children)
        assert rows <= self.options.token_budget, "more rows of logits than a worker has room for"
        self.preparations.check_computes([self.rows[seq_id].adapter for seq_id in plan.seq_ids])
        before = {seq_id: row.num_computed for seq_id, row in self.rows.items()}
        self._check_contents(before)
        self._check_contexts()
        written: dict[tuple[int, int], int] = {}
        for seq_id, count in zip(plan.seq_ids, plan.num_tokens, strict=True):
            row = self.rows[seq_id]
            drafts = plan.drafts.get(seq_id, [])
            assert row.known_in_full or not drafts, "drafts behind a token that is still to come"
            for token in drafts:
                row.append(token)
            end = row.num_computed + count
            for feature in row.features:
                after = feature.offset + feature.length
                if feature.offset < end and row.num_computed < after:
                    image = feature.image
                    assert not image or image in self.preparations.prepared, f"{image} is not prepared"
                    assert not feature.is_whole or after <= end, "a whole feature is cut"
            assert end <= len(row.tokens) <= min(row.limit, self.max_model_len)
            assert not drafts or end == len(row.tokens), "drafts behind a token that is not computed"
            assert end < row.limit, "the last token is computed, and nothing follows it"
            assert end <= row.known + len(drafts) or count == 1, "only a decode may take a token from the device"
            for group, table in zip(self.groups, row.tables, strict=True):
                assert len(table) * group.size >= end, "tokens without a slot"
                for position in range(row.num_computed, end):
                    slot = table[position // group.size], group.slot(position)
                    assert written.get(slot, seq_id if group.has_states else -1) in (-1, seq_id)
                    written[slot] = seq_id
                    value: Any = row.prints[position]
                    if group.has_states:
                        last = min(position, end - len(drafts) - 1)
                        value = StatePrint(last, row.prints[last:end])
                    self.device[slot[0]][slot[1]] = value
                    self.computed_by[slot[0]] = plan.step
            row.num_computed = end
        for child, parent in forked_children.items():
            assert self.rows[child].num_computed <= self.rows[parent].num_computed
            assert self.rows[child].tables == self.rows[parent].tables
            self.rows[child].num_computed = self.rows[parent].num_computed
        self._check_write_access({block: seq_id for (block, _), seq_id in written.items()}, forked_children)
        self._check_contents(before)
        self._check_contexts()

    def _check_contents(self, before: dict[int, int]) -> None:
        """What each row has computed reads back through its tables as its own tokens.

        As far as it is read by tokens after the first ``before``.
        """
        for seq_id, row in self.rows.items():
            for group, table in zip(self.groups, row.tables, strict=True):
                size = group.size
                assert len(table) * size >= row.num_computed
                first = group.first_read(before[seq_id])
                for index in range(first // size, -(-row.num_computed // size)):
                    start, stop = max(first, index * size), min(index * size + size, row.num_computed)
                    found: list[Any] = self.device[table[index]][start - index * size : stop - index * size]
                    if group.has_states:
                        start, state = stop - 1, self.device[table[index]][0]
                        found = [state.after(start) if isinstance(state, StatePrint) else None]
                    assert found == row.prints[start:stop], f"sequence {seq_id} reads another's in block {table[index]}"

    def _check_write_access(self, written: dict[int, int], forked_children: dict[int, int]) -> None:
        """A written block is in the table of no other sequence, except those just forked from the writer."""
        for seq_id, row in self.rows.items():
            for group, table in zip(self.groups, row.tables, strict=True):
                for block in table[group.first_read(row.num_computed) // group.size :]:
                    writer = written.get(block, seq_id)
                    assert writer in (seq_id, forked_children.get(seq_id)), (
                        f"{writer} writes into block {block} of {seq_id}"
                    )

    def _sample(self, step: FakeStep, forked_children: dict[int, int]) -> None:
        plan, result = step.plan, step.result
        moves = len(plan.blocks_to_swap_out) + len(plan.blocks_to_swap_in)
        result.swap_seconds = moves * self.seconds_per_move
        if result.swap_seconds:
            result.swaps = [(moves, result.swap_seconds)]
        result.seconds = result.swap_seconds + plan.total_tokens * self.seconds_per_token + self.seconds_per_step
        for seq_id in [*plan.seq_ids, *forked_children]:
            row, drafts = self.rows[seq_id], plan.drafts.get(seq_id, [])
            assert not row.forced, "computed without the tokens that are forced"
            if row.num_computed < len(row.tokens):
                continue
            if isinstance(row.task, Pool):
                result.extras[seq_id] = SequenceResult(pooled=b"%d" % row.prints[-1])
            if isinstance(row.task, Pool) or not row.task.samples:
                continue
            result.seq_ids.append(seq_id)
            first = len(row.tokens) - len(drafts)
            accepted = 0
            while True:
                before = row.prints[first + accepted - 1]
                token = sample(before, row.seed)
                result.token_ids.append(token)
                wanted = row.task.num_candidates if isinstance(row.task, Beam) else row.task.params.logprobs
                if wanted is not None:
                    top = candidates(before, min(wanted, self.vocabulary))
                    position = PositionLogprobs(token, -1.0, 1, list(top.token_ids), list(top.logprobs))
                    result.extras.setdefault(seq_id, SequenceResult()).logprobs.append(position)
                if accepted == len(drafts) or drafts[accepted] != token:
                    break
                accepted += 1
            if plan.drafts:
                result.num_tokens.append(1 + accepted)
            if plan.drafts or plan.num_drafts:
                row.num_computed -= len(drafts) - accepted
                for group, table in zip(self.groups, row.tables, strict=True):
                    # Blocks behind them may belong to others from now on.
                    del table[-(-row.num_computed // group.size) :]
                del row.tokens[first + accepted :], row.prints[first + accepted :]
                row.known += accepted
            if row.appends:
                row.append(token)
                step.sampled.append(row)
            self._force(seq_id, row, result)

    def _force(self, seq_id: int, row: Row, result: StepResult) -> None:
        """Names some of the next tokens, of a sequence alone with a grammar, whatever they are; or none."""
        task = row.task
        if self.max_in_flight > 1 or not isinstance(task, Generate) or task.grammar is None or task.params.n > 1:
            return
        context, count = row.prints[-1], _scramble((row.prints[-1], -77)) % 8 - 3
        for _ in range(count):
            row.forced.append(sample(context, row.seed))
            context = extend_print(context, row.forced[-1])
        if row.forced:
            result.forced_tokens[seq_id] = list(row.forced)


@dataclass
class Answer:
    """The outputs of a request so far."""

    request: EngineCoreRequest
    group: SequenceGroup
    #: By index of the sequence.
    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    hypotheses: list[Hypothesis] | None = None
    pooled: bytes | None = None
    error: str | None = None
    #: Why the whole group ended, if it did so at once.
    group_reason: str | None = None

    @property
    def num_preemptions(self) -> int:
        return self.group.totals.num_recomputes + self.group.totals.num_swaps

    @property
    def finished(self) -> bool:
        return self.group_reason is not None or len(self.reasons) == self.request.task.num_sequences


class Engine:
    """The step loop over a fake worker, with a clock that tests set."""

    def __init__(
        self,
        blocks: BlockManager,
        options: SchedulerOptions,
        max_model_len: int,
        *,
        max_in_flight: int = 1,
        drafter: Drafter | None = None,
        adaptive: bool = False,
        preparations: FakePreparations | None = None,
        stores: FakeStores | None = None,
        image_time: ImageTime | None = None,
    ) -> None:
        """``stores``: those of ``blocks``, if it has limits of them."""
        preparations = preparations or FakePreparations()
        self.now = 0.0
        self.blocks = blocks
        self.max_model_len = max_model_len
        self.scheduler = Scheduler(
            blocks,
            options,
            max_model_len,
            speculator=Speculator(drafter, 5, adaptive=adaptive) if drafter is not None else None,
            runs_ahead=max_in_flight > 1,
            preparations=Preparations(preparations.limits),
            image_time=image_time,
            clock=lambda: self.now,
        )
        self.worker = FakeWorker(blocks, options, max_model_len, preparations)
        self.worker.max_in_flight = max_in_flight
        self.worker.on_submit = self._record_plan
        self.stores = stores
        self._learned: dict[int, Sequence] = {}
        if stores is not None:
            sizes = [(group.number, group.device.num_blocks) for group in blocks.groups]
            self.worker.stores = WorkerStores(stores, [number for number, count in sizes for _ in range(count)])
        self.loop = StepLoop(self.scheduler, self.worker, max_in_flight=max_in_flight)
        self._stepping = False
        self._before: list[tuple[SequenceGroup, SequenceStatus, int]] = []
        self.answers: dict[int, Answer] = {}
        self.plans: list[StepPlan] = []
        #: Group id of every sequence that ever was.
        self.group_of: dict[int, int] = {}

    @property
    def queues(self) -> tuple[list[int], list[int], list[int]]:
        """Group ids that wait, run (in order) and are swapped out."""
        groups = self.scheduler.queues.groups.values()
        return (
            sorted(g.group_id for g in groups if g.status is SequenceStatus.WAITING),
            [g.group_id for g in self.scheduler.queues.running],
            sorted(g.group_id for g in groups if g.status is SequenceStatus.SWAPPED),
        )

    def computed(self, plan: StepPlan) -> dict[int, int]:
        """Tokens that a plan computes, by group, in the order of the plan."""
        counts: dict[int, int] = {}
        for seq_id, count in zip(plan.seq_ids, plan.num_tokens, strict=True):
            counts[self.group_of[seq_id]] = counts.get(self.group_of[seq_id], 0) + count
        return counts

    def add(self, request: EngineCoreRequest) -> Answer:
        known = self.scheduler.queues
        before = dict(known.groups)
        held = self.loop._isolation.is_active
        self.loop._isolation.add(request)
        group = known.groups.get(request.group_id)
        if group is None:  # refused, or held while suspects are computed
            assert held or known.groups == before
            group = SequenceGroup(request, -1, -1, self.max_model_len)
        answer = self.answers[request.group_id] = Answer(request, group)
        return answer

    def abort(self, group_id: int) -> None:
        answer = self.answers[group_id]
        if not self.loop._isolation.abort(group_id):
            self.scheduler.finish_group(group_id)
        if not answer.finished:
            answer.group_reason = "abort"
        if not self._stepping:
            self.loop.drain()

    def stop(self, group_id: int, index: int) -> None:
        """Ends one sequence that has sampled, as a stop text does."""
        answer = self.answers[group_id]
        if not answer.finished and index not in answer.reasons:
            answer.reasons[index] = "stopped by text"
        if not self.loop._isolation.stop(group_id, index):
            self.scheduler.finish_sequence(group_id, index)
        if not self._stepping:
            self.loop.drain()

    def step(self, between: Callable[[], None] = lambda: None, fail: str = "") -> StepPlan:
        """Executes and applies one step; returns its plan.

        ``between`` is called while the loop waits for it; ``fail`` says where the next step that is submitted fails.
        """
        calls = [between]

        def waiting(plan: StepPlan) -> None:
            self.plans.append(plan)
            if calls:
                calls.pop()()

        self.worker.on_wait, self.worker.fail = waiting, fail
        self._remember()
        taken_in = len(self.plans)
        self._stepping = True
        try:
            updates = self.loop.step()
        finally:
            self._stepping = False
            if self.worker.broken is not None:
                raise self.worker.broken
        updates = msgspec.msgpack.decode(msgspec.msgpack.encode(updates), type=EngineCoreOutputs)
        for sequence in updates.each_sequence():
            self._apply_sequence_output(sequence)
        for end in updates.groups:
            self._apply_group_output(end)
        return self.plans[taken_in] if len(self.plans) > taken_in else StepPlan(-1)

    def _remember(self) -> None:
        self._before = [(g, g.status, g.totals.num_swaps) for g in self.scheduler.queues.groups.values()]

    def _record_plan(self, plan: StepPlan) -> None:
        """Called with every new plan."""
        sequences = self.scheduler.queues.sequences
        self.group_of.update((seq_id, seq.group.group_id) for seq_id, seq in sequences.items())
        if self.stores is not None:
            ended = (seq for seq_id, seq in self._learned.items() if seq_id not in sequences)
            self.stores.learn([*sequences.values(), *ended], self.blocks.block_size, prints_of)
            self._learned = dict(sequences)
        crossing = [g.cross for g in self.scheduler.queues.groups.values() if g.cross is not None]
        self.worker.context_keys.update((cross.context_id, cross.key) for cross in crossing)
        for group, status, swaps in self._before:
            back = status is SequenceStatus.SWAPPED and group.status is SequenceStatus.RUNNING
            assert not (back and group.totals.num_swaps > swaps), "out and in in one step"
        self._remember()

    def run(self, max_steps: int = 1000) -> int:
        """Steps until nothing is left; returns the number of steps."""
        for count in range(max_steps):
            if not self.loop.has_work:
                return count
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps: {self.queues}")

    def _apply_group_output(self, update: GroupOutput) -> None:
        answer = self.answers[update.group_id]
        # Of one that a stop text has ended meanwhile nobody is told.
        was_stopped = answer.finished and "stopped by text" in answer.reasons.values()
        if answer.group_reason != "abort" and not was_stopped:
            assert not answer.finished, "a second end"
            answer.group_reason = update.finish_reason
            answer.hypotheses, answer.error = update.hypotheses, update.error.text if update.error is not None else None

    def _apply_sequence_output(self, update: SequenceOutput) -> None:
        answer = self.answers[update.group_id]
        assert answer.group_reason is None and update.index not in answer.reasons, "a token after the end"
        if update.token_ids:
            answer.tokens.setdefault(update.index, []).extend(update.token_ids)
        if update.extra is not None and update.extra.pooled is not None:
            answer.pooled = update.extra.pooled
        if update.finish_reason is not None:
            answer.reasons[update.index] = update.finish_reason
            failure = update.extra.error if update.extra is not None else None
            answer.error = failure.text if failure is not None else None


def watch_displacement(scheduler: Scheduler, worker: FakeWorker | None = None) -> list[SequenceGroup]:
    """Checks that a waiting group for which others are preempted is admitted in the same step; lists these groups.

    ``worker``: is broken otherwise, where a step loop would go on after the exception.
    """
    schedule, preempt = scheduler.schedule, scheduler._displacement.preempt_for_waiting
    found: list[SequenceGroup] = []

    def recording(step: Step) -> SequenceGroup | None:
        group = preempt(step)
        found.extend([group] if group is not None and step.blocked_on_memory else [])
        return group

    def checking() -> StepPlan:
        before = len(found)
        plan = schedule()
        with contextlib.nullcontext() if worker is None else worker.breaking():
            assert all(group.status is SequenceStatus.RUNNING for group in found[before:]), "preempted in vain"
        return plan

    scheduler._displacement.preempt_for_waiting = recording  # type: ignore[method-assign]
    scheduler.schedule = checking  # type: ignore[method-assign]
    return found


def check_accounting(engine: Engine) -> None:
    """Every block is counted once, every unfinished group is in one queue, and nothing else holds blocks."""
    queues, blocks = engine.scheduler.queues, engine.blocks
    for kv_group in blocks.groups:
        device = kv_group.device
        assert device.num_used + device.num_free + device.num_cached + device.num_pinned == device.num_blocks
    on_device: set[int] = set()
    unfinished = {gid for gid, answer in engine.answers.items() if not answer.finished}
    refused = {u.group_id for u in engine.scheduler._pending_outputs}
    kept_out = engine.loop._isolation.held_ids
    assert unfinished - refused - kept_out == set(queues.groups) - {PROBE}, "a group was lost"
    check_preparations(queues)
    check_fetches(engine)
    check_steady(queues)
    running = {g.group_id for g in queues.running}
    assert len(running) == len(queues.running)
    tables = 0
    for gid, group in queues.groups.items():
        places = [gid in running, group in queues.waiting, group in queues.waiting_long, group in queues.swapped]
        assert sum(places) == 1, "a group is in exactly one queue"
        waiting, swapped = SequenceStatus.WAITING, SequenceStatus.SWAPPED
        wanted = [SequenceStatus.RUNNING, waiting, waiting, swapped][places.index(True)]
        assert group.status is wanted
        assert (group in queues.prefilling) == (group.prefilling and wanted is SequenceStatus.RUNNING)
        assert group.seqs, "a group without sequences"
        for seq in group.seqs:
            assert seq.status is wanted and queues.sequences[seq.seq_id] is seq
            plans, seq_id = [plan for plan, _ in engine.loop._in_flight], seq.seq_id
            drafts = max((len(p.drafts.get(seq_id, ())) + p.num_drafts.get(seq_id, 0) for p in plans), default=0)
            assert seq.num_computed < len(seq.token_ids) + len(engine.loop._in_flight) + drafts
            table = blocks.table(seq.seq_id)
            held = bool(table) or blocks.is_swapped(seq.seq_id)
            assert blocks.is_swapped(seq.seq_id) <= (wanted is SequenceStatus.SWAPPED)
            assert bool(table) <= (wanted is SequenceStatus.RUNNING)
            assert not seq.num_computed or held
            for kv_group in blocks.groups:
                on_device |= set(kv_group.tables.get(seq.seq_id, ())) - {NO_BLOCK}
            tables += held
        if group.cross is not None:
            held = bool(blocks.table(group.cross.context_id)) or blocks.is_swapped(group.cross.context_id)
            assert held == group.cross.is_computed == (wanted is not SequenceStatus.WAITING)
            assert blocks.is_swapped(group.cross.context_id) == (wanted is SequenceStatus.SWAPPED)
            on_device |= set(blocks.table(group.cross.context_id))
            tables += held
    assert queues.num_waiting + len(queues.running) + len(queues.swapped) == len(queues.groups)
    assert len(queues.sequences) == sum(len(g.seqs) for g in queues.groups.values())
    assert queues.num_running_seqs == sum(g.num_seqs for g in queues.running) <= engine.scheduler.options.max_num_seqs
    on_device -= {block for pins in blocks.pinned._blocks.values() for of_group in pins for block in of_group}
    assert len(on_device) == sum(g.device.num_used for g in blocks.groups)
    assert tables == blocks.num_tables
    fails = any(isinstance(pending, _Failed) for _, pending in engine.loop._in_flight)
    if not fails and not any(step.failure for step in engine.worker.in_flight):
        check_cache(engine)  # a step that fails has moved and computed nothing, which the cache is told later


def check_steady(queues: SchedulingState) -> None:
    """What is kept of the first running groups is what they say, and their last slots are known."""
    steady, columns = queues.steady, queues.steady.columns
    groups = queues.running[: steady.num_groups]
    assert all(len(g.seqs) == 1 and not (g.prefilling or g.drafts or g.plans_on_results) for g in groups)
    seqs = [g.seqs[0] for g in groups if not g.seqs[0].is_ending]
    assert columns.seqs == seqs and columns.seq_ids == [s.seq_id for s in seqs]
    assert columns.group_ids == [s.group.group_id for s in seqs] and columns.indexes == [s.index for s in seqs]
    assert all(known is seq.token_ids for known, seq in zip(columns.token_ids, seqs, strict=True))
    assert columns.stop_token_ids >= frozenset().union(*(s.stop_token_ids for s in seqs))
    slots = [(step - steady._step) % 256 for step in steady._last_steps]
    assert slots == [max(0, s.slots_end - s.num_computed) for s in seqs], "their tests have less than 256 slots"


def check_preparations(queues: SchedulingState) -> None:
    """Every unfinished group is counted at what it needs, a running one has it, and of the rest little is kept."""
    for pool in queues.preparations.pools.values():
        groups = {gid: {p.key for p in g.preparations if p.kind == pool.kind} for gid, g in queues.groups.items()}
        running = {g.group_id for g in queues.running}
        by_key = {key: thing for key, thing in queues.preparations.by_key.items() if thing.pool is pool}
        for key, thing in by_key.items():
            users = {gid for gid, keys in groups.items() if key in keys}
            assert set(thing.waiting) == users - running and thing.num_running == len(users & running)
            assert not thing.num_running or thing.state is PreparationState.READY
            assert users or thing.pinned or thing.state is not PreparationState.WANTED
            assert (key in pool.wanted) == (thing.state is PreparationState.WANTED and bool(thing.waiting))
        assert all(keys <= set(by_key) for keys in groups.values())
        in_memory = [t for t in by_key.values() if t.state is not PreparationState.WANTED]
        assert pool.num_preparing == sum(t.state is PreparationState.PREPARING for t in in_memory)
        held = sum(thing.preparation.size for thing in in_memory)
        assert (pool.held, pool.idle_size) == (held, sum(thing.preparation.size for thing in pool.idle.values()))
        assert pool.limits.host is None or held <= pool.limits.host
        assert pool.limits.idle is None or len(pool.idle) <= pool.limits.idle
        assert [t for t in pool.slots if t] == [t for t in pool.slots if t and t.state is PreparationState.READY]


def check_fetches(engine: Engine) -> None:
    """Held groups wait for a fetch under way, and the scheduler knows of all fetches that the worker has."""
    fetches, queues = engine.scheduler.fetches, engine.scheduler.queues
    held = {gid for gid, group in queues.groups.items() if group.is_held}
    if fetches is None:
        assert not held
        return
    assert all(queues.groups[gid].status is SequenceStatus.WAITING for gid in held)
    prefixes = fetches._prefixes
    waiting = {gid for gid, prefix in prefixes.items() if prefix.group.is_held}
    followers = [group.group_id for prefix in prefixes.values() for group in prefix.followers]
    assert held == waiting | {*followers} and len(held) == len(waiting) + len(followers) == fetches.counts().waiting
    assert prefixes.keys() <= queues.groups.keys()
    sizes = {fetch.fetch_id: fetch.num_bytes for prefix in prefixes.values() for fetch in prefix.begun}
    begun, limits = sizes.keys(), fetches.limits
    assert len(begun) <= limits.max_fetches or (
        len(begun) <= limits.max_small_fetches and sum(sizes.values()) - max(sizes.values()) < limits.fetch_bytes
    )
    assert set(fetches._unreported) == {
        fetch.fetch_id for prefix in prefixes.values() for fetch in prefix.begun if fetch.num_found is None
    }
    stores = engine.worker.stores
    assert stores is not None
    unknown = (stores.fetching.keys() | stores.found.keys()) - begun - {*fetches._drop}
    assert not unknown - {i for plan, _ in engine.loop._in_flight for i in plan.drop_fetches}, "a fetch is lost"


def check_cache(engine: Engine) -> None:
    """The prefix cache describes the content of every cached block, which follows that of its parent."""
    for kv_group in engine.blocks.groups:
        if kv_group.has_states:
            check_states(engine, kv_group)
        else:
            check_index(engine, kv_group.cache.on_device)


def check_states(engine: Engine, group: KVGroup) -> None:
    """Every cached state is the one after the tokens that its digest names in the groups of tokens."""
    size = engine.blocks.block_size
    others = [other for other in engine.blocks.groups if not other.has_states]
    for state in group.cache.on_device.entries():
        assert isinstance(state, Checkpoint)
        block = engine.worker.device[state.block][0]
        found = block.after(state.position - 1) if isinstance(block, StatePrint) else None
        assert found is not None
        for other in others:
            known = other.cache.on_device.find(state.digest)
            if known is not None:
                last = engine.worker.device[known.block][(state.position - 1) % size]
                assert last == found, f"state {state.block} is another's"


def check_index(engine: Engine, index: ContentIndex) -> None:
    for known in filter(None, index._by_block):
        block = known.block
        content = engine.worker.device[block]
        parent = index.find(known.parent)
        before = engine.worker.device[parent.block][-1] if parent is not None else None
        known_content = positions(known.content)
        assert 0 < len(known_content) <= len(content)  # less at the end of a shared prefix
        for token, found in zip(known_content, content, strict=False):
            if isinstance(token, tuple):  # one that stands for a feature
                _, key, _, index_in_it = token
                token = hash((key.decode().partition(",")[0], index_in_it))
            assert found is not None and isinstance(token, int)
            assert before is None or found == extend_print(before, token), f"block {block} is not what it is known as"
            before = found


def check_nothing_held(engine: Engine) -> None:
    """At rest no block is used, on the device or the host, and the workers hold no row."""
    check_accounting(engine)
    blocks = engine.blocks
    assert all(g.device.num_used == 0 and g.host.num_used == 0 for g in blocks.groups) and blocks.num_tables == 0
    assert not engine.loop._in_flight and not engine.worker.in_flight
    if engine.scheduler.queues.forget:
        engine.step()
    assert not engine.worker.rows and not engine.worker.contexts
    for _ in range(1000):
        if not engine.scheduler.has_writes:
            break
        engine.step()
    assert not engine.scheduler.has_writes
    if engine.worker.stores is not None:
        assert not engine.worker.stores.fetching and not engine.worker.stores.found
