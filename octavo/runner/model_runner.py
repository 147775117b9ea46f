"""One worker's step: apply the plan to the rows, run the network, sample."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np

from octavo.core.errors import SequenceError
from octavo.core.plan import StepPlan, StepResult
from octavo.core.startup import WorkerFacts
from octavo.kernels.cache import LayerCache
from octavo.kernels.forward_batch import Forward, ForwardBatch, ForwardOutput
from octavo.models.sizes import weight_bytes
from octavo.runner.alignment import Alignment
from octavo.runner.context_encoder import ContextEncoder
from octavo.runner.contexts import Contexts
from octavo.runner.device_batch import SampledTokens
from octavo.runner.image_tokens import ImageTokens
from octavo.runner.input_batch import InputBatch
from octavo.runner.loaded_model import LoadedModel
from octavo.runner.network_drafter import add_drafts
from octavo.runner.pending import QueuedStep
from octavo.runner.pooling import Pooling
from octavo.runner.prompt_logprobs import PromptLogprobs
from octavo.runner.rotary_positions import RotaryPositions
from octavo.runner.sleep import WeightSleep
from octavo.runner.step_inputs import StepInputs
from octavo.runner.step_sampler import StepSampler


class ModelRunner:
    """Computes steps with a loaded model. Owns the KV cache tensors and the rows of running sequences."""

    def __init__(
        self, loaded: LoadedModel, num_blocks: list[int], num_host_blocks: list[int], max_model_len: int
    ) -> None:
        """Allocates the KV cache, on device and host, and the rows for sequences of up to ``max_model_len`` tokens.

        The numbers of blocks are those of each KV group, in the order of ``KVLayers.groups``.
        """
        self.loaded = loaded
        with loaded.mode():
            self._make(num_blocks, num_host_blocks, max_model_len)

    def _make(self, num_blocks: list[int], num_host_blocks: list[int], max_model_len: int) -> None:
        loaded = self.loaded
        options, layers = loaded.options, loaded.layers
        self.device_name, self.clock = loaded.device.name, loaded.clock
        self._device, self._kernels, self._drafter = loaded.device, loaded.kernels, loaded.drafter
        self._prompt_adapters = loaded.prompt_adapters
        self._image_tokens: ImageTokens | None = None
        if loaded.config.image_facts is not None:
            self._image_tokens = ImageTokens(loaded.images, loaded.config.vocab_size, options.num_virtual_tokens)
        sizes = [size for size, _ in layers.group_bytes()]
        with loaded.timed("KV cache"):
            self._cache = loaded.device.cache_engine(
                loaded.kernels, layers.make, layers.make_host, sizes, num_blocks, num_host_blocks
            )
        #: Bytes of the KV cache on the device, and on the host.
        self._cache_bytes = int(np.dot(num_blocks, sizes)), int(np.dot(num_host_blocks, sizes))
        self._max_model_len = max_model_len
        with loaded.timed("tables of positions"):
            loaded.network.extend_positions(max_model_len)
        samples = loaded.ranks.layout.is_last_stage
        contexts = None
        if (longest := loaded.config.longest_input(max_model_len)) is not None:
            contexts = Contexts(options.max_num_seqs, longest, options.block_size)
        self._batch = InputBatch(
            options.max_num_seqs,
            max_model_len,
            options.block_size,
            num_blocks,
            samples=samples,
            contexts=contexts,
            rotary=RotaryPositions(options.max_num_seqs) if loaded.config.rope.sections else None,
        )
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
        self._prompts = PromptLogprobs(self._batch, self._sampler, self._kernels, loaded.config.vocab_size)
        self._pooling = Pooling(loaded) if samples else None
        self._alignment = Alignment(loaded)
        self._in_flight: deque[QueuedStep] = deque()
        #: Whether forced tokens are appended. A sequence may not be planned ahead then, before they are known.
        ahead = options.pipeline_parallel_size == 1 and options.plans_ahead(self.device_name)
        jumps = options.jump_forward and not ahead
        self._step_sampler = StepSampler(self._batch, self._sampler, self._in_flight, jumps=jumps)
        self._weights = WeightSleep(loaded)

    def _capture(self) -> Forward:
        """The network, prepared for steps; the backend may record addresses of weights and KV cache here."""
        caches = self._caches()
        if self._encoder is not None:
            self._encoder.capture(caches)
        # Weak: what is captured may be the kernels', and a cycle would keep the weights until a garbage collection.
        loaded = weakref.proxy(self.loaded)
        return self._kernels.capture(
            lambda batch: loaded.forward(batch, caches), self.loaded.largest_batch(self._max_model_len)
        )

    def _caches(self) -> list[LayerCache]:
        """Of the network's layers."""
        return self.loaded.layers.split(self._cache.device)[0]

    def startup_facts(self) -> WorkerFacts:
        """What this worker got."""
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

    def sleep(self, level: int) -> int:
        """Frees memory until ``wake_up``: bytes. The content of the KV cache is lost.

        Level 1 frees the KV cache, and both free weights as ``WeightSleep.sleep`` says.

        There may be no sequence, and no step may run meanwhile. While it sleeps at level 1, level 2 may follow.
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
        """Restores these parts; whether all are there now, so that it is awake. If it fails it can be repeated.

        Raises:
            WeightError: after level 2, the checkpoint cannot be read any more.
        """
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
        """Seconds to move one block between device and host; see ``CacheEngine.measure_swap``."""
        with self.loaded.mode():
            return self._cache.measure_swap()

    def submit(self, plan: StepPlan, sampled: dict[int, list[int]] | None = None) -> QueuedStep:
        """Queues a step's work on the device. An exception means that the step failed; errors of one sequence are in
        its result.

        Further steps may be in flight, and the plan may schedule sequences that sample in them: their tokens then go
        from step to step on the device. Where the host must know a token before the next is sampled (penalties, bad
        words, processors), it is waited for when the network's forward is queued. While a sequence's token is pending,
        the plan may not fork it, append to it, or follow its unverified drafts.

        ``sampled``: tokens by sequence id that the last pipeline stage has sampled since, for a stage that does not.

        Raises:
            RuntimeError: the plan needs a token that is not known yet.
        """
        start, in_kernels = time.perf_counter(), self.clock.seconds
        with self.loaded.mode():
            if sampled:
                self._batch.append_sampled(sampled)
            result = StepResult(step=plan.step)
            self._forget(plan.forget)
            self.loaded.preparations.apply(plan, result)
            self._change_rows(plan)
            step = QueuedStep(result, self._batch, self._in_flight)
            step.swap_seconds = self._cache.move(plan)
            if self._drafter is not None:
                self._drafter.apply(plan)
            if self._encoder is not None and (wanted := [c for c in plan.contexts if c.encode is not None]):
                self._encoder.encode(wanted)
            if plan.num_drafts and self._drafter is not None:
                self._require_known(list(plan.num_drafts))
                plan = add_drafts(self._drafter, self._batch, plan, result, alone=self.loaded.ranks.group is None)
            inputs = self._batch.build(plan) if plan.seq_ids else None
            if inputs is not None:
                self._compute(inputs, step)
        self._in_flight.append(step)
        step.result.swaps = self._cache.take_swaps()
        step.result.seconds = time.perf_counter() - start
        step.result.kernel_seconds = self.clock.seconds - in_kernels
        return step

    def _compute(self, inputs: StepInputs, step: QueuedStep) -> None:
        """Runs the network, scores prompts, and samples."""
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
        if self._pooling is None:  # the rest is computed by other stages
            self._batch.advance(inputs, inputs.sampling)
            step.timer = stop_timer()
            return
        self._prompts.compute(self.loaded.network, inputs, output.hidden, step)
        self._pooling.compute(inputs, batch, output.hidden, step, self._caches)
        self._alignment.compute(inputs, batch, step, self._caches)
        if len(inputs.sampling):
            self._step_sampler.sample(inputs, output, step)
        else:
            self._batch.advance(inputs, inputs.sampling)
        if self._drafter is not None:
            sampled = None if step.sampled is None else step.sampled.sample.tokens
            self._drafter.after_step(inputs, batch, output, sampled)
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

    def _forget(self, seq_ids: list[int]) -> None:
        for seq_id in seq_ids:
            if self._batch.contexts is not None:
                self._batch.contexts.forget(seq_id)
            row = self._batch.forget(seq_id)
            if row is not None:
                self._sampler.remove(row)
                self._prompts.forget(seq_id)
                self._alignment.forget(seq_id)
                if self._pooling is not None:
                    self._pooling.forget(seq_id)
                if self._prompt_adapters is not None:
                    self._prompt_adapters.forget(seq_id)
                if self._image_tokens is not None:
                    self._image_tokens.forget(seq_id)

    def _change_rows(self, plan: StepPlan) -> None:
        for context in plan.contexts:
            if self._batch.contexts is None:
                raise RuntimeError("a plan has an encoder's output, but the network has no cross attention")
            self._batch.contexts.add(context)
        try:
            for sequence in plan.new:
                row = self._batch.add(sequence, self._slot_of(sequence.adapter))
                self._sampler.add(row, sequence, self.loaded.grammars.find(sequence.task))
                if self._drafter is not None:
                    self._drafter.add(row)
                if self._prompt_adapters is not None:
                    self._prompt_adapters.add(sequence, row, self._batch.tokens)
                if self._image_tokens is not None:
                    self._image_tokens.add(sequence)
                self._prompts.add(sequence)
                self._alignment.add(sequence)
                if self._pooling is not None:
                    self._pooling.add(sequence)
        except Exception as e:
            raise SequenceError.of(sequence.seq_id, e) from e
        if self._in_flight and (plan.forks or plan.new_tokens):
            self._require_known([fork.parent for fork in plan.forks] + list(plan.new_tokens))
        for fork in plan.forks:
            row = self._batch.fork(fork.parent, fork.child)
            self._sampler.fork(self._batch.row(fork.parent), row, fork.seed)
            if self._drafter is not None:
                self._drafter.fork(self._batch.row(fork.parent), row)
        for seq_id, token_ids in plan.new_tokens.items():
            self._batch.append(seq_id, token_ids)
        for change in plan.table_changes:
            self._batch.change_table(change)

    def _slot_of(self, adapter: str | None) -> int:
        if adapter is None or (self._prompt_adapters is not None and adapter in self._prompt_adapters):
            return -1
        loras = self.loaded.loras
        if loras is None:
            raise RuntimeError("a plan names an adapter, but adapters are not enabled")
        return loras.slot_of(adapter)

    def _require_known(self, seq_ids: list[int]) -> None:
        """Refuses a change that needs tokens of these sequences that are still on the device only."""
        unknown = {seq_id for step in self._in_flight for seq_id in step.result.seq_ids}.intersection(seq_ids)
        if unknown:
            raise RuntimeError(f"the last tokens of sequences {sorted(unknown)} are not known yet: wait for them first")


def _refuse_while_sleeping(batch: ForwardBatch) -> ForwardOutput:
    raise RuntimeError("the worker sleeps; wake_up must come before the next step")
