"""The largest step that a worker may be asked for, run before there is a KV cache: what memory steps take."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from octavo.core.plan import NewSequence
from octavo.core.request import Generate
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.forward_batch import BatchSize, ForwardBatch, ForwardOutput
from octavo.kernels.interface import Kernels, LayerCache
from octavo.runner.drafter import WorkerDrafter
from octavo.runner.kv_layers import KVLayers
from octavo.runner.memory import largest_step
from octavo.sampling.sampler import Sampler, TokenTable


class LargestStep:
    """Steps over a cache of one block, which overwrite themselves there."""

    def __init__(
        self,
        kernels: Kernels,
        run_network: Callable[[ForwardBatch, list[LayerCache]], ForwardOutput],
        drafter: WorkerDrafter | None,
        layers: KVLayers,
        make_sampler: Callable[[TokenTable], Sampler],
        size: BatchSize,
        device: torch.device,
        num_slots: int,
    ) -> None:
        """``num_slots``: of adapters, which all sequences have if there are any."""
        self._kernels, self._run_network, self._drafter = kernels, run_network, drafter
        self._layers, self._make_sampler = layers, make_sampler
        self._size, self._device, self._num_slots = size, device, num_slots

    @torch.inference_mode()
    def run(self) -> None:
        """As many tokens and sequences as allowed, which all sample at random and return logprobs."""
        batch = largest_step(self._size, self._device, self._num_slots)
        caches, draft_caches = self._caches()
        if self._drafter is not None:
            self._drafter.forward(batch, draft_caches)
        output = self._run_network(batch, caches)
        if output.logits is None:
            return
        rows = np.arange(len(batch.seq_lens))
        sampler = self._make_sampler(TokenTable(len(rows), 1))
        for row in rows.tolist():
            sampler.add(row, NewSequence(row, [0], 1, 0, Generate(SamplingParams(top_p=0.9, logprobs=1), row)))
        sampler.start(output.logits, rows).wait()

    @torch.inference_mode()
    def graph_bytes(self, in_use: Callable[[], int]) -> int:
        """Bytes of the device that captured steps will take beside eager ones; ``in_use`` tells those in use."""
        caches, draft_caches = self._caches()
        found = self._kernels.graph_bytes(lambda batch: self._run_network(batch, caches), self._size, in_use)
        if (drafter := self._drafter) is not None:
            found += self._kernels.graph_bytes(lambda batch: drafter.forward(batch, draft_caches), self._size, in_use)
        return found

    def _caches(self) -> tuple[list[LayerCache], list[LayerCache]]:
        return self._layers.split(self._layers.make([1] * len(self._layers.groups)))
