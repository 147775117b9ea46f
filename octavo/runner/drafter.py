"""Drafters that run on the worker, with a network of their own beside the model's: the infrastructure for all of them.

``StepPlan.num_drafts`` names sequences and how many tokens to draft for each at most. The worker drafts them at the
beginning of that very step, when the tokens of the steps before are known, puts them into ``StepPlan.drafts``, and from
there on they are verified like those that a plan brings. So a draft never travels, and the one step that has the slots
for it uses them: ``num_tokens`` counts the drafts, and the plan has allocated (and copied, where shared) the blocks of
positions up to that of the last draft. Fewer drafts than asked for, or none, are right too; ``StepResult.num_drafts``
says how many there were.

KV cache. The layers of a drafter have caches of their own shape, in the blocks of the model: one block table addresses
both, so that allocation, prefix cache, copy-on-write, swaps and sleep are those of the model, and a block is larger by
the drafter's layers (``ModelRunner.kv_groups``). What a drafter reads there never decides an answer, so it may be
missing or stale. A drafter may write where the step computes, and, for positions before those, what belongs there: in
shared blocks, all that share them have the same tokens.

Each rank of a tensor-parallel group drafts, and must come to the same tokens. With one rank, a drafter that raises is
reported (``StepResult.draft_error``) and the step goes on without drafts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.core.kv_spec import KVSpec
from octavo.kernels.forward_batch import ForwardBatch, ForwardOutput
from octavo.kernels.interface import LayerCache
from octavo.layers.base import Layer
from octavo.runner.input_batch import StepInputs


@dataclass(slots=True)
class Drafts:
    """What a drafter proposes in a step."""

    #: By row: one token or more.
    tokens: dict[int, list[int]] = field(default_factory=dict)
    #: Seconds that went to tokens that it should have computed in earlier steps, such as a prompt.
    catch_up_seconds: float = 0.0


class WorkerDrafter(ABC):
    """A network that drafts. Rows are those of ``InputBatch``, whose tokens and block tables it reads."""

    #: What holds its weights; moved to host memory and back by sleep mode.
    network: Layer
    #: Of each of its layers.
    kv_specs: list[KVSpec]

    @abstractmethod
    def describe(self) -> str:
        """Its method, network and memory, for logs."""

    def position_bytes(self) -> int:
        """Bytes of its tables for each position of the longest sequence."""
        return 0

    def extend_positions(self, positions: int) -> None:  # noqa: B027  not every drafter has such tables
        """Makes its tables long enough."""

    @abstractmethod
    def run_largest_step(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> None:
        """Runs its network once on a batch as large as any, to measure memory."""

    @abstractmethod
    def capture(self, caches: Sequence[LayerCache]) -> None:
        """Prepares its network for steps, with its own caches in the order of ``kv_specs``."""

    @abstractmethod
    def release(self) -> None:
        """Drops what was captured, until ``capture``."""

    def after_forward(self, inputs: StepInputs, batch: ForwardBatch, output: ForwardOutput) -> None:  # noqa: B027
        """The model's forward of a step is queued; ``output`` is overwritten by the next.

        Here a drafter takes what it needs of the model's hidden states.
        """

    @abstractmethod
    def draft(self, counts: dict[int, int]) -> Drafts:
        """Drafts at most so many tokens for each row (1 or more), of which all tokens are known."""

    @abstractmethod
    def add(self, row: int) -> None:
        """A sequence has this row from now on; none of its tokens is computed."""

    @abstractmethod
    def fork(self, parent: int, child: int) -> None:
        """A sequence has row ``child`` from now on; its blocks are, or become, copies of the parent's."""
