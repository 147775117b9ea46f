"""Images on a worker: their features, the tokens that stand for them, and the positions of these tokens (M-RoPE)."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from octavo.core.dtypes import DType
from octavo.core.plan import NewSequence
from octavo.core.request import Feature, ImageInput
from octavo.kernels.forward_batch import BatchSize, ForwardBatch, ForwardOutput
from octavo.kernels.interface import Array, Kernels, LayerCache, PartedForward
from octavo.models.network import Network, Tower, TowerInput, tower_output
from octavo.runner.input_batch import FlatInputs, Int64Array, StepInputs, flat_arrays, offsets_of, workspace_tables
from octavo.runner.preparers import Preparer
from octavo.runner.row_feature import RowFeature

if TYPE_CHECKING:
    from octavo.config.engine_config import EngineConfig
    from octavo.runner.device import Device
    from octavo.runner.loaded_model import LoadedModel
    from octavo.runner.preparers import PreparerContext

#: Time, height and width: the positions of image tokens (M-RoPE).
AXES = 3
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
        """Computes for about ``seconds``; the piece's features, float32 [N, ``ImageFacts.vectors`` * E], when they are
        complete.
        """
        assert self._forward is not None
        output = self._forward.advance(seconds)
        if output is None:
            return None
        vectors = [self._kernels.to_numpy(x) for x in (output.logits, *output.layer_features)]
        return np.concatenate(vectors, axis=1, dtype=np.float32)

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
            return tower_output(tower.features(values[: len(batch.token_ids)], batch, caches))

        return self._kernels.capture_parts(forward, self._size)

    def _workspace(self, group: int, blocks: int) -> LayerCache:
        tower = self._tower
        spec = tower.whole_workspace or tower.workspace if group else tower.workspace
        cache = self._kernels.make_group_cache(spec, 1, blocks, self._block_size)[0]
        cache.group = group
        return cache

    def _flatten(self, piece: TowerInput) -> FlatInputs:
        size, count, lens = self._block_size, len(piece.rows), np.array(piece.segments, np.int64)
        segments, whole = workspace_tables(lens, size), np.arange(-(-count // size), dtype=np.int32)
        tables = np.zeros((2, len(lens), max(len(whole), segments.shape[1])), np.int32)
        tables[0, :, : segments.shape[1]] = segments
        tables[1, :, : len(whole)] = whole
        offsets = offsets_of(lens)
        within = np.arange(count) - np.repeat(offsets[:-1], lens)
        arrays = flat_arrays(
            count,
            token_ids=np.zeros(count, np.int64) if piece.token_ids is None else piece.token_ids,
            positions=piece.positions,
            slot_mapping=np.stack([np.repeat(segments[:, 0].astype(np.int64) * size, lens) + within, np.arange(count)]),
            sampled_rows=piece.feature_rows,
            query_start_loc=offsets.astype(np.int32),
            seq_lens=lens.astype(np.int32),
            block_tables=tables,
            cross_lens=np.full(len(lens), count, np.int32),
            cross_tables=np.broadcast_to(whole, (len(lens), len(whole))).copy(),
        )
        if piece.rotary_positions is not None:
            arrays["rotary_positions"] = piece.rotary_positions
        return FlatInputs(arrays, 0, max_seq_len=int(lens.max()), all_sampled=False)


@dataclass
class _Job:
    key: str
    pieces: deque[TowerInput]
    #: Of the pieces that are computed: their places and features.
    places: list[np.ndarray | None] = field(default_factory=list)
    features: list[np.ndarray] = field(default_factory=list)


def image_bytes(network: Network, options: EngineConfig) -> int:
    """About the memory of the tower for the largest piece, and that of ``image_cache_bytes`` of features."""
    tower = network.tower
    if tower is None:
        return 0
    rows = 4 * (options.max_model_len or network.config.max_position)
    if tower.max_rows is not None:
        rows = min(rows, tower.max_rows)
    width = tower.workspace.num_kv_heads * tower.workspace.head_dim
    # Stream, norm, queries, keys, values, attention's output, and a feed-forward network of four times the width.
    return 4 * rows * (tower.row_width + 14 * width) + options.image_cache_bytes


class ImagePreparer(Preparer):
    """Computes and keeps features of images: float32 [features, ``ImageFacts.vectors`` * E] each; nothing on a stage
    without tower.
    """

    computes = True

    def __init__(self, context: PreparerContext) -> None:
        super().__init__()
        # The context would keep the network alive.
        self._device, self._kernels = context.device, context.layers.kernels
        self._options = context.options
        self._network: Network | None = context.network
        self._jobs: deque[_Job] = deque()
        self._runner: TowerRunner | None = None
        #: Whether the runner has begun the first job's first piece.
        self._has_begun = False

    def reserved_bytes(self, free: int) -> int:
        assert self._network is not None
        return image_bytes(self._network, self._options)

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
            job.places.append(job.pieces.popleft().places)
            self._has_begun = False
        if job.pieces:
            return None
        self._jobs.popleft()
        tower = self._network.tower if self._network is not None else None
        whole = np.zeros((0, 0), np.float32) if tower is None else tower.join(job.places, job.features)
        self._resources[job.key] = whole
        return job.key

    def drop(self, key: str) -> None:
        if self._resources.pop(key, None) is None:
            self._has_begun = self._has_begun and self._jobs[0].key != key
            self._jobs = deque(job for job in self._jobs if job.key != key)

    def release(self) -> None:
        """Drops the captured tower, as weights may move; a piece that has begun starts again."""
        self._runner, self._has_begun = None, False

    def detach(self) -> None:
        self.release()
        self._network = None

    def attach(self, network: Network) -> None:
        self._network = network


class ImageTokens(RowFeature):
    """Embeds the tokens that stand for image features.

    Each step writes the features into rows of the table of virtual tokens, and gives the tokens the ids of these rows.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded, self._images = loaded, loaded.images
        #: By sequence id, in the order of offsets.
        self._features: dict[int, list[Feature]] = {}

    def add(self, sequence: NewSequence, row: int) -> None:
        if sequence.features:
            self._features[sequence.seq_id] = sequence.features

    def forget(self, seq_id: int, row: int) -> None:
        self._features.pop(seq_id, None)

    def before_step(self, inputs: StepInputs) -> None:
        """Writes the features of a step's tokens; changes ``inputs`` to use them."""
        if not self._features:
            return
        ids, sees_until = inputs.arrays["token_ids"], inputs.arrays["sees_until"]
        offsets, parts, count = inputs.arrays["query_start_loc"], [], 0
        # The virtual tokens behind those of prompt adapters are reserved for images.
        first_row = self._loaded.options.num_virtual_tokens
        for i, seq_id in enumerate(inputs.seq_ids):
            begin, end = int(inputs.starts[i]), int(inputs.ends[i])
            features = self._features.get(seq_id)
            if not features or begin >= features[-1].offset + features[-1].length:
                continue
            for feature in features:
                first, last = max(begin, feature.offset), min(end, feature.offset + feature.length)
                if first >= last:
                    continue
                span = slice(feature.first + first - feature.offset, feature.first + last - feature.offset)
                parts.append(self._images.find(feature.image)[span])
                rows = slice(int(offsets[i]) + first - begin, int(offsets[i]) + last - begin)
                ids[rows] = self._loaded.config.vocab_size + first_row + count + np.arange(last - first)
                count += last - first
                if feature.is_whole:
                    sees_until[rows] = feature.offset + feature.length - 1
                    inputs.has_spans = True
        if parts:
            self._loaded.network.set_features(first_row, np.concatenate(parts))


class RotaryPositions(RowFeature):
    """M-RoPE positions of each row up to the end of its last image, and the shift of the text after it."""

    def __init__(self, max_num_seqs: int) -> None:
        #: End of the row's last image, 0 without one; and the number that is added to positions from there on.
        self._ends = np.zeros(max_num_seqs, np.int64)
        self._shifts = np.zeros(max_num_seqs, np.int64)
        #: By row: int64 [AXES, end].
        self._beginnings: dict[int, Int64Array] = {}

    def add(self, sequence: NewSequence, row: int) -> None:
        if sequence.features:
            self._beginnings[row] = beginning = image_positions(sequence.features)
            self._ends[row] = beginning.shape[1]
            self._shifts[row] = beginning.max() + 1 - beginning.shape[1]

    def fork(self, parent: int, row: int) -> None:
        if parent in self._beginnings:
            self._beginnings[row] = self._beginnings[parent]
            self._ends[row], self._shifts[row] = self._ends[parent], self._shifts[parent]

    def forget(self, seq_id: int, row: int) -> None:
        if self._beginnings.pop(row, None) is not None:
            self._ends[row] = self._shifts[row] = 0

    def add_arrays(self, inputs: FlatInputs, rows: Int64Array, starts: Int64Array) -> None:
        """Sets the positions; tokens before the end of an image are followed by none that differ by one."""
        positions, offsets = inputs.arrays["positions"], inputs.arrays["query_start_loc"]
        if not self._beginnings:
            inputs.arrays["rotary_positions"] = np.tile(positions, (AXES, 1))
            return
        rotary = np.tile(positions + np.repeat(self._shifts[rows], np.diff(offsets)), (AXES, 1))
        for i in np.flatnonzero(starts < self._ends[rows]).tolist():
            beginning = self._beginnings[int(rows[i])][:, starts[i] :]
            count = min(beginning.shape[1], int(offsets[i + 1] - offsets[i]))
            rotary[:, offsets[i] : offsets[i] + count] = beginning[:, :count]
            inputs.repeatable = False
        inputs.arrays["rotary_positions"] = rotary


def image_positions(features: Sequence[Feature]) -> Int64Array:
    """Positions [AXES, end] of a prompt's tokens up to the end of its last image; ``features``: all images in order."""
    beginning = np.empty((AXES, features[-1].offset + features[-1].length), np.int64)
    start = position = 0
    for feature in features:
        if feature.grid is None or np.prod(feature.grid) != feature.length:
            raise RuntimeError(f"an image of {feature.length} features has the grid {feature.grid}")
        end, text = feature.offset + feature.length, feature.offset - start
        beginning[:, start : feature.offset] = np.arange(position, position + text)
        position += text
        beginning[:, feature.offset : end] = np.indices(feature.grid).reshape(AXES, -1) + position
        start, position = end, position + max(feature.grid)
    return beginning
