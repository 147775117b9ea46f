"""The scheduler with a fake model: which sequences run, in which order, and that nothing is lost."""

from __future__ import annotations

import random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.plan import SequenceResult, StepPlan, StepResult
from octavo.core.request import SequenceRequest, SequenceStatus
from octavo.core.sampling_params import SamplingParams
from octavo.memory.block_manager import BlockManager
from octavo.scheduler.scheduler import Scheduler

EOS = 2


def make_scheduler(
    num_blocks: int = 64,
    block_size: int = 4,
    seqs: int = 8,
    budget: int = 32,
    watermark: float = 0.0,
    chunked: bool = True,
) -> Scheduler:
    return Scheduler(
        BlockManager(num_blocks, block_size, watermark),
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=num_blocks * block_size,
        enable_chunked_prefill=chunked,
    )


def request(seq_id: int, prompt: int, max_tokens: int = 8, **params: object) -> SequenceRequest:
    return SequenceRequest(
        seq_id=seq_id,
        prompt_token_ids=[100 + i for i in range(prompt)],
        params=SamplingParams(max_tokens=max_tokens, **params),  # type: ignore[arg-type]
        seed=0,
        stop_token_ids=[EOS, *(params.get("stop_token_ids") or [])],  # type: ignore[misc]
    )


class FakeWorker:
    """Holds what a worker would, checks that each plan is executable, and "samples" a fixed function of the context."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.blocks: dict[int, list[int]] = {}

    def execute(self, plan: StepPlan, block_size: int, choose: object = None) -> StepResult:
        plan = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)
        for seq_id in plan.forget:
            del self.tokens[seq_id], self.computed[seq_id], self.blocks[seq_id]
        for new in plan.new:
            assert new.seq_id not in self.tokens
            self.tokens[new.seq_id] = list(new.token_ids)
            self.computed[new.seq_id], self.blocks[new.seq_id] = new.num_computed, []
        for seq_id, blocks in plan.new_blocks:
            self.blocks[seq_id] += blocks
        assert len(set(plan.seq_ids)) == len(plan.seq_ids)
        result = StepResult(step=plan.step)
        for seq_id, count in zip(plan.seq_ids, plan.num_tokens, strict=True):
            assert count > 0
            self.computed[seq_id] += count
            assert self.computed[seq_id] <= len(self.tokens[seq_id])
            assert len(self.blocks[seq_id]) * block_size >= self.computed[seq_id]
            if self.computed[seq_id] == len(self.tokens[seq_id]):
                token = choose(seq_id, self.tokens[seq_id]) if callable(choose) else 1000 + len(self.tokens[seq_id])
                self.tokens[seq_id].append(token)
                result.seq_ids.append(seq_id)
                result.token_ids.append(token)
        held = [b for blocks in self.blocks.values() for b in blocks]
        assert len(held) == len(set(held)), "a block in two tables"
        return result


def step(scheduler: Scheduler, worker: FakeWorker, choose: object = None) -> StepPlan:
    plan = scheduler.schedule()
    scheduler.update(plan, worker.execute(plan, scheduler.blocks.block_size, choose))
    return plan


def ids(plan: StepPlan) -> dict[int, int]:
    return dict(zip(plan.seq_ids, plan.num_tokens, strict=True))


def test_decodes_come_before_prefill_chunks_and_chunks_fill_the_budget() -> None:
    scheduler, worker = make_scheduler(budget=10), FakeWorker()
    scheduler.add(request(0, 4))
    assert ids(step(scheduler, worker)) == {0: 4}
    scheduler.add(request(1, 25))
    plan = step(scheduler, worker)
    assert plan.seq_ids[0] == 0
    assert ids(plan) == {0: 1, 1: 9}
    assert ids(step(scheduler, worker)) == {0: 1, 1: 9}
    assert ids(step(scheduler, worker)) == {0: 1, 1: 7}
    assert ids(step(scheduler, worker)) == {0: 1, 1: 1}


def test_without_chunking_a_prompt_waits_until_the_budget_takes_it_whole() -> None:
    scheduler, worker = make_scheduler(num_blocks=4, budget=16, chunked=False), FakeWorker()
    scheduler.add(request(0, 2, max_tokens=2))
    scheduler.add(request(1, 15, max_tokens=1))
    assert ids(step(scheduler, worker)) == {0: 2}
    assert ids(step(scheduler, worker)) == {0: 1}
    assert ids(step(scheduler, worker)) == {1: 15}


def test_admission_is_in_order_of_arrival_and_stops_at_max_num_seqs() -> None:
    scheduler, worker = make_scheduler(seqs=2), FakeWorker()
    for i in range(4):
        scheduler.add(request(i, 3, max_tokens=2))
    assert ids(step(scheduler, worker)) == {0: 3, 1: 3}
    assert ids(step(scheduler, worker)) == {0: 1, 1: 1}
    assert ids(step(scheduler, worker)) == {2: 3, 3: 3}


def test_a_prompt_that_does_not_fit_yet_is_not_overtaken() -> None:
    scheduler, worker = make_scheduler(num_blocks=8, block_size=4), FakeWorker()
    scheduler.add(request(0, 17))
    step(scheduler, worker)
    scheduler.add(request(1, 20))
    scheduler.add(request(2, 1))
    assert ids(step(scheduler, worker)) == {0: 1}


def test_admission_leaves_the_watermark_free_unless_nothing_runs() -> None:
    scheduler, worker = make_scheduler(num_blocks=10, block_size=4, watermark=0.2, budget=64), FakeWorker()
    scheduler.add(request(0, 39))
    assert ids(step(scheduler, worker)) == {0: 39}
    other, worker = make_scheduler(num_blocks=10, block_size=4, watermark=0.2, budget=64), FakeWorker()
    other.add(request(0, 4))
    other.add(request(1, 29))
    assert ids(step(other, worker)) == {0: 4}


def test_blocks_promised_to_half_computed_prompts_are_not_given_away() -> None:
    scheduler, worker = make_scheduler(num_blocks=8, block_size=4, budget=8), FakeWorker()
    scheduler.add(request(0, 24, max_tokens=1))
    scheduler.add(request(1, 12, max_tokens=1))
    assert ids(step(scheduler, worker)) == {0: 8}
    assert ids(step(scheduler, worker)) == {0: 8}
    assert ids(step(scheduler, worker)) == {0: 8}
    assert ids(step(scheduler, worker)) == {1: 8}


def test_the_latest_arrival_is_preempted_and_comes_back_first() -> None:
    scheduler, worker = make_scheduler(num_blocks=4, block_size=4), FakeWorker()
    scheduler.add(request(0, 7, max_tokens=9))
    scheduler.add(request(1, 7, max_tokens=3))
    scheduler.add(request(2, 2, max_tokens=1))
    step(scheduler, worker)
    step(scheduler, worker)
    plan = step(scheduler, worker)  # both need a third block
    assert ids(plan) == {0: 1}
    assert plan.forget == [1]
    assert [s.seq_id for s in scheduler.waiting] == [1, 2]
    assert scheduler.num_preemptions == 1
    done: list[int] = []
    while scheduler.has_work:
        plan = step(scheduler, worker)
        for new in plan.new:
            done.append(new.seq_id)
            if new.seq_id == 1:  # its output is computed again as a prompt
                assert len(new.token_ids) == 9
                assert new.num_prompt_tokens == 7
    assert done == [1, 2]


def test_finish_reasons() -> None:
    scheduler, worker = make_scheduler(num_blocks=4, block_size=4), FakeWorker()
    scheduler.add(request(0, 3, max_tokens=2))
    scheduler.add(request(1, 3, stop_token_ids=[7]))
    scheduler.add(request(2, 3))
    scheduler.add(request(3, 3))
    plan = scheduler.schedule()
    result = worker.execute(plan, 4, lambda seq_id, tokens: {1: 7, 2: EOS}.get(seq_id, 50))
    result.extras[3] = SequenceResult(error="no token is left")
    updates = {u.seq_id: u for u in scheduler.update(plan, result)}
    assert updates[0].sequence.status is SequenceStatus.RUNNING
    assert (updates[1].sequence.status, updates[1].stop_reason) == (SequenceStatus.FINISHED_STOPPED, 7)
    assert (updates[2].sequence.status, updates[2].stop_reason) == (SequenceStatus.FINISHED_STOPPED, None)
    assert (updates[3].sequence.status, updates[3].error, updates[3].token_id) == (
        SequenceStatus.FINISHED_ERROR,
        "no token is left",
        None,
    )
    plan = scheduler.schedule()
    assert sorted(plan.forget) == [1, 2, 3]
    (update,) = scheduler.update(plan, worker.execute(plan, 4))
    assert update.sequence.status is SequenceStatus.FINISHED_LENGTH


def test_a_sequence_ends_at_the_context_length() -> None:
    scheduler, worker = make_scheduler(num_blocks=2, block_size=4), FakeWorker()
    scheduler.add(request(0, 5, max_tokens=100))
    steps = 0
    while scheduler.has_work:
        step(scheduler, worker)
        steps += 1
    assert steps == 3
    assert scheduler.blocks.pool.num_used == 0


def test_abort_in_every_state_frees_everything() -> None:
    scheduler, worker = make_scheduler(num_blocks=8, block_size=4, seqs=2, budget=8), FakeWorker()
    for i in range(3):
        scheduler.add(request(i, 6))
    step(scheduler, worker)  # 0 is decoding, 1 half computed, 2 waiting
    plan = scheduler.schedule()
    for i in range(3):
        assert scheduler.finish(i, SequenceStatus.FINISHED_ABORTED) is not None
    assert scheduler.finish(0, SequenceStatus.FINISHED_ABORTED) is None
    assert scheduler.blocks.pool.num_used == 0
    assert scheduler.update(plan, worker.execute(plan, 4)) == []
    assert not scheduler.has_work


def test_a_failed_step_ends_its_sequences_only() -> None:
    scheduler, worker = make_scheduler(seqs=1), FakeWorker()
    scheduler.add(request(0, 3))
    scheduler.add(request(1, 3, max_tokens=1))
    plan = scheduler.schedule()
    worker.execute(plan, 4)
    (update,) = scheduler.fail(plan, "boom")
    assert (update.seq_id, update.error, update.sequence.status) == (0, "boom", SequenceStatus.FINISHED_ERROR)
    assert ids(step(scheduler, worker)) == {1: 3}
    assert not scheduler.has_work


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(2, 12),
    block_size=st.integers(1, 5),
    seqs=st.integers(1, 6),
    extra_budget=st.integers(0, 20),
    watermark=st.sampled_from([0.0, 0.1, 0.5]),
    chunked=st.booleans(),
)
def test_every_request_finishes_whatever_arrives(
    seed: int, num_blocks: int, block_size: int, seqs: int, extra_budget: int, watermark: float, chunked: bool
) -> None:
    longest = num_blocks * block_size
    rng = random.Random(seed)
    budget = max(seqs, 0 if chunked else longest) + extra_budget
    scheduler, worker = make_scheduler(num_blocks, block_size, seqs, budget, watermark, chunked), FakeWorker()
    open_ids: set[int] = set()
    outputs: dict[int, list[int]] = {}
    added = 0
    finished: dict[int, int] = {}
    for _ in range(2000):
        if added < 12 and rng.random() < 0.5:
            prompt = rng.randint(1, max(1, longest - 1))
            if prompt < longest:
                scheduler.add(request(added, prompt, max_tokens=rng.randint(1, 10)))
                outputs[added] = []
                open_ids.add(added)
            added += 1
        if open_ids and rng.random() < 0.05:
            victim = rng.choice(sorted(open_ids))
            scheduler.finish(victim, SequenceStatus.FINISHED_ABORTED)
            open_ids.discard(victim)
        if scheduler.has_work:
            plan = scheduler.schedule()
            assert plan.seq_ids, "a step with work must compute something"
            assert plan.total_tokens <= budget
            assert len(scheduler.running) <= seqs
            for update in scheduler.update(plan, worker.execute(plan, block_size)):
                if update.token_id is not None:
                    outputs[update.seq_id].append(update.token_id)
                if update.sequence.status.finished:
                    open_ids.discard(update.seq_id)
                    finished[update.seq_id] = update.sequence.num_prompt_tokens
        elif added >= 12:
            break
        check_accounting(scheduler)
    assert not open_ids, "every request that was not aborted finishes"
    assert scheduler.blocks.pool.num_used == 0
    assert scheduler.blocks.num_tables == 0
    for seq_id, prompt in finished.items():  # preempted or not, the fake model's tokens come in order
        assert outputs[seq_id] == [1000 + prompt + i for i in range(len(outputs[seq_id]))]


def check_accounting(scheduler: Scheduler) -> None:
    pool, blocks = scheduler.blocks.pool, scheduler.blocks
    held = sum(len(blocks.table(s.seq_id)) for s in scheduler.running)
    assert held == pool.num_used
    assert pool.num_used + pool.num_free == pool.num_blocks
    for s in scheduler.running:
        assert len(blocks.table(s.seq_id)) == blocks.blocks_for(s.num_computed)
    arrivals = [s.seq_id for s in scheduler.running] + [s.seq_id for s in scheduler.waiting]
    assert arrivals == sorted(arrivals), "first come first served, preempted ones included"
