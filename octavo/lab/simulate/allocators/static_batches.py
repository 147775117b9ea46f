"""Static batching: request-level scheduling with padding, as before iteration-level scheduling (Yu et al. 2022, Orca).

The earliest requests are taken as one batch, as many as memory holds. Their prompts are padded to the longest one, all
generate as many tokens as the longest answer has, and nothing else is admitted until the batch has ended: the baseline
that Kwon et al. 2023 (PagedAttention), section 6.1, built around FasterTransformer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from octavo.core.errors import ConfigError
from octavo.lab.simulate.allocators.census import Slots
from octavo.lab.simulate.allocators.contiguous import RESERVATIONS
from octavo.lab.simulate.engine import SimulatedEngine, SimulatedRequest
from octavo.lab.workloads.work_items import WorkItem

#: By name, the reservation for each sequence of a batch, of its padded lengths.
STATIC = {f"static-{name}": RESERVATIONS[name] for name in ("oracle", "max")}


@dataclass(frozen=True)
class StaticBatch:
    """Requests that begin and end together."""

    items: list[WorkItem]
    #: Tokens of the longest prompt and of the longest output.
    input_len: int
    output_len: int
    #: Token slots that each sequence holds from the first to the last step.
    slots: int

    @property
    def padded(self) -> list[WorkItem]:
        """What is computed in place of the requests."""
        lengths = {"input_len": self.input_len, "output_len": self.output_len}
        return [msgspec.structs.replace(item, **lengths) for item in self.items]

    def tokens(self, progress: int) -> int:
        """Slots that hold a token of a request, and not of padding, when this many are computed of each sequence."""
        prompts = min(1.0, progress / self.input_len)
        made = max(0, progress - self.input_len)
        return sum(round(prompts * item.input_len) + min(made, item.output_len) for item in self.items)


def take_batch(
    waiting: Sequence[WorkItem], baseline: str, num_blocks: int, block_size: int, context: int
) -> StaticBatch:
    """The earliest requests, as many as fit into the blocks with the padded lengths of the batch.

    Args:
        waiting: at least one, in order of arrival; none has a prompt of its own.
        baseline: a name of ``STATIC``.
        num_blocks: memory.
        block_size: tokens of a block.
        context: the longest sequence of the model.

    Raises:
        ConfigError: the first request alone does not fit.
    """
    batch = None
    for count in range(1, len(waiting) + 1):
        items = list(waiting[:count])
        longest = max(item.input_len for item in items), max(item.output_len for item in items)
        slots = STATIC[baseline](*longest, context)
        # The padded prompt and the padded answer may be of two requests, and longer together than the context.
        if sum(longest) > context or count * -(-slots // block_size) > num_blocks:
            break
        batch = StaticBatch(items, *longest, slots)
    if batch is None:
        raise ConfigError(f"a request of {waiting[0].input_len} + {waiting[0].output_len} tokens does not fit")
    return batch


class StaticBatching:
    """Runs requests in static batches on a simulated engine, whose scheduler gets one batch at a time."""

    def __init__(self, engine: SimulatedEngine, baseline: str) -> None:
        self._engine, self._baseline = engine, baseline
        self._batch: StaticBatch | None = None

    def run(
        self,
        items: Iterable[WorkItem],
        on_end: Callable[[SimulatedRequest], None],
        on_step: Callable[[SimulatedEngine], None],
    ) -> None:
        """As ``simulate.engine.run``. A request ends with its batch, and counts its own tokens, without padding."""
        engine, blocks = self._engine, self._engine.blocks
        upcoming = deque(enumerate(items))
        waiting: deque[tuple[int, WorkItem]] = deque()
        while upcoming or waiting:
            if not waiting:
                engine.wait_until(upcoming[0][1].at + engine.overhead.arrival)
            while upcoming and upcoming[0][1].at + engine.overhead.arrival <= engine.now:
                waiting.append(upcoming.popleft())
            # No batch is larger than memory has blocks.
            first = [item for _, item in (waiting[i] for i in range(min(len(waiting), blocks.num_blocks)))]
            batch = take_batch(first, self._baseline, blocks.num_blocks, blocks.block_size, engine.max_model_len)
            taken = [waiting.popleft() for _ in batch.items]
            for (number, _), padded in zip(taken, batch.padded, strict=True):
                engine.add(number, padded)
            self._batch = batch
            ended = []
            while engine.has_work:
                ended += engine.step()
                on_step(engine)
            self._batch, own = None, dict(taken)
            for request in ended:
                request.item = own[request.number]
                request.tokens, request.last = request.item.output_len, engine.now
                on_end(request)

    def slots(self, engine: SimulatedEngine) -> Slots:
        """What memory holds now, see ``Slots``: padding of prompts and of answers is internal fragmentation."""
        total, batch = engine.blocks.num_blocks * engine.blocks.block_size, self._batch
        if batch is None:
            return Slots(0, 0, 0, 0, total)
        progress = max((seq.num_computed for group in engine.scheduler.queues.running for seq in group.seqs), default=0)
        tokens, held = batch.tokens(progress), len(batch.items) * batch.slots
        whole = sum(item.input_len + item.output_len for item in batch.items)
        return Slots(tokens, whole - tokens, held - whole, 0, total - held)
