"""What backends made of torch share: arrays are tensors on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.core.dtypes import DType
from octavo.kernels.cache import LayerCache
from octavo.kernels.experts import PackedExperts, RoutingSpec
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Kernels
from octavo.kernels.packed_weight import PackedHeads, PackedWeight
from octavo.kernels.torch_arrays import from_torch, to_torch, torch_dtype
from octavo.kernels.torch_experts import PlainExperts, plain_route


class PlainHeads(PackedHeads):
    """Matrices of heads as they are, multiplied by torch."""

    def __init__(self, weight: Tensor) -> None:
        """``weight``: [H, N, K]."""
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """A batch of products."""
        return torch.einsum("thk,hnk->thn", x, self.weight).contiguous()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.weight.nbytes


@dataclass(frozen=True, slots=True)
class TorchWeight(PackedWeight):
    """A weight that is not quantised: tensors as they are in the checkpoint."""

    #: [N, K], and [N] or None.
    weight: Tensor
    bias: Tensor | None
    gated: bool
    has_rows = True

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class TorchKernels(Kernels):
    """Tensors on ``device``; a step is computed without gradients."""

    device: torch.device
    mode = torch.inference_mode

    def array(self, values: np.ndarray, dtype: DType | None = None) -> Tensor:
        """A tensor on the device."""
        return to_torch(values).to(self.device, None if dtype is None else torch_dtype(dtype), copy=True).contiguous()

    def wrap(self, values: np.ndarray) -> Tensor:
        """Over the same memory if the device is a CPU."""
        return to_torch(values).to(self.device)

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """A tensor on the device."""
        return torch.zeros(shape, dtype=torch_dtype(dtype), device=self.device)

    def write(self, target: Tensor, values: np.ndarray) -> None:
        """Copies to the device."""
        target.copy_(to_torch(values))

    def to_numpy(self, x: Tensor) -> np.ndarray:
        """Copies to the host, if the device is another."""
        return from_torch(x)

    def take_rows(self, x: Tensor, rows: np.ndarray) -> Tensor:
        """By the index on the device."""
        return x.index_select(0, self.wrap(rows))

    def put_rows(self, target: Tensor, rows: np.ndarray, x: Tensor) -> None:
        """By the index on the device."""
        target.index_copy_(0, self.wrap(rows), x.to(target.dtype))

    def scatter_columns(self, x: Tensor, columns: Tensor, width: int) -> Tensor:
        """See ``ArrayMaker``."""
        return x.new_full((len(x), width), -torch.inf).index_copy_(1, columns, x)

    def as_token_ids(self, tokens: Any) -> Tensor:
        """Of tokens on the device, or of the host's."""
        return torch.as_tensor(tokens).to(self.device).clamp(min=0)

    def put_tokens(self, token_ids: Tensor, targets: np.ndarray, tokens: Any, sources: np.ndarray) -> None:
        """See ``ArrayMaker``."""
        token_ids.index_copy_(0, self.wrap(targets), self.as_token_ids(tokens).index_select(0, self.wrap(sources)))

    def take_sampled(self, hidden: Tensor, batch: ForwardBatch, rows: int = 1) -> Tensor:
        """See ``Kernels``."""
        if rows > 1:
            return _runs(hidden, batch, rows).flatten(1)
        return hidden if batch.all_sampled else hidden.index_select(0, batch.sampled_rows)

    def mean_sampled(self, hidden: Tensor, batch: ForwardBatch, rows: int) -> Tensor:
        """See ``Kernels``."""
        return _runs(hidden, batch, rows).mean(1)

    def host_call(self, function: Callable[[Any], None], x: Tensor) -> Tensor:
        """At once."""
        function(x)
        return x

    def token_rows(self, batch: ForwardBatch, width: int) -> Tensor:
        """See ``Kernels``."""
        return torch.empty((len(batch.token_ids), width), dtype=torch.float32, device=self.device)

    def all_reduce(self, x: Tensor, bias: Tensor | None = None, add: Tensor | None = None) -> Tensor:
        """By the group's communicator."""
        x = x if self.group is None else self.group.all_reduce(x)
        for term in (bias, add):
            if term is not None:
                x += term
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """By the group's communicator."""
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
        """One tensor."""
        return PlainHeads(self.array(weight, dtype))

    def pack_experts(self, gate_up: Any, down: Any, shared: int = 0) -> PackedExperts:
        """A loop over the experts."""
        return PlainExperts(gate_up, down)

    def route(self, logits: Tensor, spec: RoutingSpec, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """In plain torch."""
        return plain_route(logits, spec, bias)

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
        """By the backend's other operations."""
        rope = k_rope.shape[1]
        q_nope, q_rope = q.split((q.shape[2] - rope, rope), dim=2)
        q_rope, k = self.rotary(q_rope, k_rope.unsqueeze(1), batch.positions, cos_sin)
        self.reshape_and_cache(latent.unsqueeze(1), k, cache, batch.slot_mapping[cache.group])
        return torch.cat((absorb(q_nope), q_rope), dim=2)


def _runs(hidden: Tensor, batch: ForwardBatch, rows: int) -> Tensor:
    """Each sampled row with those that follow it, [N, rows, E]."""
    steps = torch.arange(rows, device=hidden.device)
    return hidden[batch.sampled_rows[:, None] + steps]
