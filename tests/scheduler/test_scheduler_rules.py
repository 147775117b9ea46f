"""Generated traffic as a hypothesis state machine, which shrinks a failure to the shortest sequence of calls."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from octavo.config.options import SchedulerOptions
from octavo.core.request import AnyTask, Beam, EngineCoreRequest, Generate, RequestOptions
from octavo.core.sampling_params import BeamSearchParams, SamplingParams
from octavo.memory.block_manager import BlockManager
from octavo.scheduler.policies import POLICIES
from tests.scheduler.fake_preparations import FakePreparations, grammar
from tests.scheduler.fake_worker import (
    EOS,
    Engine,
    check_accounting,
    check_nothing_held,
    hypotheses_alone,
    tokens_alone,
)

#: Prompts come of one sequence, so that they begin alike.
_TEXT = [1 + (7 * i + i // 5) % 11 for i in range(40)]


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, steps and aborts requests of all kinds, in any order."""

    @initialize(
        block_size=st.sampled_from([2, 4]),
        num_blocks=st.integers(4, 16),
        host_blocks=st.sampled_from([0, 3, 12]),
        caching=st.booleans(),
        batching=st.sampled_from(["mixed", "prefill_first"]),
        policy=st.sampled_from([*POLICIES]),
        mode=st.sampled_from(["auto", "recompute", "swap", "by_sequences"]),
        victim=st.sampled_from(["last", "least_computed", "most_blocks"]),
        depth=st.integers(1, 3),
        steps_per_grammar=st.integers(0, 3),
    )
    def begin(
        self,
        block_size: int,
        num_blocks: int,
        host_blocks: int,
        caching: bool,
        batching: str,
        policy: str,
        mode: str,
        victim: str,
        depth: int,
        steps_per_grammar: int,
    ) -> None:
        blocks = BlockManager(num_blocks, block_size, num_host_blocks=host_blocks, prefix_caching=caching)
        self.limit = min(36, num_blocks * block_size)
        self.engine = Engine(
            blocks,
            SchedulerOptions(
                max_num_seqs=5,
                max_num_batched_tokens=40 if batching == "prefill_first" else 9,
                batching=batching,
                scheduling_policy=policy,
                preemption_mode=mode,
                preemption_victim=victim,
                aging_limit=20.0,
            ),
            self.limit,
            max_in_flight=depth,
            preparations=FakePreparations(steps=steps_per_grammar),
        )
        self.requests = 0

    @rule(
        length=st.integers(1, 30),
        last=st.integers(1, 11),
        max_tokens=st.integers(0, 20),
        n=st.integers(1, 4),
        beams=st.booleans(),
        priority=st.integers(0, 3),
        key=st.sampled_from([None, "A", "B", "C", "D"]),
    )
    def add(self, length: int, last: int, max_tokens: int, n: int, beams: bool, priority: int, key: str | None) -> None:
        prompt = [*_TEXT[: min(length, self.limit - 1) - 1], last]
        bound = grammar(key) if key is not None else None
        params = SamplingParams(n=n, max_tokens=max_tokens)
        task: AnyTask = Generate(params, 100 * self.requests, [EOS], grammar=bound)
        if beams and n > 1 and max_tokens:
            task = Beam(BeamSearchParams(beam_width=n, max_tokens=max_tokens), [EOS])
        self.engine.add(
            EngineCoreRequest(
                group_id=self.requests,
                prompt_token_ids=prompt,
                task=task,
                arrival_time=self.engine.now,
                options=RequestOptions(priority=priority),
            )
        )
        self.requests += 1

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.now += 1.0
            self.engine.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.integers(0, self.requests - 1)))

    @invariant()
    def every_block_and_group_is_accounted_for(self) -> None:
        if hasattr(self, "engine"):
            check_accounting(self.engine)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.run(3000)
        check_nothing_held(self.engine)
        for answer in self.engine.answers.values():
            assert answer.finished
            if answer.hypotheses is not None:
                assert answer.hypotheses == hypotheses_alone(answer.request, self.limit)
            for index, tokens in answer.tokens.items():
                alone = tokens_alone(answer.request, index, self.limit)
                assert tokens == (alone if index in answer.reasons else alone[: len(tokens)])


SchedulerMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
test_any_order_of_events = SchedulerMachine.TestCase


@pytest.mark.slow
def test_many_orders_of_events() -> None:
    run_state_machine_as_test(
        SchedulerMachine, settings=settings(max_examples=500, stateful_step_count=50, deadline=None)
    )
