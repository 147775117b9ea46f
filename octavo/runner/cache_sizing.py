"""How large a KV cache a worker has memory for, beside its weights and the largest step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from octavo.core.kv_groups import KVLayout
from octavo.core.plan import NewSequence
from octavo.core.request import Generate
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.cache import LayerCache
from octavo.kernels.forward_batch import BatchSize
from octavo.runner.loaded_model import LoadedModel
from octavo.runner.memory import largest_step
from octavo.sampling.sampler import TokenTable


class CacheSizing:
    """Answers for one worker; the engine takes the least that any of its workers has memory for."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def kv_groups(self) -> list[tuple[int, int | None]]:
        """For each group of layers with block tables of its own: bytes of a block in all its layers, and its window."""
        return self._loaded.layers.group_bytes()

    def cache_size(self, max_model_len: int, max_num_batched_tokens: int) -> tuple[int, list[int]]:
        """Tokens of the longest sequence, and blocks of each KV group, that the memory allows now.

        See ``Device.cache_size``; ``max_num_batched_tokens`` are those of all steps in flight.
        """
        loaded = self._loaded
        if not loaded.layers.groups:
            return max_model_len, []
        with loaded.timed("memory profile"):
            size = loaded.device.cache_size(
                self._layout(max_num_batched_tokens),
                loaded.network.position_bytes() + (loaded.drafter.position_bytes() if loaded.drafter else 0),
                max_model_len,
                lambda: self.largest_step(max_model_len),
            )
        return size.max_model_len, size.num_blocks

    def num_host_blocks(self, max_model_len: int, max_num_batched_tokens: int) -> list[int]:
        """Blocks of each KV group for preempted requests that the memory allows now; see ``Device.num_host_blocks``."""
        if not self._loaded.layers.groups:
            return []
        return self._loaded.device.num_host_blocks(self._layout(max_num_batched_tokens), max_model_len)

    def largest_step(self, max_model_len: int) -> LargestStep:
        """The largest step of sequences that long; none is longer than what all of the memory could hold."""
        layout = self._layout(self._loaded.options.token_budget)
        longest = max(1, layout.longest(self._loaded.device.free_memory(), max_model_len))
        return LargestStep(self._loaded, self._loaded.largest_batch(longest))

    def _layout(self, max_num_batched_tokens: int) -> KVLayout:
        images = self._loaded.config.image_facts
        least_chunk = 1 if images is None else max(1, images.whole)
        return KVLayout.of(self.kv_groups(), self._loaded.options, max_num_batched_tokens, least_chunk)


class LargestStep:
    """The largest step that a worker may be asked for, over a cache of one block, which overwrites itself there."""

    def __init__(self, loaded: LoadedModel, size: BatchSize) -> None:
        self._loaded, self._size = loaded, size

    def run(self) -> None:
        """As many tokens and sequences as allowed, which all sample at random and return logprobs."""
        with self._loaded.mode():
            self._run()

    def _run(self) -> None:
        loaded = self._loaded
        batch = largest_step(self._size, loaded.kernels, loaded.context.max_loras)
        caches, draft_caches = self._caches()
        if loaded.drafter is not None:
            loaded.drafter.forward(batch, draft_caches)
        output = loaded.forward(batch, caches)
        if output.logits is None:
            return
        rows = np.arange(len(batch.seq_lens))
        sampler = loaded.make_sampler(TokenTable(len(rows), 1))
        for row in rows.tolist():
            sampler.add(row, NewSequence(row, [0], 1, 0, Generate(SamplingParams(top_p=0.9, logprobs=1), row)))
        sampler.start(output.logits, rows).wait()

    def graph_bytes(self, in_use: Callable[[], int]) -> int:
        """Bytes of the device that captured steps will take beside eager ones; ``in_use`` tells those in use."""
        loaded, kernels = self._loaded, self._loaded.kernels
        with loaded.mode():
            caches, draft_caches = self._caches()
            size = kernels.graph_bytes(lambda batch: loaded.forward(batch, caches), self._size, in_use)
            if (drafter := loaded.drafter) is not None:
                size += kernels.graph_bytes(lambda batch: drafter.forward(batch, draft_caches), self._size, in_use)
            return size

    def _caches(self) -> tuple[list[LayerCache], list[LayerCache]]:
        layers = self._loaded.layers
        return layers.split(layers.make([1] * len(layers.groups)))
