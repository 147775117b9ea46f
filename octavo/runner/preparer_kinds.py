"""The grammars of one worker: compiled beside its steps, kept as the plans say."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    """Compiles grammars; the vocabulary is made before the first one.

    A pipeline stage that does not sample compiles nothing, and has all at once.
    """

    #: A slow grammar does not hold up others, while llguidance leaves the interpreter to the steps.
    num_threads = 2

    def __init__(self, context: PreparerContext) -> None:
        tokenizer = context.options.tokenizer
        self._folder = context.folder if tokenizer is None else Path(tokenizer)
        self._vocab_size, self._eos_token_ids = context.config.vocab_size, context.config.eos_token_ids
        self._samples = context.samples
        self._compiled: dict[str, CompiledGrammar | None] = {}
        #: Of the threads.
        self._tokenizer: GrammarTokenizer | None = None
        self._lock = threading.Lock()

    def prepare(self, payload: bytes) -> CompiledGrammar | None:
        """See ``Preparer``."""
        if not self._samples:
            return None
        # Imported here, so that a start does not wait for it.
        from octavo.grammar.matcher import GrammarTokenizer, compile_grammar
        from octavo.loader.tokenizer_files import load_backend

        with self._lock:
            if self._tokenizer is None:
                backend, _ = load_backend(self._folder)
                self._tokenizer = GrammarTokenizer(backend, self._vocab_size, self._eos_token_ids)
        return CompiledGrammar(compile_grammar(payload.decode(), self._tokenizer), self._tokenizer)

    def message(self, payload: bytes, error: Exception) -> str:
        """See ``Preparer``."""
        from octavo.grammar.matcher import GrammarError

        if isinstance(error, GrammarError | OctavoError):
            return f"{UNUSABLE}{error}"
        return f"the grammar could not be compiled: {type(error).__name__}: {error}"

    def keep(self, key: str, thing: CompiledGrammar | None) -> None:
        """See ``Preparer``."""
        self._compiled[key] = thing

    def drop(self, key: str) -> None:
        """See ``Preparer``."""
        del self._compiled[key]

    def find(self, task: AnyTask) -> CompiledGrammar | None:
        """The grammar of a task, which a result has reported; None if it has none, or nothing is sampled here.

        Raises:
            RuntimeError: it was not compiled, or dropped since.
        """
        grammar = task.grammar if isinstance(task, Generate) else None
        if grammar is None or not self._samples:
            return None
        if grammar.key not in self._compiled:
            raise RuntimeError(f"grammar {grammar.key} is not compiled")
        return self._compiled[grammar.key]


# Prepares what encoders read: of text its token ids, of sound what the network makes of it on the host.


class EncoderInputPreparer(Preparer):
    """Owns the prepared inputs of this worker."""

    def __init__(self, context: PreparerContext) -> None:
        self._config = context.config
        self._network: type[Network] = network_class(context.config.architecture)
        self._inputs: dict[str, np.ndarray] = {}

    def prepare(self, payload: bytes) -> np.ndarray:
        """See ``Preparer``; the payload is an ``EncoderInput``.

        Raises:
            InvalidRequestError: the network cannot read it.
            RuntimeError: it made another number of positions of it than the request says.
        """
        given = msgspec.msgpack.decode(payload, type=EncoderInput)
        prepared = self._network.prepare_input(self._config, given.kind, given.payload)
        if len(prepared) != given.num_tokens:
            raise RuntimeError(f"the encoder's input has {len(prepared)} positions, not {given.num_tokens}")
        return prepared

    def message(self, payload: bytes, error: Exception) -> str:
        """See ``Preparer``."""
        return str(error) if isinstance(error, OctavoError) else super().message(payload, error)

    def keep(self, key: str, thing: Any) -> None:
        """See ``Preparer``."""
        self._inputs[key] = thing

    def drop(self, key: str) -> None:
        """See ``Preparer``."""
        del self._inputs[key]

    def find(self, key: str) -> np.ndarray:
        """A prepared input: int64 [T], or float32 [T, width].

        Raises:
            RuntimeError: it was not prepared, or dropped since.
        """
        if key not in self._inputs:
            raise RuntimeError(f"the encoder's input {key} is not prepared")
        return self._inputs[key]


# LoRA adapters of one worker: read and packed beside its steps, kept in host memory, given slots between steps.

#: Of the threads that read: they get a third of what a thread of the kernels gets. More would slow down steps by as
#: much as it takes; with less, the requests of an adapter wait for as long as others keep all processors busy.
_NICENESS = 5
#: Backends may round ranks up to so many.
_RANK_UNIT = 16

#: What ``LoraLayer.pack_lora`` made of an adapter, by the name of the layer.
Packed = dict[str, PackedAdapter]


class AdapterPreparer(Preparer):
    """What both kinds of adapters have in common: a thread of lower priority, and errors that name the adapter."""

    def begin_thread(self) -> None:
        """Lowers the thread's priority."""
        with suppress(OSError, AttributeError):  # of this thread, on Linux alone
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)

    def message(self, payload: bytes, error: Exception) -> str:
        """See ``Preparer``."""
        name = msgspec.msgpack.decode(payload, type=AdapterRef).name
        if isinstance(error, AdapterError):
            return f"adapter {name!r}: {error}"
        return f"adapter {name!r} could not be loaded: {type(error).__name__}: {error}"


class LoraPreparer(AdapterPreparer):
    """Reads adapters' files, checks their values, and packs them for the layers of this worker."""

    def __init__(self, context: PreparerContext) -> None:
        # Of the whole network; the worker has a share of it.
        self._targets, self._options = AdapterTargets(context.config), context.options
        self._layers: Mapping[str, LoraLayer] = dict(context.network.lora_layers())
        self._host: dict[str, Packed] = {}
        #: By slot, and by key.
        self._held: dict[int, str] = {}
        self._slots: dict[str, int] = {}

    def prepare(self, payload: bytes) -> Packed:
        """See ``Preparer``."""
        weights = read_adapter(
            msgspec.msgpack.decode(payload, type=AdapterRef), self._targets, self._options.max_lora_rank
        )
        layers = self._layers
        names = [name for name in weights if name in layers]  # a stage of a pipeline has some of them
        return {name: layers[name].pack_lora(weights.pop(name)) for name in names}

    def keep(self, key: str, thing: Packed) -> None:
        """See ``Preparer``."""
        self._host[key] = thing

    def drop(self, key: str) -> None:
        """See ``Preparer``."""
        del self._host[key]
        self._clear(key)

    def place(self, slot: int, key: str) -> None:
        """See ``Preparer``."""
        if self._held.get(slot) == key:
            return
        self._clear(key)
        if slot in self._held:
            del self._slots[self._held[slot]]
        self._fill(slot, self._host[key])
        self._held[slot], self._slots[key] = key, slot

    def slot_of(self, key: str) -> int:
        """The slot of an adapter that a plan has placed.

        Raises:
            RuntimeError: it has none.
        """
        if key not in self._slots:
            raise RuntimeError(f"adapter {key} has no slot")
        return self._slots[key]

    def reserved_bytes(self, free: int) -> int:
        """See ``Preparer``."""
        each, count = adapter_bytes(self._layers.values()), self._options.num_host_loras
        if each * count > free:
            raise InsufficientMemoryError(
                f"{count} adapters of rank {self._options.max_lora_rank} take up to {each * count / GIB:.2f} GiB of "
                f"host memory, but only {free / GIB:.2f} GiB are free beside the weights; lower max_cpu_loras or "
                "max_lora_rank"
            )
        return each * count

    def describe(self) -> str:
        """See ``Preparer``."""
        options, each = self._options, adapter_bytes(self._layers.values())
        return (
            f"adapters: {options.max_loras} slots, at most {options.num_host_loras} in host memory, of ranks up to "
            f"{options.max_lora_rank}: {each / (1 << 20):.1f} MiB each, {each * options.num_host_loras / GIB:.2f} GiB "
            "reserved"
        )

    def detach(self) -> None:
        """See ``Preparer``."""
        self._layers = {}

    def attach(self, network: Network) -> None:
        """See ``Preparer``: the adapters that had slots are put into those of the new network."""
        self._layers = dict(network.lora_layers())
        for slot, key in self._held.items():
            self._fill(slot, self._host[key])

    def _clear(self, key: str) -> None:
        slot = self._slots.pop(key, None)
        if slot is not None:
            del self._held[slot]
            self._fill(slot, {})

    def _fill(self, slot: int, packed: Packed) -> None:
        """All layers: the slot may hold another adapter, of other layers."""
        for name, layer in self._layers.items():
            layer.place_lora(slot, packed.get(name))


def adapter_bytes(layers: Iterable[LoraLayer]) -> int:
    """Bytes that an adapter of the largest rank takes at most on this rank, if it adapts each of these layers."""
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


# Virtual tokens of prompt adapters on one worker.

#: Keys and values, the virtual tokens of a step, and their slots [G, t].
_Write = tuple[np.ndarray, slice, NDArray[np.int64]]


class PromptAdapters(AdapterPreparer):
    """Owns the virtual tokens of the adapters in memory, and knows which sequences still have some to compute."""

    def __init__(self, context: PreparerContext) -> None:
        options = context.options
        self._config, self._context = context.config, context.layers
        self._num_tokens = options.num_virtual_tokens
        self._network: Network | None = context.network
        self._rows = options.max_prompt_adapter_token
        self._free = list(range(options.max_prompt_adapters))[::-1]
        self._sizes: VirtualTokenSizes | None = None
        #: By key: which of the table's parts an adapter has, and its virtual tokens on the host.
        self._held: dict[str, tuple[int, VirtualTokens]] = {}
        #: By sequence id: keys and values of prefixes that are not all in its blocks.
        self._unwritten: dict[int, np.ndarray] = {}
        self._writes: list[_Write] = []

    def __contains__(self, key: str) -> bool:
        return key in self._held

    def prepare(self, payload: bytes) -> VirtualTokens:
        """See ``Preparer``: this rank's part of an adapter's virtual tokens, of the network's type, on the host."""
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

    def keep(self, key: str, thing: VirtualTokens) -> None:
        """See ``Preparer``."""
        part = self._free.pop()
        self._held[key] = part, thing
        self._write_embeddings(part, thing)

    def drop(self, key: str) -> None:
        """See ``Preparer``."""
        self._free.append(self._held.pop(key)[0])

    def reserved_bytes(self, free: int) -> int:
        """See ``Preparer``: as many virtual tokens as there may be, of the largest kind, on this rank."""
        assert self._network is not None
        keys_values = sum(spec.vectors * spec.num_kv_heads * spec.head_dim for spec in self._network.kv_specs)
        return self._num_tokens * max(keys_values, self._config.hidden_size) * self._context.dtype.itemsize

    def detach(self) -> None:
        """See ``Preparer``."""
        self._network = None

    def attach(self, network: Network) -> None:
        """See ``Preparer``."""
        self._network = network
        for part, tokens in self._held.values():
            self._write_embeddings(part, tokens)

    def _write_embeddings(self, part: int, tokens: VirtualTokens) -> None:
        first, embeddings = part * self._rows, tokens.embeddings
        if embeddings is None:  # zeros: whatever is computed of them is not used
            assert self._sizes is not None
            embeddings = np.zeros((self._rows, self._sizes.width), self._context.dtype.numpy)
        assert self._network is not None
        self._network.set_virtual_tokens(first, embeddings)

    # --- sequences --------------------------------------------------------------------------------------------------

    def add(self, sequence: NewSequence, row: int, tokens: TokenTable) -> None:
        """Moves the placeholders of a new sequence, which has ``row``, to its adapter's part of the table."""
        held = self._held.get(sequence.adapter) if sequence.adapter is not None else None
        if held is None:
            return
        part, virtual = held
        known = tokens.ids[row, : sequence.num_prompt_tokens]
        known[known >= self._config.vocab_size] += part * self._rows
        prefix = virtual.keys_values
        if prefix is not None and sequence.num_computed < prefix.shape[2]:
            self._unwritten[sequence.seq_id] = prefix

    def forget(self, seq_id: int) -> None:
        """A sequence has left the worker."""
        self._unwritten.pop(seq_id, None)

    # --- steps ------------------------------------------------------------------------------------------------------

    def take_slots(self, inputs: StepInputs) -> None:
        """Takes the slots of prefixes' tokens out of a step's inputs, for ``write_prefixes``."""
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
        """Writes the keys and values of the step's prefixes; before its network, behind the plan's moves of blocks."""
        for prefix, span, slots in self._writes:
            keys_values, groups = kernels.wrap(prefix[:, :, span]), kernels.wrap(slots)
            for layer, cache in zip(range(len(prefix)), caches, strict=True):
                keys, values = keys_values[layer, 0], keys_values[layer, 1]
                kernels.reshape_and_cache(keys, values, cache, groups[cache.group])
        self._writes = []
