"""The kinds of ``Preparer`` but images: grammars, encoder inputs, LoRA adapters and prompt adapters of one worker."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import AdapterError, InsufficientMemoryError, OctavoError
from octavo.core.plan import NewSequence
from octavo.core.request import AdapterRef, AnyTask, EncoderInput, Generate
from octavo.core.sampling_params import UNUSABLE
from octavo.kernels.interface import Kernels, LayerCache, LowRank, LowRankEmbedding, PackedAdapter
from octavo.layers.layer import LoraLayer
from octavo.layers.linear import share_heads
from octavo.loader.adapters import AdapterTargets, VirtualTokens, VirtualTokenSizes, read_adapter, read_prompt_adapter
from octavo.models.network import Network
from octavo.models.registry import network_class
from octavo.process.startup import GIB
from octavo.runner.input_batch import StepInputs
from octavo.runner.preparers import Preparer
from octavo.sampling.logits_processors import CompiledGrammar
from octavo.sampling.sampler import TokenTable

if TYPE_CHECKING:
    from octavo.grammar.matcher import GrammarTokenizer
    from octavo.runner.preparers import PreparerContext


class GrammarPreparer(Preparer):
    """Compiles grammars; builds the vocabulary before the first one.

    A pipeline stage that does not sample compiles nothing, and reports each grammar at once.
    """

    #: A slow grammar does not delay others; llguidance releases the interpreter's lock.
    num_threads = 2

    def __init__(self, context: PreparerContext) -> None:
        super().__init__()
        tokenizer = context.options.tokenizer
        self._folder = context.folder if tokenizer is None else Path(tokenizer)
        self._vocab_size, self._eos_token_ids = context.config.vocab_size, context.config.eos_token_ids
        self._samples = context.samples
        self._tokenizer: GrammarTokenizer | None = None
        self._lock = threading.Lock()

    def prepare(self, payload: bytes) -> CompiledGrammar | None:
        if not self._samples:
            return None
        # Late, so that a start does not wait for the imports.
        from octavo.grammar.matcher import GrammarTokenizer, compile_grammar
        from octavo.loader.tokenizer_files import load_backend

        with self._lock:
            if self._tokenizer is None:
                backend, _ = load_backend(self._folder)
                self._tokenizer = GrammarTokenizer(backend, self._vocab_size, self._eos_token_ids)
        return CompiledGrammar(compile_grammar(payload.decode(), self._tokenizer), self._tokenizer)

    def message(self, payload: bytes, error: Exception) -> str:
        from octavo.grammar.matcher import GrammarError

        if isinstance(error, GrammarError | OctavoError):
            return f"{UNUSABLE}{error}"
        return f"the grammar could not be compiled: {type(error).__name__}: {error}"

    def find(self, task: AnyTask) -> CompiledGrammar | None:
        """The compiled grammar of a task; None if it has none, or this worker does not sample."""
        grammar = task.grammar if isinstance(task, Generate) else None
        if grammar is None or not self._samples:
            return None
        if grammar.key not in self._resources:
            raise RuntimeError(f"grammar {grammar.key} is not compiled")
        compiled: CompiledGrammar | None = self._resources[grammar.key]
        return compiled


class EncoderInputPreparer(Preparer):
    """Prepares the inputs of an encoder on the host: token ids of text, features of sound."""

    def __init__(self, context: PreparerContext) -> None:
        super().__init__()
        self._config = context.config
        self._network: type[Network] = network_class(context.config.architecture)

    def prepare(self, payload: bytes) -> np.ndarray:
        source = msgspec.msgpack.decode(payload, type=EncoderInput)
        prepared = self._network.prepare_input(self._config, source.kind, source.payload)
        if len(prepared) != source.num_tokens:
            raise RuntimeError(f"the encoder's input has {len(prepared)} positions, not {source.num_tokens}")
        return prepared

    def message(self, payload: bytes, error: Exception) -> str:
        return str(error) if isinstance(error, OctavoError) else super().message(payload, error)

    def find(self, key: str) -> np.ndarray:
        """A prepared input: token ids int64 [T], or features float32 [T, width]."""
        if key not in self._resources:
            raise RuntimeError(f"the encoder's input {key} is not prepared")
        prepared: np.ndarray = self._resources[key]
        return prepared


# --- adapters ---------------------------------------------------------------------------------------------------------

#: Niceness of threads that read adapters: a third of the processor time of a kernel's thread. A larger share would slow
#: down steps; with a smaller one, requests of a new adapter would wait while other work fills all processors.
_NICENESS = 5
#: Backends may round ranks up to a multiple of this.
_RANK_UNIT = 16

#: An adapter's packed weights, by the name of the layer.
Packed = dict[str, PackedAdapter]


class AdapterPreparer(Preparer):
    def begin_thread(self) -> None:
        with suppress(OSError, AttributeError):  # on Linux alone, the priority is the thread's
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)

    def message(self, payload: bytes, error: Exception) -> str:
        name = msgspec.msgpack.decode(payload, type=AdapterRef).name
        if isinstance(error, AdapterError):
            return f"adapter {name!r}: {error}"
        return f"adapter {name!r} could not be loaded: {type(error).__name__}: {error}"


class LoraPreparer(AdapterPreparer):
    """Reads LoRA adapters, checks their values, packs them for this rank's layers, and copies them into slots."""

    def __init__(self, context: PreparerContext) -> None:
        super().__init__()
        # Of the whole network, of which this rank has a share.
        self._targets, self._options = AdapterTargets(context.config), context.options
        self._layers: Mapping[str, LoraLayer] = dict(context.network.lora_layers())
        #: The adapter in each slot, and the slot of each adapter.
        self._held: dict[int, str] = {}
        self._slots: dict[str, int] = {}

    def prepare(self, payload: bytes) -> Packed:
        weights = read_adapter(
            msgspec.msgpack.decode(payload, type=AdapterRef), self._targets, self._options.max_lora_rank
        )
        layers = self._layers
        names = [name for name in weights if name in layers]  # a pipeline stage has some of the layers
        return {name: layers[name].pack_lora(weights.pop(name)) for name in names}

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
        self._layers = dict(network.lora_layers())
        for slot, key in self._held.items():
            self._fill(slot, self._resources[key])

    def _clear(self, key: str) -> None:
        slot = self._slots.pop(key, None)
        if slot is not None:
            del self._held[slot]
            self._fill(slot, {})

    def _fill(self, slot: int, packed: Packed) -> None:
        # All layers: the slot may hold another adapter, of other layers.
        for name, layer in self._layers.items():
            layer.place_lora(slot, packed.get(name))


def adapter_bytes(layers: Iterable[LoraLayer]) -> int:
    """Bytes of an adapter of the maximum LoRA rank that adapts all of these layers."""
    total = 0
    for layer in layers:
        low_rank = layer.low_rank
        if isinstance(low_rank, LowRank):
            numbers = low_rank.inputs * len(low_rank.outputs) + sum(low_rank.outputs)
        else:
            assert isinstance(low_rank, LowRankEmbedding)
            numbers = low_rank.rows + low_rank.outputs
        rank = -(-low_rank.max_rank // _RANK_UNIT) * _RANK_UNIT
        total += numbers * rank * low_rank.dtype.itemsize
    return total


#: Keys and values, the virtual tokens of a step, and their slots [G, t].
_Write = tuple[np.ndarray, slice, NDArray[np.int64]]


class PromptAdapters(AdapterPreparer):
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
        self._writes: list[_Write] = []

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
        keys_values = sum(spec.vectors * spec.num_kv_heads * spec.head_dim for spec in self._network.kv_specs)
        return self._num_tokens * max(keys_values, self._config.hidden_size) * self._context.dtype.itemsize

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

    def add(self, sequence: NewSequence, row: int, tokens: TokenTable) -> None:
        """Maps the placeholder tokens of a new sequence to its adapter's part of the table."""
        held = self._held.get(sequence.adapter) if sequence.adapter is not None else None
        if held is None:
            return
        part, virtual = held
        prompt = tokens.ids[row, : sequence.num_prompt_tokens]
        prompt[prompt >= self._config.vocab_size] += part * self._rows
        prefix = virtual.keys_values
        if prefix is not None and sequence.num_computed < prefix.shape[2]:
            self._unwritten[sequence.seq_id] = prefix

    def forget(self, seq_id: int) -> None:
        self._unwritten.pop(seq_id, None)

    def take_slots(self, inputs: StepInputs) -> None:
        """Takes the KV slots of prefix tokens out of a step's inputs, for ``write_prefixes``."""
        self._writes = []
        if not self._unwritten:
            return
        slots, offsets = inputs.arrays["slot_mapping"], inputs.arrays["query_start_loc"]
        for i, seq_id in enumerate(inputs.seq_ids):
            prefix = self._unwritten.get(seq_id)
            if prefix is None:
                continue
            start, stop = int(inputs.starts[i]), min(int(inputs.ends[i]), prefix.shape[2])
            if stop == prefix.shape[2]:
                del self._unwritten[seq_id]
            rows = slice(int(offsets[i]), int(offsets[i]) + stop - start)
            self._writes.append((prefix, slice(start, stop), slots[:, rows].copy()))
            slots[:, rows] = -1

    def write_prefixes(self, kernels: Kernels, caches: Sequence[LayerCache]) -> None:
        """Writes the keys and values of the step's prefixes; after the plan's moves of blocks, before the forward."""
        for prefix, span, slots in self._writes:
            keys_values, groups = kernels.wrap(prefix[:, :, span]), kernels.wrap(slots)
            for layer, cache in zip(range(len(prefix)), caches, strict=True):
                keys, values = keys_values[layer, 0], keys_values[layer, 1]
                kernels.reshape_and_cache(keys, values, cache, groups[cache.group])
        self._writes = []
