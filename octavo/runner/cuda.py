"""A GPU as the device of a worker."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.config.engine_config import EngineConfig
from octavo.config.kv_spec import KVLayout
from octavo.core.model_config import ModelConfig
from octavo.core.plan import StepPlan
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import KernelClock, Kernels
from octavo.kernels.torch_backend import CudaMemory, PinnedSend, host_empty, in_use, measure_peak
from octavo.layers.layer import Layer, LayerContext
from octavo.runner import memory
from octavo.runner.cache_engine import CacheEngine, MakeCache, SwapSeconds
from octavo.runner.device import Device, to_device
from octavo.runner.input_batch import FlatInputs

if TYPE_CHECKING:
    from octavo.runner.device import ProfiledStep, SampledTokens, WeightsAway
    from octavo.runner.memory import CacheSize, WorkerShare
    from octavo.runner.model_runner import StepTimer


# Swaps of blocks on a GPU, beside its computation.


@dataclass(eq=False)
class _Step:
    """The blocks that a step computes over, by group, or copies; and an event behind its work on the compute stream."""

    copied: list[int]
    tables: NDArray[np.int32] | None = None
    end: Any = None


@dataclass(eq=False)
class _Swap:
    """A swap that is queued, and the events around it."""

    num_bytes: int
    begin: Any
    end: Any


class StreamedCacheEngine(CacheEngine):
    """Swaps on a GPU, on a stream of its own, beside what the compute stream does where that is safe.

    All swaps are done one after the other, so a host block is never read before the copy to it is done, nor written
    while it is read. The compute stream waits for them where their plan swaps in (its sequences go on at once), and
    where a plan hands out a device block that is still being copied to the host; so preempting a sequence does not
    delay a step that does not need its blocks yet. Every block that a step writes to for the first time is in its plan:
    a target of a copy, or new in a block table.

    Swaps begin when the steps queued before them are done, as these write what is to leave, or may use what is to be
    overwritten. Blocks that come in where no step in flight computes begin at once: they travel beside the step before
    the one that needs them. An event for each layer would hide less, as a step is over when its last layer has waited,
    and would cost more: a block of all layers is one contiguous copy, and a captured step waits nowhere within itself.
    """

    def __init__(
        self,
        kernels: Kernels,
        make: MakeCache,
        make_host: MakeCache,
        block_bytes: Sequence[int],
        num_blocks: Sequence[int],
        num_host_blocks: Sequence[int],
        cuda: Any,
    ) -> None:
        """As ``CacheEngine``; ``cuda``: ``torch.cuda``; tests give another with ``Stream`` and ``Event``."""
        super().__init__(kernels, make, make_host, block_bytes, num_blocks, num_host_blocks)
        self._cuda = cuda
        self._stream = cuda.Stream()
        #: Device blocks that may still be read for the host, until the event ``_swapped``.
        self._swapping_out: set[int] = set()
        self._swapped: Any = None
        #: Steps whose work may not be done, and swaps whose seconds were not told yet; oldest first.
        self._steps: deque[_Step] = deque()
        self._queued: deque[_Swap] = deque()

    def move(self, plan: StepPlan) -> SwapSeconds | None:
        """Queues the plan's moves; later work on the current stream waits for those that it depends on."""
        if self._num_host_blocks:
            self._end_steps()
        if self._swapping_out:
            if self._swapped.query():
                self._swapping_out.clear()
            elif not plan.blocks_to_swap_in and self._reuses(plan):
                self._wait_for_swaps()
        seconds = super().move(plan)
        if self._num_host_blocks:
            self._steps.append(_Step([block for pair in plan.blocks_to_copy for block in pair]))
        return seconds

    def computes_over(self, tables: NDArray[np.int32]) -> None:
        """Keeps the tables until the step is done."""
        if self._steps:
            self._steps[-1].tables = tables

    def _end_steps(self) -> None:
        """Marks the end of the last step's work, and forgets the steps that are done."""
        if self._steps and self._steps[-1].end is None:
            self._steps[-1].end = self._cuda.Event()
            self._steps[-1].end.record()
        while self._steps and self._steps[0].end.query():
            self._steps.popleft()

    def _swap(self, plan: StepPlan) -> SwapSeconds | None:
        begin, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        if plan.blocks_to_swap_out or self._in_use([block for _, block in plan.blocks_to_swap_in]):
            self._stream.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(self._stream):
            begin.record()
            num_bytes = self._queue_swaps(plan)
            end.record()
        self._queued.append(_Swap(num_bytes, begin, end))
        self._swapped = end
        self._swapping_out.update(block for block, _ in plan.blocks_to_swap_out)
        if not (plan.blocks_to_swap_in or self._reuses(plan)):
            return None
        self._wait_for_swaps()
        return lambda: float(begin.elapsed_time(end)) / 1e3

    def _in_use(self, blocks: list[int]) -> bool:
        """Whether a step that may not be done computes over one of these blocks, or copies it."""
        used = np.zeros(sum(self._blocks), dtype=np.bool_)
        for step in self._steps:
            used[step.copied] = True
            if step.tables is not None:
                for first, table in zip(self._first, step.tables, strict=True):
                    used[first + table.reshape(-1)] = True
        return bool(used[blocks].any())

    def take_swaps(self) -> list[tuple[int, float]]:
        """As ``CacheEngine``: a swap may end in a later step than that of its plan."""
        while self._queued and self._queued[0].end.query():
            swap = self._queued.popleft()
            self._swaps.append((swap.num_bytes, swap.begin.elapsed_time(swap.end) / 1e3))
        return super().take_swaps()

    def _reuses(self, plan: StepPlan) -> bool:
        """Whether the plan writes to a block that may still be read for the host."""
        swapping_out = self._swapping_out
        return any(target in swapping_out for _, target in plan.blocks_to_copy) or any(
            not swapping_out.isdisjoint(change.blocks) for change in plan.table_changes
        )

    def _wait_for_swaps(self) -> None:
        """What the current stream does from here on comes after all swaps queued so far."""
        self._cuda.current_stream().wait_event(self._swapped)
        self._swapping_out.clear()

    def finish_swaps(self) -> None:
        """Returns when all that was queued on the device is done."""
        self._cuda.synchronize()


# Weights of a GPU in host memory, so the device's memory is free.

#: Objects that layers refer to but do not own.
_SHARED = (Kernels, KernelClock, LayerContext)
_PLAIN = (str, bytes, int, float, complex, type(None), slice, torch.dtype, torch.device, torch.Size, type)


@dataclass(frozen=True)
class _EmptiedStorage:
    """One storage that was emptied."""

    tensors: list[Tensor]
    #: Size in bytes, and the content.
    size: int
    kept: Tensor
    #: Offset, shape and stride of each of ``tensors``, where they were detached from their storage.
    views: list[tuple[int, torch.Size, tuple[int, ...]]]


@dataclass(frozen=True)
class SleepState:
    """What ``wake_up`` needs to bring everything back."""

    emptied: list[_EmptiedStorage]

    @property
    def bytes_freed(self) -> int:
        """Device memory that was freed."""
        return sum(p.size for p in self.emptied)

    def wake_up(self) -> None:
        """See ``wake_up``."""
        wake_up(self)


@torch.inference_mode()
def put_to_sleep(networks: Layer | Sequence[Layer]) -> SleepState:
    """Moves the weights to host memory.

    No step may run, and no captured graph be replayed, before ``wake_up``.
    """
    emptied: list[_EmptiedStorage] = []
    try:
        for tensors in _by_storage(_tensors(networks)):
            emptied.append(_empty(tensors))
    except BaseException:  # such as no host memory: undo
        wake_up(SleepState(emptied))
        raise
    return SleepState(emptied)


@torch.inference_mode()
def wake_up(state: SleepState) -> None:
    """Brings the weights back; the tensors are those of before.

    If another program has taken the memory, torch's error is passed on, and the call can be repeated.
    """
    for p in state.emptied:
        storage = p.tensors[0].untyped_storage()
        if p.views:
            storage = torch.from_numpy(np.empty(p.size, dtype=np.uint8)).untyped_storage()
            for tensor, (offset, shape, stride) in zip(p.tensors, p.views, strict=True):
                tensor.set_(storage, offset, shape, stride)
        elif storage.nbytes() == 0:
            storage.resize_(p.size)
        _bytes_of(storage).copy_(p.kept, non_blocking=True)
    if any(p.tensors[0].is_cuda for p in state.emptied):
        torch.cuda.synchronize()  # the host memory of the copies is freed next


def _empty(tensors: list[Tensor]) -> _EmptiedStorage:
    storage = tensors[0].untyped_storage()
    size = storage.nbytes()
    kept = _host_memory(size, tensors[0].is_cuda)
    kept.copy_(_bytes_of(storage))
    if storage.resizable():
        storage.resize_(0)
        return _EmptiedStorage(tensors, size, kept, [])
    # Memory that torch did not allocate is freed when no tensor refers to it.
    views = [(int(tensor.storage_offset()), tensor.shape, tensor.stride()) for tensor in tensors]
    for tensor in tensors:
        tensor.set_(torch.UntypedStorage(0), 0, (0,), (1,))
    return _EmptiedStorage(tensors, size, kept, views)


def _host_memory(size: int, pinned: bool) -> Tensor:
    return host_empty(size, torch.uint8) if pinned else torch.empty(size, dtype=torch.uint8)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _by_storage(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors of each storage that is not empty."""
    found: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage.data_ptr(), []).append(tensor)
    return list(found.values())


def _tensors(root: object) -> Iterator[Tensor]:
    """Every tensor that can be reached from a network, or several, once."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        value = stack.pop()
        if isinstance(value, (*_PLAIN, *_SHARED)) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
        else:
            stack += _parts(value)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return list(vars(value).values()) if hasattr(value, "__dict__") else []


# Times steps on a GPU.


class CudaTimers:
    """Times steps by events on the current stream."""

    def __init__(self, cuda: Any) -> None:
        """``cuda``: ``torch.cuda``; tests give another with its ``Event``."""
        self._cuda = cuda
        self._last_end: Any = None

    def begin(self) -> CudaTimer:
        """The step's work is queued from here on."""
        return CudaTimer(self._last_end, self._record())

    def end(self, timer: CudaTimer) -> CudaTimer:
        """All of the step's work is queued."""
        timer.end = self._last_end = self._record()
        return timer

    def _record(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass(slots=True)
class CudaTimer:
    """Times the work of one step: events before it, at its beginning and at its end."""

    before: Any
    begin: Any
    end: Any = None

    def wait(self) -> tuple[float, float]:
        """Waits for the work; the seconds that it took, and those that the device was idle before it."""
        self.end.synchronize()
        idle = 0.0 if self.before is None else self.before.elapsed_time(self.begin) / 1e3
        return self.begin.elapsed_time(self.end) / 1e3, idle


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
