"""One worker's step: apply the plan to the rows, run the network, sample."""

from __future__ import annotations

import time
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from octavo.core.config import EngineConfig
from octavo.core.model_config import ModelConfig
from octavo.core.plan import SequenceResult, StepPlan, StepResult
from octavo.kernels import load_kernels
from octavo.kernels.interface import Kernels, LayerCache
from octavo.kernels.timing import KernelClock
from octavo.layers.context import LayerContext
from octavo.loader.model import load_model
from octavo.loader.resolve import gguf_source
from octavo.runner import memory
from octavo.runner.cache_engine import CacheEngine
from octavo.runner.input_batch import InputBatch, StepInputs
from octavo.runner.sampler import Sampler

#: Rows of logits computed at once for prompt logprobs; bounds their memory at 128 x vocabulary x 4 bytes.
_PROMPT_LOGPROB_ROWS = 128


class ModelRunner:
    """Owns the weights, the KV cache tensors and the rows of one device."""

    def __init__(self, options: EngineConfig, config: ModelConfig, folder: Path, dtype: str) -> None:
        """Loads the weights; ``make_cache`` must follow before the first step.

        Raises:
            InsufficientMemoryError: the weights do not fit.
            WeightError: a weight file is missing or wrong.
        """
        memory.check_weights_fit(config, dtype)
        self.options = options
        self.config = config
        self.dtype = dtype
        kernels = load_kernels(options.kernels, "cpu", head_dim=config.head_dim)
        kernels.set_threads(options.num_threads)
        self.clock = KernelClock(kernels)
        # The clock passes every call on, so it stands in for the backend that it measures.
        self._kernels = cast(Kernels, self.clock) if options.time_kernels else kernels
        cache_dtype = dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
        self._cache_dtype: torch.dtype = getattr(torch, cache_dtype)
        context = LayerContext(
            kernels=self._kernels, dtype=getattr(torch, dtype), device="cpu", quantization=options.quantization
        )
        gguf = gguf_source(options.model) if options.quantization == "gguf" else None
        self.model = load_model(folder, config, context, gguf)

    def num_blocks(self, max_model_len: int) -> int:
        """KV cache blocks that the memory allows now; see ``memory.num_blocks``."""
        block_bytes = self._block_bytes()
        free = memory.free_for_caches(self.config, self.options)
        # This device computes in the host's memory, so what is swapped out only moves within it. Host blocks take no
        # memory before they are used; given away here, it would be missing just when the cache is full.
        host_blocks = memory.num_host_blocks(self.config, self.options, block_bytes, free)
        return memory.num_blocks(self.options, block_bytes, free - host_blocks * block_bytes, max_model_len)

    def num_host_blocks(self) -> int:
        """Blocks for preempted requests that the memory allows now; see ``memory.num_host_blocks``."""
        free = memory.free_for_caches(self.config, self.options)
        return memory.num_host_blocks(self.config, self.options, self._block_bytes(), free)

    def _block_bytes(self) -> int:
        """Bytes of a block in all layers."""
        c = self.config
        return c.num_layers * self._kernels.block_bytes(
            self.options.block_size, c.num_kv_heads, c.head_dim, self._cache_dtype
        )

    @torch.inference_mode()
    def make_cache(self, num_blocks: int, num_host_blocks: int, max_model_len: int) -> None:
        """Allocates the KV cache, on device and host, and the rows for sequences of up to ``max_model_len`` tokens."""
        c, block_size, kernels = self.config, self.options.block_size, self._kernels

        def make(blocks: int) -> list[LayerCache]:
            return kernels.make_cache(c.num_layers, blocks, block_size, c.num_kv_heads, c.head_dim, self._cache_dtype)

        self._cache = CacheEngine(kernels, make, self._block_bytes(), num_blocks, num_host_blocks)
        caches, model = self._cache.device, self.model
        self._forward = self._kernels.capture(
            lambda token_ids, batch: model.forward(token_ids, caches, batch), self.options.max_num_batched_tokens
        )
        self._batch = InputBatch(self.options.max_num_seqs, max_model_len, self.options.block_size)
        self._sampler = Sampler(c.vocab_size, self._batch.tokens)
        self._wants_prompt_logprobs: dict[int, int] = {}

    @torch.inference_mode()
    def measure_swap(self) -> float:
        """Seconds to move one block between device and host; see ``CacheEngine.measure_swap``."""
        return self._cache.measure_swap()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step. An error of one sequence is part of the result; an exception means that the step failed."""
        start = time.perf_counter()
        in_kernels = self.clock.seconds
        self._forget(plan.forget)
        result = StepResult(step=plan.step, swap_seconds=self._cache.move(plan))
        self._change_rows(plan)
        if plan.seq_ids:
            inputs = self._batch.build(plan)
            hidden = self._forward(inputs.token_ids, inputs.attention)
            if self._wants_prompt_logprobs:
                self._add_prompt_logprobs(plan, inputs, hidden, result)
            self._sample(plan, inputs, hidden, result)
        result.seconds = time.perf_counter() - start
        result.kernel_seconds = self.clock.seconds - in_kernels
        return result

    def _forget(self, seq_ids: list[int]) -> None:
        for seq_id in seq_ids:
            row = self._batch.forget(seq_id)
            if row is not None:
                self._sampler.remove(row)
                self._wants_prompt_logprobs.pop(seq_id, None)

    def _change_rows(self, plan: StepPlan) -> None:
        for sequence in plan.new:
            row = self._batch.add(sequence)
            self._sampler.add(row, sequence)
            if sequence.params.prompt_logprobs is not None:
                self._wants_prompt_logprobs[sequence.seq_id] = sequence.params.prompt_logprobs
        for fork in plan.forks:
            row = self._batch.fork(fork.parent, fork.child)
            self._sampler.fork(self._batch.row(fork.parent), row, fork.seed)
        for seq_id, token in plan.last_tokens:
            self._batch.set_last_token(seq_id, token)
        for change in plan.table_changes:
            self._batch.change_table(change)

    def _sample(self, plan: StepPlan, inputs: StepInputs, hidden: Tensor, result: StepResult) -> None:
        """Samples for the sequences that have come to their last known token, and for those just forked from them."""
        chosen, forked = inputs.sampling, inputs.forked
        rows, tokens = inputs.rows[chosen], np.zeros(0, dtype=np.int64)
        if len(chosen):
            result.seq_ids = [plan.seq_ids[i] for i in chosen.tolist()]
            last = torch.from_numpy(inputs.offsets[1:][chosen] - 1)
            # Most often every row samples; indexing would only copy.
            logits = self.model.logits(hidden if len(chosen) == len(hidden) else hidden[last])
            if forked is not None:
                result.seq_ids += forked.seq_ids
                rows = np.concatenate([rows, forked.rows])
                # The sampler edits logits in place, so a child needs its own.
                logits = torch.cat([logits, logits[torch.from_numpy(forked.parents)]])
            output = self._sampler.sample(logits, rows)
            tokens = np.asarray(output.token_ids, dtype=np.int64)
            result.token_ids = tokens.tolist()
            for i, logprobs in output.logprobs.items():
                result.extras.setdefault(result.seq_ids[i], SequenceResult()).logprobs = logprobs
            for i, message in output.errors.items():
                result.extras.setdefault(result.seq_ids[i], SequenceResult()).error = message
        self._batch.advance(inputs, rows, tokens)

    def _add_prompt_logprobs(self, plan: StepPlan, inputs: StepInputs, hidden: Tensor, result: StepResult) -> None:
        """Scores the prompt tokens that follow the positions computed in this step."""
        table = self._batch.tokens
        for i, seq_id in enumerate(plan.seq_ids):
            count = self._wants_prompt_logprobs.get(seq_id)
            if count is None:
                continue
            row, start = int(inputs.rows[i]), int(inputs.starts[i])
            stop = min(int(inputs.ends[i]), int(table.num_prompt[row]) - 1)  # the last one's successor is generated
            scored = []
            for low in range(start, stop, _PROMPT_LOGPROB_ROWS):
                high = min(low + _PROMPT_LOGPROB_ROWS, stop)
                first = int(inputs.offsets[i]) + low - start
                logits = self.model.logits(hidden[first : first + high - low])
                scored += self._sampler.prompt_logprobs(logits, table.ids[row, low + 1 : high + 1], count)
            if scored:
                extra = result.extras.setdefault(seq_id, SequenceResult())
                extra.prompt_start, extra.prompt_logprobs = start + 1, scored
