"""``TorchKernels``, the base of backends whose arrays are tensors of torch; pinned memory, measurements of devices."""

from __future__ import annotations

import functools
import itertools
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError, InsufficientMemoryError
from octavo.kernels import reference_gated_delta, reference_scan, reference_states
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import (
    SWIGLU_LIMIT,
    Activation,
    Array,
    AttentionTemperature,
    Kernels,
    LayerCache,
    PackedExperts,
    PackedHeads,
    PackedWeight,
    RoutingSpec,
    Xielu,
)
from octavo.kernels.sampling import NumpySampling

# Arrays of torch, and of numpy with ml_dtypes, over the same memory.

_DTYPES = {name: getattr(torch, "float8_e4m3fn" if name is DType.FP8 else name.value) for name in DType}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
#: Types that numpy itself lacks, and one of its types of the same size.
_FOREIGN = {DType.BFLOAT16: (np.int16, torch.int16), DType.FP8: (np.uint8, torch.uint8)}


def torch_dtype(dtype: DType | str) -> torch.dtype:
    return _DTYPES[DType(dtype)]


def to_torch(values: np.ndarray) -> Tensor:
    """A tensor over the array's memory, which must not be written if the array's must not."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        foreign = {"bfloat16": DType.BFLOAT16, "float8_e4m3fn": DType.FP8}.get(values.dtype.name)
        if foreign is None:
            return torch.from_numpy(values)
        return torch.from_numpy(values.view(_FOREIGN[foreign][0])).view(_DTYPES[foreign])


def from_torch(x: Tensor) -> np.ndarray:
    """The values on the host: over the tensor's memory if it is there."""
    x, name = x.detach().cpu(), _NAMES.get(x.dtype)
    if name in _FOREIGN:
        return x.view(_FOREIGN[name][1]).numpy().view(name.numpy)
    values: np.ndarray = x.numpy()
    return values


#: Of float32.
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "swiglu_oai": lambda x: (x := x.clamp(max=SWIGLU_LIMIT)) * torch.sigmoid(1.702 * x),
    "relu2": lambda x: F.relu(x).square(),
}


class TorchKernels(Kernels):
    """Tensors on ``device``; a step is computed without gradients."""

    device: torch.device
    mode = torch.inference_mode

    def set_threads(self, count: int | None, pin: bool = False) -> None:
        if count is not None:
            torch.set_num_threads(count)

    def array(self, values: np.ndarray, dtype: DType | None = None) -> Tensor:
        return to_torch(values).to(self.device, None if dtype is None else torch_dtype(dtype), copy=True).contiguous()

    def wrap(self, values: np.ndarray) -> Tensor:
        return to_torch(values).to(self.device)

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        return torch.zeros(shape, dtype=torch_dtype(dtype), device=self.device)

    def write(self, target: Tensor, values: np.ndarray) -> None:
        target.copy_(to_torch(values))

    def to_numpy(self, x: Tensor) -> np.ndarray:
        return from_torch(x)

    def take_rows(self, x: Tensor, rows: np.ndarray) -> Tensor:
        return x.index_select(0, self.wrap(rows))

    def put_rows(self, target: Tensor, rows: np.ndarray, x: Tensor) -> None:
        target.index_copy_(0, self.wrap(rows), x.to(target.dtype))

    def scatter_columns(self, x: Tensor, columns: Tensor, width: int) -> Tensor:
        return x.new_full((len(x), width), -torch.inf).index_copy_(1, columns, x)

    def mask_clusters(self, logits: Tensor, scores: Tensor, clusters: Tensor, count: int) -> None:
        columns = clusters[scores.topk(count, dim=1).indices].flatten(1)
        kept = logits.gather(1, columns)
        logits.fill_(-torch.inf).scatter_(1, columns, kept)

    def as_token_ids(self, tokens: Any) -> Tensor:
        return torch.as_tensor(tokens).to(self.device).clamp(min=0)

    def put_tokens(self, token_ids: Tensor, targets: np.ndarray, tokens: Any, sources: np.ndarray) -> None:
        token_ids.index_copy_(0, self.wrap(targets), self.as_token_ids(tokens).index_select(0, self.wrap(sources)))

    def take_sampled(self, hidden: Tensor, batch: ForwardBatch, rows: int = 1) -> Tensor:
        if rows > 1:
            return _sampled_runs(hidden, batch, rows).flatten(1)
        return hidden if batch.all_sampled else hidden.index_select(0, batch.sampled_rows)

    def mean_sampled(self, hidden: Tensor, batch: ForwardBatch, rows: int) -> Tensor:
        return _sampled_runs(hidden, batch, rows).mean(1)

    def clamp(self, x: Tensor, limit: float, least: float | None = None) -> Tensor:
        return x.clamp_(-limit if least is None else least, limit)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return x.div_(cap).tanh_().mul_(cap)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x.mul_(factor)

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        return x.copy_(ACTIVATIONS[activation](x.float()))

    def multiply(self, x: Tensor, factors: Tensor, bias: Tensor | None = None) -> Tensor:
        product = x.float() * factors
        return x.copy_(product if bias is None else product + bias)

    def xielu(self, x: Tensor, parameters: Xielu) -> Tensor:
        positive, negative, beta, eps = parameters
        below = (torch.expm1(x.clamp(max=eps)) - x).mul_(negative)
        return torch.where(x > 0, positive * x * x, below) + beta * x

    causal_conv = staticmethod(reference_states.causal_conv)
    gated_delta_rule = staticmethod(reference_gated_delta.gated_delta_rule)
    sigmoid_gate = staticmethod(reference_gated_delta.sigmoid_gate)
    selective_scan = staticmethod(reference_scan.selective_scan)
    ssd_scan = staticmethod(reference_scan.ssd_scan)
    silu_gate = staticmethod(reference_scan.silu_gate)

    def scale_queries(self, q: Tensor, positions: Tensor, temperature: AttentionTemperature) -> Tensor:
        periods = (positions + temperature.offset) // temperature.period
        factors = 1.0 + temperature.beta * torch.log1p(periods.double())
        return (q.float() * factors.float()[:, None, None]).to(q.dtype)

    def rotary(
        self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, sections: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """Rotates in float32 and rounds once; the results are new, and views of one tensor."""
        cos, sin = _angles(positions, cos_sin, sections).unsqueeze(1).chunk(2, dim=-1)
        heads, half = (q.shape[1], k.shape[1]), cos.shape[-1]
        x = torch.cat((q, k), dim=1)
        first, second = x[..., :half].float(), x[..., half : 2 * half].float()
        # Both are computed before either is written: if x is float32, first and second are views of it.
        rotated = first * cos - second * sin
        x[..., half : 2 * half] = second * cos + first * sin
        x[..., :half] = rotated
        rotated_q, rotated_k = x.split(heads, dim=1)
        return rotated_q, rotated_k

    def host_call(self, function: Callable[[Any], None], x: Tensor) -> Tensor:
        function(x)
        return x

    def token_rows(self, batch: ForwardBatch, width: int) -> Tensor:
        return torch.empty((len(batch.token_ids), width), dtype=torch.float32, device=self.device)

    def all_reduce(self, x: Tensor, bias: Tensor | None = None, add: Tensor | None = None) -> Tensor:
        x = x if self.group is None else self.group.all_reduce(x)
        for term in (bias, add):
            if term is not None:
                x += term
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x if self.group is None else torch.as_tensor(self.group.all_gather(x))

    def stack(self, parts: Sequence[np.ndarray], bias: np.ndarray | None, dtype: DType) -> tuple[Tensor, Tensor | None]:
        """The parts [n_i, K] as one matrix, and their bias, on the device and rounded to ``dtype`` there."""
        shape = (sum(len(part) for part in parts), parts[0].shape[1])
        out = torch.empty(shape, dtype=torch_dtype(dtype), device=self.device)
        start = 0
        for part in parts:
            out[start : start + len(part)].copy_(to_torch(part))
            start += len(part)
        return out, None if bias is None else self.array(bias, dtype)

    def pack_heads(self, weight: np.ndarray, dtype: DType) -> PackedHeads:
        return PlainHeads(self.array(weight, dtype))

    def pack_experts(
        self,
        gate_up: Any,
        down: Any,
        shared: int = 0,
        activation: Activation = "silu",
        *,
        weighs_input: bool = False,
    ) -> PackedExperts:
        return PlainExperts(gate_up, down, activation, weighs_input=weighs_input)

    def add_expert_bias(self, x: Tensor, experts: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
        for slot in range(experts.shape[1]):  # not one sum over the slots, whose order torch would choose
            x += bias[experts[:, slot]] * weights[:, slot, None]
        return x

    def sum_of_rows(self, x: Tensor) -> Tensor:
        """The sum [N, 1] of each of a few numbers, x [N, K]."""
        return x.sum(-1, keepdim=True)

    def route(
        self, logits: Tensor, spec: RoutingSpec, bias: Tensor | None = None, factors: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        routed, shared = logits.split([logits.shape[1] - spec.shared, spec.shared], dim=1)
        if spec.scoring == "sparsemixer":
            experts, weights = _sparse_mixer(routed, spec.top_k, spec.jitter)
            return experts, weights.masked_fill(routed.isnan().any(-1, keepdim=True), float("nan"))
        scores = routed.softmax(-1) if spec.scoring == "softmax" else routed.sigmoid()
        choices = scores if bias is None else scores + bias
        if spec.scoring == "sigmoid" and bias is None and spec.num_groups == 1:
            choices = routed
        if spec.num_groups > 1:
            groups = choices.unflatten(1, (spec.num_groups, -1))
            best = groups.sort(-1, descending=True).values[..., : spec.best_of_group]
            of_group = self.sum_of_rows(best.flatten(0, 1)).view(best.shape[:2])
            kept = torch.zeros_like(of_group, dtype=torch.bool).scatter_(
                1, _best_indices(of_group, spec.top_groups), True
            )
            choices = groups.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)
        experts = _best_indices(choices, spec.top_k)
        weights = scores.gather(1, experts)
        if spec.renormalize:
            weights = weights / (self.sum_of_rows(weights) + 1e-20).clamp(min=spec.least_sum)
        weights = weights.masked_fill(routed.isnan().any(-1, keepdim=True), float("nan"))
        behind = torch.arange(routed.shape[1], logits.shape[1], device=logits.device).expand(len(logits), -1)
        scale = spec.scale if factors is None else spec.scale * factors[experts]
        weights = torch.cat((weights * scale, shared.sigmoid()), 1)
        return torch.cat((experts, behind), 1).to(torch.int32), weights

    def latent_rotary_and_cache(
        self,
        q: Tensor,
        latent: Tensor,
        k_rope: Tensor,
        absorb: PackedHeads,
        batch: ForwardBatch,
        cos_sin: Tensor,
        cache: LayerCache,
    ) -> Tensor:
        rope = k_rope.shape[1]
        q_nope, q_rope = q.split((q.shape[2] - rope, rope), dim=2)
        q_rope, k = self.rotary(q_rope, k_rope.unsqueeze(1), batch.positions, cos_sin)
        self.reshape_and_cache(latent.unsqueeze(1), k, cache, batch.slot_mapping[cache.group])
        return torch.cat((absorb(q_nope), q_rope), dim=2)


def _sampled_runs(hidden: Tensor, batch: ForwardBatch, rows: int) -> Tensor:
    """Each sampled row with those that follow it, [N, rows, E]."""
    steps = torch.arange(rows, device=hidden.device)
    return hidden[batch.sampled_rows[:, None] + steps]


def _sparse_mixer(logits: Tensor, top_k: int, jitter: float) -> tuple[Tensor, Tensor]:
    left, experts, weights = logits, [], []
    for _ in range(top_k):
        best = _best_indices(left, 1)
        top = left.gather(1, best)
        far = (top - logits) / logits.abs().maximum(top) > 2 * jitter
        weights.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(1, best))
        experts.append(best)
        left = left.scatter(1, best, float("-inf"))
    return torch.cat(experts, 1).to(torch.int32), torch.cat(weights, 1)


def _best_indices(scores: Tensor, count: int) -> Tensor:
    """Indices of the highest scores of each row, of equal ones the lowest first."""
    return scores.sort(stable=True, dim=-1, descending=True).indices[:, :count]


@dataclass(frozen=True, slots=True)
class TorchWeight(PackedWeight):
    """A weight that is not quantised: tensors as they are in the checkpoint."""

    #: [N, K], and [N] or None.
    weight: Tensor
    bias: Tensor | None
    gated: bool
    has_rows = True


class PlainHeads(PackedHeads):
    """Matrices of heads as they are, multiplied by torch."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return torch.einsum("thk,hnk->thn", x, self.weight).contiguous()


class PlainExperts(PackedExperts):
    """Loops over the experts, with the products of any backend."""

    def __init__(
        self,
        gate_up: Sequence[PackedWeight],
        down: Sequence[PackedWeight],
        activation: Activation = "silu",
        *,
        weighs_input: bool = False,
    ) -> None:
        self._experts, self._weighs_input = [*zip(gate_up, down, strict=True)], weighs_input
        self._activation: Activation = activation

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, add: Tensor | None = None) -> Tensor:
        out = x.new_zeros(x.shape, dtype=torch.float32) if add is None else add
        for expert in experts.unique().tolist():
            gate_up, down = self._experts[expert]
            tokens, slots = (experts == expert).nonzero(as_tuple=True)
            rows, factors = x[tokens], weights[tokens, slots, None]
            if self._weighs_input:
                rows, factors = (rows * factors).to(x.dtype), torch.ones_like(factors)
            result = down(gate_up(rows, activation=self._activation), DType.FLOAT32)
            out.index_add_(0, tokens, result * factors)
        return out


# Collectives of ``torch.distributed``, and links between pipeline stages.


class TorchCommunicator:
    """A group of ``torch.distributed``: NCCL between GPUs, Gloo on CPUs."""

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.rank: int = torch.distributed.get_rank(group)
        self.size: int = torch.distributed.get_world_size(group)

    def all_reduce(self, x: Tensor) -> Tensor:
        """More than two ranks gather all parts and add them, as the order of sums of NCCL and Gloo is unspecified."""
        x = torch.as_tensor(x)
        if self.size > 2:
            return sum_as_tree(self._gather(x))
        torch.distributed.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._gather(torch.as_tensor(x)), dim=-1)

    def _gather(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        torch.distributed.all_gather(parts, x, group=self._group)
        return parts


class TorchLink:
    """A link of ``torch.distributed``, between any two processes."""

    def __init__(self, peer: int) -> None:
        self._peer = peer

    def send(self, x: Any) -> None:
        torch.distributed.send(torch.as_tensor(x).contiguous(), self._peer)

    def receive(self, x: Any) -> None:
        torch.distributed.recv(torch.as_tensor(x), self._peer)


def sum_as_tree(parts: Sequence[Tensor]) -> Tensor:
    """The sum of tensors, joined as a binary tree; the left half has the odd one."""
    if len(parts) == 1:
        return parts[0]
    middle = (len(parts) + 1) // 2
    return sum_as_tree(parts[:middle]) + sum_as_tree(parts[middle:])


# Host memory that a GPU copies from and to, pinned if possible.

logger = logging.getLogger("octavo")


def host_empty(shape: int | Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uninitialised host memory, pinned if the system allows it; else plain, with a warning once.

    Copies of plain memory are several times as slow, and do not run beside kernels.
    """
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError as e:  # for example a limit on locked memory, or a driver without it (WSL)
        _warn(str(e).partition("\n")[0])
        return torch.empty(shape, dtype=dtype)


def host_copy(tensor: Tensor) -> Tensor:
    return host_empty(tensor.shape, tensor.dtype).copy_(tensor)


@functools.cache
def _warn(reason: str) -> None:
    logger.warning(
        "host memory cannot be pinned (%s): plain memory is used, copies to and from the GPU are slower", reason
    )


# Sends the inputs of a step to a GPU as one copy from pinned memory.

#: Arrays begin at multiples of this number of 4-byte words in a packed copy; kernels are compiled for such pointers.
_ALIGNMENT = 4


class PinnedSend:
    """Packs arrays of int32 and int64 into a pinned buffer and queues one copy on the current stream.

    Owns two buffers used in turn, so that one is filled while the other is read. Before a buffer is filled again, the
    thread waits for its last copy, which with at most two steps in flight has ended with its step.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._pin = device.type == "cuda"
        self._buffers = [_Buffer(1 << 14, self._pin) for _ in range(2)]

    def __call__(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """The arrays on the device, as views of one new tensor."""
        counts = [array.nbytes // 4 for array in arrays]
        # By turns an array and the gap after it.
        sizes = [size for count in counts for size in (count, -count % _ALIGNMENT)]
        starts = [0, *itertools.accumulate(sizes)]
        buffer = self._next(starts[-1])
        for array, start, count in zip(arrays, starts[::2], counts, strict=False):
            buffer.words[start : start + count] = array.reshape(-1).view(np.int32)
        packed = buffer.memory[: starts[-1]].to(self._device, non_blocking=True, copy=True)
        buffer.copied = self._cuda.Event()
        buffer.copied.record()
        parts = zip(packed.split(sizes)[::2], arrays, strict=True)
        typed = ((part.view(torch.int64) if array.itemsize == 8 else part, array) for part, array in parts)
        return [part if array.ndim == 1 else part.view(array.shape) for part, array in typed]

    def _next(self, size: int) -> _Buffer:
        """The buffer whose turn it is, of at least ``size`` words and free to be written."""
        buffer = self._buffers.pop(0)
        if buffer.copied is not None:
            buffer.copied.synchronize()
        if len(buffer.words) < size:
            buffer = _Buffer(2 * size, self._pin)
        self._buffers.append(buffer)
        return buffer


class _Buffer:
    """Host memory for ``size`` int32, also as an array, and the event after the last copy from it."""

    def __init__(self, size: int, pin: bool) -> None:
        self.memory = host_empty(size, torch.int32) if pin else torch.empty(size, dtype=torch.int32)
        self.words: NDArray[np.int32] = self.memory.numpy()
        self.copied: Any = None


# Copies of logits and tokens to the host.


class TorchLogits(NumpySampling):
    """``NumpySampling`` for logits of torch."""

    def prepare(self, logits: Array) -> Array:
        return as_rows(logits.cpu()).numpy()


class HostCopy:
    """An asynchronous copy of a tensor to the host."""

    __slots__ = ("_copy", "_done")

    def __init__(self, values: Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        self._copy = values
        if values.is_cuda:
            # Torch's pool reuses pinned memory only after copies into it are done.
            self._copy = host_empty(values.shape, values.dtype)
            self._copy.copy_(values, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(values.device))

    def wait(self) -> Tensor:
        if self._done is not None:
            self._done.synchronize()
        return self._copy


def as_rows(logits: Tensor) -> Tensor:
    """The logits as float32, contiguous in the last dimension, in the same memory if possible."""
    values = logits.detach().float()
    return values if values.stride(-1) == 1 else values.contiguous()


# The memory of a GPU, and its peak in the largest step (vLLM: profile_run).


class DeviceMemory(Protocol):
    """Memory of one device, in bytes."""

    def reset_peak(self) -> None:
        """Frees cached memory and resets the peak."""

    def peak(self) -> int:
        """Peak of this process's tensors since ``reset_peak``, fragmentation included."""

    def outside(self) -> int:
        """Bytes in use other than by this process's tensors: the driver's context, compiled code, other programs."""

    def total(self) -> int:
        """All bytes of the device."""

    def free(self) -> int:
        """Bytes not in use."""


class CudaMemory:
    """Memory of a CUDA device, as torch and the driver count it."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)

    def reset_peak(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """Segments that torch has reserved from the driver, fragmentation included."""
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_reserved(self._device))

    def outside(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return max(0, int(total - free - torch.cuda.memory_reserved(self._device)))

    def total(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free(self) -> int:
        kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(torch.cuda.mem_get_info(self._device)[0] + kept)


def measure_peak(run_largest_step: Callable[[], object], memory: DeviceMemory) -> int:
    """Bytes of the device in use at the peak of the largest step, weights and other programs included.

    The step is run twice: the first run compiles kernels and allocates workspaces that stay. Freed memory is returned
    to the device, for the KV cache.

    Raises:
        InsufficientMemoryError: the step does not fit.
    """
    try:
        run_largest_step()
        memory.reset_peak()
        run_largest_step()
    except torch.OutOfMemoryError as e:
        raise InsufficientMemoryError(
            "a step of max_num_batched_tokens tokens and max_num_seqs sequences does not fit beside the weights in the "
            f"GPU's {memory.total() / (1 << 30):.2f} GiB; lower these: {e}"
        ) from None
    peak = memory.peak() + memory.outside()
    memory.reset_peak()
    return peak


def in_use(memory: DeviceMemory) -> int:
    """Bytes of the device in use, after torch's cache is freed."""
    memory.reset_peak()
    return memory.peak() + memory.outside()


# Peak rates of a device of torch, and timing of calls: events on a GPU, a clock on a CPU.

#: A call to be timed; its result is ignored.
Work = Callable[[], object]


class DeviceLimits(msgspec.Struct, frozen=True):
    """Measured limits of one device."""

    device: str
    #: In 10^9 bytes a second, of a copy within the device's memory (read and written), and of a sum (read).
    copy_gb_s: float
    read_gb_s: float
    #: Of a large product of random matrices, in 10^12 operations a second; a multiply-add is two.
    bf16_tflops: float

    @property
    def bandwidth_gb_s(self) -> float:
        """The larger bandwidth; shares of bandwidth are relative to this."""
        return max(self.copy_gb_s, self.read_gb_s)


def measure_device(device: torch.device | str, copied_bytes: int = 4 << 30, size: int = 8192) -> DeviceLimits:
    """Measures for a second or two.

    Args:
        copied_bytes: size of the tensor that is copied and summed, many times a GPU's caches; at most a quarter of its
            free memory.
        size: rows and columns of the matrices.
    """
    device = torch.device(device)
    if device.type == "cuda":
        copied_bytes = min(copied_bytes, torch.cuda.mem_get_info(device)[0] // 4)
    elements = copied_bytes // 4
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    copy, read = seconds_per_call(lambda: target.copy_(source), device), seconds_per_call(source.sum, device)
    # Random numbers, as on zeros a GPU draws less power and runs faster.
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)

    def product() -> Tensor:
        return torch.mm(a, b, out=out)

    return DeviceLimits(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        copy_gb_s=2 * 4 * elements / copy / 1e9,
        read_gb_s=4 * elements / read / 1e9,
        bf16_tflops=2 * size**3 / seconds_per_call(product, device) / 1e12,
    )


def seconds_per_call(work: Work, device: torch.device | str, budget: float = 0.3) -> float:
    """Median seconds of the calls that fit in ``budget`` seconds (3 to 1000), after three warm-up calls.

    On a GPU the calls are queued without waiting; work that is shorter than its launch should be a graph (``graphed``).
    """
    for _ in range(3):
        work()
    once = _clocked(work, device)
    count = max(3, min(1000, int(budget / max(once, 1e-6))))
    if torch.device(device).type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            work()
            event.record()
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events))
    return statistics.median(_clocked(work, device) for _ in range(count))


def graphed(work: Work, device: torch.device | str) -> Work:
    """The replay of ``work`` as a captured graph, without launch overhead; ``work`` itself on a CPU."""
    if torch.device(device).type != "cuda":
        return work
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # first calls compile and allocate, which must not be captured
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _clocked(work: Work, device: torch.device | str) -> float:
    gpu = torch.device(device).type == "cuda"
    if gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start


# GPUs that torch sees.


def num_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def why_no_gpu() -> str:
    why = "was built without CUDA" if torch.version.cuda is None else "sees no GPU; does nvidia-smi?"
    return f"torch {torch.__version__} {why}"


def gpu_name() -> str:
    return str(torch.cuda.get_device_name())


def check_fp8(device: torch.device, option: str) -> None:
    """Raises ConfigError, which names the option, if the GPU has no fp8."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"{option} needs a GPU of compute capability 8.9 or newer; {name} is older: use int8")


def describe_gpus() -> list[dict[str, Any]]:
    """The facts of each GPU that ``octavo info`` prints."""
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(
            {
                "name": properties.name,
                "memory_bytes": {"total": total, "available": free},
                "compute_capability": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
            }
        )
    return gpus


def cuda_version() -> str | None:
    return torch.version.cuda


def _angles(positions: Tensor, cos_sin: Tensor, sections: Sequence[int]) -> Tensor:
    """The rows of the table for positions [T], or composed of sections from the rows for positions [axes, T]."""
    if not sections:
        return cos_sin.index_select(0, positions)
    halves = cos_sin[positions].unflatten(-1, (2, -1)).split([*sections], dim=-1)  # of all positions
    return torch.cat([part[i % len(positions)] for i, part in enumerate(halves)], dim=-1).flatten(1)
