"""``RowFeature``: what a worker keeps for some of its sequences, and does for them in a step.

LoRA adapters, prompt adapters, images, encoder outputs, drafts, pooling and prompt logprobs are such features.
``InputBatch`` tells all of them of added, forked and forgotten rows, ``ModelRunner`` of plans and steps; neither knows
one by name. ``LoadedModel.make_features`` lists them. A new feature is a class in its own module, and a line there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

# Types alone: all others import this module.
if TYPE_CHECKING:
    from octavo.core.plan import NewSequence, StepPlan, StepResult, TableChange
    from octavo.kernels.forward_batch import BatchSize, ForwardBatch, ForwardOutput
    from octavo.runner.cache_engine import CacheEngine
    from octavo.runner.device import Device
    from octavo.runner.input_batch import FlatInputs, InputBatch, Int64Array, StepInputs
    from octavo.runner.model_runner import QueuedStep
    from octavo.sampling.sampler import Sampler


@dataclass(frozen=True)
class RowContext:
    """The rows that features follow, and the rest of their worker."""

    #: Weak, as the batch owns the features.
    batch: InputBatch
    sampler: Sampler
    device: Device
    cache: CacheEngine
    #: Tokens of the longest sequence, and the largest step.
    max_model_len: int
    largest: BatchSize


class RowFeature:
    """Follows the rows of ``InputBatch``. Each hook does nothing by default; they are listed in the order of a step.

    A feature that no sequence uses must return from each hook at once. A hook that raises fails the step; in ``add`` it
    fails the sequence.
    """

    worker: RowContext

    def start(self, worker: RowContext) -> None:
        """Called once, before all other hooks."""
        self.worker = worker

    # --- changes of rows ---

    def begin(self, plan: StepPlan) -> None:
        """Called first with each plan."""

    def forget(self, seq_id: int, row: int) -> None:
        """The sequence ends or is preempted, and its row is free."""

    def add(self, sequence: NewSequence, row: int) -> None:
        """A new sequence, or one that comes back after a preemption, gets this row, with its tokens."""

    def fork(self, parent: int, row: int) -> None:
        """A new sequence gets a copy of the row ``parent``; its blocks are, or become, copies of the parent's."""

    def change_table(self, change: TableChange) -> bool:
        """Takes the blocks of an id that is not a sequence's but the feature's; False if it is not."""
        return False

    def change_plan(self, plan: StepPlan, result: StepResult) -> StepPlan:
        """The plan with the tokens to compute. Rows and tables are changed, and moves of blocks are queued."""
        return plan

    # --- a step ---

    def add_arrays(self, inputs: FlatInputs, rows: Int64Array, starts: Int64Array) -> None:
        """Changes the arrays of ``ForwardBatch`` for the tokens from ``starts`` [S] on of these rows [S].

        Not called for a step that repeats the last one (``FlatInputs.repeatable``), and called for drafters, too.
        """

    def before_step(self, inputs: StepInputs) -> None:
        """May change the inputs, or queue work on the device, before the network's forward."""

    def reads_hidden(self) -> bool:
        """Whether ``after_step`` may read hidden states or features of rows that are not sampled in the next step."""
        return False

    def after_step(self, inputs: StepInputs, batch: ForwardBatch, output: ForwardOutput, step: QueuedStep) -> None:
        """Called when the network's forward and the sampling are queued; the next step overwrites ``output``.

        ``batch``: ``inputs`` on the device; ``step``: takes results, and has sampled tokens if a sequence samples.
        """

    # --- sleep mode ---

    def release(self) -> None:
        """Drops captured graphs and addresses of the KV cache; no step comes before ``capture``."""

    def capture(self) -> None:
        """Prepares for steps, at the start and after a sleep: KV cache and weights may be at new addresses."""
