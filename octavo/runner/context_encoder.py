"""The encoder of an encoder-decoder network as part of a step: inputs in, keys and values in the contexts' blocks."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.dtypes import DType
from octavo.core.plan import NewContext
from octavo.kernels.cache import LayerCache
from octavo.kernels.forward_batch import BatchSize, Forward, ForwardBatch, ForwardOutput
from octavo.runner.contexts import NO_CONTEXTS, Contexts
from octavo.runner.encoder_input_preparer import EncoderInputPreparer
from octavo.runner.loaded_model import LoadedModel
from octavo.runner.rotary_positions import NO_ROTARY_POSITIONS
from octavo.runner.step_inputs import FlatInputs


class ContextEncoder:
    """Owns the recorded encoder, its workspace and the memory of its features."""

    def __init__(self, loaded: LoadedModel, inputs: EncoderInputPreparer, contexts: Contexts, size: BatchSize) -> None:
        """``size``: the largest batch of inputs that a step computes."""
        self._loaded, self._inputs, self._contexts, self._size = loaded, inputs, contexts, size
        facts = loaded.config.encoder_facts
        assert facts is not None
        self._features: Any = None
        if facts.feature_width is not None:
            self._features = loaded.kernels.zeros((size.tokens, facts.feature_width), DType.FLOAT32)
        self._workspace = loaded.layers.make_workspace()
        self._forward: Forward | None = None

    def capture(self, caches: list[LayerCache]) -> None:
        """Prepares the encoder for steps; ``caches`` are those of the decoder's layers."""
        loaded, workspace, features = weakref.proxy(self._loaded), self._workspace, self._features

        def forward(batch: ForwardBatch) -> ForwardOutput:
            inputs = batch.token_ids if features is None else features[: len(batch.token_ids)]
            return ForwardOutput(loaded.network.encode(inputs, batch, workspace, caches))

        self._forward = self._loaded.kernels.capture(forward, self._size)

    def release(self) -> None:
        """Forgets what was prepared; ``capture`` must follow."""
        self._forward = None

    def encode(self, contexts: Sequence[NewContext]) -> None:
        """Computes the inputs of new contexts, and writes keys and values to their blocks.

        Raises:
            RuntimeError: an input is not prepared.
        """
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
        return FlatInputs(
            arrays={
                "token_ids": ids,
                "positions": positions,
                "token_types": np.zeros(count, np.int64),
                "slot_mapping": np.ascontiguousarray(slots),
                "sampled_rows": np.zeros(0, np.int64),
                "query_start_loc": offsets.astype(np.int32),
                "seq_lens": lens.astype(np.int32),
                "block_tables": both,
                "adapters": np.full(count, -1, np.int32),
                "sees_until": np.full(count, -1, np.int32),
                **NO_CONTEXTS,
                "rotary_positions": NO_ROTARY_POSITIONS,
            },
            num_decodes=int((lens == 1).sum()),
            max_seq_len=int(lens.max()),
            all_sampled=False,
            has_adapters=False,
        )
