"""One worker's step: apply the plan to the rows, run the network, sample."""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch

from octavo.core.config import EngineConfig
from octavo.core.errors import SequenceError
from octavo.core.kv_groups import KVLayout
from octavo.core.kv_spec import KVGroup, group_layers
from octavo.core.logits_plugins import LogitsPlugins
from octavo.core.model_config import ModelConfig
from octavo.core.plan import StepPlan, StepResult
from octavo.core.startup import WorkerFacts
from octavo.kernels.forward_batch import BatchSize, ForwardBatch, ForwardOutput
from octavo.kernels.interface import Kernels, LayerCache
from octavo.kernels.timing import KernelClock
from octavo.layers.context import LayerContext
from octavo.models.network import Network
from octavo.models.sizes import outline, outline_network, weight_bytes
from octavo.runner import memory
from octavo.runner.adapters import LoraPreparer, describe_adapters, reserved_bytes
from octavo.runner.device import make_device
from octavo.runner.device_batch import SampledTokens
from octavo.runner.drafter import WorkerDrafter, add_drafts, find_drafter
from octavo.runner.grammars import GrammarPreparer
from octavo.runner.input_batch import InputBatch
from octavo.runner.kv_layers import KVLayers, find_groups
from octavo.runner.memory import WorkerShare
from octavo.runner.pending import QueuedStep
from octavo.runner.preparations import PreparerContext, WorkerPreparations, make_preparers
from octavo.runner.profile import LargestStep
from octavo.runner.prompt_adapters import PromptAdapters, virtual_token_bytes
from octavo.runner.prompt_results import PromptResults
from octavo.runner.ranks import Ranks
from octavo.runner.setup import load_network, make_context, make_kernels
from octavo.runner.sleep import SleepState, put_to_sleep, release_device_memory, wake_up
from octavo.runner.step_inputs import StepInputs
from octavo.runner.step_sampler import StepSampler
from octavo.sampling.sampler import Sampler, TokenTable


class ModelRunner:
    """Owns the weights, the KV cache tensors and the rows of one device."""

    def __init__(
        self,
        options: EngineConfig,
        config: ModelConfig,
        folder: Path,
        dtype: str,
        share: WorkerShare | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Loads the weights; ``make_cache`` must follow before the first step.

        ``share`` is what the worker may take of its machine, by default all; ``ranks`` its place among the workers, by
        default alone.

        Raises:
            InsufficientMemoryError: the weights do not fit.
            WeightError: a weight file is missing or wrong.
        """
        self.options = options
        self.config = config
        self.dtype = dtype
        share = share or WorkerShare()
        self._ranks = ranks = ranks or Ranks()
        layout = ranks.layout
        self._device = make_device(options, config, share)
        self.device = self._device.torch_device
        # Of the whole network: kernels that serve some of its layers only are not chosen.
        kv_specs = set(outline(config, dtype, kv_cache_dtype=options.kv_cache_dtype).kv_specs)
        drafts = find_drafter(options, config)
        if drafts is not None:
            draft_specs = outline(drafts.config, dtype, kv_cache_dtype=options.kv_cache_dtype).kv_specs
            find_groups(draft_specs, [spec.window for spec in kv_specs])
            kv_specs |= set(draft_specs)
        kernels = make_kernels(options, self.device, kv_specs, layout)
        if ranks.group is not None:
            kernels.join(ranks.group)
        threads = share.num_threads(options.num_threads)
        kernels.set_threads(threads, options.pin_threads)
        #: Those that compute the masks of grammars.
        self._num_threads = threads or len(os.sched_getaffinity(0))
        self._mode = nullcontext if kernels.computes_outside_torch else torch.inference_mode
        self.clock = KernelClock(kernels)
        # The clock forwards every call to the backend that it measures.
        self._kernels = cast(Kernels, self.clock) if options.time_kernels else kernels
        context = make_context(options, config, self._kernels, dtype, self.device, layout)
        # What the kernels do not have is refused before anything is read.
        kernels.check_dtype(context.dtype)
        for spec in kv_specs:
            kernels.block_bytes(spec, options.block_size)
        free = self._device.free_memory()
        memory.check_weights_fit(config, context, free)
        if drafts is not None:
            loaded = weight_bytes(outline_network(config, context))
            memory.check_weights_fit(drafts.config, drafts.context(context), free - loaded)
        self._folder, self._context = folder, context
        #: Seconds of each part of the start.
        self._startup_seconds: dict[str, float] = {}
        with self._timed("reading and packing weights"):
            #: Absent while a sleep of level 2 lasts.
            self.model = self._load_model()
        #: What proposes drafts with a network of its own.
        self._drafter: WorkerDrafter | None = None
        if drafts is not None:
            with self._timed("drafter"):
                self._drafter = drafts.load(context, self.model)
        self._prepare_for_requests(layout.is_last_stage)
        if options.enable_lora:
            self._device.reserved = reserved_bytes(options, self.model, share.free_memory())
        self._device.reserved += virtual_token_bytes(options, self.model, context)
        # The group that keeps most tokens first, as the block manager expects.
        groups = sorted(self._group_layers(context), key=lambda group: -(group.spec.window or config.max_position))
        draft_specs = [] if self._drafter is None else self._drafter.kv_specs
        self._layers = KVLayers(self._kernels, groups, options.block_size, draft_specs)
        if drafts is not None and self.device.type == "cpu":
            self._device.reserved += memory.activation_bytes(drafts.config, options)

    def _group_layers(self, context: LayerContext) -> list[KVGroup]:
        if context.layers is None:
            return group_layers(self.model.kv_specs)
        return group_layers(outline_network(self.config, replace(context, layers=None)).kv_specs, context.layers)

    def _prepare_for_requests(self, samples: bool) -> None:
        context = PreparerContext(self.options, self.config, self._folder, self._context, self.model, samples)
        preparers = make_preparers(context)
        self._preparations = WorkerPreparations(preparers)
        # What steps ask of them.
        self._grammars = cast(GrammarPreparer, preparers["grammar"])
        self._loras = cast(LoraPreparer | None, preparers.get("lora"))
        self._prompt_adapters = cast(PromptAdapters | None, preparers.get("prompt_adapter"))

    def _load_model(self) -> Network:
        return load_network(self.options, self.config, self._context, self._folder)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        """Counts the seconds of a part of the start."""
        start = time.perf_counter()
        yield
        self._startup_seconds[part] = time.perf_counter() - start

    def startup_facts(self) -> WorkerFacts:
        """What this worker got; to be asked after ``make_cache``."""
        on_device, on_host = self._cache_bytes
        return WorkerFacts(
            self._kernels.describe(),
            self._context.quantization,
            weight_bytes(self.model),
            on_device,
            on_host,
            dict(self._startup_seconds),
            describe_adapters(self.options, self.model),
            self._describe_drafter(),
        )

    def _describe_drafter(self) -> str:
        if self._drafter is None:
            return ""
        return f"{self._drafter.describe()}, {self._layers.drafter_share():.1%} of the KV cache"

    def cache_size(self, max_model_len: int, max_num_batched_tokens: int) -> tuple[int, list[int]]:
        """Tokens of the longest sequence, and blocks of each KV group, that the memory allows now.

        See ``Device.cache_size``; ``max_num_batched_tokens`` are those of all steps in flight.
        """
        with self._timed("memory profile"):
            size = self._device.cache_size(
                self._kv_layout(max_num_batched_tokens),
                self.model.position_bytes() + (self._drafter.position_bytes() if self._drafter is not None else 0),
                max_model_len,
                lambda: self._largest_step(max_model_len),
            )
        return size.max_model_len, size.num_blocks

    def num_host_blocks(self, max_model_len: int, max_num_batched_tokens: int) -> list[int]:
        """Blocks of each KV group for preempted requests that the memory allows now; see ``Device.num_host_blocks``."""
        return self._device.num_host_blocks(self._kv_layout(max_num_batched_tokens), max_model_len)

    def _kv_layout(self, max_num_batched_tokens: int) -> KVLayout:
        return KVLayout.of(self.kv_groups(), self.options, max_num_batched_tokens)

    def kv_groups(self) -> list[tuple[int, int | None]]:
        """For each group of layers with block tables of its own: bytes of a block in all its layers, and its window."""
        return self._layers.group_bytes()

    def _make_sampler(self, tokens: TokenTable) -> Sampler:
        vocab_size = self.config.vocab_size
        backend = self._kernels.make_sampling_backend(vocab_size)
        plugins = LogitsPlugins(self.options.logits_processors or ())
        return Sampler(vocab_size, tokens, backend, self._num_threads, plugins)

    def _largest_step(self, max_model_len: int) -> LargestStep:
        # No context is longer than what all of the memory could hold, whatever the model says.
        layout = self._kv_layout(self.options.token_budget)
        size = self._largest(max(1, layout.longest(self._device.free_memory(), max_model_len)))
        kernels, slots = self._kernels, self._context.max_loras
        return LargestStep(
            kernels, self._run_network, self._drafter, self._layers, self._make_sampler, size, self.device, slots
        )

    def _largest(self, max_model_len: int) -> BatchSize:
        """The largest batch that a step may have."""
        options = self.options
        tokens, sequences = options.token_budget, min(options.max_num_seqs, options.token_budget)
        # Every token may be sampled at, where drafts are verified.
        return BatchSize(tokens, sequences, tokens, max_model_len, options.block_size, len(self._layers.groups))

    def _run_network(self, batch: ForwardBatch, caches: list[LayerCache]) -> ForwardOutput:
        """This stage's part of the network; hidden states come from the stage before and go to the one after."""
        ranks, kernels = self._ranks, self._kernels
        kernels.begin_adapters(batch)
        if ranks.incoming is None:
            residual = self.model.embed(batch.token_ids)
        else:
            residual = kernels.host_call(ranks.incoming.receive, kernels.token_rows(batch, self.config.hidden_size))
        reader = None if self._drafter is None else self._drafter.make_reader()
        hidden = self.model.forward_layers(residual, batch, caches, reader)
        if ranks.outgoing is not None:
            return ForwardOutput(kernels.host_call(ranks.outgoing.send, hidden))
        logits, tokens = self.model.logits_or_tokens(kernels.take_sampled(hidden, batch))
        return ForwardOutput(hidden, logits, tokens, None if reader is None else reader.features)

    @torch.inference_mode()
    def make_cache(self, num_blocks: list[int], num_host_blocks: list[int], max_model_len: int) -> None:
        """Allocates the KV cache, on device and host, and the rows for sequences of up to ``max_model_len`` tokens.

        The numbers of blocks are those of each group, in the order of ``kv_groups``.
        """
        options, layers = self.options, self._layers
        sizes = [size for size, _ in self.kv_groups()]
        with self._timed("KV cache"):
            self._cache = self._device.cache_engine(
                self._kernels, layers.make, layers.make_host, sizes, num_blocks, num_host_blocks
            )
        #: Bytes of the KV cache on the device, and on the host.
        self._cache_bytes = tuple(int(np.dot(counts, sizes)) for counts in (num_blocks, num_host_blocks))
        self._max_model_len = max_model_len
        with self._timed("tables of positions"):
            self.model.extend_positions(max_model_len)
        samples = self._ranks.layout.is_last_stage
        self._batch = InputBatch(options.max_num_seqs, max_model_len, options.block_size, num_blocks, samples=samples)
        self._sampler = self._make_sampler(self._batch.tokens)
        with self._timed("recording the step"):
            self._capture()
            if self._drafter is not None:
                caches, largest = self._layers.split(self._cache.device)[1], self._largest(max_model_len)
                self._drafter.start(self._batch, self._sampler, self._device, largest, caches)
        self._prompts = PromptResults(self._batch, self._sampler, self._kernels, self.config.vocab_size)
        self._in_flight: deque[QueuedStep] = deque()
        #: Whether forced tokens are appended. A sequence may not be planned ahead then, before they are known.
        ahead = options.pipeline_parallel_size == 1 and options.plans_ahead(self.device.type)
        jumps = options.jump_forward and not ahead
        self._step_sampler = StepSampler(self._batch, self._sampler, self._in_flight, jumps=jumps)
        #: Weights of a GPU that are in host memory.
        self._weights_asleep: SleepState | None = None

    def _capture(self) -> None:
        """Prepares the network for steps; the backend may record addresses of weights and KV cache here."""
        caches = self._layers.split(self._cache.device)[0]
        # Weak: what is captured belongs to the runner, and a cycle would keep the weights until a garbage collection.
        runner = weakref.proxy(self)
        self._forward = self._kernels.capture(
            lambda batch: runner._run_network(batch, caches), self._largest(self._max_model_len)
        )

    @torch.inference_mode()
    def sleep(self, level: int) -> int:
        """Frees memory until ``wake_up``: bytes. The content of the KV cache is lost.

        Level 1 frees the KV cache and moves the weights of a GPU to host memory; on a CPU they are there already, and
        stay as they are packed. Level 2 drops the weights too: ``wake_up`` reads them again.

        There may be no sequence, and no step may run meanwhile. While it sleeps at level 1, level 2 may follow.
        """
        if self._in_flight:
            raise RuntimeError("a step is in flight: wait for it before sleep")
        freed = 0
        if self._forward is not _refuse_while_sleeping:
            # Drops the graphs: their memory is freed, and their addresses become invalid.
            self._forward = _refuse_while_sleeping
            if self._drafter is not None:
                self._drafter.release()
            self._cache.release()
            freed += sum(self._cache_bytes)
        try:
            if level == 2:
                freed += self._drop_weights()
            elif self._weights_asleep is None and self.device.type != "cpu":
                self._weights_asleep = put_to_sleep(self._networks())
                freed += self._weights_asleep.bytes_freed
        except BaseException:  # such as no host memory
            self.wake_up()
            raise
        release_device_memory(self.device)
        return freed

    def _drop_weights(self) -> int:
        if not hasattr(self, "model"):
            return 0
        freed = 0 if self._weights_asleep else sum(map(weight_bytes, self._networks()))
        self._weights_asleep = None
        self._preparations.detach()
        if self._drafter is not None:
            del self._drafter.network
        del self.model
        return freed

    def _networks(self) -> list[Network]:
        return [self.model] if self._drafter is None else [self.model, self._drafter.network]

    @torch.inference_mode()
    def wake_up(self) -> None:
        """Restores weights and KV cache; nothing happens if it is not sleeping. If it fails it can be repeated.

        Raises:
            WeightError: after level 2, the checkpoint cannot be read any more.
        """
        if self._forward is not _refuse_while_sleeping:
            return
        if not hasattr(self, "model"):
            self.model = self._load_model()
            self.model.extend_positions(self._max_model_len)
            if self._drafter is not None:
                self._drafter.load(self.model)
            self._preparations.attach(self.model)
        if self._weights_asleep is not None:
            wake_up(self._weights_asleep)
            self._weights_asleep = None
        self._cache.allocate()
        if self._drafter is not None:
            self._drafter.capture(self._layers.split(self._cache.device)[1])
        self._capture()

    @torch.inference_mode()
    def measure_swap(self) -> float:
        """Seconds to move one block between device and host; see ``CacheEngine.measure_swap``."""
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
        with self._mode():
            if sampled:
                self._batch.append_sampled(sampled)
            result = StepResult(step=plan.step)
            self._forget(plan.forget)
            self._preparations.apply(plan, result)
            self._change_rows(plan)
            step = QueuedStep(result, self._batch, self._in_flight)
            step.swap_seconds = self._cache.move(plan)
            if self._drafter is not None:
                self._drafter.apply(plan)
            if plan.num_drafts and self._drafter is not None:
                self._require_known(list(plan.num_drafts))
                plan = add_drafts(self._drafter, self._batch, plan, result, alone=self._ranks.group is None)
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
        self._cache.computes_over(inputs.arrays["block_tables"])
        batch = self._device.to_device(inputs, self._pending_tokens(inputs))
        # Not earlier: while the device waits for the host or for blocks to arrive, it counts as idle.
        stop_timer = self._device.start_timer()
        if self._prompt_adapters is not None:
            self._prompt_adapters.write_prefixes(self._kernels, self._layers.split(self._cache.device)[0])
        if self.options.screen_lm_head:
            batch.only_most_likely = self._step_sampler.wants_most_likely(inputs)
        output = self._forward(batch)
        if output.logits is None:
            self._batch.advance(inputs, inputs.sampling)
            step.timer = stop_timer()
            return
        self._prompts.compute(self.model, inputs, batch, output.hidden, step)
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
            row = self._batch.forget(seq_id)
            if row is not None:
                self._sampler.remove(row)
                self._prompts.forget(seq_id)
                if self._prompt_adapters is not None:
                    self._prompt_adapters.forget(seq_id)

    def _change_rows(self, plan: StepPlan) -> None:
        try:
            for sequence in plan.new:
                row = self._batch.add(sequence, self._slot_of(sequence.adapter))
                self._sampler.add(row, sequence, self._grammars.find(sequence.task))
                if self._drafter is not None:
                    self._drafter.add(row)
                if self._prompt_adapters is not None:
                    self._prompt_adapters.add(sequence, row, self._batch.tokens)
                self._prompts.add(sequence)
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
        if self._loras is None:
            raise RuntimeError("a plan names an adapter, but adapters are not enabled")
        return self._loras.slot_of(adapter)

    def _require_known(self, seq_ids: list[int]) -> None:
        """Refuses a change that needs tokens of these sequences that are still on the device only."""
        unknown = {seq_id for step in self._in_flight for seq_id in step.result.seq_ids}.intersection(seq_ids)
        if unknown:
            raise RuntimeError(f"the last tokens of sequences {sorted(unknown)} are not known yet: wait for them first")


def _refuse_while_sleeping(batch: ForwardBatch) -> ForwardOutput:
    raise RuntimeError("the worker sleeps; wake_up must come before the next step")
