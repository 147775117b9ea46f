"""A GPU as the device of a worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from octavo.core.config import EngineConfig
from octavo.core.kv_groups import KVLayout
from octavo.core.model_config import ModelConfig
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.torch_memory import CudaMemory, in_use, measure_peak
from octavo.kernels.torch_send import PinnedSend
from octavo.layers.layer import Layer
from octavo.runner import memory
from octavo.runner.cuda_cache_engine import StreamedCacheEngine
from octavo.runner.cuda_sleep import put_to_sleep
from octavo.runner.cuda_timers import CudaTimers
from octavo.runner.device import Device, ProfiledStep, WeightsAway
from octavo.runner.device_batch import SampledTokens, to_device
from octavo.runner.memory import CacheSize, WorkerShare
from octavo.runner.pending import StepTimer
from octavo.runner.step_inputs import FlatInputs


class CudaDevice(Device):
    """A GPU: has memory of its own, and computes what is queued while the host goes on."""

    name = "cuda"
    cache_engine = staticmethod(partial(StreamedCacheEngine, cuda=torch.cuda))

    def __init__(self, options: EngineConfig, config: ModelConfig, share: WorkerShare) -> None:
        super().__init__(options, config, share)
        device = torch.device("cuda")
        self._memory = CudaMemory(device)
        self._send = PinnedSend(device)
        self._timers = CudaTimers(torch.cuda)

    def free_memory(self) -> int:
        """As the driver and torch count it."""
        return self._memory.free()

    def cache_size(
        self, layout: KVLayout, position_bytes: int, max_model_len: int, largest_step: Callable[[], ProfiledStep]
    ) -> CacheSize:
        """See ``memory.gpu_cache_size``; the largest step is measured, and what captured steps take."""
        step = largest_step()
        peak = measure_peak(step.run, self._memory)
        peak += step.graph_bytes(lambda: in_use(self._memory))
        total = self._memory.total()
        size = memory.gpu_cache_size(layout, self._options, total, peak, max_model_len, position_bytes)
        self._own_blocks = size.num_blocks
        return size

    def to_device(self, inputs: FlatInputs, pending: Sequence[SampledTokens]) -> ForwardBatch:
        """In one copy from pinned memory."""
        return to_device(inputs, pending, self._send, self.kernels)

    def put_to_sleep(self, networks: Sequence[Layer]) -> WeightsAway:
        """See ``Device``."""
        return put_to_sleep(networks)

    def release_memory(self) -> None:
        """Of torch's cache, too."""
        super().release_memory()
        torch.cuda.empty_cache()

    def start_timer(self) -> Callable[[], StepTimer | None]:
        """See ``Device``."""
        timer = self._timers.begin()
        return lambda: self._timers.end(timer)
