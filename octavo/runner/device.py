"""What differs between devices: counting memory, sending a step's inputs, moving blocks, timing steps."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from octavo.core.config import EngineConfig
from octavo.core.kv_groups import KVLayout
from octavo.core.model_config import ModelConfig
from octavo.kernels.arrays import Array
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Kernels
from octavo.layers.layer import Layer
from octavo.runner import memory
from octavo.runner.cache_engine import CacheEngine
from octavo.runner.device_batch import SampledTokens, to_device
from octavo.runner.memory import CacheSize, WorkerShare
from octavo.runner.pending import StepTimer
from octavo.runner.step_inputs import FlatInputs


class ProfiledStep(Protocol):
    """The largest step, run to see what memory it takes."""

    def run(self) -> None:
        """Runs it eagerly."""

    def graph_bytes(self, in_use: Callable[[], int]) -> int:
        """Bytes of the device that captured steps will take beside eager ones; ``in_use`` tells those in use."""


class WeightsAway(Protocol):
    """Weights whose memory on the device is free."""

    @property
    def bytes_freed(self) -> int:
        """Bytes of the device."""
        ...

    def wake_up(self) -> None:
        """Brings them back to the same arrays; if it fails it can be repeated."""
        ...


class Device(ABC):
    """The device of one worker: everything in which runners on different devices differ."""

    #: "cpu" or "cuda".
    name: str
    #: What computes on it, once it is chosen.
    kernels: Kernels

    #: What moves blocks on the device, and to the host and back.
    cache_engine: Callable[..., CacheEngine]

    def __init__(self, options: EngineConfig, config: ModelConfig, share: WorkerShare) -> None:
        """``share`` is the worker's of its machine."""
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

    def put_to_sleep(self, networks: Sequence[Layer]) -> WeightsAway | None:
        """Moves weights to the host's memory, if the device has memory of its own.

        No step may run, and no captured step be replayed, before they are woken up.
        """
        return None

    def release_memory(self) -> None:
        """Returns freed memory to its owner, for other programs; what was captured may wait for the collector."""
        gc.collect()

    @abstractmethod
    def start_timer(self) -> Callable[[], StepTimer | None]:
        """Starts to time a step's work; the returned function is called when all of it is queued.

        It returns None if work is done when it is queued.
        """


class HostDevice(Device):
    """A CPU: computes in the host's memory, so inputs stay where they are."""

    name = "cpu"
    cache_engine = CacheEngine

    def __init__(self, options: EngineConfig, config: ModelConfig, share: WorkerShare) -> None:
        super().__init__(options, config, share)
        #: Arrays over the inputs' own memory, kept while a step repeats the one before.
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
            return to_device(inputs, pending, self._wrap, self.kernels)
        if self._last is not None and self._last[0] is inputs:
            batch = self._last[1]
            batch.max_seq_len = inputs.max_seq_len
        else:
            batch = to_device(inputs, (), self._wrap, self.kernels)
            self._last = inputs, batch
        return batch

    def _wrap(self, arrays: Sequence[NDArray[Any]]) -> list[Array]:
        return [self.kernels.wrap(array) for array in arrays]

    def start_timer(self) -> Callable[[], StepTimer | None]:
        """See ``Device``: a step is computed while it is submitted."""
        return _no_timer


def _no_timer() -> None:
    return None
