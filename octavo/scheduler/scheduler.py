"""The scheduler: which groups each step computes, admits and preempts. ``Scheduler.schedule`` is the whole of it."""

from __future__ import annotations

import time
from collections.abc import Callable

from octavo.config.options import SchedulerOptions
from octavo.core.failures import KV_CACHE, SequenceFailure
from octavo.core.plan import EngineCoreOutputs, GroupOutput, StepPlan, StepResult
from octavo.core.request import EngineCoreRequest, SequenceStatus
from octavo.core.stats import SchedulerStats, sum_groups
from octavo.memory.block_manager import BlockManager
from octavo.memory.kv_group import AllocStatus
from octavo.scheduler.admission import Admission, Displacement
from octavo.scheduler.concurrency import ConcurrencyLimit
from octavo.scheduler.fetches import Fetches
from octavo.scheduler.groups import SequenceGroup, suspend
from octavo.scheduler.image_time import ImageTime
from octavo.scheduler.preparations import Preparations
from octavo.scheduler.running import Drafting, MoveCost, Preemption, Running
from octavo.scheduler.state import SchedulingState
from octavo.scheduler.step import Step, advance, make_plan
from octavo.scheduler.step_results import Results
from octavo.scheduler.stored_prompts import StoredPrompts
from octavo.speculation.speculator import Speculator


class Scheduler:
    """Plans each step anew (``schedule``) and applies its result (``update``).

    That is the iteration-level scheduling of Orca (Yu et al. 2022): a request joins and leaves the batch between any
    two steps. The sequences of one request (``SequenceGroup``) are scheduled together (gang scheduling) and preempted
    together (all-or-nothing eviction: Kwon et al. 2023, section 4.5; see ``Preemption``).

    The option ``batching`` names two ways to fill a step: ``mixed`` (decodes first, then prompt chunks) and
    ``prefill_first`` (Kwon et al.: whole prompts in steps of their own, swapped groups before new ones).

    vLLM's names: its ``SchedulerOutput`` is the ``StepPlan``, its ``SchedulingBudget`` the budget of a ``Step``, its
    ``BlockSpaceManager`` or ``KVCacheManager`` the ``BlockManager``.
    """

    def __init__(
        self,
        blocks: BlockManager,
        options: SchedulerOptions,
        max_model_len: int,
        *,
        speculator: Speculator | None = None,
        runs_ahead: bool = False,
        num_stages: int = 1,
        preparations: Preparations | None = None,
        image_time: ImageTime | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts without a group.

        Args:
            speculator: Proposes drafts that a step verifies; the step after it is planned when its result is known.
            runs_ahead: Whether steps are planned while another one is in flight.
            num_stages: Pipeline stages. With several, the running sequences are divided among as many steps, and a
                sequence is in one step at a time: its sampled token comes back with the result.
            preparations: A request that needs any other preparation ends as ignored.
            image_time: Of models that see images.
        """
        if blocks.can_allocate(blocks.demand(blocks.blocks_for(max_model_len))) is AllocStatus.NEVER:
            raise ValueError(f"max_model_len {max_model_len} does not fit {blocks.num_blocks} blocks")
        self.blocks = blocks
        self.options = options
        self.preparations = preparations or Preparations()
        self._image_time = image_time
        self._speculator, self._stats = speculator, SchedulerStats()
        self._num_stages, self._clock = num_stages, clock
        self.max_model_len, self._runs_ahead = max_model_len, runs_ahead
        self._budgets = options.token_budget, options.encoder_budget
        self._in_flight: dict[int, Step] = {}
        self._pending_outputs: list[GroupOutput] = []
        #: The last plan, which may not have been submitted; None if its result is known.
        self._last_plan: StepPlan | None = None
        #: Outputs of the last ``update``, until its caller has taken them.
        self.unreported: EngineCoreOutputs | None = None
        self._last_prompt_latency = self._last_update = 0.0
        #: With ``adapt_num_seqs``.
        self.concurrency = ConcurrencyLimit(options.max_num_seqs) if options.adapt_num_seqs else None
        stored = blocks.stored
        self._cost = MoveCost()
        #: None without KV stores.
        self.fetches = None if stored is None else Fetches(blocks, stored, lambda: self._cost.seconds_per_token)
        self._make_parts()

    def _make_parts(self) -> None:
        options, speculator, num_stages = self.options, self._speculator, self._num_stages
        self.queues = SchedulingState(
            options,
            self.blocks,
            self.max_model_len,
            plans_on_results=num_stages > 1,
            preparations=self.preparations,
            speculator=speculator,
            fetches=self.fetches,
            image_time=self._image_time,
        )
        self._drafting: Drafting | None = None
        if speculator is not None:
            runs_ahead = self._runs_ahead and num_stages == 1
            self._drafting = Drafting(self.queues, speculator, self._stats, runs_ahead=runs_ahead)
        self._preemption = Preemption(options, self.queues, self._stats, self._cost)
        self._admission = Admission(options, self.queues, self.concurrency, self.fetches)
        self._displacement = Displacement(options, self.queues, self._admission, self._preemption)
        self._running = Running(options, self.queues, self._preemption, num_stages)
        self._results = Results(self.queues, self.max_model_len, self._drafting, self.concurrency)
        #: None without ``replica_roles``.
        self._stored_prompts: StoredPrompts | None = None
        stored = self.blocks.stored
        if stored is not None and stored.limits.reports_written:
            self._stored_prompts = StoredPrompts(stored, self.blocks.prefixes, len(self.blocks.groups))
        self._displaces = options.priority_preemption or self.queues.policy.preemptive

    def schedule(self) -> StepPlan:
        """Plans the next step; with steps in flight, only if it ``can_run_ahead``."""
        if self._in_flight and not self.can_run_ahead:
            raise RuntimeError(f"step {min(self._in_flight)} is in flight and its result is needed first")
        step = Step(self._clock(), *self._budgets, num_ended=self.queues.num_ended)
        drafting = self._drafting
        if drafting is None or (self._num_stages == 1 and not drafting.may_draft(self._in_flight)):
            drafting = None
        # A prompt that is computed whole may need the whole budget.
        reserved = drafting.reserve(step.budget) if drafting is not None and self.options.cuts_prompts else 0
        step.budget -= reserved
        # 1. The order of the groups, and preemption for a waiting one.
        self.blocks.retention.expire(step.now)
        self.queues.reorder(step.now)
        self.preparations.place_pinned()
        preempting = self._displacement.preempt_for_waiting(step) if self._displaces else None
        # 2. Running groups, then waiting and swapped ones.
        if self.options.batching == "prefill_first":
            self._schedule_prefill_first(step, preempting)
        else:
            self._schedule_running(step)
            if preempting is None and not step.blocked_on_memory:
                self._place_fetched(step)
            if preempting is not None:
                self._admission.admit_preempting(preempting, step)
            if not step.blocked_on_memory:  # preempted groups must neither be overtaken nor resume at once
                self._admission.schedule_waiting(step)
        self._end_unservable(step)
        if self.options.batching == "prefill_first" and preempting is None and not step.blocked_on_memory:
            self._place_fetched(step)
        # 3. Drafts, with what is left of budget and blocks.
        step.budget += reserved
        if drafting is not None:
            drafting.add_drafts(step)
        # 4. The plan; then the tokens count as computed.
        self._stats.steps = self.queues.last_step = self._stats.steps + 1
        plan = self._last_plan = make_plan(self.queues, step, self._stats.steps)
        self.preparations.begin(step.now)
        self.preparations.add_to(plan)
        if self._image_time is not None and self.preparations.num_computing:
            plan.compute_seconds = self._image_time.for_features(step)
        num_awaited = self.preparations.num_preparing
        if self.fetches is not None:
            self.fetches.add_to(plan)
            num_awaited += self.fetches.num_unreported
        # Behind a step in flight, waiting would delay the requests that follow its result.
        is_idle = not (plan.seq_ids or self._in_flight or self._pending_outputs)
        plan.awaits_prepared = is_idle and num_awaited > 0
        advance(self.queues, step)
        self._in_flight[plan.step] = step
        stats = self._stats
        stats.decode_tokens += len(step.decodes) + len(step.drafted)
        if step.extended:
            stats.decode_tokens += sum(n for _, n in step.extended)
        stats.prefill_tokens += step.num_prompt_tokens
        stats.swapped_out_blocks += len(plan.blocks_to_swap_out)
        stats.swapped_in_blocks += len(plan.blocks_to_swap_in)
        return plan

    def _place_fetched(self, step: Step) -> None:
        """Places blocks of the KV stores, after running groups have got theirs, and looks at the next waiting group."""
        if self.fetches is not None:
            step.placed = self.fetches.place(step.now)
            self._admission.next_group(step.now)

    def _schedule_prefill_first(self, step: Step, preempting: SequenceGroup | None) -> None:
        """Whole prompts; without any, the running groups, then swapped ones."""
        if preempting is not None:
            self._admission.admit_preempting(preempting, step)
        elif self._passed_delay(step.now):
            while step.budget > 0 and (group := self._next_waiting(step.now)) is not None:
                if not self._admission.admit_waiting(group, step):
                    break
        if step.prefills or step.decodes:
            return
        self._schedule_running(step)
        while not step.blocked_on_memory and (group := self._first_swapped(step.now)) is not None:
            first = self._admission.next_group(step.now)
            overtakes = first is None or (first is not group and first.urgent)
            if overtakes or not self._admission.admit_swapped(group, step):
                break

    def _schedule_running(self, step: Step) -> None:
        for group in self._running.schedule_running(step):
            self._end_exceeding(group, step)

    def _next_waiting(self, now: float) -> SequenceGroup | None:
        """The waiting group that goes before the swapped ones: if any is swapped, only an urgent one."""
        if self._first_swapped(now) is None:
            return self._admission.next_waiting(now)
        first = self._admission.next_group(now)
        return first if first is not None and first.urgent and first.status is SequenceStatus.WAITING else None

    def _first_swapped(self, now: float) -> SequenceGroup | None:
        return self.queues.peek(self.queues.swapped, now)

    def _passed_delay(self, now: float) -> bool:
        """``scheduler_delay_factor``: from the earliest arrival on, in multiples of the last prompt step's seconds."""
        factor, queues = self.options.scheduler_delay_factor, self.queues
        if not factor or not queues.running:
            return True
        earliest = [g.arrival for g in (queues.waiting.earliest(), queues.waiting_long.earliest()) if g is not None]
        return bool(earliest) and now - min(earliest)[0] > factor * self._last_prompt_latency

    def _end_unservable(self, step: Step) -> None:
        """Ends a group of several sequences that does not fit although no other holds a block: it never will."""
        if self.queues.running or step.blocked_on_memory or step.ended or step.placed:
            return
        swapped = self._first_swapped(step.now) if self.options.batching == "prefill_first" else None
        group = self._next_waiting(step.now) if swapped is not None else None
        group = group or swapped or self._admission.next_group(step.now)
        # Tokens in flight may end some or all of its sequences.
        if group is not None and not self._admission.has_tokens_in_flight(group):
            self._end_exceeding(group, step)

    def _end_exceeding(self, group: SequenceGroup, step: Step) -> None:
        step.ended = True
        lengths = [len(s.token_ids) for s in group.seqs]
        states = "".join(f" and {g.num_unpinned} recurrent states" for g in self.blocks.groups[1:] if g.has_states)
        message = (
            f"{len(lengths)} sequences of {min(lengths)} to {max(lengths)} tokens have outgrown the KV cache of "
            f"{self.blocks.pinned.capacity} of {self.blocks.block_size} tokens{states}, alone in it"
        )
        self._fail(group, SequenceFailure(message, KV_CACHE))

    def update(self, plan: StepPlan, result: StepResult) -> EngineCoreOutputs:
        """Applies the result of a plan: appends tokens, ends finished sequences. Called in the order of the plans."""
        step = self._in_flight.pop(plan.step)
        self.queues.last_result = plan.step
        now = self._clock()
        if step.prefills:  # a step planned ahead starts when the one before it is done
            self._last_prompt_latency = now - max(step.now, self._last_update)
        self._last_update, cost = now, self._cost
        if plan is self._last_plan:
            self._last_plan = None  # it may have many prompts
        for num_bytes, seconds in result.swaps:
            cost.observe_move(num_bytes, seconds)
        if step.num_prompt_tokens > 4 * len(step.decodes) and result.seconds:
            computing = result.seconds - result.swap_seconds - result.draft_seconds - result.compute_seconds
            cost.observe_prefill(step.num_prompt_tokens + len(step.decodes), computing)
        if self._image_time is not None:
            self._image_time.observe(step, result)
        if self.concurrency is not None:
            self._observe_concurrency(self.concurrency, step, result)
        outputs = self.unreported = EngineCoreOutputs()
        self._results.update(step, result, outputs)
        for group, failure in self.preparations.update(plan, result):
            self._fail(group, failure)
        if self.fetches is not None:
            self.fetches.update(plan, result, now)
        if self._stored_prompts is not None:
            self._stored_prompts.observe_filled(step)
            outputs.stored = self._stored_prompts.take()
        for group, message in self.queues.take_policy_failures():
            self._fail(group, SequenceFailure(message))
        outputs.groups += self._pop_pending_outputs()
        return outputs

    def _observe_concurrency(self, concurrency: ConcurrencyLimit, step: Step, result: StepResult) -> None:
        num_seqs = (len(step.decodes) + len(step.drafted)) * self._num_stages
        only_decodes = not (step.prefills or step.extended or result.swap_seconds or result.compute_seconds)
        concurrency.observe(num_seqs, result.seconds if only_decodes else None)
        if step.lost_tokens or result.swap_seconds:
            per_token = self._cost.seconds_per_token or 0.0
            concurrency.observe_loss(step.lost_seqs, step.lost_tokens * per_token + result.swap_seconds)

    def step_of(self, plan: StepPlan) -> Step:
        """The step of a plan in flight."""
        return self._in_flight[plan.step]

    def obstacle(self) -> str:
        """``Admission.obstacle`` now."""
        return self._admission.obstacle(self._clock())

    def groups_of(self, plan: StepPlan) -> set[int]:
        """The unfinished groups that a plan in flight computes, or whose blocks it moves."""
        step = self._in_flight[plan.step]
        decoding = [*step.decodes.seqs, *(s for s, _ in step.drafted), *(s for s, _ in step.extended)]
        groups = [*(s.group for s in decoding), *step.prefill_groups, *step.swapped_groups, *step.with_contexts]
        return {group.group_id for group in groups} & self.queues.groups.keys()

    def _fail(self, group: SequenceGroup, failure: SequenceFailure) -> None:
        self.queues.end_group(group, SequenceStatus.FINISHED_ERROR)
        self._pending_outputs.append(GroupOutput(group.group_id, group.status.value, failure))

    def _pop_pending_outputs(self) -> list[GroupOutput]:
        pending, self._pending_outputs = self._pending_outputs, []
        return pending

    @property
    def has_work(self) -> bool:
        """Whether a group is unfinished, or the end of one is still to be reported."""
        return bool(self.queues.groups or self._pending_outputs)

    @property
    def has_writes(self) -> bool:
        """Whether further plans would pass blocks to the KV stores, or drop fetches."""
        stored, fetches = self.blocks.stored, self.fetches
        return stored is not None and (stored.num_queued > 0 or (fetches is not None and fetches.has_drops))

    @property
    def can_run_ahead(self) -> bool:
        """Whether any group can be scheduled before the results of the steps in flight are known."""
        queues = self.queues
        if self._num_stages == 1 and self._drafting is not None and self._drafting.awaits_results(self._in_flight):
            return False
        if self._num_stages > 1 and queues.num_waiting:
            now = self._clock()
            if any(queues.peek(queue, now) is not None for queue in (queues.waiting, queues.waiting_long)):
                return True
        return any(not (g.seqs[0].is_ending or g.awaits_result) for g in queues.running)

    @property
    def move_cost(self) -> MoveCost:
        """Observed costs of swapping and recomputing, on which ``preemption_mode=auto`` decides."""
        return self._cost

    def add(self, request: EngineCoreRequest) -> None:
        """Queues a group; one that could never run ends as ignored with the next ``update``.

        The prompt must be shorter than ``max_model_len``; if nothing is sampled, it may be as long.
        """
        if (error := self.preparations.refusal(request)) is not None:
            ignored = SequenceStatus.FINISHED_IGNORED.value
            self._pending_outputs.append(GroupOutput(request.group_id, ignored, SequenceFailure(str(error))))
            return
        group = self.queues.add(request)
        if (rejection_reason := self._admission.rejection_reason(group)) is not None:
            self.queues.end_group(group, SequenceStatus.FINISHED_IGNORED)
            ignored, rejection = group.status.value, SequenceFailure(rejection_reason)
            self._pending_outputs.append(GroupOutput(group.group_id, ignored, rejection))

    def finish_group(self, group_id: int, status: SequenceStatus = SequenceStatus.FINISHED_ABORTED) -> None:
        group = self.queues.groups.get(group_id)
        if group is not None:
            self.queues.end_group(group, status)

    def finish_sequence(self, group_id: int, index: int) -> None:
        """Ends one sequence of a group, as a stop string does; no effect on beams and before the group has forked."""
        group = self.queues.groups.get(group_id)
        if group is None or group.num_pending_forks or group.beam is not None:
            return
        for seq in group.seqs:
            if seq.index == index:
                self.queues.end_sequence(seq, SequenceStatus.FINISHED_STOPPED)
                return

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """Empties the prefix cache, but for pinned blocks; with ``reset_running_requests``, groups recompute theirs."""
        if reset_running_requests:
            self._preemption.recompute_all()
        if self.fetches is not None:
            self.fetches.release_all()
        self.blocks.reset_prefix_cache()

    def take_all(self, last_submitted: int) -> tuple[list[EngineCoreRequest], list[GroupOutput]]:
        """Takes all groups out after an exception or a failed step, in order of arrival; ``add`` resumes them.

        The queues are made anew and all blocks are freed; the workers forget all sequences with the next plan. No step
        may be in flight; the workers have the plan of ``last_submitted``.

        Returns the requests with their progress; and the ends of other groups. A lost block is a RuntimeError.
        """
        before, requests, ends = self.queues, [], self._pop_pending_outputs()
        for group in sorted(before.groups.values(), key=lambda group: group.arrival):
            request = suspend(group)
            if request is not None:
                requests.append(request)
            else:
                failure = SequenceFailure("its step failed")
                ends.append(GroupOutput(group.group_id, SequenceStatus.FINISHED_ERROR.value, failure))
        if self._speculator is not None:
            for seq in before.sequences.values():
                self._speculator.on_end(seq)
        self.preparations.release_all()
        self.blocks.clear()
        self._in_flight.clear()
        if self.fetches is not None:
            self.fetches.forget_all()
        self._make_parts()
        self.queues.follow(before, self._stats.steps)
        before.dissolve()
        if self._last_plan is not None and self._last_plan.step > last_submitted:
            self.queues.forget += self._last_plan.forget
            self.preparations.repeat(self._last_plan)
        self._last_plan = None
        return requests, ends

    def stats(self) -> SchedulerStats:
        """Queues and blocks now, and totals so far. Its time grows with the number of running sequences."""
        stats, size = self.counts(), self.blocks.block_size
        # Slots of used blocks without a token; a shared block counts once.
        held: dict[int, int] = {}
        for group in self.queues.running:
            for seq in group.seqs:
                for index, block in self.blocks.held(seq.seq_id):
                    held[block] = max(held.get(block, 0), min(size, seq.num_computed - index * size))
        stats.empty_slots = len(held) * size - sum(max(0, tokens) for tokens in held.values())
        return stats

    def counts(self) -> SchedulerStats:
        """``stats`` in constant time: ``empty_slots`` is as ``stats`` last counted it."""
        stats, queues, blocks = self._stats, self.queues, self.blocks
        stats.num_waiting, stats.num_running = queues.num_waiting, len(queues.running)
        stats.num_swapped = len(queues.swapped)
        groups = [group.state() for group in blocks.groups]
        total = sum_groups(groups)
        stats.blocks_used, stats.blocks_cached, stats.blocks_free = total.used, total.cached, total.free
        stats.blocks_pinned, stats.host_blocks_used = total.pinned, total.host_used
        if len(groups) > 1:
            stats.groups = groups
        stats.adapters = self.preparations.adapter_stats()
        if self._speculator is not None:
            stats.speculation = self._speculator.stats()
        stats.retention = blocks.retention.stats()
        if self.fetches is not None:
            stats.stores = self.fetches.counts()
        prefixes = blocks.prefixes
        stats.prefix_queried_tokens, stats.prefix_hit_tokens = prefixes.cached_queries, prefixes.cached_hits
        return stats
