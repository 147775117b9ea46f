"""One worker's step: ``ModelRunner`` applies the plan to the rows, runs the network and samples."""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from octavo.core.errors import SequenceError
from octavo.core.plan import SequenceResult, StepPlan, StepResult
from octavo.kernels.forward_batch import Forward, ForwardBatch, ForwardOutput
from octavo.process.startup import WorkerFacts
from octavo.runner.block_store import make_block_store
from octavo.runner.device import SampledTokens, WeightSleep
from octavo.runner.input_batch import DraftedTokens, InputBatch, NewTokens, StepInputs
from octavo.runner.row_feature import RowContext
from octavo.sampling.logits_processors import RowFailure

if TYPE_CHECKING:
    from octavo.runner.device import StepTimer
    from octavo.runner.loaded_model import LoadedModel
    from octavo.sampling.logits_processors import PendingSamplerOutput, SamplerOutput

logger = logging.getLogger("octavo")


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
        self._device, self._kernels = loaded.device, loaded.kernels
        self._max_model_len, options, layers = max_model_len, loaded.options, loaded.layers
        with loaded.mode():
            sizes = [shape.block_bytes for shape in layers.shapes()]
            with loaded.timed("KV cache"):
                self._cache = loaded.device.cache_engine(layers, num_blocks, num_host_blocks)
            self._store = self._cache.store = make_block_store(loaded) if options.has_stores else None
            self._cache_bytes = int(np.dot(num_blocks, sizes)), int(np.dot(num_host_blocks, sizes))
            with loaded.timed("tables of positions"):
                loaded.network.extend_positions(max_model_len)
            self._samples = loaded.ranks.layout.is_last_stage
            self._features = loaded.make_features(max_model_len)
            shape = options.max_num_seqs, max_model_len, options.block_size, num_blocks
            self._batch = InputBatch(*shape, samples=self._samples, features=self._features)
            self._sampler = loaded.make_sampler(self._batch.tokens)
            #: Steps whose result was not waited for, oldest first.
            self._in_flight: deque[QueuedStep] = deque()
            with loaded.timed("recording the step"):
                self._largest, batch = loaded.largest_batch(max_model_len), weakref.proxy(self._batch)
                worker = RowContext(batch, self._sampler, self._device, self._cache, max_model_len, self._largest)
                for feature in self._features:
                    feature.start(worker)
                self._forward = self._capture()
            self._may_leave_rows = self._samples and loaded.generates and loaded.network.query_only_from is not None
            self._weights = WeightSleep(loaded)

    def _capture(self) -> Forward:
        """Prepares the network for steps; the backend may record addresses of weights and KV cache here."""
        # Weak: the kernels may own the captured function, and a cycle would keep the weights until they are collected.
        loaded, caches = weakref.proxy(self.loaded), self._cache.network_caches
        for feature in self._features:
            feature.capture()
        forward = lambda batch: loaded.forward(batch, caches)  # noqa: E731
        return self._kernels.capture(forward, self._largest) if loaded.network.is_recordable else forward

    def startup_facts(self) -> WorkerFacts:
        return self.loaded.startup_facts(*self._cache_bytes)

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
            for feature in self._features:
                feature.begin(plan)
            for seq_id in plan.forget:
                row = self._batch.forget(seq_id)
                if row is not None:
                    self._sampler.remove(row)
            store = self._store
            if store is None:
                self.loaded.preparations.apply(plan, result)
            else:
                store.begin(plan.fetch)
                self.loaded.preparations.apply(plan, result, store.pending)
            self._change_rows(plan)
            step = QueuedStep(result, self._batch, self._in_flight)
            step.swap_seconds = self._cache.move(plan)
            if store is not None:
                result.not_stored = store.take_refused()
                store.drop(plan.drop_fetches)
            for feature in self._features:
                plan = feature.change_plan(plan, result)
            if plan.seq_ids:
                self._compute(self._batch.build(plan), step)
            if store is not None:  # at last, as fetches end while the step computes
                store.report(result)
        self._in_flight.append(step)
        result.swaps = self._cache.take_swaps()
        result.seconds = time.perf_counter() - start
        result.kernel_seconds = self.loaded.clock.seconds - in_kernels
        return step

    def _compute(self, inputs: StepInputs, step: QueuedStep) -> None:
        for feature in self._features:
            feature.before_step(inputs)
        self._cache.computes_over(inputs.arrays["block_tables"], inputs.arrays["cross_tables"])
        batch = self._device.to_device(inputs, self._pending_tokens(inputs))
        if self._may_leave_rows and not inputs.all_sampled and not any(f.reads_hidden() for f in self._features):
            batch.sampled_only = self._device.to_device(inputs.sampled_only(), ())
        # Not earlier: while the device waits for the host or for blocks to arrive, it counts as idle.
        stop_timer = self._device.start_timer()
        output = self._forward(batch)
        if self._samples and len(inputs.sampling):
            self._sample(inputs, output, step)
        else:
            self._batch.advance(inputs, inputs.sampling)
        for feature in self._features:
            feature.after_step(inputs, batch, output, step)
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

    # --- rows -------------------------------------------------------------------------------------------------------

    def _change_rows(self, plan: StepPlan) -> None:
        batch = self._batch
        try:
            for sequence in plan.new:
                self._sampler.add(batch.add(sequence), sequence)
        except Exception as e:
            raise SequenceError.of(sequence.seq_id, e) from e
        if self._in_flight and (plan.forks or plan.new_tokens or plan.num_drafts):
            self._require_known([*(fork.parent for fork in plan.forks), *plan.new_tokens, *plan.num_drafts])
        for fork in plan.forks:
            row = batch.fork(fork.parent, fork.child)
            self._sampler.fork(batch.row(fork.parent), row, fork.seed)
        for seq_id, token_ids in plan.new_tokens.items():
            batch.append(seq_id, token_ids)
        for change in plan.table_changes:
            batch.change_table(change)

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
            for feature in self._features:
                feature.release()
            self.loaded.preparations.release()
        if self._cache.device:
            self._cache.release()
            freed += sum(self._cache_bytes)
        if self._store is not None:
            self._store.free()
            if level == 2:
                self._store.distrust_weights()
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
                is_new = not self.loaded.has_weights
                self._weights.wake_up(self._max_model_len)
                if is_new and self._store is not None:
                    self._store.trust_weights()
            if "kv_cache" in parts and not self._cache.device:
                self._cache.allocate()
            if self._weights.are_away or not self._cache.device:
                return False
            self._forward = self._capture()
        return True

    def distrust_weights(self, reason: str) -> None:
        """Blocks of weights that may not be the checkpoint's are neither stored nor fetched."""
        if self._store is not None:
            self._store.distrust_weights(reason)

    def close_stores(self) -> None:
        """Writes blocks that wait to be stored, within ``CLOSE_SECONDS``, and closes the KV stores; no step follows."""
        if self._store is not None:
            self._store.close()

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
        #: Take results of the step: once its tokens are in the token table, and before ``wait`` returns.
        self.on_tokens: list[Callable[[], None]] = []
        self.on_wait: list[Callable[[], None]] = []
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
        for take in self.on_wait:
            take()
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
                self.extra(result.seq_ids[i]).logprobs = [logprobs]
            for i, failure in output.errors.items():
                self.extra(result.seq_ids[i]).error = failure
        for take in self.on_tokens:
            take()

    def _accept(self, drafted: DraftedTokens, output: SamplerOutput) -> None:
        """Accepts the sampled tokens that agree with the drafts, and the token after them."""
        result, start = self.result, 0
        accepted = drafted.accept(output.token_ids.tolist())
        for seq_id, tokens, count in zip(result.seq_ids, accepted, drafted.counts.tolist(), strict=True):
            taken = range(start, start + len(tokens))
            failed = next((i for i in taken if i in output.errors), None)
            if failed is not None:
                taken = range(start, failed + 1)
                self.extra(seq_id).error = output.errors[failed]
                del tokens[len(taken) :]
            result.token_ids += tokens
            result.num_tokens.append(len(tokens))
            self._batch.accept(seq_id, tokens)
            if logprobs := [output.logprobs[i] for i in taken if i in output.logprobs]:
                self.extra(seq_id).logprobs = logprobs
            start += count

    def extra(self, seq_id: int) -> SequenceResult:
        """The result of one sequence besides its tokens."""
        return self.result.extras.setdefault(seq_id, SequenceResult())
