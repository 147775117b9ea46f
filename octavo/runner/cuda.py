"""``CudaDevice``: a worker's GPU, and everything that only a GPU needs. Imports torch."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
from octavo.runner.cache_engine import CacheEngine, KVLayers, SwapSeconds
from octavo.runner.device import Device, to_device
from octavo.runner.input_batch import FlatInputs

if TYPE_CHECKING:
    from octavo.runner.device import SampledTokens, StepTimer, WeightsAway
    from octavo.runner.memory import CacheSize, LargestStep, WorkerShare


class CudaDevice(Device):
    """A GPU: has memory of its own, and computes what is queued while the host goes on."""

    name = "cuda"

    def __init__(self, options: EngineConfig, config: ModelConfig, share: WorkerShare) -> None:
        super().__init__(options, config, share)
        self.cache_engine = partial(StreamedCacheEngine, cuda=torch.cuda)
        device = torch.device("cuda")
        self._memory = CudaMemory(device)
        self._send = PinnedSend(device)
        self._timers = CudaTimers(torch.cuda)

    def free_memory(self) -> int:
        return self._memory.free()

    def cache_size(
        self, layout: KVLayout, position_bytes: int, max_model_len: int, largest_step: Callable[[], LargestStep]
    ) -> CacheSize:
        """Runs the largest step to measure its memory, and that of captured steps (vLLM's ``profile_run``)."""
        step = largest_step()
        peak = measure_peak(step.run, self._memory)
        peak += step.graph_bytes(lambda: in_use(self._memory))
        total = self._memory.total()
        size = memory.cache_size(layout, self._options, total - peak, max_model_len, position_bytes, total)
        self._own_blocks = size.num_blocks
        return size

    def to_device(self, inputs: FlatInputs, pending: Sequence[SampledTokens]) -> ForwardBatch:
        return to_device(inputs, pending, self._send, self.kernels)

    def put_to_sleep(self, networks: Sequence[Layer]) -> WeightsAway:
        return put_to_sleep(networks)

    def release_memory(self) -> None:
        super().release_memory()
        torch.cuda.empty_cache()

    def start_timer(self) -> Callable[[], StepTimer | None]:
        return self._timers.start()


class CudaTimers:
    """Times steps by events on the current stream. ``cuda``: ``torch.cuda``, or an object with its ``Event``."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._last_end: Any = None

    def start(self) -> Callable[[], CudaTimer]:
        """Begins to time a step; the returned function is called when all of its work is queued."""
        timer = CudaTimer(self._last_end, self._record())

        def stop() -> CudaTimer:
            timer.end = self._last_end = self._record()
            return timer

        return stop

    def _record(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass(slots=True)
class CudaTimer:
    before: Any
    begin: Any
    end: Any = None

    def wait(self) -> tuple[float, float]:
        self.end.synchronize()
        idle = 0.0 if self.before is None else self.before.elapsed_time(self.begin) / 1e3
        return self.begin.elapsed_time(self.end) / 1e3, idle


@dataclass(eq=False)
class _Step:
    """The blocks that a step moves and reads, and an event behind its work on the compute stream."""

    #: On the compute stream: copied, stored, fetched.
    moved: list[int]
    #: Block tables of each KV group, then those of cross attention, over blocks of the first group.
    tables: list[NDArray[np.int32]] = field(default_factory=list)
    end: Any = None


@dataclass(eq=False)
class _Swap:
    num_bytes: int
    begin: Any
    end: Any


class StreamedCacheEngine(CacheEngine):
    """Swaps blocks on a GPU stream of its own, beside the compute stream where that is safe.

    Swaps run one after the other, so no host block is read before the copy to it is done, nor written while it is read.
    The compute stream waits for them if their plan swaps in (its sequences go on at once), and if a plan hands out a
    device block that is still being copied to the host; so a preemption does not delay a step that does not need its
    blocks yet. A plan names every block that its step writes for the first time: as the target of a copy, or as new in
    a block table.

    A swap waits for the steps queued before it, which write the blocks that leave, or may use the blocks that it
    overwrites. A swap into blocks that no step in flight uses begins at once: it overlaps the step before the one that
    needs it. An event for each layer would hide less, as a step is over when its last layer has waited, and would cost
    more: a block of all layers is one contiguous copy, and a captured step cannot wait within itself.
    """

    def __init__(self, layers: KVLayers, num_blocks: Sequence[int], num_host_blocks: Sequence[int], cuda: Any) -> None:
        """``cuda``: ``torch.cuda``, or an object with its ``Stream`` and ``Event``."""
        super().__init__(layers, num_blocks, num_host_blocks)
        self._cuda = cuda
        self._stream = cuda.Stream()
        #: Device blocks that may still be read for the host, until the event ``_swapped``.
        self._swapping_out: set[int] = set()
        self._swapped: Any = None
        #: Steps that the device may not have finished, and swaps that were not reported yet; oldest first.
        self._steps: deque[_Step] = deque()
        self._queued: deque[_Swap] = deque()

    def move(self, plan: StepPlan) -> SwapSeconds | None:
        """Queues the plan's moves; later work on the current stream waits for those that it depends on."""
        if self._num_host_blocks:
            if self._steps and self._steps[-1].end is None:
                self._steps[-1].end = self._cuda.Event()
                self._steps[-1].end.record()
            while self._steps and self._steps[0].end.query():
                self._steps.popleft()
        if self._swapping_out:
            if self._swapped.query():
                self._swapping_out.clear()
            elif not plan.blocks_to_swap_in and self._reuses(plan):
                self._wait_for_swaps()
        seconds = super().move(plan)
        if self._num_host_blocks:
            moved = [block for pair in plan.blocks_to_copy for block in pair]
            moved += [block for block, _ in plan.blocks_to_store]
            moved += [block for _, _, block in plan.blocks_fetched]
            self._steps.append(_Step(moved))
        return seconds

    def computes_over(self, tables: NDArray[np.int32], cross_tables: NDArray[np.int32]) -> None:
        if self._steps:
            self._steps[-1].tables = [*tables, cross_tables]

    def _swap(self, plan: StepPlan) -> SwapSeconds | None:
        begin, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        arriving = [block for _, block in plan.blocks_to_swap_in]
        stored = {block for block, _ in plan.blocks_to_store}
        if plan.blocks_to_swap_out or not stored.isdisjoint(arriving) or self._in_use(arriving):
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
        """Whether a step that the device may not have finished uses one of these blocks."""
        used = np.zeros(sum(self._blocks), dtype=np.bool_)
        for step in self._steps:
            used[step.moved] = True
            for first, table in zip([*self._first, 0], step.tables, strict=False):
                used[first + table.reshape(-1)] = True
        return bool(used[blocks].any())

    def take_swaps(self) -> list[tuple[int, float]]:
        while self._queued and self._queued[0].end.query():
            swap = self._queued.popleft()
            self._swaps.append((swap.num_bytes, swap.begin.elapsed_time(swap.end) / 1e3))
        return super().take_swaps()

    def _reuses(self, plan: StepPlan) -> bool:
        """Whether the plan writes to a block that may still be read for the host."""
        swapping_out = self._swapping_out
        return (
            any(target in swapping_out for _, target in plan.blocks_to_copy)
            or any(target in swapping_out for _, _, target in plan.blocks_fetched)
            or any(not swapping_out.isdisjoint(change.blocks) for change in plan.table_changes)
        )

    def _wait_for_swaps(self) -> None:
        self._cuda.current_stream().wait_event(self._swapped)
        self._swapping_out.clear()

    def finish_swaps(self) -> None:
        self._cuda.synchronize()


# --- sleep mode: weights of a GPU in host memory ----------------------------------------------------------------------

#: Objects that layers refer to but do not own.
_SHARED = (Kernels, KernelClock, LayerContext)
_PLAIN = (str, bytes, int, float, complex, type(None), slice, torch.dtype, torch.device, torch.Size, type)


@dataclass(frozen=True)
class _EmptiedStorage:
    """A storage whose memory was freed; its content is in ``copy``."""

    tensors: list[Tensor]
    num_bytes: int
    copy: Tensor
    #: Offset, shape and stride of each tensor, if they were detached from their storage.
    views: list[tuple[int, torch.Size, tuple[int, ...]]]


@dataclass(frozen=True)
class SleepState:
    emptied: list[_EmptiedStorage]

    @property
    def bytes_freed(self) -> int:
        return sum(p.num_bytes for p in self.emptied)

    @torch.inference_mode()
    def wake_up(self) -> None:
        """Brings the weights back to the same tensors; if another program has taken the memory, call it again."""
        for p in self.emptied:
            storage = p.tensors[0].untyped_storage()
            if p.views:
                storage = torch.from_numpy(np.empty(p.num_bytes, dtype=np.uint8)).untyped_storage()
                for tensor, (offset, shape, stride) in zip(p.tensors, p.views, strict=True):
                    tensor.set_(storage, offset, shape, stride)
            elif storage.nbytes() == 0:
                storage.resize_(p.num_bytes)
            _bytes_of(storage).copy_(p.copy, non_blocking=True)
        if any(p.tensors[0].is_cuda for p in self.emptied):
            torch.cuda.synchronize()  # the host memory of the copies is freed next


@torch.inference_mode()
def put_to_sleep(networks: Layer | Sequence[Layer]) -> SleepState:
    """Moves the weights to host memory. No step may run, and no captured graph be replayed, before ``wake_up``."""
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in _tensors(networks):
        storage = tensor.untyped_storage()
        if storage.nbytes():
            by_storage.setdefault(storage.data_ptr(), []).append(tensor)
    state = SleepState([])
    try:
        for tensors in by_storage.values():
            state.emptied.append(_empty(tensors))
    except BaseException:  # such as no host memory: undo
        state.wake_up()
        raise
    return state


def _empty(tensors: list[Tensor]) -> _EmptiedStorage:
    storage = tensors[0].untyped_storage()
    size = storage.nbytes()
    pinned = tensors[0].is_cuda
    copy = host_empty(size, torch.uint8) if pinned else torch.empty(size, dtype=torch.uint8)
    copy.copy_(_bytes_of(storage))
    if storage.resizable():
        storage.resize_(0)
        return _EmptiedStorage(tensors, size, copy, [])
    # Memory that torch did not allocate is freed when no tensor refers to it.
    views = [(int(tensor.storage_offset()), tensor.shape, tensor.stride()) for tensor in tensors]
    for tensor in tensors:
        tensor.set_(torch.UntypedStorage(0), 0, (0,), (1,))
    return _EmptiedStorage(tensors, size, copy, views)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _tensors(root: Any) -> Iterator[Tensor]:
    """Every tensor that can be reached from ``root``, once."""
    seen: set[int] = set()
    stack: list[Any] = [root]
    while stack:
        value = stack.pop()
        if isinstance(value, (*_PLAIN, *_SHARED)) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            stack += value
        elif dataclasses.is_dataclass(value):
            stack += [getattr(value, field.name) for field in dataclasses.fields(value)]
        elif hasattr(value, "__dict__"):
            stack += vars(value).values()
