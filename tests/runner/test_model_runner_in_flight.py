"""Steps submitted before the result of the step ahead is known: the results are the same."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from octavo.config.engine_config import make_config
from octavo.core.failures import SequenceFailure
from octavo.core.plan import Fork, NewSequence, StepPlan, StepResult, TableChange
from octavo.core.request import Generate
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.forward_batch import ForwardBatch, ForwardOutput
from octavo.kernels.reference import ReferenceKernels
from octavo.kernels.torch_backend import PinnedSend
from octavo.models.config_files import read_model_config
from octavo.runner.device import SampledTokens, to_device
from octavo.runner.input_batch import InputBatch
from octavo.runner.loaded_model import LoadedModel
from octavo.runner.model_runner import ModelRunner, QueuedStep

BLOCK, MAX_LEN, ROWS = 4, 64, 4
BLOCKS_OF_ONE = MAX_LEN // BLOCK
#: What every sequence has sampled, as far as it is known when a plan is made.
Tokens = dict[int, list[int]]
#: Makes a plan of what is known.
MakePlan = Callable[[Tokens], dict[str, Any]]


class Worker:
    """A runner whose plans are made one by one, with so many steps in flight."""

    def __init__(self, folder: Path, kernels: str) -> None:
        config = make_config(
            model=str(folder),
            kernels=kernels,
            device="cuda" if kernels == "triton" else "cpu",
            block_size=BLOCK,
            max_num_seqs=ROWS,
            max_num_batched_tokens=96,
            num_threads=1,
        )
        loaded = LoadedModel(config, read_model_config(folder), folder, "float32")
        self.runner = ModelRunner(loaded, [8 * BLOCKS_OF_ONE], [2 * BLOCKS_OF_ONE], MAX_LEN)

    def run(self, plans: list[MakePlan], depth: int) -> list[StepResult]:
        """The results of all plans, each of which is made when the one ``depth`` before it is known."""
        tokens: Tokens = {}
        results: list[StepResult] = []
        flying: deque[QueuedStep] = deque()

        def wait() -> None:
            results.append(flying.popleft().wait())
            for seq_id, token in zip(results[-1].seq_ids, results[-1].token_ids, strict=True):
                tokens.setdefault(seq_id, []).append(token)

        for i, make in enumerate(plans):
            if len(flying) == depth:
                wait()
            flying.append(self.runner.submit(StepPlan(step=i, **make(tokens))))
        while flying:
            wait()
        self.runner.submit(StepPlan(step=0, forget=list(tokens))).wait()
        return results

    def check(self, plans: list[MakePlan]) -> list[StepResult]:
        """The results, the same two deep as one after the other."""
        ahead, expected = self.run(plans, 2), self.run(plans, 1)
        assert [facts(result) for result in ahead] == [facts(result) for result in expected]
        return ahead


def facts(result: StepResult) -> tuple[Any, ...]:
    return result.step, result.seq_ids, result.token_ids, result.extras


def sampled(results: list[StepResult], seq_id: int) -> list[int]:
    found = (dict(zip(result.seq_ids, result.token_ids, strict=True)) for result in results)
    return [tokens[seq_id] for tokens in found if seq_id in tokens]


@pytest.fixture(scope="module", params=["cpu", "reference", pytest.param("triton", marks=pytest.mark.gpu)])
def worker(request: pytest.FixtureRequest, network: Path) -> Worker:
    """Holds no sequence between runs."""
    if request.param == "cpu":
        pytest.importorskip("octavo._cpu")
    return Worker(network, request.param)


def introduce(seq_id: int, tokens: list[int], params: SamplingParams, **more: Any) -> NewSequence:
    fields = {"num_prompt_tokens": len(tokens), "num_computed": 0, **more}
    return NewSequence(seq_id, tokens, task=Generate(params, 100 + seq_id), **fields)


def blocks(place: int) -> list[int]:
    """The blocks of one of eight sequences, enough for the longest."""
    return list(range(place * BLOCKS_OF_ONE, (place + 1) * BLOCKS_OF_ONE))


def table(seq_id: int, place: int) -> TableChange:
    return TableChange(seq_id, 0, blocks(place))


def always(**plan: Any) -> MakePlan:
    return lambda tokens: plan


def decode(*seq_ids: int, **plan: Any) -> MakePlan:
    return always(seq_ids=list(seq_ids), num_tokens=[1] * len(seq_ids), **plan)


GREEDY = SamplingParams(temperature=0.0, logprobs=2)
RANDOM = SamplingParams(temperature=3.0, top_p=0.95, logprobs=1)
PROMPT = [7, 3, 60, 22, 22, 9, 41, 5, 13, 30]


def start(*seq_ids: int, params: SamplingParams = RANDOM, **plan: Any) -> MakePlan:
    """Computes the prompts of these sequences, whose blocks are those of the same number."""
    new = [introduce(i, PROMPT[: 3 + i], params) for i in seq_ids]
    return always(
        new=new,
        table_changes=[table(i, i) for i in seq_ids],
        seq_ids=list(seq_ids),
        num_tokens=[3 + i for i in seq_ids],
        **plan,
    )


def test_decodes_follow_each_other(worker: Worker) -> None:
    results = worker.check([start(0, 1, 2), *[decode(0, 1, 2)] * 6, decode(2, 0), decode(1, 2)])
    tokens = [sampled(results, i) for i in range(3)]
    assert [len(t) for t in tokens] == [8, 8, 9]
    assert len({tuple(t[:8]) for t in tokens}) == 3


def test_a_sequence_ends_as_it_does_alone(worker: Worker) -> None:
    """Its last tokens reach the context length: they have no place in the table."""
    long = [i % 60 for i in range(MAX_LEN - 2)]
    new = [introduce(0, long, GREEDY), introduce(1, PROMPT, GREEDY)]
    first = always(new=new, table_changes=[table(0, 0), table(1, 1)], seq_ids=[0, 1], num_tokens=[62, 10])
    results = worker.check([first, decode(0, 1), decode(1, 0), decode(1), decode(1, forget=[0]), decode(1)])
    assert len(sampled(results, 0)) == 3
    assert len(sampled(results, 1)) == 6


def test_chunks_of_a_prompt_beside_decodes(worker: Worker) -> None:
    new = [introduce(5, PROMPT, RANDOM)]
    plans = [
        start(0, 1),
        always(new=new, table_changes=[table(5, 5)], seq_ids=[0, 1, 5], num_tokens=[1, 1, 4]),
        always(seq_ids=[1, 0, 5], num_tokens=[1, 1, 5]),
        decode(5, 0, 1),
        decode(0, 5),
        decode(5, 1),
    ]
    results = worker.check(plans)
    assert [r.seq_ids for r in results] == [[0, 1], [0, 1], [1, 0], [5, 0, 1], [0, 5], [5, 1]]


def test_a_reused_row_does_not_get_the_token_of_its_last_sequence(worker: Worker) -> None:
    """All rows are in use; sequence 1 samples in the step that is in flight when another takes its row."""
    assert ROWS == 4
    plans = [
        start(0, 1, 2, 3),
        decode(0, 1, 2, 3),
        start(4, forget=[1]),
        decode(4, 0, 2, 3),
        always(
            forget=[0, 4],
            new=[introduce(6, PROMPT, RANDOM), introduce(1, PROMPT[:5], GREEDY)],
            table_changes=[table(6, 6), table(1, 1)],
            seq_ids=[2, 3, 6, 1],
            num_tokens=[1, 1, 10, 2],
        ),
        always(seq_ids=[6, 3, 2, 1], num_tokens=[1, 1, 1, 3]),
        decode(1, 2, 3, 6),
    ]
    worker.check(plans)
    # Nor does the token of a sequence that comes back at once get into its own new row.
    again = introduce(0, PROMPT, GREEDY)
    back = always(forget=[0], new=[again], table_changes=[table(0, 0)], seq_ids=[1, 0], num_tokens=[1, 6])
    worker.check([start(0, 1), decode(0, 1), back, always(seq_ids=[1, 0], num_tokens=[1, 4]), decode(0, 1)])


@pytest.mark.parametrize("swap", [False, True])
def test_preempted_while_its_token_is_in_flight(worker: Worker, swap: bool) -> None:
    moved = [(block, block - 2 * BLOCKS_OF_ONE) for block in blocks(2)] if swap else []

    def come_back(tokens: Tokens) -> dict[str, Any]:
        known = PROMPT[:5] + tokens[2]
        computed = len(known) - 1 if swap else 0
        return {
            "blocks_to_swap_in": [(host, 7 * BLOCKS_OF_ONE + host) for _, host in moved],
            "new": [introduce(2, known, RANDOM, num_prompt_tokens=5, num_computed=computed)],
            "table_changes": [table(2, 7)],
            "seq_ids": [1, 2],
            "num_tokens": [1, len(known) - computed],
        }

    plans = [
        start(1, 2),
        decode(1, 2),
        decode(1, forget=[2], blocks_to_swap_out=moved),
        decode(1),
        come_back,
        decode(1, 2),
        decode(2, 1),
    ]
    results = worker.check(plans)
    undisturbed = worker.run([start(1, 2), *[decode(1, 2)] * 4], 1)
    assert sampled(results, 2) == sampled(undisturbed, 2)


def test_forks_beside_decodes_in_flight(worker: Worker) -> None:
    new = [introduce(1, PROMPT, RANDOM)]
    split = [TableChange(1, 2, [100]), TableChange(2, 0, [*blocks(1)[:2], 101])]
    plans = [
        start(0),
        decode(0),
        always(
            new=new,
            forks=[Fork(1, 2, 7)],
            table_changes=[table(1, 1), table(2, 1)],
            seq_ids=[0, 1],
            num_tokens=[1, 10],
        ),
        decode(0, 1, 2, blocks_to_copy=[(blocks(1)[2], 100), (blocks(1)[2], 101)], table_changes=split),
        decode(2, 1, 0),
    ]
    results = worker.check(plans)
    assert results[2].seq_ids == [0, 1, 2]
    assert sampled(results, 1) != sampled(results, 2)


def test_three_steps_in_flight(worker: Worker) -> None:
    """The newest of a sequence's tokens counts, whichever step it is of."""
    plans = [start(0, 1, 2), decode(0, 1, 2), decode(0, 1), decode(1, 0), decode(2, 0), decode(2), decode(1, 2, 0)]
    ahead, expected = worker.run(plans, 3), worker.run(plans, 1)
    assert [facts(result) for result in ahead] == [facts(result) for result in expected]


@pytest.mark.parametrize("depth", [2, 3])
def test_penalties_of_tokens_that_are_in_flight(worker: Worker, depth: int) -> None:
    """They are waited for when the forward is queued."""
    params = SamplingParams(temperature=2.0, repetition_penalty=1.8, frequency_penalty=1.0)
    new = [introduce(0, PROMPT[:3], RANDOM), introduce(1, PROMPT, params)]
    tables = [table(0, 0), table(1, 1)]
    first = always(new=new, table_changes=tables, seq_ids=[0, 1], num_tokens=[3, 10])
    plans = [first, decode(0, 1), decode(1, 0), decode(0), decode(0, 1), decode(1), decode(0, 1)]
    ahead, expected = worker.run(plans, depth), worker.run(plans, 1)
    assert [facts(result) for result in ahead] == [facts(result) for result in expected]
    assert len(sampled(expected, 1)) == 6


def test_penalties_where_the_tokens_are_known(worker: Worker) -> None:
    """The sequence is scheduled in every second step only."""
    params = SamplingParams(temperature=2.0, repetition_penalty=1.8, frequency_penalty=1.0)
    new = [introduce(1, PROMPT, params)]
    first = always(new=new, table_changes=[table(1, 1)], seq_ids=[0, 1], num_tokens=[1, 10])
    results = worker.check([start(0), first, decode(0), decode(0, 1), decode(0), decode(1, 0), decode(0), decode(1)])
    assert len(sampled(results, 1)) == 4


def test_prompt_logprobs_and_errors_come_with_their_step(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second step's logits are NaN for one sequence."""
    forward, calls = worker.runner._forward, 0

    def spoiled(batch: ForwardBatch) -> ForwardOutput:
        nonlocal calls
        calls += 1
        output = forward(batch)
        if calls % 5 == 2:  # of the five steps
            assert output.logits is not None
            worker.runner._kernels.write(output.logits[:1], np.full((1, output.logits.shape[1]), np.nan, np.float32))
        return output

    monkeypatch.setattr(worker.runner, "_forward", spoiled)
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    results = worker.check([start(0, params=params), *[decode(0)] * 4])
    assert results[0].extras[0].prompt_logprobs is not None
    assert results[0].extras[0].prompt_start == 1
    assert results[1].extras[0].error == SequenceFailure("the logits are NaN")
    assert results[1].token_ids == [0]
    assert not results[2].extras


def test_prompt_logprobs_are_waited_for_with_their_step(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is submitted before those of the step ahead of it are there."""
    started, waited = 0, []
    start_scoring = worker.runner._sampler.start_prompt_logprobs

    class Late:
        def __init__(self, pending: Any, number: int) -> None:
            self.pending, self.number = pending, number

        def wait(self) -> Any:
            waited.append(self.number)
            return self.pending.wait()

    def late(*arguments: Any) -> Late:
        nonlocal started
        started += 1
        return Late(start_scoring(*arguments), started)

    plan = StepPlan(step=1, **start(0, params=SamplingParams(temperature=0.0, prompt_logprobs=1))({}))
    expected = worker.runner.submit(plan).wait()
    worker.runner.submit(StepPlan(step=0, forget=[0])).wait()
    monkeypatch.setattr(worker.runner._sampler, "start_prompt_logprobs", late)
    first = worker.runner.submit(plan)
    second = worker.runner.submit(StepPlan(step=2, **decode(0)({})))
    assert (started, waited) == (1, [])
    assert facts(first.wait()) == facts(expected)
    assert waited == [1]
    second.wait()
    worker.runner.submit(StepPlan(step=0, forget=[0])).wait()


def test_steps_without_tokens(worker: Worker) -> None:
    plans = [start(0, 1), always(), decode(0, 1), always(forget=[1]), always(), decode(0)]
    results = worker.check(plans)
    assert [len(r.token_ids) for r in results] == [2, 0, 2, 0, 0, 1]


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 12))])
def test_any_mix(worker: Worker, seed: int) -> None:
    worker.check(random_plans(random.Random(seed), 30))


class Finished:
    """An event on a device that does everything at once."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def test_packed_inputs_are_the_same_inputs(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU gets in one copy, through two buffers that are filled again and again."""
    plans = random_plans(random.Random(99), 30)
    expected = worker.run(plans, 1)
    packed, kernels = PinnedSend(torch.device("cpu"), SimpleNamespace(Event=Finished)), worker.runner._kernels

    def send(arrays: Sequence[np.ndarray]) -> list[Any]:
        return [kernels.wrap(tensor.numpy()) for tensor in packed(arrays)]

    monkeypatch.setattr(worker.runner._device, "to_device", partial(to_device, send=send, kernels=kernels))
    assert [facts(result) for result in worker.run(plans, 2)] == [facts(result) for result in expected]


# --- random plans ---------------------------------------------------------------------------------------------------


class Life:
    """A sequence of a random plan."""

    def __init__(self, seq_id: int, place: int, rng: random.Random) -> None:
        self.seq_id, self.place = seq_id, place
        self.prompt = [rng.randrange(64) for _ in range(rng.randrange(1, 14))]
        self.params = rng.choice([GREEDY, RANDOM, SamplingParams(temperature=0.7, top_k=9, min_p=0.01)])
        self.known, self.computed = len(self.prompt), 0
        #: The step that preempted it.
        self.out_since = -9
        self.held = False

    def new(self, tokens: Tokens) -> NewSequence:
        known = self.prompt + tokens.get(self.seq_id, [])
        return introduce(self.seq_id, known, self.params, num_prompt_tokens=len(self.prompt))


def random_plans(rng: random.Random, count: int) -> list[MakePlan]:
    """Sequences come, are computed in chunks, decode, pause, are preempted, come back when known, and end."""
    lives: list[Life] = []
    plans: list[MakePlan] = []
    next_id = 0
    for step in range(count):
        forget, new, work = [], [], []
        for life in [life for life in lives if life.held and rng.random() < 0.12]:
            forget.append(life.seq_id)
            life.held, life.out_since, life.computed = False, step, 0
            if rng.random() < 0.5:
                lives.remove(life)
        while len(lives) < ROWS and rng.random() < 0.5:
            place = rng.choice([p for p in range(8) if p not in [life.place for life in lives]])
            lives.append(Life(next_id, place, rng))
            next_id += 1
        for life in rng.sample(lives, len(lives)):
            if not life.held and step - life.out_since >= 2 and rng.random() < 0.7:
                new.append(life)
                life.held = True
            if life.held and rng.random() < 0.85 and life.known < MAX_LEN:
                left = life.known - life.computed
                n = left if rng.random() < 0.6 else rng.randrange(1, left + 1)
                work.append((life.seq_id, n))
                life.computed += n
                life.known += life.computed == life.known
        work.sort(key=lambda pair: pair[1] != 1)
        plans.append(partial(make, forget=forget, new=new, work=work))
    return plans


def make(tokens: Tokens, forget: list[int], new: list[Life], work: list[tuple[int, int]]) -> dict[str, Any]:
    return {
        "forget": forget,
        "new": [life.new(tokens) for life in new],
        "table_changes": [table(life.seq_id, life.place) for life in new],
        "seq_ids": [seq_id for seq_id, _ in work],
        "num_tokens": [n for _, n in work],
    }


# --- what is refused ------------------------------------------------------------------------------------------------


def test_steps_are_waited_for_in_order_and_once(worker: Worker) -> None:
    first = worker.runner.submit(StepPlan(step=1, **start(0)({})))
    second = worker.runner.submit(StepPlan(step=2, **decode(0)({})))
    with pytest.raises(RuntimeError, match="step 2 is not the oldest"):
        second.wait()
    assert len(first.wait().token_ids) == 1
    with pytest.raises(RuntimeError, match="step 1 is not the oldest"):
        first.wait()
    assert len(second.wait().token_ids) == 1
    worker.runner.submit(StepPlan(step=3, forget=[0])).wait()


def test_a_plan_that_needs_a_token_in_flight_is_refused(worker: Worker) -> None:
    pending = worker.runner.submit(StepPlan(step=1, **start(0)({})))
    with pytest.raises(RuntimeError, match=r"sequences \[0\] are not known yet"):
        worker.runner.submit(StepPlan(step=2, forks=[Fork(0, 1, 5)]))
    with pytest.raises(RuntimeError, match=r"sequences \[0\] are not known yet"):
        worker.runner.submit(StepPlan(step=2, new_tokens={0: [5]}))
    pending.wait()
    worker.runner.submit(StepPlan(step=3, forget=[0])).wait()


def test_a_step_that_fails_is_not_in_flight(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = worker.run([start(0), decode(0), decode(0)], 1)
    first = worker.runner.submit(StepPlan(step=0, **start(0)({})))

    def fail(batch: ForwardBatch) -> ForwardOutput:
        raise ValueError("no")

    with monkeypatch.context() as patch:
        patch.setattr(worker.runner, "_forward", fail)
        with pytest.raises(ValueError, match="no"):
            worker.runner.submit(StepPlan(step=1, **start(1)({})))
    second = worker.runner.submit(StepPlan(step=1, **decode(0, forget=[1])({})))
    results = [first.wait(), second.wait(), worker.runner.submit(StepPlan(step=2, **decode(0)({}))).wait()]
    worker.runner.submit(StepPlan(step=3, forget=[0])).wait()
    assert [facts(r) for r in results] == [facts(r) for r in expected]


# --- parts ----------------------------------------------------------------------------------------------------------


def test_an_invalid_sampled_token_becomes_token_zero() -> None:
    """The sequence that samples it has an error, which the host receives later."""
    batch = InputBatch(4, MAX_LEN, BLOCK)
    for i in range(3):
        batch.add(introduce(i, PROMPT[: 2 + i], GREEDY))
        batch.change_table(table(i, i))
    first = batch.build(StepPlan(step=1, seq_ids=[0, 1, 2], num_tokens=[2, 3, 4]))
    new = batch.advance(first, first.rows)
    then = batch.build(StepPlan(step=2, seq_ids=[2, 0, 1], num_tokens=[1, 1, 1]))
    tokens, kernels = np.array([5, -2, 9]), ReferenceKernels()

    def on_device(inputs: Any) -> Any:
        pending = [SampledTokens(tokens, *batch.find_pending(inputs, new))]
        return to_device(inputs, pending, lambda arrays: [kernels.wrap(array) for array in arrays], kernels)

    inputs = on_device(then)
    assert inputs.token_ids.tolist() == [9, 5, 0]
    assert inputs.positions.tolist() == [4, 2, 3]
    same = batch.build(StepPlan(step=2, seq_ids=[0, 1, 2], num_tokens=[1, 1, 1]))
    inputs = on_device(same)
    assert inputs.token_ids.tolist() == [5, 0, 9]
    batch.fill(new, np.array([5, 0, 9]))
    rows = [batch.row(i) for i in range(3)]
    assert batch.tokens.num_tokens[rows].tolist() == [3, 4, 5]
    assert batch.tokens.ids[rows, [2, 3, 4]].tolist() == [5, 0, 9]
