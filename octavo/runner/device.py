"""``Device``: the differences between CPU and GPU: memory, inputs of a step, swaps, timers; and sleep mode."""

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
    from octavo.runner.memory import CacheSize, LargestStep, WorkerShare


class StepTimer(Protocol):
    def wait(self) -> tuple[float, float]:
        """Waits for the step's work: the seconds that it took, and those that the device was idle before it."""
        ...


class WeightsAway(Protocol):
    """Weights that were moved to host memory; their device memory is free."""

    @property
    def bytes_freed(self) -> int: ...

    def wake_up(self) -> None:
        """Brings them back to the same arrays; a call that fails can be repeated."""
        ...


class Device(ABC):
    #: "cpu" or "cuda".
    name: str
    kernels: Kernels
    #: Moves blocks on the device, and to the host and back.
    cache_engine: Callable[..., CacheEngine]

    def __init__(self, options: EngineConfig, config: ModelConfig, share: WorkerShare) -> None:
        self._options, self._config, self._share = options, config, share
        #: Bytes of host memory reserved for adapters, images and the like.
        self.reserved = 0
        #: KV cache blocks of each group, if the device has memory of its own.
        self._own_blocks: list[int] | None = None

    @abstractmethod
    def free_memory(self) -> int: ...

    @abstractmethod
    def cache_size(
        self, layout: KVLayout, position_bytes: int, max_model_len: int, largest_step: Callable[[], LargestStep]
    ) -> CacheSize:
        """The KV cache that fits beside the weights and the largest step (vLLM's ``determine_available_memory``).

        Tables take ``position_bytes`` more for each position of the longest sequence.

        Raises:
            InsufficientMemoryError: not one sequence of ``max_model_len`` tokens fits, or not one block.
        """

    def num_host_blocks(self, layout: KVLayout, max_model_len: int) -> list[int]:
        """Host blocks of each group for preempted requests; to be called after ``cache_size``."""
        return self._host_blocks_within(self._free_for_caches(), layout, max_model_len)

    def _free_for_caches(self) -> int:
        """Bytes of the worker's share of host memory that are free beside the largest step and the weights."""
        step = memory.activation_bytes(self._config, self._options, self.kernels.name)
        return max(0, self._share.free_memory() - step - self.reserved)

    def _host_blocks_within(self, free: int, layout: KVLayout, max_model_len: int) -> list[int]:
        workers, own = self._share.local_size, self._own_blocks
        return memory.num_host_blocks(layout, self._options, free, max_model_len, workers, own)

    @abstractmethod
    def to_device(self, inputs: FlatInputs, pending: Sequence[SampledTokens]) -> ForwardBatch:
        """The inputs of a step on the device, valid until the step is done."""

    def put_to_sleep(self, networks: Sequence[Layer]) -> WeightsAway | None:
        """Moves weights to host memory, if the device has memory of its own. No step may run before ``wake_up``."""
        return None

    def release_memory(self) -> None:
        gc.collect()  # captured graphs may be in cycles

    @abstractmethod
    def start_timer(self) -> Callable[[], StepTimer | None]:
        """Starts to time a step; the returned function, called when all work is queued, returns None if it is done."""


class HostDevice(Device):
    """A CPU: computes in the host's memory, so inputs stay where they are."""

    name = "cpu"
    cache_engine = CacheEngine

    def __init__(self, options: EngineConfig, config: ModelConfig, share: WorkerShare) -> None:
        super().__init__(options, config, share)
        #: Arrays over the inputs' own memory, kept while a step repeats the one before.
        self._last: tuple[FlatInputs, ForwardBatch] | None = None

    def free_memory(self) -> int:
        return self._share.free_memory()

    def cache_size(
        self, layout: KVLayout, position_bytes: int, max_model_len: int, largest_step: Callable[[], LargestStep]
    ) -> CacheSize:
        free = self._free_for_caches()
        # Swapping moves blocks within this memory, so the host blocks are subtracted although they are not touched
        # before they are used: otherwise memory would be short just when the cache is full.
        free -= layout.size(self._host_blocks_within(free, layout, max_model_len))
        return memory.cache_size(layout, self._options, free, max_model_len, position_bytes)

    def to_device(self, inputs: FlatInputs, pending: Sequence[SampledTokens]) -> ForwardBatch:
        if pending:  # some tokens are not in the arrays
            return to_device(inputs, pending, self._send, self.kernels)
        if self._last is not None and self._last[0] is inputs:
            batch = self._last[1]
            batch.max_seq_len = inputs.max_seq_len
        else:
            batch = to_device(inputs, (), self._send, self.kernels)
            self._last = inputs, batch
        return batch

    def _send(self, arrays: Sequence[NDArray[Any]]) -> list[Array]:
        return [self.kernels.wrap(array) for array in arrays]

    def start_timer(self) -> Callable[[], StepTimer | None]:
        return lambda: None  # a step is computed while it is submitted


class Send(Protocol):
    """Copies arrays (int64, then int32) to the device, valid until the step is done; a CPU may share their memory."""

    def __call__(self, arrays: Sequence[NDArray[Any]]) -> list[Array]: ...


@dataclass(slots=True)
class SampledTokens:
    """Tokens that a step in flight samples: their ids are on the device only."""

    #: int64 [n], in the memory of the sampler; a negative id stands for no token.
    token_ids: Any
    #: Index of each among this step's flat tokens, and among ``token_ids``: [m].
    targets: NDArray[np.int64]
    sources: NDArray[np.int64]


def to_device(inputs: FlatInputs, pending: Sequence[SampledTokens], send: Send, kernels: Kernels) -> ForwardBatch:
    """Sends a step's arrays to the device, and puts ``pending`` tokens, which are on it, into their places."""
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
        in_order = len(tokens.sources) == count == len(tokens.token_ids)
        if in_order and (tokens.sources == np.arange(count)).all():  # the same sequences decode again
            batch.token_ids = kernels.as_token_ids(tokens.token_ids)
        else:
            kernels.put_tokens(batch.token_ids, tokens.targets, tokens.token_ids, tokens.sources)
    return batch


class WeightSleep:
    """Sleep mode: frees the memory of a model's weights, and brings them back."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._asleep: WeightsAway | None = None

    @property
    def are_away(self) -> bool:
        return self._asleep is not None or not self._loaded.has_weights

    def sleep(self, level: int) -> int:
        """Frees bytes. Level 1 moves a GPU's weights to host memory; level 2 drops them, also after level 1."""
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
        """Restores the weights; reads dropped weights again, for sequences of up to ``num_positions`` tokens."""
        if not self._loaded.has_weights:
            self._loaded.read_weights(num_positions)
        if self._asleep is not None:
            self._asleep.wake_up()
            self._asleep = None
