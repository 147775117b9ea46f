"""Encoders on the worker: of encoder-decoder networks (``ContextEncoder``), and of images (``ImagePreparer``)."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from octavo.config.kv_spec import LayerGroup
from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError
from octavo.core.plan import NewContext, NewSequence
from octavo.core.request import Feature, Generate, ImageInput
from octavo.kernels.forward_batch import BatchSize, Forward, ForwardBatch, ForwardOutput, make_batch
from octavo.kernels.interface import Array, Kernels, LayerCache, PartedForward
from octavo.layers.attention import CrossQueries
from octavo.models.network import Network, Tower, TowerInput
from octavo.runner.input_batch import Contexts, FlatInputs, StepInputs, flat_arrays
from octavo.runner.preparers import Preparer

if TYPE_CHECKING:
    from octavo.runner.device import Device
    from octavo.runner.loaded_model import LoadedModel
    from octavo.runner.model_runner import QueuedStep
    from octavo.runner.preparer_kinds import EncoderInputPreparer
    from octavo.runner.preparers import PreparerContext


class ContextEncoder:
    """Runs the encoder of an encoder-decoder network within a step.

    It writes keys and values of the encoder's output into the blocks of contexts. Owns the captured encoder, its
    workspace and the memory of its features.
    """

    def __init__(self, loaded: LoadedModel, inputs: EncoderInputPreparer, contexts: Contexts, size: BatchSize) -> None:
        self._loaded, self._inputs, self._contexts, self._size = loaded, inputs, contexts, size
        facts = loaded.config.encoder_facts
        assert facts is not None
        self._features: Any = None
        if facts.feature_width is not None:
            self._features = loaded.kernels.zeros((size.tokens, facts.feature_width), DType.FLOAT32)
        self._workspace = loaded.layers.make_workspace()
        self._forward: Forward | None = None

    def capture(self, caches: list[LayerCache]) -> None:
        loaded, workspace, features = weakref.proxy(self._loaded), self._workspace, self._features

        def forward(batch: ForwardBatch) -> ForwardOutput:
            inputs = batch.token_ids if features is None else features[: len(batch.token_ids)]
            return ForwardOutput(loaded.network.encode(inputs, batch, workspace, caches))

        self._forward = self._loaded.kernels.capture(forward, self._size)

    def release(self) -> None:
        self._forward = None

    def encode(self, contexts: Sequence[NewContext]) -> None:
        """Computes new contexts, whose inputs must be prepared."""
        assert self._forward is not None
        contexts = sorted(contexts, key=lambda context: context.num_tokens > 1)  # as kernels want them
        rows = [self._inputs.find(context.encode) for context in contexts if context.encode is not None]
        lens = np.array([len(values) for values in rows], np.int64)
        values = rows[0] if len(rows) == 1 else np.concatenate(rows)
        ids = values if self._features is None else np.zeros(len(values), np.int64)
        if self._features is not None:
            self._loaded.kernels.write(self._features[: len(values)], values)
        tables = [self._contexts.table(context.context_id) for context in contexts]
        self._forward(self._loaded.device.to_device(self._flatten(ids, lens, tables), ()))

    def _flatten(
        self, ids: NDArray[np.int64], lens: NDArray[np.int64], tables: Sequence[NDArray[np.int32]]
    ) -> FlatInputs:
        """The batch of whole inputs: the first KV group is that of the decoder, the last is the workspace."""
        size, count = self._contexts.block_size, len(ids)
        offsets = np.zeros(len(lens) + 1, np.int64)
        np.cumsum(lens, out=offsets[1:])
        positions = np.arange(count) - np.repeat(offsets[:-1], lens)
        blocks = -(-lens // size)
        first = np.cumsum(blocks) - blocks
        longest = int(blocks.max())
        workspace = (first[:, None] + np.arange(longest)).astype(np.int32)
        padded = np.zeros_like(workspace)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        both = np.stack([padded, workspace])
        sequence = np.repeat(np.arange(len(lens)), lens)
        slots = both[:, sequence, positions // size].astype(np.int64) * size + positions % size
        arrays = flat_arrays(
            count,
            token_ids=ids,
            positions=positions,
            slot_mapping=np.ascontiguousarray(slots),
            sampled_rows=np.zeros(0, np.int64),
            query_start_loc=offsets.astype(np.int32),
            seq_lens=lens.astype(np.int32),
            block_tables=both,
        )
        num_decodes = int((lens == 1).sum())
        return FlatInputs(arrays, num_decodes, max_seq_len=int(lens.max()), all_sampled=False, has_adapters=False)


# --- cross-attention weights (word timestamps of speech) --------------------------------------------------------------

Caches = list[LayerCache]


@dataclass(slots=True)
class _Aligned:
    heads: list[tuple[int, int]]
    num_tokens: int
    #: float32 [heads, tokens, positions] of each step so far.
    parts: list[NDArray[np.float32]] = field(default_factory=list)


class Alignment:
    """Computes cross-attention weights for the sequences that request them.

    Attention kernels return no weights, but sums of values. If the values are unit vectors, the sum is the weights
    themselves, of as many positions as a head has numbers. So the layers are computed once more beside the captured
    step; in the requested layers, attention runs over copies of the context's keys with such values, one range of
    positions after another. Like the kernels, it is batch-invariant.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._held: dict[int, _Aligned] = {}

    def add(self, sequence: NewSequence) -> None:
        task = sequence.task
        if not isinstance(task, Generate) or not task.alignment_heads:
            return
        if sequence.num_computed:
            raise ConfigError(f"attention weights need all tokens, but {sequence.num_computed} are computed already")
        self._held[sequence.seq_id] = _Aligned(task.alignment_heads, sequence.num_prompt_tokens)

    def forget(self, seq_id: int) -> None:
        self._held.pop(seq_id, None)

    def compute(self, inputs: StepInputs, batch: ForwardBatch, step: QueuedStep, caches: Callable[[], Caches]) -> None:
        """Takes the weights of the step's tokens; adds those of complete prompts to ``step``.

        ``caches``: of the network's layers; they are written again, with the same bits.
        """
        if not self._held:
            return
        places = {i: held for i, seq_id in enumerate(inputs.seq_ids) if (held := self._held.get(seq_id)) is not None}
        if not places:
            return
        network, layers = self._loaded.network, caches()
        reader = _WeightReader(self._loaded, inputs, batch, layers, places)
        network.forward_layers(network.embed(batch.token_ids), batch, layers, reader)
        for i, held in places.items():
            held.parts.append(np.stack([reader.weights[i, layer][head] for layer, head in held.heads]))
            if inputs.ends[i] < held.num_tokens:
                continue
            weights, seq_id = np.concatenate(held.parts, axis=1), inputs.seq_ids[i]
            if np.isfinite(weights).all():
                step.pooled[seq_id] = weights
            else:
                step.failed[seq_id] = "the attention weights are not finite (NaN or infinite)"


@dataclass(slots=True)
class _WeightReader:
    """Computes the weights of some sequences of a step. A ``ResidualReader``."""

    loaded: LoadedModel
    inputs: StepInputs
    batch: ForwardBatch
    caches: Caches
    #: By index of the sequence in the step.
    places: dict[int, _Aligned]
    #: By index and layer: float32 [heads, tokens of the step, positions].
    weights: dict[tuple[int, int], NDArray[np.float32]] = field(default_factory=dict)

    def read(self, layer: int, residual: Array) -> None:
        indices = [i for i, held in self.places.items() if any(layer == requested for requested, _ in held.heads)]
        if not indices:
            return
        loaded, arrays = self.loaded, self.inputs.arrays
        # A copy: the network goes on with the stream, and the layer's sums may reuse its memory.
        stream = loaded.kernels.array(loaded.kernels.to_numpy(residual))
        queries = loaded.network.cross_queries(layer, stream, self.caches[layer], self.batch)
        offsets = arrays["query_start_loc"].tolist()
        for i in indices:
            rows = replace(queries, values=queries.values[offsets[i] : offsets[i + 1]])
            length = int(arrays["cross_lens"][i])
            table = arrays["cross_tables"][i]
            self.weights[i, layer] = attention_weights(loaded, layer, rows, self.caches[layer], table, length)


def attention_weights(
    loaded: LoadedModel, layer: int, queries: CrossQueries, cache: LayerCache, table: NDArray[np.int32], length: int
) -> NDArray[np.float32]:
    """The weights of a layer over one context of ``length`` positions: float32 [heads of all ranks, tokens, length].

    ``table``: blocks of the context.
    """
    kernels, size = loaded.kernels, loaded.options.block_size
    tokens, _, width = queries.values.shape
    spec, blocks = loaded.network.kv_specs[layer], -(-length // size)
    keys, units = (kernels.make_group_cache(spec, 1, blocks, size)[0] for _ in range(2))
    kernels.swap_blocks([cache], [keys], [(int(block), i) for i, block in enumerate(table[:blocks])])
    mixed = replace(keys, value=units.value)
    own_tables = np.zeros((1, -(-tokens // size)), np.int32)
    cross_tables = np.arange(blocks, dtype=np.int32)[None]
    batch = make_batch([tokens], [tokens], own_tables, size, kernels, cross_lens=[length], cross_tables=cross_tables)
    shape, slots = (length, spec.num_kv_heads, width), kernels.wrap(np.arange(length))
    nothing = kernels.zeros(shape, loaded.context.dtype)
    out = np.zeros((queries.num_heads, tokens, length), np.float32)
    for first in range(0, length, width):
        values, numbers = np.zeros(shape, np.float32), np.arange(min(width, length - first))
        values[first + numbers, :, numbers] = 1.0
        kernels.reshape_and_cache(nothing, kernels.array(values, loaded.context.dtype), units, slots)
        part = np.zeros((tokens, queries.num_heads, width), np.float32)
        part[:, queries.heads] = kernels.to_numpy(kernels.paged_attention(queries.values, mixed, batch, queries.spec))
        joined = kernels.all_reduce(kernels.array(part.reshape(tokens, -1)))
        part = kernels.to_numpy(joined).reshape(part.shape)[:, :, : len(numbers)]
        out[:, :, first : first + len(numbers)] = part.transpose(1, 0, 2)
    return out


# --- images -----------------------------------------------------------------------------------------------------------

#: Rows of the smallest captured tower; larger pieces are captured with twice as many, four times, and so on.
_LEAST_ROWS = 64


class TowerRunner:
    """Runs a vision tower between steps, one piece of an image after the other, each in parts of milliseconds.

    Owns the captured tower, its workspace and the memory of its rows, for the largest piece so far.
    """

    def __init__(self, tower: Tower, device: Device, kernels: Kernels, block_size: int) -> None:
        self._tower, self._device, self._kernels, self._block_size = tower, device, kernels, block_size
        self._size = BatchSize(0, 0, 0, 0, block_size)
        self._rows: Array = None
        self._forward: PartedForward | None = None

    def begin(self, piece: TowerInput) -> None:
        size = self._size
        if len(piece.rows) > size.tokens or len(piece.segments) > size.sequences or self._forward is None:
            self._forward = self._capture(piece)
        assert self._forward is not None
        self._kernels.write(self._rows[: len(piece.rows)], piece.rows)
        self._forward.begin(self._device.to_device(self._flatten(piece), ()))

    def advance(self, seconds: float) -> np.ndarray | None:
        """Computes for about ``seconds``; the piece's features, float32 [N, E], when they are complete."""
        assert self._forward is not None
        output = self._forward.advance(seconds)
        if output is None:
            return None
        return self._kernels.to_numpy(output.logits).astype(np.float32, copy=True)

    def _capture(self, piece: TowerInput) -> PartedForward:
        rows, segments = self._size.tokens or _LEAST_ROWS, self._size.sequences or 1
        while rows < len(piece.rows):
            rows *= 2
        while segments < len(piece.segments):
            segments *= 2
        blocks = -(-rows // self._block_size)
        self._size = BatchSize(rows, segments, rows, rows, self._block_size, 2, blocks, self._tower.rotary_axes)
        self._rows = self._kernels.zeros((rows, self._tower.row_width), DType.FLOAT32)
        # Each segment begins at a block.
        caches = [self._workspace(0, blocks + segments), self._workspace(1, blocks)]
        tower, values = weakref.proxy(self._tower), self._rows

        def forward(batch: ForwardBatch) -> ForwardOutput:
            features = tower.features(values[: len(batch.token_ids)], batch, caches)
            return ForwardOutput(features, features)  # logits are the part of the output that the caller gets

        return self._kernels.capture_parts(forward, self._size)

    def _workspace(self, group: int, blocks: int) -> LayerCache:
        cache = self._kernels.make_cache([LayerGroup(self._tower.workspace, (0,))], [blocks], self._block_size)[0]
        cache.group = group
        return cache

    def _flatten(self, piece: TowerInput) -> FlatInputs:
        size, count, lens = self._block_size, len(piece.rows), np.array(piece.segments, np.int64)
        blocks = -(-lens // size)
        first = np.cumsum(blocks) - blocks
        whole = np.arange(-(-count // size), dtype=np.int32)
        segments = (first[:, None] + np.arange(int(blocks.max()))).astype(np.int32)
        tables = np.zeros((2, len(lens), max(len(whole), segments.shape[1])), np.int32)
        tables[0, :, : segments.shape[1]] = segments
        tables[1, :, : len(whole)] = whole
        offsets = np.zeros(len(lens) + 1, np.int64)
        np.cumsum(lens, out=offsets[1:])
        within = np.arange(count) - np.repeat(offsets[:-1], lens)
        arrays = flat_arrays(
            count,
            token_ids=np.zeros(count, np.int64),
            positions=piece.positions,
            slot_mapping=np.stack([np.repeat(first * size, lens) + within, np.arange(count)]),
            sampled_rows=piece.feature_rows,
            query_start_loc=offsets.astype(np.int32),
            seq_lens=lens.astype(np.int32),
            block_tables=tables,
            cross_lens=np.full(len(lens), count, np.int32),
            cross_tables=np.broadcast_to(whole, (len(lens), len(whole))).copy(),
        )
        if piece.rotary_positions is not None:
            arrays["rotary_positions"] = piece.rotary_positions
        return FlatInputs(arrays, 0, max_seq_len=int(lens.max()), all_sampled=False, has_adapters=False)


@dataclass
class _Job:
    key: str
    pieces: deque[TowerInput]
    features: list[np.ndarray] = field(default_factory=list)


class ImagePreparer(Preparer):
    """Computes and keeps the features of images: float32 [features, E] each; nothing on a stage without tower."""

    computes = True

    def __init__(self, context: PreparerContext) -> None:
        super().__init__()
        # The context would keep the network alive.
        self._device, self._kernels = context.device, context.layers.kernels
        self._options, self._config = context.options, context.config
        self._network: Network | None = context.network
        self._jobs: deque[_Job] = deque()
        self._runner: TowerRunner | None = None
        #: Whether the runner has begun the first job's first piece.
        self._has_begun = False

    def reserved_bytes(self, free: int) -> int:
        """About the memory of the tower for the largest piece, and that of ``image_cache_bytes`` of features."""
        assert self._network is not None
        tower, options = self._network.tower, self._options
        if tower is None:
            return 0
        rows = 4 * (options.max_model_len or self._config.max_position)
        if tower.max_rows is not None:
            rows = min(rows, tower.max_rows)
        width = tower.workspace.num_kv_heads * tower.workspace.head_dim
        # Stream, norm, queries, keys, values, attention's output, and a feed-forward network of four times the width.
        return 4 * rows * (tower.row_width + 14 * width) + options.image_cache_bytes

    def prepare(self, payload: bytes) -> list[TowerInput]:
        assert self._network is not None
        tower = self._network.tower
        return [] if tower is None else tower.prepare(ImageInput.decode(payload))

    def keep(self, key: str, resource: list[TowerInput]) -> None:
        self._jobs.append(_Job(key, deque(resource)))

    def compute(self, seconds: float) -> str | None:
        if not self._jobs:
            return None
        job = self._jobs[0]
        if job.pieces:
            if self._runner is None:
                assert self._network is not None and self._network.tower is not None
                self._runner = TowerRunner(self._network.tower, self._device, self._kernels, self._options.block_size)
            runner = self._runner
            if not self._has_begun:
                runner.begin(job.pieces[0])
                self._has_begun = True
            features = runner.advance(seconds)
            if features is None:
                return None
            job.features.append(features)
            job.pieces.popleft()
            self._has_begun = False
        if job.pieces:
            return None
        self._jobs.popleft()
        self._resources[job.key] = np.concatenate(job.features) if job.features else np.zeros((0, 0), np.float32)
        return job.key

    def drop(self, key: str) -> None:
        if self._resources.pop(key, None) is None:
            self._has_begun = self._has_begun and self._jobs[0].key != key
            self._jobs = deque(job for job in self._jobs if job.key != key)

    def find(self, key: str) -> np.ndarray:
        if key not in self._resources:
            raise RuntimeError(f"the features of {key} are not there")
        features: np.ndarray = self._resources[key]
        return features

    def release(self) -> None:
        """Drops the captured tower, as weights may move; a piece that has begun starts again."""
        self._runner, self._has_begun = None, False

    def detach(self) -> None:
        self.release()
        self._network = None

    def attach(self, network: Network) -> None:
        self._network = network


class ImageTokens:
    """Embeds the tokens that stand for image features.

    Each step writes the features into rows of the table of virtual tokens, and gives the tokens the ids of these rows.
    """

    def __init__(self, images: ImagePreparer, vocab_size: int, first_row: int) -> None:
        """``first_row``: of the virtual tokens that are reserved for images."""
        self._images, self._vocab_size, self._first_row = images, vocab_size, first_row
        #: By sequence id, in the order of offsets.
        self._features: dict[int, list[Feature]] = {}

    def add(self, sequence: NewSequence) -> None:
        if sequence.features:
            self._features[sequence.seq_id] = sequence.features

    def forget(self, seq_id: int) -> None:
        self._features.pop(seq_id, None)

    def write(self, inputs: StepInputs, network: Network) -> None:
        """Writes the features of a step's tokens; changes ``inputs`` to use them."""
        if not self._features:
            return
        ids, sees_until = inputs.arrays["token_ids"], inputs.arrays["sees_until"]
        offsets, parts, count = inputs.arrays["query_start_loc"], [], 0
        for i, seq_id in enumerate(inputs.seq_ids):
            begin, end = int(inputs.starts[i]), int(inputs.ends[i])
            for feature in self._features.get(seq_id, ()):
                first, last = max(begin, feature.offset), min(end, feature.offset + feature.length)
                if first >= last:
                    continue
                span = slice(feature.first + first - feature.offset, feature.first + last - feature.offset)
                parts.append(self._images.find(feature.image)[span])
                rows = slice(int(offsets[i]) + first - begin, int(offsets[i]) + last - begin)
                ids[rows] = self._vocab_size + self._first_row + count + np.arange(last - first)
                count += last - first
                if feature.is_whole:
                    sees_until[rows] = feature.offset + feature.length - 1
                    inputs.has_spans = True
        if parts:
            network.set_virtual_tokens(self._first_row, np.concatenate(parts))
