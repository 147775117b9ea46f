"""One simulated engine: the scheduler, the block manager and the step loop, over workers that only count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from octavo.config.engine_config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import AdmissionStats, CompletionResumePoint, ResumePoint
from octavo.engine.core import StepLoop
from octavo.lab.simulate.blocks import make_simulated_blocks
from octavo.lab.simulate.core_requests import STOP, add_with_computed_kv, core_request
from octavo.lab.simulate.figures import StoreFigures, add_stores
from octavo.lab.simulate.prompt_ids import TOKEN, prompt_of
from octavo.lab.simulate.step_profile import Overhead, StepProfile
from octavo.lab.simulate.stores import SimulatedStore, StoreClient, make_disk, make_shared
from octavo.lab.simulate.work import count_work
from octavo.lab.workloads.tokens import output_ids
from octavo.lab.workloads.work_items import WorkItem
from octavo.memory.block_manager import BlockManager
from octavo.scheduler.groups import Sequence
from octavo.scheduler.scheduler import Scheduler

#: Seconds of a step that computes and moves nothing, as while ``scheduler_delay_factor`` holds prompts back.
_EMPTY_STEP = 20e-6
#: Most seconds of an empty step that waits for a fetch, as in a worker.
_LONGEST_WAIT = 0.02
_NEVER = 1 << 60
_NO_ANSWER: tuple[int, list[int]] = (0, [])

#: ``max_tokens`` of a request, which policies may look at; None: what the context length leaves.
MaxTokens = Callable[[WorkItem], int | None]


def exact_max_tokens(item: WorkItem) -> int | None:
    """As if every user knew the length of the answer."""
    return item.output_len


@dataclass(slots=True)
class SimulatedRequest:
    """A request in a simulation. Times in seconds on its clock; -1.0 while they are not known."""

    number: int
    item: WorkItem
    #: When the client sent it, and had its first and its last token so far.
    sent: float
    first: float = -1.0
    last: float = -1.0
    tokens: int = 0
    #: ``last`` before its last token.
    before: float = -1.0
    #: "stop" and "length" if it has ended as it should; "ignored" or "error"; None while it runs.
    finish_reason: str | None = None

    def set_back(self) -> None:
        """Its last token was not sent: the engine failed in that step."""
        self.tokens -= 1
        self.last = self.before
        if not self.tokens:
            self.first = -1.0


#: Called for tokens of a step: seconds since the tokens before them, and how many there are.
OnGap = Callable[[float, int], None]
#: Called with each plan as it is submitted, and the seconds that it takes.
OnPlan = Callable[[StepPlan, float], None]


class SimulatedEngine:
    """Owns a scheduler, its blocks and a clock that steps move on; runs what an engine core runs, but no worker.

    Invariant: ``now`` never decreases, and is the same for the same items and options on every machine.
    """

    def __init__(
        self,
        profile: StepProfile,
        options: EngineConfig,
        *,
        mode: Literal["offline", "server"] = "offline",
        max_tokens: MaxTokens = exact_max_tokens,
        on_gap: OnGap | None = None,
        on_plan: OnPlan | None = None,
        make_blocks: Callable[..., BlockManager] = BlockManager,
        samples: int = 1,
        disk: SimulatedStore | None = None,
        shared: SimulatedStore | None = None,
    ) -> None:
        """Makes the blocks as an engine with these options would, in memory as the profile says.

        Args:
            profile: costs of steps, and sizes.
            options: those of scheduler and KV cache count; ``model`` and where it runs do not.
            mode: which of the profile's overheads count.
            max_tokens: what a request says about its length; it ends after ``output_len`` tokens all the same.
            on_gap: called for the tokens of each step that follow others: seconds, and how many tokens.
            on_plan: called for each step when it is planned: its sequences hold the blocks that it writes.
            make_blocks: called as ``BlockManager`` is.
            samples: sequences of each request, which share its prompt (``n``); a request has the tokens of all.
            disk: a KV store that outlives the engine; without one it makes that of its options, if they ask for it.
            shared: a KV store that other engines use too; likewise.

        Raises:
            ConfigError: options of parallelism are given, or ``max_model_len`` does not fit.
        """
        if options.world_size > 1 or options.data_parallel_size > 1:
            raise ConfigError(
                "a simulated engine has one worker, whose profile says what its steps cost: leave "
                "tensor_parallel_size, pipeline_parallel_size and data_parallel_size at 1"
            )
        self.profile = profile
        self.now = 0.0
        self.overhead: Overhead = getattr(profile, mode)
        self.max_model_len, self.blocks, self.options, in_flight = make_simulated_blocks(profile, options, make_blocks)
        self.scheduler = Scheduler(self.blocks, self.options, self.max_model_len, clock=lambda: self.now)
        if options.preemption_mode == "auto" and profile.moved:
            self.scheduler.move_cost.observe_move(1, profile.swap_seconds(1, options.block_size))
        stores = [disk or make_disk(options), shared or make_shared(profile, options)]
        used = [store for store in stores if store is not None]
        #: None without KV stores.
        self.stores = StoreClient(profile, options.block_size, used) if used else None
        self._workers = _Workers(self)
        # The loop needs no other method of an executor than ``submit``, as no step fails.
        self._loop = StepLoop(self.scheduler, cast(Any, self._workers), max_in_flight=in_flight)
        self._max_tokens, self._samples = max_tokens, samples
        self._on_gap = on_gap or _ignore_gap
        self.on_plan = on_plan
        self._open: dict[int, SimulatedRequest] = {}
        #: Unfinished requests that have a token, by number; and how many unfinished ones each user has, if any.
        self.started: dict[int, SimulatedRequest] = {}
        self.open_by_user: Counter[str] = Counter()
        self._last_end = -2.0  # no token of a request came then

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self._open)

    @property
    def num_open(self) -> int:
        """Unfinished requests."""
        return len(self._open)

    def wait_until(self, now: float) -> None:
        """Lets the idle engine's clock run on to a moment; nothing happens if that is past.

        Meanwhile it passes blocks to its KV stores.
        """
        while self.now < now and not self._open and self.scheduler.has_writes:
            self._loop.step()
        self.now = max(self.now, now)

    def add(self, number: int, item: WorkItem, progress: SimulatedRequest | None = None) -> SimulatedRequest:
        """Adds a request that has arrived; ``number`` is its own.

        ``progress``: what an engine that has failed had sent of it. It goes on from there, as the engine's requests do:
        its tokens are computed again with its prompt, as after a preemption by recompute.

        Raises:
            ConfigError: the prompt or the output is longer than ``max_model_len`` allows, or empty.
        """
        prompt = prompt_of(number, item)
        length = len(prompt) + item.output_len
        if item.output_len < 1 or length > self.max_model_len:
            raise ConfigError(
                f"request {number} has {len(prompt)} tokens of prompt and {item.output_len} of output: there must be "
                f"at least 1 of output, and together at most max_model_len ({self.max_model_len})"
            )
        added = self._begin(number, item, progress)
        request = core_request(number, item, prompt, self._max_tokens(item), self._samples)
        answer: list[int] = []
        if item.session is not None and self.options.enable_prefix_caching:  # its next turn brings these tokens
            answer = output_ids(item)
            self._workers.answers[number] = (len(prompt), answer)
        if added.tokens:
            ids = answer[: added.tokens] or [TOKEN] * added.tokens
            request.progress = ResumePoint([CompletionResumePoint(0, ids)], totals=AdmissionStats(number))
        self.scheduler.add(request)
        self._end_at(number, length)
        return added

    def _begin(self, number: int, item: WorkItem, progress: SimulatedRequest | None) -> SimulatedRequest:
        self.now += self.overhead.request
        added = self._open[number] = progress or SimulatedRequest(number, item, item.at)
        added.finish_reason = None
        if added.tokens:
            self.started[number] = added
        if item.user is not None:
            self.open_by_user[item.user] += 1
        return added

    def take_over(self, number: int, item: WorkItem, progress: SimulatedRequest) -> SimulatedRequest | None:
        """Adds a request whose prompt and tokens so far another engine has computed, and whose KV cache has arrived.

        It goes into host blocks, from which the request is admitted as one that was swapped out; that move costs
        nothing. None, and nothing is changed, if too few host blocks are available now.

        Raises:
            ConfigError: prompt and output together are longer than ``max_model_len``.
        """
        if item.input_len + item.output_len > self.max_model_len:
            raise ConfigError(
                f"request {number} has {item.input_len} tokens of prompt and {item.output_len} of output, together "
                f"more than max_model_len ({self.max_model_len})"
            )
        limit = self._max_tokens(item)
        # Their content is not looked at, but it must not be that of another prompt.
        prompt = [number + TOKEN + 1] + [TOKEN] * (item.input_len + progress.tokens - 1)
        request = core_request(number, item, prompt, None if limit is None else limit - progress.tokens)
        if not add_with_computed_kv(self.scheduler.queues, request):
            return None
        added = self._begin(number, item, progress)
        self._workers.received.update(self.blocks.groups[0].on_host.by_id[self._sequence(number)])
        self._end_at(number, item.input_len + item.output_len)
        return added

    def open_requests(self) -> list[SimulatedRequest]:
        """Those that are unfinished."""
        return list(self._open.values())

    def set_back(self, ended: list[SimulatedRequest]) -> list[SimulatedRequest]:
        """All requests without the last step's tokens, which were not sent; ``ended``: those that ended with it.

        The engine is not used any more.
        """
        requests = [*self._open.values(), *ended]
        for request in requests:
            if request.last == self._last_end:
                request.set_back()
        return requests

    @property
    def busy(self) -> float:
        """Seconds of all steps."""
        return self._loop.times.worker

    def store_figures(self, before: Mapping[str, StoreFigures]) -> dict[str, StoreFigures]:
        """Those of its KV stores, added to those of engines that had them before."""
        stats = self.stores.stats() if self.stores is not None else []
        return add_stores(before, ((one.tier, one) for one in stats), same=("disk", "shared"))

    def _sequence(self, number: int) -> int:
        return self.scheduler.queues.groups[number].seqs[0].seq_id

    def _end_at(self, number: int, length: int) -> None:
        """Ends a request at this many tokens of prompt and output, if its limit does not."""
        group = self.scheduler.queues.groups.get(number)
        if group is not None and group.max_length > length:
            self._workers.ends[number] = length

    def step(self) -> list[SimulatedRequest]:
        """Runs one step; returns the requests that ended with it."""
        outputs = self._loop.step()
        self.now += self.overhead.step
        open_, now, before = self._open, self.now + self.overhead.answer, self._last_end
        self._last_end = now
        ended = []
        steady = 0
        for output in outputs.each_sequence():
            request, last = open_[output.group_id], open_[output.group_id].last
            request.tokens += len(output.token_ids)
            if output.finish_reason is not None and output.group_id not in self.scheduler.queues.groups:
                if request.finish_reason is None:
                    ended.append(request)
                request.finish_reason = output.finish_reason
            if last == now:  # another of its samples
                continue
            request.before, request.last = last, now
            if last == before:
                steady += 1
            elif last < 0:
                request.first = now
                self.started[request.number] = request
            else:
                self._on_gap(now - last, 1)
        if steady:
            self._on_gap(now - before, steady)
        for request in ended:
            del open_[request.number]
        self._workers.forget(ended)
        for end in outputs.groups:
            request = open_.pop(end.group_id)
            request.finish_reason = end.finish_reason
            ended.append(request)
        for request in ended:
            self._forget(request)
        return ended

    def _forget(self, request: SimulatedRequest) -> None:
        self.started.pop(request.number, None)
        user = request.item.user
        if user is not None:
            self.open_by_user[user] -= 1
            if not self.open_by_user[user]:
                del self.open_by_user[user]


def run(
    engine: SimulatedEngine,
    items: Iterable[WorkItem],
    on_end: Callable[[SimulatedRequest], None],
    on_step: Callable[[SimulatedEngine], None],
) -> None:
    """Runs items, which come in the order of their arrival, until all have ended; calls what observes them.

    Raises:
        ConfigError: an item is not valid, or arrives before the one before it.
    """
    previous = 0.0
    for number, item in enumerate(items):
        if not item.at >= previous:
            raise ConfigError(f"request {number} arrives at {item.at} s, before the one before it ({previous} s)")
        previous = item.at
        arrival = item.at + engine.overhead.arrival
        while engine.has_work and engine.now < arrival:
            for request in engine.step():
                on_end(request)
            on_step(engine)
        engine.wait_until(arrival)
        engine.add(number, item)
    while engine.has_work:
        for request in engine.step():
            on_end(request)
        on_step(engine)


class _Workers:
    """Takes plans like an executor: each takes the device for the time that the profile says."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine
        self._free_at = 0.0
        #: By request: tokens after which it stops, of those that their limit does not end.
        self.ends: dict[int, int] = {}
        #: By request: tokens of its prompt, and those that it samples, of requests that others continue.
        self.answers: dict[int, tuple[int, list[int]]] = {}
        #: Host blocks whose content came from another engine: the transfer has been paid for.
        self.received: set[int] = set()

    def forget(self, ended: list[SimulatedRequest]) -> None:
        """Requests that have ended."""
        if self.ends or self.answers:
            for request in ended:
                self.ends.pop(request.number, None)
                self.answers.pop(request.number, None)

    def submit(self, plan: StepPlan) -> _SimulatedStep:
        engine = self._engine
        work, sampled = count_work(plan, engine.scheduler.queues)
        if self.received and plan.blocks_to_swap_in:
            arrived = self.received.intersection([host for host, _ in plan.blocks_to_swap_in])
            self.received -= arrived
            work.transfers -= len(arrived)
            work.moved -= len(arrived) * engine.options.block_size
        busy = work.tokens or work.moved or work.copied
        seconds = engine.profile.seconds(work) if busy else _EMPTY_STEP
        begin = max(self._free_at, engine.now)
        if engine.stores is not None:
            engine.stores.begin(plan, begin)
            if plan.awaits_prepared:
                seconds = max(seconds, min(engine.stores.next_end - begin, _LONGEST_WAIT))
        if engine.on_plan is not None:
            engine.on_plan(plan, seconds)
        self._free_at = begin + seconds
        swapped = work.transfers - len(plan.blocks_fetched)
        swapping = engine.profile.swap_seconds(swapped, swapped * engine.options.block_size)
        result = StepResult(plan.step, seconds=seconds, swap_seconds=swapping)
        every = len(sampled) == len(plan.seq_ids) and not plan.forks
        result.seq_ids = plan.seq_ids if every else [seq.seq_id for seq in sampled]
        if result.swap_seconds:
            result.swaps = [(swapped, result.swap_seconds)]
        return _SimulatedStep(self, result, sampled, self._free_at)

    def done(self, result: StepResult, sampled: list[Sequence], end: float) -> StepResult:
        """The step's result, at its end."""
        self._engine.now = max(self._engine.now, end)
        if self._engine.stores is not None:
            self._engine.stores.end(result, end)
        result.token_ids = tokens = [TOKEN] * len(sampled)
        if self.answers:
            for i, seq in enumerate(sampled):
                prompt, answer = self.answers.get(seq.group.group_id, _NO_ANSWER)
                position = len(seq.token_ids) - prompt
                if position < len(answer):
                    tokens[i] = answer[position]
        if self.ends:
            for i, seq in enumerate(sampled):
                if len(seq.token_ids) + 1 >= self.ends.get(seq.group.group_id, _NEVER):
                    tokens[i] = STOP
        return result


@dataclass(slots=True)
class _SimulatedStep:
    workers: _Workers
    result: StepResult
    sampled: list[Sequence]
    end: float

    def wait(self) -> StepResult:
        return self.workers.done(self.result, self.sampled, self.end)


def _ignore_gap(seconds: float, tokens: int) -> None:
    pass
