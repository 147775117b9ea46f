"""Selective state spaces: the mixers of Mamba 1 (Gu & Dao 2023) and Mamba 2 (Dao & Gu 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from octavo.config.kv_spec import KVSpec
from octavo.core.dtypes import DType
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Array, LayerCache, ScanChannels, ScanHeads, scan_numbers, ssd_numbers
from octavo.layers.layer import Layer, LayerContext, RMSNorm, Weight
from octavo.layers.linear import ParallelLinear, Part, RowParallelLinear, share_heads
from octavo.layers.states import CausalConv, StateLayer


@dataclass(frozen=True)
class Mamba2Shape:
    heads: int
    head_dim: int
    #: Groups of heads with the same B and C.
    groups: int
    state_size: int
    #: Inputs of the convolution, with a token's own.
    taps: int
    conv_bias: bool = True
    #: Of the projections.
    bias: bool = False
    #: Bounds of dt.
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    #: RMS norm of each group, of the gated results, or before the gate.
    norm: Literal["gated", "before gate", ""] = "gated"

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def width(self) -> int:
        """Numbers of a token in a layer, the scan's results in float32."""
        return 6 * self.inner + 4 * self.groups * self.state_size + self.heads


class Mamba2Scales(NamedTuple):
    """Factors of the projected z, x, B, C and dt, and of the input of the last projection (Falcon-H1).

    Those of x, B and C are in the weights of the convolution, the others in the scan: no matrix is rounded again.
    """

    z: float = 1.0
    x: float = 1.0
    b: float = 1.0
    c: float = 1.0
    dt: float = 1.0
    out: float = 1.0


class Mamba2Mixer(StateLayer):
    """A convolution of x, B and C, the scan of each head, a gate with perhaps a norm, and a projection.

    Each rank has a share of the heads, and the groups that they use: with more ranks than groups, neighbouring ranks
    have the same one. A block of states has the numbers of the convolution and then those of the heads.
    """

    def __init__(
        self,
        context: LayerContext,
        hidden: int,
        shape: Mamba2Shape,
        eps: float = 1e-5,
        scales: Mamba2Scales = Mamba2Scales(),  # noqa: B008  # it is immutable
    ) -> None:
        """Tensors: in_proj_{z, x, b, c, dt}, conv1d, A_log, dt_bias, D, norm.weight if there is a norm, and out_proj.

        ``eps``: of the norm. ``MAMBA2_NAMES`` (``octavo.models.mamba``) splits in_proj.
        """
        super().__init__()
        self.kernels, self.dtype, self._shape, self._scales = context.kernels, context.dtype, shape, scales
        self._own, groups = share_heads(context, shape.heads, shape.groups, ("heads", "groups of heads"))
        self.heads, self.groups = self._own.stop - self._own.start, groups.stop - groups.start
        inner, keys = shape.inner, shape.groups * shape.state_size
        own = slice(self._own.start * shape.head_dim, self._own.stop * shape.head_dim)
        own_keys = slice(groups.start * shape.state_size, groups.stop * shape.state_size)
        parts = [Part(f"in_proj_{name}", inner, own) for name in "zx"]
        parts += [Part(f"in_proj_{name}", keys, own_keys) for name in "bc"]
        parts.append(Part("in_proj_dt", shape.heads, self._own))
        self.projection = self.attach("", ParallelLinear(context, parts, hidden, shape.bias, prefix="in_proj."))
        starts = (0, own), (inner, own_keys), (inner + keys, own_keys)
        channels = np.concatenate([np.arange(start + rows.start, start + rows.stop) for start, rows in starts])
        factors = np.repeat(np.array([scales.x, scales.b, scales.c], np.float32), (inner, keys, keys))
        width = inner + 2 * keys
        self.conv = self.attach("conv1d", CausalConv(context, width, shape.taps, shape.conv_bias, channels, factors))
        self.norm: GroupNorm | None = None
        if shape.norm:
            self.norm = self.attach("norm", GroupNorm(context, inner, shape.groups, own, eps, scales.out))
        self.out = self.attach("out_proj", RowParallelLinear(context, inner, hidden, shape.bias, own))
        self._vectors: dict[str, Array] = {}
        for name in ("A_log", "dt_bias", "D"):
            self.expected[name] = (shape.heads,)
            self.holds.append(Weight(name, (self.heads,), "vector", DType.FLOAT32))
        matrices = ssd_numbers(self.heads, shape.head_dim, shape.state_size, context.draft_tokens)
        self.kv_spec = KVSpec.state(self.conv.numbers + matrices, context.draft_tokens)

    def add_to(self, residual: Array, x: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        """See ``StateLayer``."""
        conv, inner, norm = self.conv, self.heads * self._shape.head_dim, self.norm
        projected, width = self.projection(x), conv.channels
        z, xbc, dt = projected[:, :inner], projected[:, inner : inner + width], projected[:, inner + width :]
        xbc = self.kernels.causal_conv(xbc, conv.weight, conv.bias, cache, batch, activation="silu")
        scan, heads, offset = self.kernels.ssd_scan, self._scan, conv.numbers
        if norm is None:
            y = scan(xbc, dt, heads, cache, batch, z=z, offset=offset)
        elif self._shape.norm == "gated":
            y = norm(scan(xbc, dt, heads, cache, batch, z=z, offset=offset, out_dtype=DType.FLOAT32), self.dtype)
        else:
            y = norm(scan(xbc, dt, heads, cache, batch, offset=offset, out_dtype=DType.FLOAT32), DType.FLOAT32)
            y = self.kernels.silu_gate(y, z, self._scales.z)
        return self.out.add_to(residual, y)

    def place(self, shard: str, tensor: np.ndarray) -> None:
        values = np.asarray(tensor, np.float32)[self._own]
        self._vectors[shard] = self.kernels.array(-np.exp(values) if shard == "A_log" else np.ascontiguousarray(values))

    def complete(self) -> None:
        shape, scales = self._shape, self._scales
        decay, dt_bias, skip = (self._vectors[name] for name in ("A_log", "dt_bias", "D"))
        self._scan = ScanHeads(
            self.heads,
            self.groups,
            shape.head_dim,
            shape.state_size,
            decay,
            dt_bias,
            skip,
            shape.dt_limits,
            dt_scale=scales.dt,
            gate_scale=scales.z,
            scale=1.0 if shape.norm else scales.out,
        )


class GroupNorm(Layer):
    """RMS norm of each group of channels, with a weight for each channel.

    Each rank has some channels. Ranks that share a group compute the norm of all groups, and keep their own channels.
    """

    def __init__(
        self, context: LayerContext, channels: int, groups: int, own: slice, eps: float, factor: float = 1.0
    ) -> None:
        """``own``: this rank's channels; ``factor``: of the results."""
        super().__init__()
        self.kernels, self._eps, self._factor, self._own = context.kernels, eps, factor, own
        self._shares = context.tp_size > groups
        self._size = channels // groups
        self.expected["weight"] = (channels,)
        held = channels if self._shares else own.stop - own.start
        self.holds.append(Weight("weight", (held,), "vector", DType.FLOAT32))

    def __call__(self, x: Array, dtype: DType) -> Array:
        """The norm of this rank's channels, x float32 [T, channels]."""
        tokens = x.shape[0]
        x = self.kernels.all_gather(x) if self._shares else x
        grouped = x.reshape(tokens, -1, self._size)
        normed = self.kernels.rms_norm(grouped, self.weight, self._eps, out_dtype=dtype).reshape(tokens, -1)
        return normed[:, self._own] if self._shares else normed

    def place(self, shard: str, tensor: np.ndarray) -> None:
        values = np.asarray(tensor, np.float32) * np.float32(self._factor)
        values = values if self._shares else values[self._own]
        self.weight = self.kernels.array(np.ascontiguousarray(values.reshape(-1, self._size)))


@dataclass(frozen=True)
class Mamba1Shape:
    #: Channels of the scan.
    inner: int
    state_size: int
    #: Inner size of the projection of dt.
    dt_rank: int
    #: Inputs of the convolution, with a token's own.
    taps: int
    conv_bias: bool = True
    #: Of the first and the last projection.
    bias: bool = False

    @property
    def width(self) -> int:
        """Numbers of a token in a layer, those of dt in float32."""
        return 6 * self.inner


class Mamba1Mixer(StateLayer):
    """A convolution, projections to dt, B and C, the scan of each channel with its gate, and a projection.

    Each rank has a share of the channels, and all of B and C. A block of states has the numbers of the convolution
    and then those of the channels.
    """

    def __init__(
        self,
        context: LayerContext,
        hidden: int,
        shape: Mamba1Shape,
        norm: type[RMSNorm] | None = None,
        eps: float = 1e-6,
    ) -> None:
        """Tensors: in_proj_{x, z}, conv1d, x_proj, dt_proj, A_log, D and out_proj.

        ``norm``: of dt before its projection, B and C, as {dt, b, c}_layernorm. ``MAMBA1_NAMES``
        (``octavo.models.mamba``) splits in_proj.
        """
        super().__init__()
        self.kernels, inner, states = context.kernels, shape.inner, shape.state_size
        self.out = self.attach("out_proj", RowParallelLinear(context, inner, hidden, shape.bias))
        self._own = own = self.out.columns
        self._width = width = own.stop - own.start
        parts = [Part(f"in_proj_{name}", inner, own) for name in "xz"]
        self.projection = self.attach("", ParallelLinear(context, parts, hidden, shape.bias, prefix="in_proj."))
        self.conv = self.attach("conv1d", CausalConv(context, inner, shape.taps, shape.conv_bias, own))
        self._sizes = shape.dt_rank, states, states
        self.selection = self.attach("x_proj", RowParallelLinear(context, inner, sum(self._sizes), False, own))
        self.dt = self.attach("dt_proj", ParallelLinear(context, [Part("", inner, own)], shape.dt_rank, False))
        self.norms: list[RMSNorm] = []
        if norm is not None:
            names = zip(("dt", "b", "c"), self._sizes, strict=True)
            self.norms = [self.attach(f"{name}_layernorm", norm(context, size, eps)) for name, size in names]
        self._vectors: dict[str, Array] = {}
        for name, sizes in (("A_log", (states,)), ("D", ()), ("dt_proj.bias", ())):
            self.expected[name] = (inner, *sizes)
            self.holds.append(Weight(name, (width, *sizes), "vector", DType.FLOAT32))
        numbers = self.conv.numbers + scan_numbers(width, states, context.draft_tokens)
        self.kv_spec = KVSpec.state(numbers, context.draft_tokens)

    def add_to(self, residual: Array, x: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        """See ``StateLayer``."""
        conv, width, (rank, states, _) = self.conv, self._width, self._sizes
        projected = self.projection(x)
        x = self.kernels.causal_conv(projected[:, :width], conv.weight, conv.bias, cache, batch, activation="silu")
        selected = self.selection(x)
        dt, b, c = selected[:, :rank], selected[:, rank : rank + states], selected[:, rank + states :]
        if self.norms:
            dt, b, c = (norm.float32(part) for norm, part in zip(self.norms, (dt, b, c), strict=True))
        dt = self.dt.packed(dt, DType.FLOAT32, self.dt.with_adapters(dt))
        y = self.kernels.selective_scan(
            x, dt, b, c, projected[:, width:], self._scan, cache, batch, offset=conv.numbers
        )
        return self.out.add_to(residual, y)

    def place(self, shard: str, tensor: np.ndarray) -> None:
        values = np.asarray(tensor, np.float32)[self._own]
        values = -np.exp(values).T if shard == "A_log" else values
        self._vectors[shard] = self.kernels.array(np.ascontiguousarray(values))

    def complete(self) -> None:
        self._scan = ScanChannels(*(self._vectors[name] for name in ("A_log", "dt_proj.bias", "D")))
