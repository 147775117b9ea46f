"""Drafters that run on the worker, with a network of their own beside the model's: the infrastructure for all of them.

``StepPlan.num_drafts`` names sequences and how many tokens to draft for each at most. The worker drafts them at the
beginning of that very step, when the tokens of the steps before are known, puts them into ``StepPlan.drafts``, and from
there on they are verified like those that a plan brings. So a draft never travels, and the one step that has the slots
for it uses them: ``num_tokens`` counts the drafts, and the plan has allocated (and copied, where shared) the blocks of
positions up to that of the last draft. Fewer drafts than asked for, or none, are right too; ``StepResult.num_drafts``
says how many there were.

KV cache. The layers of a drafter have caches of their own shape, in the blocks of the model: one block table addresses
both, so that allocation, prefix cache, copy-on-write, swaps and sleep are those of the model, and a block is larger by
the drafter's layers (``KVLayers.group_bytes``). What a drafter reads there never decides an answer, so it may be
missing or stale. A drafter may write where the step computes, and, for positions before those, what belongs there: in
shared blocks, all that share them have the same tokens.

Each rank of a tensor-parallel group drafts, and must come to the same tokens. With one rank, a drafter that raises is
reported (``StepResult.draft_error``) and the step goes on without drafts.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.config.kv_spec import KVSpec
from octavo.core.model_config import ModelConfig
from octavo.core.plan import StepPlan, StepResult
from octavo.kernels.forward_batch import BatchSize, ForwardBatch, ForwardOutput
from octavo.kernels.interface import LayerCache
from octavo.layers.layer import LayerContext
from octavo.models.network import Network
from octavo.runner.device import Device
from octavo.runner.input_batch import InputBatch, StepInputs
from octavo.sampling.sampler import Sampler

if TYPE_CHECKING:
    from octavo.models.eagle import FeatureReader

logger = logging.getLogger("octavo")


@dataclass(slots=True)
class Drafts:
    """What a drafter proposes in a step."""

    #: By row: one token or more.
    tokens: dict[int, list[int]] = field(default_factory=dict)
    #: Seconds that went to tokens that it had not computed when they were sampled, such as a prompt, and their number.
    catch_up_seconds: float = 0.0
    catch_up_tokens: int = 0


class WorkerDrafter(ABC):
    """A network that drafts. Rows are those of ``InputBatch``, whose tokens and block tables it reads."""

    #: What holds its weights; sleep mode moves them to host memory and back, or drops them.
    network: Network
    #: Of each of its layers.
    kv_specs: list[KVSpec]

    @abstractmethod
    def describe(self) -> str:
        """Its method, network and memory, for logs."""

    def position_bytes(self) -> int:
        """Bytes of its tables for each position of the longest sequence."""
        return 0

    @abstractmethod
    def load(self, model: Network) -> None:
        """Reads its weights again, after ``network`` was deleted; ``model`` is the network that it drafts for.

        Raises:
            WeightError: they cannot be read.
        """

    @abstractmethod
    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> ForwardOutput:
        """Its network, eagerly: also run on the largest batch, before ``start``, to measure memory."""

    @abstractmethod
    def start(
        self, batch: InputBatch, sampler: Sampler, device: Device, largest: BatchSize, caches: Sequence[LayerCache]
    ) -> None:
        """Prepares for steps of at most this size; its own caches are in the order of ``kv_specs``."""

    @abstractmethod
    def capture(self, caches: Sequence[LayerCache]) -> None:
        """As ``start``, after a sleep: the caches are new, and so may be the weights."""

    @abstractmethod
    def release(self) -> None:
        """Drops what was captured, until ``capture``."""

    def make_reader(self) -> FeatureReader | None:
        """What reads the model's residual stream in a step, as part of its captured forward; None: nothing."""
        return None

    def apply(self, plan: StepPlan) -> None:  # noqa: B027  not every drafter keeps account of blocks
        """The plan's moves are queued, and rows and block tables are as it says."""

    def after_step(  # noqa: B027  not every drafter needs the model's hidden states
        self, inputs: StepInputs, batch: ForwardBatch, output: ForwardOutput, sampled: Any | None
    ) -> None:
        """A step's forward and its sampling are queued; ``output`` is overwritten by the next.

        Args:
            inputs: of the step.
            batch: the same on the device.
            output: hidden states of all tokens, and the features that ``make_reader`` has read.
            sampled: int64, the tokens of the sampled rows, where the sampler has them; None: no sequence samples.
        """

    @abstractmethod
    def draft(self, counts: dict[int, int]) -> Drafts:
        """Drafts at most so many tokens for each row (1 or more), all tokens of which are known."""

    @abstractmethod
    def add(self, row: int) -> None:
        """A sequence has this row from now on; none of its tokens is computed."""

    @abstractmethod
    def fork(self, parent: int, child: int) -> None:
        """A sequence has row ``child`` from now on; its blocks are, or become, copies of the parent's."""


class DraftSource(ABC):
    """Where the network of a drafter comes from; its weights are not loaded yet."""

    config: ModelConfig

    @abstractmethod
    def context(self, context: LayerContext) -> LayerContext:
        """What its layers are built with, by that of the model that it drafts for."""

    @abstractmethod
    def load(self, context: LayerContext, model: Network) -> WorkerDrafter:
        """The drafter, with its weights, of a model that was built with this context.

        Raises:
            OctavoError: the weights cannot be read, or do not fit the model.
        """


def add_drafts(
    drafter: WorkerDrafter, batch: InputBatch, plan: StepPlan, result: StepResult, *, alone: bool
) -> StepPlan:
    """The plan with the drafts that it asks for in ``drafts``, and ``num_tokens`` by how many there are.

    An exception of the drafter is reported in the result if this rank is ``alone``; else it is the step's, as other
    ranks may have drafts.
    """
    start = time.perf_counter()
    seq_ids = {batch.row(seq_id): seq_id for seq_id in plan.num_drafts}
    found = Drafts()
    try:
        found = drafter.draft({row: plan.num_drafts[seq_id] for row, seq_id in seq_ids.items()})
    except Exception as e:
        if not alone:
            raise
        logger.error("the drafter failed", exc_info=e)
        result.draft_error = f"{type(e).__name__}: {e}"
    tokens = {seq_ids[row]: drafts for row, drafts in found.tokens.items()}
    result.num_drafts = {seq_id: len(drafts) for seq_id, drafts in tokens.items()}
    missing = {seq_id: count - result.num_drafts.get(seq_id, 0) for seq_id, count in plan.num_drafts.items()}
    num_tokens = [n - missing.get(s, 0) for s, n in zip(plan.seq_ids, plan.num_tokens, strict=True)]
    result.draft_seconds = time.perf_counter() - start
    result.draft_catch_up_seconds = found.catch_up_seconds
    result.draft_catch_up_tokens = found.catch_up_tokens
    return msgspec.structs.replace(plan, num_tokens=num_tokens, drafts={**plan.drafts, **tokens})
