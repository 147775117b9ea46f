"""What differs between devices: counting memory, sending a step's inputs, moving blocks, timing steps."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.config.engine_config import EngineConfig
from octavo.config.kv_spec import KVLayout
from octavo.core.model_config import ModelConfig
from octavo.kernels.forward_batch import ARRAYS, ForwardBatch
from octavo.kernels.interface import Array, Kernels
from octavo.layers.layer import Layer
from octavo.models.network import weight_bytes
from octavo.runner import memory
from octavo.runner.cache_engine import CacheEngine
from octavo.runner.input_batch import FlatInputs

if TYPE_CHECKING:
    from octavo.runner.loaded_model import LoadedModel
    from octavo.runner.memory import CacheSize, WorkerShare
    from octavo.runner.model_runner import StepTimer


# The inputs of a step on the device, with tokens that steps in flight sample there.


class Send(Protocol):
    """Takes arrays to the device; where that is the host's own memory, they may be changed when the step is done."""

    def __call__(self, arrays: Sequence[NDArray[Any]]) -> list[Array]:
        """The same arrays (int64, then int32) on the device, in order; valid until the step is done."""
        ...


@dataclass(slots=True)
class SampledTokens:
    """Tokens that were sampled by a step in flight: their ids are on the device only."""

    #: int64 [n] where the sampler has them; a negative one stands for no token.
    token_ids: Any
    #: Where they belong among this step's tokens, and which of ``token_ids`` each is: [m].
    targets: NDArray[np.int64]
    sources: NDArray[np.int64]

    def is_all(self, num_tokens: int) -> bool:
        """Whether they are all of the step's ``num_tokens``, in order: the same sequences as before decode."""
        count = len(self.sources)
        return count == num_tokens == len(self.token_ids) and bool((self.sources == np.arange(count)).all())


def to_device(inputs: FlatInputs, pending: Sequence[SampledTokens], send: Send, kernels: Kernels) -> ForwardBatch:
    """Sends a step's arrays, and puts tokens that are on the device already in their places there, in this order."""
    batch = ForwardBatch.of(
        send([inputs.arrays[array.name] for array in ARRAYS]),
        num_decodes=inputs.num_decodes,
        max_seq_len=inputs.max_seq_len,
        all_sampled=inputs.all_sampled,
        has_adapters=inputs.has_adapters,
        has_spans=inputs.has_spans,
    )
    count = len(inputs.arrays["token_ids"])
    for tokens in pending:
        if tokens.is_all(count):
            batch.token_ids = kernels.as_token_ids(tokens.token_ids)
        else:
            kernels.put_tokens(batch.token_ids, tokens.targets, tokens.token_ids, tokens.sources)
    return batch


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


# Sleep mode: the memory of weights is given back, for a while.


class WeightSleep:
    """Frees the memory of a model's weights, and brings them back."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        #: Weights of a GPU that are in host memory.
        self._asleep: WeightsAway | None = None

    @property
    def are_away(self) -> bool:
        """Whether ``wake_up`` has something to restore."""
        return self._asleep is not None or not self._loaded.has_weights

    def sleep(self, level: int) -> int:
        """Bytes that were freed. Level 2 may follow level 1.

        Level 1 moves the weights of a GPU to host memory; on a CPU they are there already, and stay as they are packed.
        Level 2 drops the weights.
        """
        loaded = self._loaded
        if not loaded.has_weights:
            return 0
        if level == 2:
            freed = 0 if self._asleep else sum(map(weight_bytes, loaded.networks))
            self._asleep = None
            loaded.drop_weights()
            return freed
        if self._asleep is not None:
            return 0
        self._asleep = loaded.device.put_to_sleep(loaded.networks)
        return 0 if self._asleep is None else self._asleep.bytes_freed

    def wake_up(self, num_positions: int) -> None:
        """Restores the weights, read again for sequences of up to so many tokens if they were dropped.

        Raises:
            WeightError: the checkpoint cannot be read any more.
        """
        if not self._loaded.has_weights:
            self._loaded.read_weights(num_positions)
        if self._asleep is not None:
            self._asleep.wake_up()
            self._asleep = None
