"""A tower as it is run beside the steps: one piece of an image after the other, each in parts of milliseconds."""

from __future__ import annotations

import weakref

import numpy as np

from octavo.core.dtypes import DType
from octavo.core.kv_spec import LayerGroup
from octavo.kernels.arrays import Array
from octavo.kernels.cache import LayerCache
from octavo.kernels.forward_batch import BatchSize, ForwardBatch, ForwardOutput
from octavo.kernels.interface import Kernels, PartedForward
from octavo.models.vision.tower import Tower, TowerInput
from octavo.runner.device import Device
from octavo.runner.rotary_positions import NO_ROTARY_POSITIONS
from octavo.runner.step_inputs import FlatInputs

#: Rows of the smallest recording; larger pieces have one of twice, four times as many, and so on.
_LEAST_ROWS = 64


class TowerRunner:
    """Owns the recorded tower, its workspace and the memory of its rows, for pieces of up to a size that grows."""

    def __init__(self, tower: Tower, device: Device, kernels: Kernels, block_size: int) -> None:
        self._tower, self._device, self._kernels, self._block_size = tower, device, kernels, block_size
        self._size = BatchSize(0, 0, 0, 0, block_size)
        self._rows: Array = None
        self._forward: PartedForward | None = None

    def begin(self, piece: TowerInput) -> None:
        """A new piece, in place of one that is not finished."""
        size = self._size
        if len(piece.rows) > size.tokens or len(piece.segments) > size.sequences or self._forward is None:
            self._forward = self._capture(piece)
        assert self._forward is not None
        self._kernels.write(self._rows[: len(piece.rows)], piece.rows)
        self._forward.begin(self._device.to_device(self._flatten(piece), ()))

    def advance(self, seconds: float) -> np.ndarray | None:
        """Computes about so many seconds; float32 [N, E], the features of the piece, once they are there."""
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
            return ForwardOutput(features, features)  # as what sampled rows have

        return self._kernels.capture_parts(forward, self._size)

    def _workspace(self, group: int, blocks: int) -> LayerCache:
        cache = self._kernels.make_cache([LayerGroup(self._tower.workspace, (0,))], [blocks], self._block_size)[0]
        cache.group = group
        return cache

    def _flatten(self, piece: TowerInput) -> FlatInputs:
        """The batch of a piece, as ``Tower`` says."""
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
        arrays = {
            "token_ids": np.zeros(count, np.int64),
            "positions": piece.positions,
            "token_types": np.zeros(count, np.int64),
            "slot_mapping": np.stack([np.repeat(first * size, lens) + within, np.arange(count)]),
            "sampled_rows": piece.feature_rows,
            "query_start_loc": offsets.astype(np.int32),
            "seq_lens": lens.astype(np.int32),
            "block_tables": tables,
            "adapters": np.full(count, -1, np.int32),
            "sees_until": np.full(count, -1, np.int32),
            "rotary_positions": NO_ROTARY_POSITIONS if piece.rotary_positions is None else piece.rotary_positions,
            "cross_lens": np.full(len(lens), count, np.int32),
            "cross_tables": np.broadcast_to(whole, (len(lens), len(whole))).copy(),
        }
        return FlatInputs(
            arrays=arrays,
            num_decodes=0,
            max_seq_len=int(lens.max()),
            all_sampled=False,
            has_adapters=False,
        )
