"""Weights of cross attention: where in an encoder's input a decoder's tokens look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import ConfigError
from octavo.core.plan import NewSequence
from octavo.core.request import Generate
from octavo.kernels.arrays import Array
from octavo.kernels.cache import LayerCache
from octavo.kernels.forward_batch import ForwardBatch, make_batch
from octavo.layers.cross_attention import CrossQueries
from octavo.runner.loaded_model import LoadedModel
from octavo.runner.pending import QueuedStep
from octavo.runner.step_inputs import StepInputs

Caches = list[LayerCache]


@dataclass(slots=True)
class _Aligned:
    """A sequence whose weights are asked for."""

    heads: list[tuple[int, int]]
    num_tokens: int
    #: float32 [heads, tokens, positions] of each step so far.
    parts: list[NDArray[np.float32]] = field(default_factory=list)


class Alignment:
    """Owns the weights of held sequences that ask for them.

    Attention kernels show no weights: they sum values with them. Of values that are unit vectors that sum is the
    weights themselves, of as many positions as a head has numbers. So the layers are computed once more beside the
    recorded step, and in the layers that are asked for, attention over copies of the context's keys and such values,
    one range of positions after another. The bits do not depend on what else is in a step, as those of the kernels.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._held: dict[int, _Aligned] = {}

    def add(self, sequence: NewSequence) -> None:
        """A sequence is held from now on; nothing is done for one that does not ask.

        Raises:
            ConfigError: a part of its prompt is computed, and its weights are lost.
        """
        task = sequence.task
        if not isinstance(task, Generate) or not task.alignment_heads:
            return
        if sequence.num_computed:
            raise ConfigError(f"attention weights need all tokens, but {sequence.num_computed} are computed already")
        self._held[sequence.seq_id] = _Aligned(task.alignment_heads, sequence.num_prompt_tokens)

    def forget(self, seq_id: int) -> None:
        """A sequence is held no more."""
        self._held.pop(seq_id, None)

    def compute(self, inputs: StepInputs, batch: ForwardBatch, step: QueuedStep, caches: Callable[[], Caches]) -> None:
        """Takes the weights of what the step has computed, and gives those of prompts that end.

        ``caches``: those of the network's layers; what is written to them again has the same bits.
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
            held.parts.append(np.stack([reader.found[i, layer][head] for layer, head in held.heads]))
            if inputs.ends[i] < held.num_tokens:
                continue
            weights, seq_id = np.concatenate(held.parts, axis=1), inputs.seq_ids[i]
            if np.isfinite(weights).all():
                step.pooled[seq_id] = weights
            else:
                step.failed[seq_id] = "the attention weights are not finite (NaN or infinite)"


class _WeightReader:
    """Computes the weights of some sequences of a step, as a ``ResidualReader``."""

    def __init__(
        self, loaded: LoadedModel, inputs: StepInputs, batch: ForwardBatch, caches: Caches, places: dict[int, _Aligned]
    ) -> None:
        """``places``: which sequences of the step."""
        self._loaded, self._inputs, self._batch = loaded, inputs, batch
        self._caches, self._places = caches, places
        #: By place and layer: float32 [heads, tokens of the step, positions].
        self.found: dict[tuple[int, int], NDArray[np.float32]] = {}

    def read(self, layer: int, residual: Array) -> None:
        """See ``ResidualReader``."""
        wanted = [i for i, held in self._places.items() if any(layer == asked for asked, _ in held.heads)]
        if not wanted:
            return
        loaded, arrays = self._loaded, self._inputs.arrays
        # A copy: the network goes on with the stream, and the layer's sums may reuse its memory.
        stream = loaded.kernels.array(loaded.kernels.to_numpy(residual))
        queries = loaded.network.cross_queries(layer, stream, self._caches[layer], self._batch)
        offsets = arrays["query_start_loc"].tolist()
        for i in wanted:
            rows = replace(queries, values=queries.values[offsets[i] : offsets[i + 1]])
            length = int(arrays["cross_lens"][i])
            table = arrays["cross_tables"][i]
            self.found[i, layer] = attention_weights(loaded, layer, rows, self._caches[layer], table, length)


def attention_weights(
    loaded: LoadedModel, layer: int, queries: CrossQueries, cache: LayerCache, table: NDArray[np.int32], length: int
) -> NDArray[np.float32]:
    """The weights of a layer over one context, of all heads of all ranks: float32 [heads, tokens, length].

    Args:
        loaded: the model.
        layer: whose they are.
        queries: of the tokens.
        cache: of the layer.
        table: blocks of the context.
        length: its positions.
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
