"""Adapters of a worker: LoRA adapters in slots of the layers, and prompt adapters with their virtual tokens."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from octavo.core.dtypes import DType
from octavo.core.errors import AdapterError, InsufficientMemoryError
from octavo.core.failures import ADAPTER, SequenceFailure
from octavo.core.plan import NewSequence
from octavo.core.request import AdapterRef
from octavo.kernels.interface import LowRank, LowRankEmbedding, LowRankShape, PackedAdapter
from octavo.layers.layer import LoraLayer
from octavo.layers.linear import share_heads
from octavo.loader.adapters import AdapterTargets, VirtualTokens, VirtualTokenSizes, read_adapter, read_prompt_adapter
from octavo.models.network import Network
from octavo.process.startup import GIB
from octavo.runner.input_batch import FlatInputs, Int64Array, StepInputs
from octavo.runner.preparers import Preparer
from octavo.runner.row_feature import RowFeature

if TYPE_CHECKING:
    from octavo.runner.preparers import PreparerContext

#: Niceness of threads that read adapters: a third of the processor time of a kernel's thread. A larger share would slow
#: down steps; with a smaller one, requests of a new adapter would wait while other work fills all processors.
_NICENESS = 5
#: Backends may round ranks up to a multiple of this.
_RANK_UNIT = 16

#: Of a layer: its name, which others may have too, and its first part.
LayerKey = tuple[str, str]
#: An adapter's packed weights.
Packed = dict[LayerKey, PackedAdapter]


class AdapterPreparer(Preparer):
    def begin_thread(self) -> None:
        with suppress(OSError, AttributeError):  # on Linux alone, the priority is the thread's
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)

    def failure(self, payload: bytes, error: Exception) -> SequenceFailure:
        name = msgspec.msgpack.decode(payload, type=AdapterRef).name
        if not isinstance(error, AdapterError):
            return SequenceFailure(f"adapter {name!r} could not be loaded: {type(error).__name__}: {error}", ADAPTER)
        if error.file is not None:  # clients may see its name alone
            error.file = Path(error.file).name
        return SequenceFailure(f"adapter {name!r}: {error}", ADAPTER)


class LoraPreparer(AdapterPreparer, RowFeature):
    """Reads LoRA adapters, checks their values, packs them for this rank's layers, and copies them into slots.

    As a feature of rows: gives each token the slot of its sequence's adapter.
    """

    #: Adapters without slots.
    prompt_adapters: PromptAdapters | None = None

    def __init__(self, context: PreparerContext) -> None:
        super().__init__()
        # Of the whole network, of which this rank has a share.
        self._targets, self._options = AdapterTargets(context.config), context.options
        self._layers: Mapping[LayerKey, LoraLayer] = _layers_of(context.network)
        #: The adapter in each slot, and the slot of each adapter.
        self._held: dict[int, str] = {}
        self._slots: dict[str, int] = {}
        self._kernels = context.layers.kernels
        #: Slot of the adapter of each row, -1 without one; and the number of rows with an adapter.
        self._of_row = np.full(context.options.max_num_seqs, -1, np.int32)
        self._num_adapted = 0

    def prepare(self, payload: bytes) -> Packed:
        weights = read_adapter(
            msgspec.msgpack.decode(payload, type=AdapterRef), self._targets, self._options.max_lora_rank
        )
        packed: Packed = {}
        for key, layer in self._layers.items():  # a pipeline stage has some of the layers
            matrices = weights.get(key[0], {})
            own = {part: matrices.pop(part) for part in layer.lora_parts if part in matrices}
            if own:
                packed[key] = layer.pack_lora(own)
        return packed

    def drop(self, key: str) -> None:
        super().drop(key)
        self._clear(key)

    def place(self, slot: int, key: str) -> None:
        if self._held.get(slot) == key:
            return
        self._clear(key)
        if slot in self._held:
            del self._slots[self._held[slot]]
        self._fill(slot, self._resources[key])
        self._held[slot], self._slots[key] = key, slot

    def slot_of(self, key: str) -> int:
        if key not in self._slots:
            raise RuntimeError(f"adapter {key} has no slot")
        return self._slots[key]

    def add(self, sequence: NewSequence, row: int) -> None:
        if (key := sequence.adapter) is not None and (self.prompt_adapters is None or key not in self.prompt_adapters):
            self._set_row(row, self.slot_of(key))

    def fork(self, parent: int, row: int) -> None:
        self._set_row(row, int(self._of_row[parent]))

    def forget(self, seq_id: int, row: int) -> None:
        self._set_row(row, -1)

    def _set_row(self, row: int, slot: int) -> None:
        self._num_adapted += (slot >= 0) - (int(self._of_row[row]) >= 0)
        self._of_row[row] = slot

    def add_arrays(self, inputs: FlatInputs, rows: Int64Array, starts: Int64Array) -> None:
        if self._num_adapted:
            slots = np.repeat(self._of_row[rows], np.diff(inputs.arrays["query_start_loc"]))
            inputs.arrays["adapters"], inputs.has_adapters = slots, bool((slots >= 0).any())

    def use(self, rows: Int64Array) -> None:
        """Makes the network's next products, outside a step, use the adapters of these rows."""
        slots = self._of_row[rows]
        self._kernels.adapters.use(self._kernels.wrap(slots) if (slots >= 0).any() else None)

    def reserved_bytes(self, free: int) -> int:
        each, count = adapter_bytes(self._layers.values()), self._options.num_host_loras
        if each * count > free:
            raise InsufficientMemoryError(
                f"{count} adapters of rank {self._options.max_lora_rank} take up to {each * count / GIB:.2f} GiB of "
                f"host memory, but only {free / GIB:.2f} GiB are free beside the weights; lower max_cpu_loras or "
                "max_lora_rank"
            )
        return each * count

    def describe(self) -> str:
        options, each = self._options, adapter_bytes(self._layers.values())
        return (
            f"adapters: {options.max_loras} slots, at most {options.num_host_loras} in host memory, of ranks up to "
            f"{options.max_lora_rank}: {each / (1 << 20):.1f} MiB each, {each * options.num_host_loras / GIB:.2f} GiB "
            "reserved"
        )

    def detach(self) -> None:
        self._layers = {}

    def attach(self, network: Network) -> None:
        self._layers = _layers_of(network)
        for slot, key in self._held.items():
            self._fill(slot, self._resources[key])

    def _clear(self, key: str) -> None:
        slot = self._slots.pop(key, None)
        if slot is not None:
            del self._held[slot]
            self._fill(slot, {})

    def _fill(self, slot: int, packed: Packed) -> None:
        # All layers: the slot may hold another adapter, of other layers.
        for key, layer in self._layers.items():
            layer.place_lora(slot, packed.get(key))


def _layers_of(network: Network) -> dict[LayerKey, LoraLayer]:
    return {(name, next(iter(layer.lora_parts))): layer for name, layer in network.lora_layers()}


def adapter_bytes(layers: Iterable[LoraLayer]) -> int:
    """Bytes of an adapter of the maximum LoRA rank that adapts all of these layers."""
    total = 0
    for layer in layers:
        low_rank: LowRank | LowRankEmbedding | LowRankShape | None = layer.low_rank
        if isinstance(low_rank, LowRankEmbedding):
            numbers = low_rank.rows + low_rank.outputs
        else:  # a shape: of a network without memory
            assert isinstance(low_rank, LowRank | LowRankShape)
            numbers = low_rank.inputs * len(low_rank.outputs) + sum(low_rank.outputs)
        rank = -(-low_rank.max_rank // _RANK_UNIT) * _RANK_UNIT
        total += numbers * rank * low_rank.dtype.itemsize
    return total


def virtual_token_bytes(network: Network, tokens: int, dtype: DType) -> int:
    """Bytes of the virtual tokens of prompt adapters on the host: embeddings, or keys and values of all layers."""
    keys_values = sum(spec.vectors * spec.num_kv_heads * spec.head_dim for spec in network.kv_specs)
    return tokens * max(keys_values, network.config.hidden_size) * dtype.itemsize


class PromptAdapters(AdapterPreparer, RowFeature):
    """Prompt adapters: their virtual tokens in the embedding table, and prefixes that are not written yet."""

    def __init__(self, context: PreparerContext) -> None:
        super().__init__()
        options = context.options
        self._config, self._context = context.config, context.layers
        self._num_tokens = options.num_virtual_tokens
        self._network: Network | None = context.network
        self._rows = options.max_prompt_adapter_token
        self._free = list(range(options.max_prompt_adapters))[::-1]
        self._sizes: VirtualTokenSizes | None = None
        #: By key: the index of the adapter's part of the table, and its virtual tokens on the host.
        self._held: dict[str, tuple[int, VirtualTokens]] = {}
        #: By sequence id: keys and values of a prefix that is not yet written to its blocks.
        self._unwritten: dict[int, np.ndarray] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._held

    def prepare(self, payload: bytes) -> VirtualTokens:
        ref = msgspec.msgpack.decode(payload, type=AdapterRef)
        if self._sizes is None:
            self._sizes = VirtualTokenSizes.of(self._config)
        tokens, context = read_prompt_adapter(ref, self._sizes), self._context
        if tokens.keys_values is None:
            assert tokens.embeddings is not None
            return VirtualTokens(embeddings=tokens.embeddings.astype(context.dtype.numpy))
        own = share_heads(context, self._config.num_heads, self._sizes.kv_heads)[1]
        layers = context.layers_of(self._sizes.layers)
        part = tokens.keys_values[layers.start : layers.stop, :, :, own]
        return VirtualTokens(keys_values=np.array(part, context.dtype.numpy, order="C"))

    def keep(self, key: str, resource: VirtualTokens) -> None:
        part = self._free.pop()
        self._held[key] = part, resource
        self._write_embeddings(part, resource)

    def drop(self, key: str) -> None:
        self._free.append(self._held.pop(key)[0])

    def reserved_bytes(self, free: int) -> int:
        assert self._network is not None
        return virtual_token_bytes(self._network, self._num_tokens, self._context.dtype)

    def detach(self) -> None:
        self._network = None

    def attach(self, network: Network) -> None:
        self._network = network
        for part, tokens in self._held.values():
            self._write_embeddings(part, tokens)

    def _write_embeddings(self, part: int, tokens: VirtualTokens) -> None:
        first, embeddings = part * self._rows, tokens.embeddings
        if embeddings is None:  # a prefix: results of its tokens are not used
            assert self._sizes is not None
            embeddings = np.zeros((self._rows, self._sizes.width), self._context.dtype.numpy)
        assert self._network is not None
        self._network.set_virtual_tokens(first, embeddings)

    def add(self, sequence: NewSequence, row: int) -> None:
        """Maps the placeholder tokens of a new sequence to its adapter's part of the table."""
        held = self._held.get(sequence.adapter) if sequence.adapter is not None else None
        if held is None:
            return
        part, virtual = held
        prompt = self.worker.batch.tokens.ids[row, : sequence.num_prompt_tokens]
        prompt[prompt >= self._config.vocab_size] += part * self._rows
        prefix = virtual.keys_values
        if prefix is not None and sequence.num_computed < prefix.shape[2]:
            self._unwritten[sequence.seq_id] = prefix

    def forget(self, seq_id: int, row: int) -> None:
        self._unwritten.pop(seq_id, None)

    def before_step(self, inputs: StepInputs) -> None:
        """Writes keys and values of prefixes to the KV slots of their tokens, which the step then leaves alone."""
        if not self._unwritten:
            return
        slots, offsets = inputs.arrays["slot_mapping"], inputs.arrays["query_start_loc"]
        kernels, caches = self._context.kernels, self.worker.cache.network_caches
        for i, seq_id in enumerate(inputs.seq_ids):
            prefix = self._unwritten.get(seq_id)
            if prefix is None:
                continue
            start, stop = int(inputs.starts[i]), min(int(inputs.ends[i]), prefix.shape[2])
            if stop == prefix.shape[2]:
                del self._unwritten[seq_id]
            rows = slice(int(offsets[i]), int(offsets[i]) + stop - start)
            keys_values, groups = kernels.wrap(prefix[:, :, start:stop]), kernels.wrap(slots[:, rows].copy())
            slots[:, rows] = -1
            for layer, cache in zip(range(len(prefix)), caches, strict=True):
                keys, values = keys_values[layer, 0], keys_values[layer, 1]
                kernels.reshape_and_cache(keys, values, cache, groups[cache.group])
