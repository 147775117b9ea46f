"""Encoders of encoder-decoder networks on a worker: their inputs, their outputs (contexts), and attention to these."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError, OctavoError
from octavo.core.failures import SequenceFailure
from octavo.core.plan import NewContext, NewSequence, StepPlan, StepResult, TableChange
from octavo.core.request import EncoderInput, Generate
from octavo.kernels.forward_batch import Forward, ForwardBatch, ForwardOutput, make_batch
from octavo.kernels.interface import Array, LayerCache
from octavo.layers.attention import CrossQueries
from octavo.models.network import Network
from octavo.models.registry import network_of
from octavo.runner.input_batch import FlatInputs, Int64Array, StepInputs, flat_arrays, offsets_of, workspace_tables
from octavo.runner.preparers import Preparer
from octavo.runner.row_feature import RowContext, RowFeature

if TYPE_CHECKING:
    from octavo.runner.loaded_model import LoadedModel
    from octavo.runner.model_runner import QueuedStep
    from octavo.runner.preparers import PreparerContext


class EncoderInputPreparer(Preparer):
    """Prepares an encoder's inputs on the host: token ids of text, int64 [T]; features of sound, float32 [T, E]."""

    def __init__(self, context: PreparerContext) -> None:
        super().__init__()
        self._config = context.config
        self._network: type[Network] = network_of(context.config)

    def prepare(self, payload: bytes) -> np.ndarray:
        source = msgspec.msgpack.decode(payload, type=EncoderInput)
        prepared = self._network.prepare_input(self._config, source.kind, source.payload)
        if len(prepared) != source.num_tokens:
            raise RuntimeError(f"the encoder's input has {len(prepared)} positions, not {source.num_tokens}")
        return prepared

    def failure(self, payload: bytes, error: Exception) -> SequenceFailure:
        return SequenceFailure(str(error)) if isinstance(error, OctavoError) else super().failure(payload, error)


class Contexts(RowFeature):
    """The encoder outputs (contexts) that rows attend to. A context keeps its place until a plan forgets it.

    The encoder runs within the first step that has a context, and writes its keys and values into the context's blocks.
    Owns the captured encoder, its workspace and the memory of its features.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded, self._inputs = loaded, loaded.encoder_inputs

    def start(self, worker: RowContext) -> None:
        super().start(worker)
        loaded, rows = self._loaded, self._loaded.options.max_num_seqs
        facts, longest = loaded.config.encoder_facts, loaded.config.longest_input(worker.max_model_len)
        assert facts is not None and longest is not None
        self._block_size = loaded.options.block_size
        self._tables = np.zeros((rows, -(-longest // self._block_size)), np.int32)
        self._lens = np.zeros(rows, np.int32)
        self._places: dict[int, int] = {}
        self._free = list(range(rows - 1, -1, -1))
        #: The place of each row's context.
        self._of_row = np.zeros(rows, np.int64)
        self._size = loaded.largest_encoding(worker.max_model_len)
        self._features: Any = None
        if facts.feature_width is not None:
            self._features = loaded.kernels.zeros((self._size.tokens, facts.feature_width), DType.FLOAT32)
        self._workspace = loaded.layers.make_workspace()
        self._forward: Forward | None = None

    def begin(self, plan: StepPlan) -> None:
        for context_id in plan.forget:  # most ids are those of sequences
            if (place := self._places.pop(context_id, None)) is not None:
                self._free.append(place)
        for context in plan.contexts:
            place = self._places[context.context_id] = self._free.pop()
            self._lens[place] = context.num_tokens

    def add(self, sequence: NewSequence, row: int) -> None:
        if sequence.context is None:
            raise RuntimeError("the network attends to an encoder's output, but a sequence names none")
        self._of_row[row] = self._places[sequence.context]

    def fork(self, parent: int, row: int) -> None:
        self._of_row[row] = self._of_row[parent]

    def change_table(self, change: TableChange) -> bool:
        place = self._places.get(change.seq_id)
        if place is None:
            return False
        self._tables[place, change.index : change.index + len(change.blocks)] = change.blocks
        return True

    def add_arrays(self, inputs: FlatInputs, rows: Int64Array, starts: Int64Array) -> None:
        places = self._of_row[rows]
        inputs.arrays["cross_lens"] = lens = self._lens[places]
        longest = -(-int(lens.max(initial=0)) // self._block_size)
        inputs.arrays["cross_tables"] = np.ascontiguousarray(self._tables[places, :longest])

    def capture(self) -> None:
        loaded, workspace, features = weakref.proxy(self._loaded), self._workspace, self._features
        caches = self.worker.cache.network_caches

        def forward(batch: ForwardBatch) -> ForwardOutput:
            inputs = batch.token_ids if features is None else features[: len(batch.token_ids)]
            return ForwardOutput(loaded.network.encode(inputs, batch, workspace, caches))

        self._forward = self._loaded.kernels.capture(forward, self._size)

    def release(self) -> None:
        self._forward = None

    def change_plan(self, plan: StepPlan, result: StepResult) -> StepPlan:
        """Computes new contexts, whose inputs must be prepared."""
        new = [(context, context.encode) for context in plan.contexts if context.encode is not None]
        if new:
            self._encode(sorted(new, key=lambda pair: pair[0].num_tokens > 1))  # as kernels want them
        return plan

    def _encode(self, contexts: Sequence[tuple[NewContext, str]]) -> None:
        assert self._forward is not None
        rows = [self._inputs.find(key) for _, key in contexts]
        lens = np.array([len(values) for values in rows], np.int64)
        values = rows[0] if len(rows) == 1 else np.concatenate(rows)
        ids = values if self._features is None else np.zeros(len(values), np.int64)
        if self._features is not None:
            self._loaded.kernels.write(self._features[: len(values)], values)
        places = [self._places[context.context_id] for context, _ in contexts]
        self._forward(self.worker.device.to_device(self._flatten(ids, lens, self._tables[places]), ()))

    def _flatten(self, ids: Int64Array, lens: Int64Array, tables: NDArray[np.int32]) -> FlatInputs:
        """The batch of whole inputs: the first KV group is that of the decoder, the last is the workspace."""
        size, count = self._block_size, len(ids)
        offsets, workspace = offsets_of(lens), workspace_tables(lens, size)
        positions = np.arange(count) - np.repeat(offsets[:-1], lens)
        both = np.stack([tables[:, : workspace.shape[1]], workspace])
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
        return FlatInputs(arrays, num_decodes, max_seq_len=int(lens.max()), all_sampled=False)


# --- cross-attention weights (word timestamps of speech) --------------------------------------------------------------


@dataclass(slots=True)
class _Aligned:
    heads: list[tuple[int, int]]
    num_tokens: int
    #: float32 [heads, tokens, positions] of each step so far.
    parts: list[NDArray[np.float32]] = field(default_factory=list)


class Alignment(RowFeature):
    """Computes cross-attention weights for the sequences that request them.

    Attention kernels return no weights, but sums of values. If the values are unit vectors, the sum is the weights
    themselves, of as many positions as a head has numbers. So the layers are computed once more beside the captured
    step; in the requested layers, attention runs over copies of the context's keys with such values, one range of
    positions after another. Like the kernels, it is batch-invariant.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._held: dict[int, _Aligned] = {}

    def add(self, sequence: NewSequence, row: int) -> None:
        task = sequence.task
        if not isinstance(task, Generate) or not task.alignment_heads:
            return
        if sequence.num_computed:
            raise ConfigError(f"attention weights need all tokens, but {sequence.num_computed} are computed already")
        self._held[sequence.seq_id] = _Aligned(task.alignment_heads, sequence.num_prompt_tokens)

    def forget(self, seq_id: int, row: int) -> None:
        self._held.pop(seq_id, None)

    def after_step(self, inputs: StepInputs, batch: ForwardBatch, output: ForwardOutput, step: QueuedStep) -> None:
        """Takes the weights of the step's tokens; adds those of complete prompts to ``step``.

        The layers' KV entries are written again, with the same bits.
        """
        if not self._held:
            return
        places = {i: held for i, seq_id in enumerate(inputs.seq_ids) if (held := self._held.get(seq_id)) is not None}
        if not places:
            return
        network, layers = self._loaded.network, self.worker.cache.network_caches
        reader = _WeightReader(self._loaded, inputs, batch, layers, places)
        network.forward_layers(network.embed(batch.token_ids), batch, layers, reader)
        for i, held in places.items():
            held.parts.append(np.stack([reader.weights[i, layer][head] for layer, head in held.heads]))
            if inputs.ends[i] < held.num_tokens:
                continue
            weights, seq_id = np.concatenate(held.parts, axis=1), inputs.seq_ids[i]
            if np.isfinite(weights).all():
                step.extra(seq_id).pooled = weights.tobytes()
            else:
                step.extra(seq_id).error = SequenceFailure("the attention weights are not finite (NaN or infinite)")


@dataclass(slots=True)
class _WeightReader:
    """Computes the weights of some sequences of a step. A ``ResidualReader``."""

    loaded: LoadedModel
    inputs: StepInputs
    batch: ForwardBatch
    caches: list[LayerCache]
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
