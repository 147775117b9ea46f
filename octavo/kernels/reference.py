"""The reference backend in plain torch: slow, short, and the standard for faster backends."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.config.kv_spec import KVSpec
from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import (
    NEGATIVE_ZERO,
    SWIGLU_LIMIT,
    Activation,
    Adapters,
    AttentionSpec,
    LayerCache,
    LowRank,
    LowRankEmbedding,
    LowRankPart,
    LowRankShape,
    Wait,
    check_part,
    check_rows,
    no_wait,
    round_part,
)
from octavo.kernels.torch_backend import ACTIVATIONS, TorchKernels, TorchLogits, TorchWeight, to_torch, torch_dtype
from octavo.kernels.weight_rows import QuantizedRows

#: Maximum number of float32 elements in a tensor of gathered keys or of scores (64 MiB).
_MAX_ELEMENTS = 1 << 24


class ReferenceKernels(TorchKernels):
    """Plain torch on any device."""

    name = "reference"

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)
        self.adapters = TorchAdapters()

    def numerics(self) -> str:
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else torch.get_num_threads()
        return f"reference {torch.__version__} {device}"

    def make_sampling_backend(self, vocab_size: int) -> TorchLogits:
        return TorchLogits(vocab_size)

    def block_bytes(self, spec: KVSpec, block_size: int) -> int:
        if not DType(spec.dtype).is_float:  # there are no scales
            raise ConfigError(
                f"the reference backend has no KV cache of type {spec.dtype}; kv_cache_dtype may be auto, float32, "
                "bfloat16 or float16"
            )
        return spec.vectors * block_size * spec.num_kv_heads * spec.head_dim * torch_dtype(spec.dtype).itemsize

    def make_group_cache(self, spec: KVSpec, layers: int, blocks: int, block_size: int) -> list[LayerCache]:
        """Keys and values are [blocks, block_size, kv_heads, head_dim], one array in a latent cache."""
        shape, dtype = (blocks, block_size, spec.num_kv_heads, spec.head_dim), torch_dtype(spec.dtype)
        arrays = [_untouched_zeros(shape, dtype, self.device) for _ in range(spec.vectors * layers)]
        pairs = zip(arrays[:: spec.vectors], arrays[spec.vectors - 1 :: spec.vectors], strict=True)
        return [LayerCache(key, value) for key, value in pairs]

    def pack(
        self,
        parts: Sequence[np.ndarray | QuantizedRows],
        bias: np.ndarray | None = None,
        quantization: str | None = None,
        *,
        dtype: DType,
        gated: bool = False,
        pieces: int = 1,
    ) -> PlainWeight:
        matrices = [part for part in parts if isinstance(part, np.ndarray)]
        if len(matrices) < len(parts) or quantization not in (None, "gguf"):
            raise ConfigError(
                f"the {self.name} backend has no quantised products: it cannot serve "
                f"quantization={quantization or 'gguf'!r}"
            )
        return PlainWeight(*self.stack(matrices, bias, dtype), gated)

    def embedding(
        self,
        ids: Tensor,
        table: Tensor,
        first: int = 0,
        *,
        scale: float = 1.0,
        add: Tensor | None = None,
        otherwise: int | None = None,
    ) -> Tensor:
        if otherwise is not None:
            ids = torch.where((ids >= first) & (ids < first + len(table)), ids, first + otherwise)
        rows = masked_embedding(ids, table, first)
        rows = rows if scale == 1.0 else rows.mul_(scale)
        return rows if add is None else rows.add_(add)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, out_dtype: DType | None = None, add: Tensor | None = None
    ) -> Tensor:
        normed = F.rms_norm(x.float(), (x.shape[-1],), None, eps) * weight
        return normed.to(torch_dtype(out_dtype) if out_dtype else weight.dtype) if add is None else normed.float() + add

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, out_dtype: DType | None = None
    ) -> Tensor:
        floats = None if bias is None else bias.float()
        if weight.dim() == 2:
            normed = F.layer_norm(x.float(), (x.shape[-1],), None, None, eps) * weight.float()
            normed = normed if floats is None else normed + floats
        else:
            normed = F.layer_norm(x.float(), (x.shape[-1],), weight.float(), floats, eps)
        return normed.to(torch_dtype(out_dtype) if out_dtype else weight.dtype)

    def reshape_and_cache(self, k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor) -> None:
        written = slots >= 0
        slots, k, v = slots[written], k[written], v[written]
        if cache.value is cache.key:
            cache.key.view(-1, *cache.key.shape[2:]).index_copy_(0, slots, torch.cat((k, v), dim=2))
            return
        cache.key.view(-1, *k.shape[1:]).index_copy_(0, slots, k)
        cache.value.view(-1, *v.shape[1:]).index_copy_(0, slots, v)

    def paged_attention(self, q: Tensor, cache: LayerCache, batch: ForwardBatch, spec: AttentionSpec) -> Tensor:
        """All decodes in one computation, then each prefill in slices of its queries."""
        decodes, sequences = batch.num_decodes, batch.seq_lens.shape[0]
        tables, seq_lens, longest = batch.block_tables[cache.group], batch.seq_lens, batch.max_seq_len
        if spec.cross:
            tables, seq_lens, longest = batch.cross_tables, batch.cross_lens, int(batch.cross_lens.max())
        later = None
        if spec.sees_spans and batch.has_spans:
            later, decodes = (batch.sees_until - batch.positions).clamp(min=0), 0
        if decodes == sequences:
            return _decode(q, cache, tables, batch.positions, seq_lens, longest, spec)
        starts, lens = batch.query_start_loc.tolist(), seq_lens.tolist()
        parts = []
        if decodes:
            device_lens, positions = seq_lens[:decodes], batch.positions[:decodes]
            parts.append(
                _decode(q[:decodes], cache, tables[:decodes], positions, device_lens, max(lens[:decodes]), spec)
            )
        for s in range(decodes, sequences):
            rows = slice(starts[s], starts[s + 1])
            seen = None if later is None else later[rows]
            parts.append(_prefill(q[rows], cache, tables[s], batch.positions[rows], lens[s], spec, seen))
        return torch.cat(parts)

    def copy_blocks(self, caches: list[LayerCache], pairs: list[tuple[int, int]]) -> None:
        self.swap_blocks(caches, caches, pairs)

    def swap_blocks(self, sources: list[LayerCache], targets: list[LayerCache], pairs: list[tuple[int, int]]) -> None:
        if not pairs:
            return
        read, written = torch.tensor(pairs, dtype=torch.int64, device=self.device).unbind(1)
        for source, target in zip(sources, targets, strict=True):
            target.key.index_copy_(0, written, source.key.index_select(0, read))
            if source.value is not source.key:
                target.value.index_copy_(0, written, source.value.index_select(0, read))

    def read_blocks(self, caches: list[LayerCache], blocks: list[int], rows: np.ndarray) -> Wait:
        arrays, numbers = self._rows_of(caches, blocks, rows)
        if blocks:
            parts = [array.index_select(0, numbers).flatten(1).view(torch.uint8) for array in arrays]
            to_torch(rows).copy_(torch.cat(parts, dim=1))
        return no_wait

    def write_blocks(self, caches: list[LayerCache], blocks: list[int], rows: np.ndarray) -> Wait:
        arrays, numbers = self._rows_of(caches, blocks, rows)
        if blocks:
            parts = to_torch(rows).to(self.device).split([array[0].nbytes for array in arrays], dim=1)
            for array, part in zip(arrays, parts, strict=True):
                array.index_copy_(0, numbers, part.contiguous().view(array.dtype).view(-1, *array.shape[1:]))
        return no_wait

    def _rows_of(self, caches: list[LayerCache], blocks: list[int], rows: np.ndarray) -> tuple[list[Tensor], Tensor]:
        """The arrays of the caches in order, and the blocks on the device, once all is checked."""
        arrays = [array for c in caches for array in ((c.key,) if c.value is c.key else (c.key, c.value))]
        check_rows(caches, blocks, rows, sum(array[0].nbytes for array in arrays))
        return arrays, torch.tensor(blocks, dtype=torch.int64, device=self.device)


def masked_embedding(ids: Tensor, table: Tensor, first: int) -> Tensor:
    ids = ids - first
    outside = (ids < 0) | (ids >= table.shape[0])
    return F.embedding(ids.masked_fill(outside, 0), table).float().masked_fill_(outside.unsqueeze(1), 0.0)


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU they use no memory until they are written (calloc, where torch writes zeros)."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:  # torch cannot view an empty array as another type
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(size, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class PlainWeight(TorchWeight):
    def rows(self, ids: Tensor, first: int, *, scale: float, dtype: DType) -> Tensor:
        rows = masked_embedding(ids, self.weight, first)
        return rows if scale == 1.0 else rows.mul_(scale)

    def __call__(
        self, x: Tensor, out_dtype: DType | None = None, add: Tensor | None = None, activation: Activation | None = None
    ) -> Tensor:
        """Computed in float32 and rounded once, except a plain product in the type of x."""
        to = x.dtype if out_dtype is None else torch_dtype(out_dtype)
        x = x.to(self.weight.dtype)
        if to == x.dtype and add is None and activation is None:
            return F.linear(x, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.float()
        product = F.linear(x.float(), self.weight.float(), bias)
        if add is not None:
            product += add
        if self.gated:
            assert activation is not None
            gate, up = product.chunk(2, dim=-1)
            if activation == "swiglu_oai":
                up = up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1
            product = ACTIVATIONS[activation](gate) * up
        elif activation is not None:
            product = ACTIVATIONS[activation](product)
        return product.to(to)


# Attention.


def _decode(
    q: Tensor, cache: LayerCache, tables: Tensor, positions: Tensor, lens: Tensor, max_len: int, spec: AttentionSpec
) -> Tensor:
    """One query per sequence: q [S, H, D], tables [S, max_blocks], positions and lens [S] to [S, H, D].

    Computed in slices of the batch, of at most ``_MAX_ELEMENTS`` gathered elements.
    """
    block_size, kv_heads, head_dim = cache.key.shape[1:]
    num_blocks = -(-max_len // block_size)
    if spec.before is not None and spec.after is not None:
        # Maximum number of blocks with tokens of the window.
        num_blocks = min(num_blocks, -(-(spec.before + 1 + spec.after) // block_size) + 1)
    at_once = max(1, _MAX_ELEMENTS // max(1, num_blocks * block_size * kv_heads * head_dim))
    pieces = zip(*(x.split(at_once) for x in (q, tables, positions, lens)), strict=True)
    outs = [_decode_slice(rows, cache, table, at, ends, num_blocks, spec) for rows, table, at, ends in pieces]
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _decode_slice(
    q: Tensor, cache: LayerCache, tables: Tensor, positions: Tensor, lens: Tensor, num_blocks: int, spec: AttentionSpec
) -> Tensor:
    sequences, heads, head_dim = q.shape
    block_size, kv_heads = cache.key.shape[1:3]
    offsets = torch.arange(num_blocks * block_size, device=q.device)
    if spec.before is None:
        tables, columns = tables[:, :num_blocks], offsets
    else:
        first_block = (positions.unsqueeze(1) - spec.before).clamp_(min=0) // block_size
        tables = tables.gather(1, (first_block + offsets[:num_blocks]).clamp_(max=tables.shape[1] - 1).long())
        columns = first_block * block_size + offsets
    beyond = columns >= lens.unsqueeze(1)
    if spec.chunked and spec.window is not None:
        beyond = beyond | (columns < (positions // spec.window * spec.window).unsqueeze(1))
    shape = (sequences, num_blocks * block_size, kv_heads, head_dim)
    blocks = tables.reshape(-1)
    key = _as_heads(cache.key.index_select(0, blocks).view(shape))
    value = _as_heads(cache.value.index_select(0, blocks).view(shape)[..., : spec.value_dim])
    value.masked_fill_(beyond[:, None, :, None], 0.0)
    query = q.reshape(sequences, kv_heads, heads // kv_heads, head_dim).float() * spec.scale
    scores = torch.matmul(query, key.transpose(2, 3)).unsqueeze(3)
    distance = columns - positions.unsqueeze(1)
    weights = _weights(scores, distance[:, None, None, None], beyond[:, None, None, None], spec, spec.after).squeeze(3)
    return torch.matmul(weights, value).view(sequences, heads, value.shape[-1]).to(q.dtype)


def _prefill(
    q: Tensor,
    cache: LayerCache,
    table: Tensor,
    positions: Tensor,
    seq_len: int,
    spec: AttentionSpec,
    later: Tensor | None = None,
) -> Tensor:
    """Consecutive tokens of one sequence: q [L, H, D], table [max_blocks], positions [L] to [L, H, D].

    ``later`` [L]: how many tokens after itself each sees, if that differs.
    """
    length, heads, head_dim = q.shape
    if not length:
        return q.clone()
    block_size, kv_heads = cache.key.shape[1:3]
    first_query, before = int(positions[0]), spec.before
    after = spec.after if later is None else int(later.max())
    origin = 0 if before is None else max(0, first_query - before) // block_size * block_size
    last = seq_len if after is None else min(seq_len, first_query + length + after)
    blocks = table[origin // block_size : -(-last // block_size)]
    shape = (1, blocks.shape[0] * block_size, kv_heads, head_dim)
    # [K, context, D], from position `origin` to the last one that a query attends to.
    key = _as_heads(cache.key.index_select(0, blocks).view(shape)[:, : last - origin])[0]
    value = _as_heads(cache.value.index_select(0, blocks).view(shape)[:, : last - origin, :, : spec.value_dim])[0]
    query = q.transpose(0, 1).reshape(kv_heads, heads // kv_heads, length, head_dim).float() * spec.scale
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    step = max(1, _MAX_ELEMENTS // (heads * (last - origin)))
    for start in range(0, length, step):
        end = min(start + step, length)
        oldest = origin if before is None else max(origin, first_query + start - before)
        newest = seq_len if after is None else min(seq_len, first_query + end + after)
        seen = slice(oldest - origin, newest - origin)
        columns = torch.arange(oldest, newest, device=q.device)
        distance = columns - positions[start:end].unsqueeze(1)
        # The query heads of a KV head are rows of one product, so keys are not repeated.
        rows_of_head = query[:, :, start:end].reshape(kv_heads, -1, head_dim)
        scores = torch.matmul(rows_of_head, key[:, seen].transpose(1, 2))
        beyond = columns >= seq_len
        if spec.chunked and spec.window is not None:
            beyond = beyond | (columns < (positions[start:end] // spec.window * spec.window).unsqueeze(1))
        if later is not None:
            beyond = beyond | (distance > later[start:end].unsqueeze(1))
        last_seen = spec.after if later is None else None
        weights = _weights(scores.view(kv_heads, -1, *distance.shape), distance, beyond, spec, last_seen)
        attended = torch.matmul(weights.view_as(scores), value[:, seen])
        out[:, :, start:end] = attended.view(kv_heads, -1, end - start, value.shape[-1])
    return out.view(heads, length, value.shape[-1]).transpose(0, 1).to(q.dtype, memory_format=torch.contiguous_format)


def _weights(scores: Tensor, distance: Tensor, beyond: Tensor, spec: AttentionSpec, after: int | None) -> Tensor:
    """The masked softmax of scores [.., K, G, queries, keys], which are overwritten.

    ``distance`` (position of the key - position of the query) and ``beyond`` (whether the key is past the context) are
    broadcast against the scores; keys more than ``after`` past the query are masked, too.
    """
    if spec.soft_cap:
        scores = scores.div_(spec.soft_cap).tanh_().mul_(spec.soft_cap)
    if spec.alibi_slopes is not None:
        slopes = torch.tensor(spec.alibi_slopes, device=scores.device).view(scores.shape[-4:-2])
        scores = scores.add_(slopes[..., None, None] * distance)
    if spec.bias is not None:
        table = torch.from_numpy(spec.bias.values).to(scores.device).view(*scores.shape[-4:-2], 1, -1)
        index = (distance + spec.bias.reach).clamp(0, 2 * spec.bias.reach).expand(scores.shape)
        scores = scores.add_(table.expand(*scores.shape[:-1], -1).gather(-1, index))
    if after is not None:
        beyond = beyond | (distance > after)
    if spec.before is not None:
        beyond = beyond | (distance < -spec.before)
    scores = scores.masked_fill_(beyond, float("-inf"))
    if spec.sinks is None:
        return scores.softmax(-1)
    sinks = spec.sinks.view(*scores.shape[-4:-2], 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]


def _as_heads(x: Tensor) -> Tensor:
    """[S, L, K, D] to a new, contiguous float32 [S, K, L, D]."""
    out = torch.empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3], dtype=torch.float32, device=x.device)
    return out.copy_(x.transpose(1, 2))


# Low-rank products of adapters.


@dataclass(frozen=True)
class PlainAdapter:
    parts: tuple[LowRankPart | None, ...]


class PlainLowRank(LowRank):
    """Low-rank products by torch on any device; the rows of an adapter in one product."""

    def __init__(self, adapters: Adapters, shape: LowRankShape, *, sampled: bool = False) -> None:
        super().__init__(adapters, shape, sampled=sampled)
        self._held: list[PlainAdapter | None] = [None] * shape.slots

    def pack(self, parts: Sequence[LowRankPart | None]) -> PlainAdapter:
        self.check(parts)
        return PlainAdapter(tuple(None if part is None else round_part(part, self.dtype) for part in parts))

    def place(self, slot: int, packed: PlainAdapter | None) -> None:
        self._held[slot] = packed

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor | None:
        slots = self._adapters.slots(sampled=self._sampled)
        if slots is None:
            return add
        out = x.new_full((len(x), sum(self.outputs)), NEGATIVE_ZERO, dtype=torch.float32) if add is None else add
        x = x.to(torch_dtype(self.dtype)).float()
        starts = [0, *itertools.accumulate(self.outputs)]
        for chosen, adapter in _rows_by_adapter(slots, self._held):
            for part, start in zip(adapter.parts, starts, strict=False):
                if part is not None:
                    columns = slice(start, start + len(part.up))
                    shrunk = x[chosen] @ _floats(part.down, x).T
                    out[chosen, columns] += _expand(shrunk, part.up)
        return out


class PlainLowRankEmbedding(LowRankEmbedding):
    def __init__(self, adapters: Adapters, shape: LowRankShape) -> None:
        super().__init__(adapters, shape)
        self._held: list[PlainAdapter | None] = [None] * shape.slots

    def pack(self, part: LowRankPart) -> PlainAdapter:
        check_part(part, self.rows, self.outputs, self.max_rank)
        return PlainAdapter((round_part(part, self.dtype),))

    def place(self, slot: int, packed: PlainAdapter | None) -> None:
        self._held[slot] = packed

    def __call__(self, ids: Tensor, add: Tensor, first: int = 0) -> Tensor:
        slots = self._adapters.slots()
        if slots is None:
            return add
        ids = ids - first
        slots = slots.masked_fill((ids < 0) | (ids >= self.rows), -1)
        for chosen, adapter in _rows_by_adapter(slots, self._held):
            (part,) = adapter.parts
            assert part is not None
            add[chosen] += _expand(_floats(part.down, add).T[ids[chosen]], part.up)
        return add


class TorchAdapters(Adapters):
    low_rank: ClassVar[type[LowRank]] = PlainLowRank
    low_rank_embedding: ClassVar[type[LowRankEmbedding]] = PlainLowRankEmbedding

    def _take(self, slots: Tensor, rows: Tensor) -> Tensor:
        return slots.index_select(0, rows)


def _rows_by_adapter(slots: Tensor, held: Sequence[PlainAdapter | None]) -> list[tuple[Tensor, PlainAdapter]]:
    """(rows, adapter) of each slot that holds an adapter."""
    pairs = []
    for slot in slots.unique().tolist():
        adapter = held[slot] if slot >= 0 else None
        if adapter is not None:
            pairs.append(((slots == slot).nonzero().squeeze(1), adapter))
    return pairs


def _expand(shrunk: Tensor, up: np.ndarray) -> Tensor:
    """The product by ``up``, of rows [n, rank] rounded to its type: float32 [n, outputs]."""
    return shrunk.to(to_torch(up).dtype).float() @ _floats(up, shrunk).T


def _floats(matrix: np.ndarray, like: Tensor) -> Tensor:
    return to_torch(matrix).to(like.device).float()
