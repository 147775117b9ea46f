"""One worker's step: ``ModelRunner`` applies the plan to the rows, runs the network and samples."""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from octavo.core.errors import SequenceError
from octavo.core.plan import NewSequence, SequenceResult, StepPlan, StepResult
from octavo.kernels.forward_batch import Forward, ForwardBatch, ForwardOutput
from octavo.kernels.interface import Array, Kernels, LayerCache
from octavo.models.network import Network, weight_bytes
from octavo.process.startup import WorkerFacts
from octavo.runner.device import SampledTokens, WeightSleep
from octavo.runner.encoders import Alignment, ContextEncoder, ImageTokens
from octavo.runner.input_batch import Contexts, DraftedTokens, InputBatch, NewTokens, RotaryPositions, StepInputs
from octavo.runner.pooling import Pooling
from octavo.sampling.logits_processors import RowFailure
from octavo.sampling.sampler import Sampler

if TYPE_CHECKING:
    from octavo.kernels.sampling import PendingLogprobs
    from octavo.runner.device import StepTimer
    from octavo.runner.loaded_model import LoadedModel
    from octavo.sampling.logits_processors import PendingSamplerOutput, SamplerOutput

logger = logging.getLogger("octavo")

#: Rows of prompt logits computed at once: 128 x vocabulary x 4 bytes of memory at most.
_PROMPT_ROWS = 128


class ModelRunner:
    """Computes steps with a loaded model. Owns the KV cache tensors and the rows of running sequences.

    vLLM's ``GPUModelRunner``, on every device: ``submit`` is its ``execute_model``.
    """

    def __init__(
        self, loaded: LoadedModel, num_blocks: list[int], num_host_blocks: list[int], max_model_len: int
    ) -> None:
        """Allocates the KV cache, on device and host, and the rows for sequences of up to ``max_model_len`` tokens.

        The numbers of blocks are those of each KV group, in the order of ``KVLayers.groups``.
        """
        self.loaded = loaded
        self.device_name = loaded.device.name
        self._device, self._kernels, self._drafter = loaded.device, loaded.kernels, loaded.drafter
        self._prompt_adapters = loaded.prompt_adapters
        self._max_model_len = max_model_len
        options, config, layers = loaded.options, loaded.config, loaded.layers
        with loaded.mode():
            sizes = [size for size, _ in layers.group_bytes()]
            with loaded.timed("KV cache"):
                self._cache = loaded.device.cache_engine(layers, num_blocks, num_host_blocks)
            self._cache_bytes = int(np.dot(num_blocks, sizes)), int(np.dot(num_host_blocks, sizes))
            with loaded.timed("tables of positions"):
                loaded.network.extend_positions(max_model_len)
            samples = loaded.ranks.layout.is_last_stage
            longest = config.longest_input(max_model_len)
            contexts = None if longest is None else Contexts(options.max_num_seqs, longest, options.block_size)
            rotary = RotaryPositions(options.max_num_seqs) if config.rope.sections else None
            shape = options.max_num_seqs, max_model_len, options.block_size, num_blocks
            self._batch = InputBatch(*shape, samples=samples, contexts=contexts, rotary=rotary)
            self._encoder: ContextEncoder | None = None
            if contexts is not None:
                size = loaded.largest_encoding(max_model_len)
                self._encoder = ContextEncoder(loaded, loaded.encoder_inputs, contexts, size)
            self._sampler = loaded.make_sampler(self._batch.tokens)
            with loaded.timed("recording the step"):
                self._forward = self._capture()
                if self._drafter is not None:
                    caches, largest = layers.split(self._cache.device)[1], loaded.largest_batch(max_model_len)
                    self._drafter.start(self._batch, self._sampler, self._device, largest, caches)
            self._image_tokens: ImageTokens | None = None
            if config.image_facts is not None:
                self._image_tokens = ImageTokens(loaded.images, config.vocab_size, options.num_virtual_tokens)
            self._prompts = PromptLogprobs(self._batch, self._sampler, self._kernels, config.vocab_size)
            self._pooling = Pooling(loaded) if samples else None
            self._alignment = Alignment(loaded)
            #: Everything that keeps state per sequence by its id.
            self._trackers = [t for t in (self._image_tokens, self._prompts, self._alignment, self._pooling) if t]
            #: Steps whose result was not waited for, oldest first.
            self._in_flight: deque[QueuedStep] = deque()
            # Forced tokens are appended by the next plan, so steps may not be planned ahead of them.
            ahead = options.pipeline_parallel_size == 1 and options.plans_ahead(self.device_name)
            self._reports_forced_tokens = options.jump_forward and not ahead
            self._weights = WeightSleep(loaded)

    def _capture(self) -> Forward:
        """Prepares the network for steps; the backend may record addresses of weights and KV cache here."""
        caches = self._caches()
        if self._encoder is not None:
            self._encoder.capture(caches)
        # Weak: the kernels may own the captured function, and a cycle would keep the weights until they are collected.
        loaded = weakref.proxy(self.loaded)
        return self._kernels.capture(
            lambda batch: loaded.forward(batch, caches), self.loaded.largest_batch(self._max_model_len)
        )

    def _caches(self) -> list[LayerCache]:
        return self.loaded.layers.split(self._cache.device)[0]

    def startup_facts(self) -> WorkerFacts:
        loaded = self.loaded
        drafter = ""
        if loaded.drafter is not None:
            drafter = f"{loaded.drafter.describe()}, {loaded.layers.drafter_share():.1%} of the KV cache"
        return WorkerFacts(
            loaded.kernels.describe(),
            loaded.context.quantization,
            weight_bytes(loaded.network),
            *self._cache_bytes,
            dict(loaded.startup_seconds),
            loaded.preparations.describe(),
            drafter,
        )

    # --- a step -----------------------------------------------------------------------------------------------------

    def submit(self, plan: StepPlan, sampled: dict[int, list[int]] | None = None) -> QueuedStep:
        """Queues a step's work on the device. An exception fails the step; the result holds errors of one sequence.

        Further steps may be in flight, and the plan may schedule sequences that sample in them: their tokens then go
        from step to step on the device. If the host needs a token before it samples the next (penalties, bad words,
        processors), it waits for the token after it has queued the network's forward. While a sequence's token is
        pending, the plan may not fork it, append to it, or follow its unverified drafts (RuntimeError).

        ``sampled``: on a pipeline stage that does not sample, tokens that the last stage has sampled since, by
        sequence id.
        """
        start, in_kernels = time.perf_counter(), self.loaded.clock.seconds
        with self.loaded.mode():
            if sampled:
                self._batch.append_sampled(sampled)
            result = StepResult(step=plan.step)
            self._forget(plan.forget)
            self.loaded.preparations.apply(plan, result)
            self._change_rows(plan)
            step = QueuedStep(result, self._batch, self._in_flight)
            step.swap_seconds = self._cache.move(plan)
            if self._encoder is not None and (new := [c for c in plan.contexts if c.encode is not None]):
                self._encoder.encode(new)
            if self._drafter is not None:
                self._drafter.apply(plan)
                if plan.num_drafts:
                    self._require_known(list(plan.num_drafts))
                    plan = self._draft(plan, result)
            if plan.seq_ids:
                self._compute(self._batch.build(plan), step)
        self._in_flight.append(step)
        result.swaps = self._cache.take_swaps()
        result.seconds = time.perf_counter() - start
        result.kernel_seconds = self.loaded.clock.seconds - in_kernels
        return step

    def _compute(self, inputs: StepInputs, step: QueuedStep) -> None:
        if self._prompt_adapters is not None:
            self._prompt_adapters.take_slots(inputs)
        if self._image_tokens is not None:
            self._image_tokens.write(inputs, self.loaded.network)
        tables = inputs.arrays["block_tables"]
        if self._encoder is not None:
            tables = np.concatenate([tables, inputs.arrays["cross_tables"][None]], axis=2)
        self._cache.computes_over(tables)
        batch = self._device.to_device(inputs, self._pending_tokens(inputs))
        # Not earlier: while the device waits for the host or for blocks to arrive, it counts as idle.
        stop_timer = self._device.start_timer()
        if self._prompt_adapters is not None:
            self._prompt_adapters.write_prefixes(self._kernels, self._caches())
        output = self._forward(batch)
        if self._pooling is None:  # other stages compute the rest
            self._batch.advance(inputs, inputs.sampling)
            step.timer = stop_timer()
            return
        self._prompts.compute(self.loaded.network, inputs, output.hidden, step)
        self._pooling.compute(inputs, batch, output.hidden, step, self._caches)
        self._alignment.compute(inputs, batch, step, self._caches)
        if len(inputs.sampling):
            self._sample(inputs, output, step)
        else:
            self._batch.advance(inputs, inputs.sampling)
        if self._drafter is not None:
            tokens = None if step.sampled is None else step.sampled.sample.tokens
            self._drafter.after_step(inputs, batch, output, tokens)
        step.timer = stop_timer()

    def _pending_tokens(self, inputs: StepInputs) -> list[SampledTokens]:
        """The tokens of this step that steps in flight sample, oldest first."""
        pending = []
        for step in self._in_flight:
            if step.sampled is not None:
                targets, sources = self._batch.find_pending(inputs, step.sampled.new)
                if len(targets):
                    pending.append(SampledTokens(step.sampled.sample.tokens, targets, sources))
        return pending

    def _sample(self, inputs: StepInputs, output: ForwardOutput, step: QueuedStep) -> None:
        """Queues the sampling of sequences whose last token is computed, and of sequences just forked from them."""
        assert output.logits is not None
        chosen, forked = inputs.sampling, inputs.forked
        rows, seq_ids = inputs.rows, inputs.seq_ids
        if len(chosen) != len(rows):
            rows, seq_ids = rows[chosen], [seq_ids[i] for i in chosen.tolist()]
        if forked is not None:
            seq_ids = seq_ids + forked.seq_ids
            rows = np.concatenate([rows, forked.rows])
        step.result.seq_ids = seq_ids
        sampled, positions, drafted = rows, None, inputs.drafted
        if drafted is not None:
            sampled = np.repeat(rows, drafted.counts)
            positions = self._batch.tokens.num_tokens[sampled] + drafted.offsets
        if self._sampler.needs_tokens(rows):
            for earlier in self._in_flight:
                earlier.receive()
        try:
            sample = self._sampler.start(output.logits, sampled, positions)
        except RowFailure as e:
            raise SequenceError.of(seq_ids[rows.tolist().index(e.row)], e.error) from e.error
        step.sampled = PendingTokens(sample, self._batch.advance(inputs, rows), drafted)
        if self._reports_forced_tokens and self._sampler.may_force(rows):
            step.find_forced = self._find_forced

    def _find_forced(self, seq_ids: list[int]) -> dict[int, list[int]]:
        rows = {seq_id: row for seq_id in seq_ids if (row := self._batch.find_row(seq_id)) is not None}
        return {seq_id: tokens for seq_id, row in rows.items() if (tokens := self._sampler.forced_tokens(row))}

    def _draft(self, plan: StepPlan, result: StepResult) -> StepPlan:
        """Drafts the tokens that the plan asks for: the plan with ``drafts``, and with their number in ``num_tokens``.

        If the drafter raises, a single rank reports it and goes on; with several ranks the step fails, as the others
        may have drafts.
        """
        assert self._drafter is not None
        start = time.perf_counter()
        seq_ids = {self._batch.row(seq_id): seq_id for seq_id in plan.num_drafts}
        tokens: dict[int, list[int]] = {}
        try:
            drafts = self._drafter.draft({row: plan.num_drafts[seq_id] for row, seq_id in seq_ids.items()})
        except Exception as e:
            if self.loaded.ranks.group is not None:
                raise
            logger.error("the drafter failed", exc_info=e)
            result.draft_error = f"{type(e).__name__}: {e}"
        else:
            tokens = {seq_ids[row]: drafted for row, drafted in drafts.tokens.items()}
            result.draft_catch_up_seconds = drafts.catch_up_seconds
            result.draft_catch_up_tokens = drafts.catch_up_tokens
        result.num_drafts = {seq_id: len(drafted) for seq_id, drafted in tokens.items()}
        missing = {seq_id: count - result.num_drafts.get(seq_id, 0) for seq_id, count in plan.num_drafts.items()}
        num_tokens = [n - missing.get(s, 0) for s, n in zip(plan.seq_ids, plan.num_tokens, strict=True)]
        result.draft_seconds = time.perf_counter() - start
        return msgspec.structs.replace(plan, num_tokens=num_tokens, drafts={**plan.drafts, **tokens})

    # --- rows -------------------------------------------------------------------------------------------------------

    def _forget(self, seq_ids: list[int]) -> None:
        for seq_id in seq_ids:
            if self._batch.contexts is not None:
                self._batch.contexts.forget(seq_id)
            row = self._batch.forget(seq_id)
            if row is not None:
                self._sampler.remove(row)
                if self._prompt_adapters is not None:
                    self._prompt_adapters.forget(seq_id)
                for tracker in self._trackers:
                    tracker.forget(seq_id)

    def _change_rows(self, plan: StepPlan) -> None:
        batch = self._batch
        for context in plan.contexts:
            if batch.contexts is None:
                raise RuntimeError("a plan has an encoder's output, but the network has no cross attention")
            batch.contexts.add(context)
        try:
            for sequence in plan.new:
                row = batch.add(sequence, self._slot_of(sequence.adapter))
                self._sampler.add(row, sequence, self.loaded.grammars.find(sequence.task))
                if self._drafter is not None:
                    self._drafter.add(row)
                if self._prompt_adapters is not None:
                    self._prompt_adapters.add(sequence, row, batch.tokens)
                for tracker in self._trackers:
                    tracker.add(sequence)
        except Exception as e:
            raise SequenceError.of(sequence.seq_id, e) from e
        if self._in_flight and (plan.forks or plan.new_tokens):
            self._require_known([fork.parent for fork in plan.forks] + list(plan.new_tokens))
        for fork in plan.forks:
            row = batch.fork(fork.parent, fork.child)
            self._sampler.fork(batch.row(fork.parent), row, fork.seed)
            if self._drafter is not None:
                self._drafter.fork(batch.row(fork.parent), row)
        for seq_id, token_ids in plan.new_tokens.items():
            batch.append(seq_id, token_ids)
        for change in plan.table_changes:
            batch.change_table(change)

    def _slot_of(self, adapter: str | None) -> int:
        if adapter is None or (self._prompt_adapters is not None and adapter in self._prompt_adapters):
            return -1
        if self.loaded.loras is None:
            raise RuntimeError("a plan names an adapter, but adapters are not enabled")
        return self.loaded.loras.slot_of(adapter)

    def _require_known(self, seq_ids: list[int]) -> None:
        """Refuses a change that needs tokens of these sequences that are still on the device only."""
        unknown = {seq_id for step in self._in_flight for seq_id in step.result.seq_ids}.intersection(seq_ids)
        if unknown:
            raise RuntimeError(f"the last tokens of sequences {sorted(unknown)} are not known yet: wait for them first")

    # --- memory -----------------------------------------------------------------------------------------------------

    def sleep(self, level: int) -> int:
        """Frees memory until ``wake_up``: bytes. Loses the content of the KV cache.

        Level 1 frees the KV cache; ``WeightSleep.sleep`` explains how each level frees weights. There may be no
        sequence, and no step may run meanwhile. While the worker sleeps at level 1, level 2 may follow.
        """
        if self._in_flight:
            raise RuntimeError("a step is in flight: wait for it before sleep")
        freed = 0
        if self._forward is not _refuse_while_sleeping:
            # Drops the graphs: their memory is freed, and their addresses become invalid.
            self._forward = _refuse_while_sleeping
            if self._encoder is not None:
                self._encoder.release()
            self.loaded.images.release()
            if self._drafter is not None:
                self._drafter.release()
        if self._cache.device:
            self._cache.release()
            freed += sum(self._cache_bytes)
        try:
            freed += self._weights.sleep(level)
        except BaseException:  # such as no host memory
            self.wake_up()
            raise
        self._device.release_memory()
        return freed

    def wake_up(self, parts: Sequence[str] = ("weights", "kv_cache")) -> bool:
        """Restores these parts: whether the worker is awake, with both parts. A call that fails can be repeated."""
        if self._forward is not _refuse_while_sleeping:
            return True
        with self.loaded.mode():
            if "weights" in parts:
                self._weights.wake_up(self._max_model_len)
            if "kv_cache" in parts and not self._cache.device:
                self._cache.allocate()
            if self._weights.are_away or not self._cache.device:
                return False
            if self._drafter is not None:
                self._drafter.capture(self.loaded.layers.split(self._cache.device)[1])
            self._forward = self._capture()
        return True

    def measure_swap(self) -> float:
        with self.loaded.mode():
            return self._cache.measure_swap()


def _refuse_while_sleeping(batch: ForwardBatch) -> ForwardOutput:
    raise RuntimeError("the worker sleeps; wake_up must come before the next step")


@dataclass(slots=True)
class PendingTokens:
    """The tokens that a queued step samples, and the places in the token table where they belong."""

    sample: PendingSamplerOutput
    new: NewTokens
    drafted: DraftedTokens | None


class QueuedStep:
    """A step that the device may still be computing; ``wait`` for it, in the order of submission."""

    def __init__(self, result: StepResult, batch: InputBatch, in_flight: deque[QueuedStep]) -> None:
        self.result = result
        self.sampled: PendingTokens | None = None
        #: By sequence id: the prompt position of the first logprobs, and the logprobs from there on.
        self.prompts: dict[int, tuple[int, list[PendingLogprobs]]] = {}
        #: By sequence id: the pooled prompt, float32; or an error message.
        self.pooled: dict[int, np.ndarray] = {}
        self.failed: dict[int, str] = {}
        #: By sequence id, the tokens that grammars force after the step's tokens.
        self.find_forced: Callable[[list[int]], dict[int, list[int]]] | None = None
        self.swap_seconds: Callable[[], float] | None = None
        self.timer: StepTimer | None = None
        self._batch = batch
        self._in_flight = in_flight
        self._received = False

    def wait(self) -> StepResult:
        """Waits for the device: the result of the plan, whose tokens are in the token table from now on."""
        if not self._in_flight or self._in_flight[0] is not self:
            raise RuntimeError(f"step {self.result.step} is not the oldest one in flight: wait in order, and once")
        self._in_flight.popleft()
        start, result = time.perf_counter(), self.result
        for seq_id, (first, scored) in self.prompts.items():
            extra = self._extra(seq_id)
            extra.prompt_start = first
            extra.prompt_logprobs = [position for logprobs in scored for position in logprobs.wait()]
        for seq_id, vector in self.pooled.items():
            self._extra(seq_id).pooled = vector.tobytes()
        for seq_id, message in self.failed.items():
            self._extra(seq_id).error = message
        self.receive()
        if self.timer is not None:
            result.device_seconds, result.idle_seconds = self.timer.wait()
        result.seconds = max(result.seconds + time.perf_counter() - start, result.device_seconds)
        if self.swap_seconds is not None:
            result.swap_seconds = min(self.swap_seconds(), result.seconds - result.device_seconds)
        return result

    def receive(self) -> None:
        """Waits for the step's tokens alone; from now on they are in the token table."""
        if self.sampled is None or self._received:
            return
        self._received = True
        result, output = self.result, self.sampled.sample.wait()
        if self.sampled.drafted is not None:
            self._accept(self.sampled.drafted, output)
        else:
            result.token_ids = output.token_ids.tolist()
            self._batch.fill(self.sampled.new, output.token_ids)
            for i, logprobs in output.logprobs.items():
                self._extra(result.seq_ids[i]).logprobs = [logprobs]
            for i, message in output.errors.items():
                self._extra(result.seq_ids[i]).error = message
        if self.find_forced is not None:
            result.forced_tokens = self.find_forced(result.seq_ids)

    def _accept(self, drafted: DraftedTokens, output: SamplerOutput) -> None:
        """Accepts the sampled tokens that agree with the drafts, and the token after them."""
        result, start = self.result, 0
        accepted = drafted.accept(output.token_ids.tolist())
        for seq_id, tokens, count in zip(result.seq_ids, accepted, drafted.counts.tolist(), strict=True):
            taken = range(start, start + len(tokens))
            failed = next((i for i in taken if i in output.errors), None)
            if failed is not None:
                taken = range(start, failed + 1)
                self._extra(seq_id).error = output.errors[failed]
                del tokens[len(taken) :]
            result.token_ids += tokens
            result.num_tokens.append(len(tokens))
            self._batch.accept(seq_id, tokens)
            if logprobs := [output.logprobs[i] for i in taken if i in output.logprobs]:
                self._extra(seq_id).logprobs = logprobs
            start += count

    def _extra(self, seq_id: int) -> SequenceResult:
        return self.result.extras.setdefault(seq_id, SequenceResult())


class PromptLogprobs:
    """Scores the prompts of the sequences that ask for ``prompt_logprobs``."""

    def __init__(self, batch: InputBatch, sampler: Sampler, kernels: Kernels, vocab_size: int) -> None:
        self._batch, self._sampler, self._kernels, self._vocab_size = batch, sampler, kernels, vocab_size
        #: By sequence id: number of most likely tokens to return at each position.
        self._counts: dict[int, int] = {}

    def add(self, sequence: NewSequence) -> None:
        if sequence.task.prompt_logprobs is not None:
            self._counts[sequence.seq_id] = sequence.task.prompt_logprobs

    def forget(self, seq_id: int) -> None:
        self._counts.pop(seq_id, None)

    def compute(self, model: Network, inputs: StepInputs, hidden: Array, step: QueuedStep) -> None:
        """Queues the logprobs of the prompt tokens that follow the positions computed in this step.

        ``hidden``: the step's hidden states, [T, E].
        """
        if not self._counts:
            return
        table = self._batch.tokens
        offsets = inputs.arrays["query_start_loc"]
        for i, seq_id in enumerate(inputs.seq_ids):
            count = self._counts.get(seq_id)
            if count is None:
                continue
            row, num_prompt = int(inputs.rows[i]), int(table.num_prompt[inputs.rows[i]])
            # Virtual tokens of an adapter have no logprobs, nor has the token after them.
            virtual = int(np.count_nonzero(table.ids[row, :num_prompt] >= self._vocab_size))
            start = max(int(inputs.starts[i]), virtual)
            stop = min(int(inputs.ends[i]), num_prompt - 1)  # the token after the last one is generated
            scored = []
            slot = int(self._batch.adapters[row])
            for low in range(start, stop, _PROMPT_ROWS):
                high = min(low + _PROMPT_ROWS, stop)
                first = int(offsets[i]) + low - int(inputs.starts[i])
                slots = np.full(high - low, slot, np.int32)
                self._kernels.adapters.use(self._kernels.wrap(slots) if slot >= 0 else None)
                logits = model.logits(hidden[first : first + high - low])
                scored.append(self._sampler.start_prompt_logprobs(logits, table.ids[row, low + 1 : high + 1], count))
            if scored:
                step.prompts[seq_id] = start + 1, scored
