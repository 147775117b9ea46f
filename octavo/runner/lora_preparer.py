"""LoRA adapters of one worker: read and packed beside its steps, kept in host memory, given slots between steps."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress

import msgspec

from octavo.core.adapters import AdapterRef
from octavo.core.errors import AdapterError, InsufficientMemoryError
from octavo.core.startup import GIB
from octavo.kernels.lora import LowRank, LowRankEmbedding, PackedAdapter
from octavo.layers.lora import LoraLayer
from octavo.loader.adapters.adapter_files import read_adapter
from octavo.loader.adapters.targets import AdapterTargets
from octavo.models.network import Network
from octavo.runner.preparers import Preparer, PreparerContext

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
