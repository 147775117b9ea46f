"""What differs between devices: counting memory, sending a step's inputs, moving blocks, timing steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from octavo.core.config import EngineConfig
from octavo.core.kv_groups import KVLayout
from octavo.core.model_config import ModelConfig
from octavo.kernels import resolve_device
from octavo.kernels.forward_batch import ForwardBatch
from octavo.runner import memory
from octavo.runner.cache_engine import CacheEngine, StreamedCacheEngine
from octavo.runner.device_batch import PinnedSend, SampledTokens, send_nowhere, to_device
from octavo.runner.memory import CacheSize, CudaMemory, WorkerShare
from octavo.runner.pending import CudaTimer, CudaTimers
from octavo.runner.step_inputs import FlatInputs


class ProfiledStep(Protocol):
    """The largest step, run to see what memory it takes."""

    def run(self) -> None:
        """Runs it eagerly."""

    def graph_bytes(self, in_use: Callable[[], int]) -> int:
        """Bytes of the device that captured steps will take beside eager ones; ``in_use`` tells those in use."""


class Device(ABC):
    """The device of one worker: everything in which runners on different devices differ."""

    #: What moves blocks on the device, and to the host and back.
    cache_engine: type[CacheEngine]

    def __init__(self, name: str, options: EngineConfig, config: ModelConfig, share: WorkerShare) -> None:
        """``name`` is torch's; ``share`` is the worker's of its machine."""
        self.torch_device = torch.device(name)
        self._options, self._config, self._share = options, config, share
        #: Bytes of host memory that are kept for adapters.
        self.reserved = 0
        #: KV cache blocks of each group in memory of the device's own.
        self._own_blocks: list[int] | None = None

    @abstractmethod
    def free_memory(self) -> int:
        """Bytes that weights may take."""

    @abstractmethod
    def cache_size(
        self, layout: KVLayout, position_bytes: int, max_model_len: int, largest_step: Callable[[], ProfiledStep]
    ) -> CacheSize:
        """The KV cache that fits beside the weights and the largest step.

        Each position of the longest sequence takes ``position_bytes`` beside it.

        Raises:
            InsufficientMemoryError: too little does; see ``memory.cache_size``.
        """

    def num_host_blocks(self, layout: KVLayout, max_model_len: int) -> list[int]:
        """Blocks of host memory for preempted requests; see ``memory.num_host_blocks``. ``cache_size`` comes first."""
        return self._host_blocks_within(self._free_for_caches(), layout, max_model_len)

    def _free_for_caches(self) -> int:
        """Bytes of the worker's share of the host that are free beside the largest step, once there are weights."""
        step = memory.activation_bytes(self._config, self._options)
        return max(0, self._share.free_memory() - step - self.reserved)

    def _host_blocks_within(self, free: int, layout: KVLayout, max_model_len: int) -> list[int]:
        workers, own = self._share.local_size, self._own_blocks
        return memory.num_host_blocks(layout, self._options, free, max_model_len, workers, own)

    @abstractmethod
    def to_device(self, inputs: FlatInputs, pending: Sequence[SampledTokens]) -> ForwardBatch:
        """The inputs of a step on the device, valid until the step is done."""

    @abstractmethod
    def start_timer(self) -> Callable[[], CudaTimer | None]:
        """Starts to time a step's work; the returned function is called when all of it is queued.

        It returns None if work is done when it is queued.
        """


class HostDevice(Device):
    """A CPU: computes in the host's memory, so inputs stay where they are."""

    cache_engine = CacheEngine

    def __init__(self, options: EngineConfig, config: ModelConfig, share: WorkerShare) -> None:
        super().__init__("cpu", options, config, share)
        #: Tensors over the arrays' own memory, kept while a step repeats the one before.
        self._last: tuple[FlatInputs, ForwardBatch] | None = None

    def free_memory(self) -> int:
        """The worker's share of what is free on the host."""
        return self._share.free_memory()

    def cache_size(
        self, layout: KVLayout, position_bytes: int, max_model_len: int, largest_step: Callable[[], ProfiledStep]
    ) -> CacheSize:
        """See ``memory.cache_size``; the largest step is estimated."""
        free = self._free_for_caches()
        # Swapping moves blocks within this memory, so the host blocks are subtracted although they are not touched
        # before they are used: otherwise memory would be short just when the cache is full.
        free -= layout.size(self._host_blocks_within(free, layout, max_model_len))
        return memory.cache_size(layout, self._options, free, max_model_len, position_bytes)

    def to_device(self, inputs: FlatInputs, pending: Sequence[SampledTokens]) -> ForwardBatch:
        """See ``Device``."""
        if pending:  # some tokens are not in the arrays
            return to_device(inputs, pending, send_nowhere)
        if self._last is not None and self._last[0] is inputs:
            batch = self._last[1]
            batch.max_seq_len = inputs.max_seq_len
        else:
            batch = to_device(inputs, (), send_nowhere)
            self._last = inputs, batch
        return batch

    def start_timer(self) -> Callable[[], CudaTimer | None]:
        """See ``Device``: a step is computed while it is submitted."""
        return _no_timer


class CudaDevice(Device):
    """A GPU: has memory of its own, and computes what is queued while the host goes on."""

    cache_engine = StreamedCacheEngine

    def __init__(self, options: EngineConfig, config: ModelConfig, share: WorkerShare) -> None:
        super().__init__("cuda", options, config, share)
        self._memory = CudaMemory(self.torch_device)
        self._send = PinnedSend(self.torch_device)
        self._timers = CudaTimers()

    def free_memory(self) -> int:
        """As the driver and torch count it."""
        return self._memory.free()

    def cache_size(
        self, layout: KVLayout, position_bytes: int, max_model_len: int, largest_step: Callable[[], ProfiledStep]
    ) -> CacheSize:
        """See ``memory.gpu_cache_size``; the largest step is measured, and what captured steps take."""
        step = largest_step()
        peak = memory.measure_peak(step.run, self._memory)
        peak += step.graph_bytes(lambda: memory.in_use(self._memory))
        total = self._memory.total()
        size = memory.gpu_cache_size(layout, self._options, total, peak, max_model_len, position_bytes)
        self._own_blocks = size.num_blocks
        return size

    def to_device(self, inputs: FlatInputs, pending: Sequence[SampledTokens]) -> ForwardBatch:
        """In one copy from pinned memory."""
        return to_device(inputs, pending, self._send)

    def start_timer(self) -> Callable[[], CudaTimer | None]:
        """See ``Device``."""
        timer = self._timers.begin()
        return lambda: self._timers.end(timer)


def make_device(options: EngineConfig, config: ModelConfig, share: WorkerShare) -> Device:
    """The device that ``options.device`` means.

    Raises:
        ConfigError: a GPU was asked for and torch sees none.
    """
    kind = CudaDevice if resolve_device(options.device) == "cuda" else HostDevice
    return kind(options, config, share)


def _no_timer() -> None:
    return None
