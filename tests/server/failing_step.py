"""A scheduling policy whose module has steps fail: at requests with ``max_tokens`` 41, from 20 tokens on."""

from __future__ import annotations

from typing import Any

from octavo.core.plan import StepPlan
from octavo.core.request import Generate
from octavo.runner.model_runner import ModelRunner
from octavo.scheduler.policies import FirstComeFirstServed

POISON, TOKENS = 41, 20


class Failing(FirstComeFirstServed):
    """First come, first served."""


def _inject() -> None:
    #: By sequence: tokens that are still to be computed well.
    left: dict[int, int] = {}
    submit, compute = ModelRunner.submit, ModelRunner._compute

    def submitted(self: ModelRunner, plan: StepPlan, *others: Any) -> Any:
        for new in plan.new:
            if isinstance(new.task, Generate) and new.task.params.max_tokens == POISON:
                left[new.seq_id] = TOKENS - (len(new.token_ids) - new.num_prompt_tokens)
        return submit(self, plan, *others)

    def computed(self: ModelRunner, inputs: Any, step: Any) -> None:
        for seq_id in inputs.seq_ids:
            if seq_id in left:
                if left[seq_id] <= 0:
                    raise ArithmeticError("injected")
                left[seq_id] -= 1
        compute(self, inputs, step)

    ModelRunner.submit, ModelRunner._compute = submitted, computed  # type: ignore[method-assign,assignment]


_inject()
