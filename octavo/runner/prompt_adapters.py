"""Virtual tokens of prompt adapters on one worker.

They come as placeholders at the beginning of a prompt: the ids ``vocab_size`` to ``vocab_size + n - 1``, whatever the
adapter, as its key is part of the names of their blocks. A worker gives each adapter in memory rows of the embedding's
table of virtual tokens, and moves the placeholders of its sequences to these rows.

An adapter of prefix tuning has no embeddings, but keys and values. Its placeholders are computed like tokens whose
embedding is zero and whose keys and values are not written; the adapter's are, to the same slots, before the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.core.adapters import AdapterRef
from octavo.core.plan import NewSequence
from octavo.kernels.cache import LayerCache
from octavo.kernels.interface import Kernels
from octavo.layers.linear import share_heads
from octavo.loader.adapters.prompt import VirtualTokens, VirtualTokenSizes, read_prompt_adapter
from octavo.models.network import Network
from octavo.runner.lora_preparer import AdapterPreparer
from octavo.runner.preparers import PreparerContext
from octavo.runner.step_inputs import StepInputs
from octavo.sampling.sampler import TokenTable

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
