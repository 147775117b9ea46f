"""The adapters of one worker: read and packed beside its steps, kept in host memory, given slots between steps."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from octavo.core.adapters import AdapterRef
from octavo.core.config import EngineConfig
from octavo.core.errors import AdapterError, InsufficientMemoryError
from octavo.core.model_config import ModelConfig
from octavo.core.plan import StepPlan, StepResult
from octavo.kernels.lora import LowRank, LowRankEmbedding, PackedAdapter
from octavo.layers.lora import LoraLayer
from octavo.loader.adapters.check import read_adapter
from octavo.loader.adapters.prompt import VirtualTokens
from octavo.loader.adapters.targets import AdapterTargets
from octavo.models.network import Network
from octavo.runner.prompt_adapters import PromptAdapters

#: Of the thread that reads: it gets a third of what a thread of the kernels gets. More would slow down steps by as
#: much as it takes; with less, the requests of an adapter wait for as long as others keep all processors busy.
_NICENESS = 5
#: Seconds that a step without other work waits for an adapter, after which the scheduler looks for new requests.
_WAIT = 0.02
#: Backends may round ranks up to so many.
_RANK_UNIT = 16

#: What ``LoraLayer.pack_lora`` made of an adapter, by the name of the layer.
Packed = dict[str, PackedAdapter]


@dataclass(frozen=True)
class _Load:
    """An adapter that is being read, or waits for it; one that was dropped and asked for again is another one."""

    ref: AdapterRef


@dataclass(frozen=True)
class _Loaded:
    """The end of a load: what is kept, or why nothing is."""

    load: _Load
    content: Packed | VirtualTokens
    error: str | None = None


class AdapterStore:
    """Obeys the plans: which adapters are in host memory, and which of them is in which slot, is decided there.

    One thread, of lower priority, reads files, checks their values and packs them; each of its operations is short or
    leaves the interpreter to the steps. An adapter that cannot be loaded is an error of that adapter alone.
    """

    def __init__(
        self, network: Network, targets: AdapterTargets, max_rank: int, prompts: PromptAdapters | None = None
    ) -> None:
        """``network`` is the worker's share, ``targets`` those of the whole network; ``prompts`` keeps those adapters
        that have virtual tokens, which need no slots.
        """
        self._targets, self._max_rank, self._prompts = targets, max_rank, prompts
        self._layers: Mapping[str, LoraLayer] = dict(network.lora_layers())
        self._host: dict[str, Packed] = {}
        #: By slot, and by key.
        self._held: dict[int, str] = {}
        self._slots: dict[str, int] = {}
        self._loading: dict[str, _Load] = {}
        # It ends its thread when this store is no longer referred to.
        self._reader = ThreadPoolExecutor(1, "adapters", initializer=_lower_priority)
        self._finished: queue.SimpleQueue[_Loaded] = queue.SimpleQueue()
        #: What the next result says.
        self._new: list[str] = []
        self._errors: dict[str, str] = {}

    def apply(self, plan: StepPlan, result: StepResult) -> None:
        """Does what the plan says of adapters, and adds to the result what is known since the last one.

        Raises:
            RuntimeError: an adapter is to be placed that is not in host memory.
        """
        if self._loading or plan.adapters_to_load or plan.adapters_to_drop or plan.adapters_to_place:
            start = time.perf_counter()
            for key in plan.adapters_to_drop:
                self._drop(key)
            for ref in plan.adapters_to_load:
                self._start(ref)
            self._receive_finished()
            for slot, key in plan.adapters_to_place:
                self._place(slot, key)
            if plan.awaits_adapter and self._loading and not (self._new or self._errors):
                with suppress(queue.Empty):
                    self._receive(self._finished.get(timeout=_WAIT))
            if plan.adapters_to_place or plan.awaits_adapter:
                result.adapter_seconds += time.perf_counter() - start
        if self._new or self._errors:
            result.loaded_adapters, self._new = self._new, []
            result.adapter_errors, self._errors = self._errors, {}

    def slot_of(self, key: str) -> int:
        """The slot of an adapter that a plan has placed; -1 of a prompt adapter.

        Raises:
            RuntimeError: it has none.
        """
        if self._prompts is not None and key in self._prompts:
            return -1
        if key not in self._slots:
            raise RuntimeError(f"adapter {key} has no slot")
        return self._slots[key]

    def detach(self) -> None:
        """Forgets the network's layers, which are to be freed; adapters stay in host memory."""
        while self._loading:
            self._receive(self._finished.get())
        self._layers = {}
        if self._prompts is not None:
            self._prompts.detach()

    def attach(self, network: Network) -> None:
        """Puts the adapters that had slots into those of a new network with the same weights."""
        self._layers = dict(network.lora_layers())
        for slot, key in self._held.items():
            self._fill(slot, self._host[key])
        if self._prompts is not None:
            self._prompts.attach(network)

    # --- what plans say ---------------------------------------------------------------------------------------------

    def _drop(self, key: str) -> None:
        self._loading.pop(key, None)
        self._host.pop(key, None)
        if self._prompts is not None:
            self._prompts.drop(key)
        slot = self._slots.pop(key, None)
        if slot is not None:
            del self._held[slot]
            self._fill(slot, {})

    def _start(self, ref: AdapterRef) -> None:
        if ref.key in self._host or (self._prompts is not None and ref.key in self._prompts):
            self._new.append(ref.key)
        elif ref.key not in self._loading:
            self._loading[ref.key] = load = _Load(ref)
            self._reader.submit(self._read, load)

    def _place(self, slot: int, key: str) -> None:
        while key in self._loading:
            self._receive(self._finished.get())
        if key not in self._host:
            raise RuntimeError(f"adapter {key} is not in host memory: {self._errors.get(key, 'it was not loaded')}")
        if self._held.get(slot) == key:
            return
        before = self._slots.pop(key, None)
        if before is not None:
            del self._held[before]
            self._fill(before, {})
        if slot in self._held:
            del self._slots[self._held[slot]]
        self._fill(slot, self._host[key])
        self._held[slot], self._slots[key] = key, slot

    def _fill(self, slot: int, packed: Packed) -> None:
        """All layers: the slot may hold another adapter, of other layers."""
        for name, layer in self._layers.items():
            layer.place_lora(slot, packed.get(name))

    # --- the end of loads -------------------------------------------------------------------------------------------

    def _receive_finished(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._receive(self._finished.get_nowait())

    def _receive(self, loaded: _Loaded) -> None:
        key = loaded.load.ref.key
        if self._loading.get(key) is not loaded.load:  # dropped meanwhile
            return
        del self._loading[key]
        if loaded.error is not None:
            self._errors[key] = loaded.error
            return
        if isinstance(loaded.content, VirtualTokens):
            assert self._prompts is not None
            self._prompts.place(key, loaded.content)
        else:
            self._host[key] = loaded.content
        self._new.append(key)

    # --- the thread -------------------------------------------------------------------------------------------------

    def _read(self, load: _Load) -> None:
        self._finished.put(self._load(load))

    def _load(self, load: _Load) -> _Loaded:
        ref = load.ref
        if self._loading.get(ref.key) is not load:
            return _Loaded(load, {}, "it was dropped before it was read")
        try:
            if ref.num_virtual_tokens:
                assert self._prompts is not None
                return _Loaded(load, self._prompts.read(ref))
            weights = read_adapter(ref, self._targets, self._max_rank)
            # A stage of a pipeline has some of the layers.
            names = [name for name in weights if name in self._layers]
            return _Loaded(load, {name: self._layers[name].pack_lora(weights.pop(name)) for name in names})
        except AdapterError as e:
            return _Loaded(load, {}, f"adapter {ref.name!r}: {e}")
        except Exception as e:
            return _Loaded(load, {}, f"adapter {ref.name!r} could not be loaded: {type(e).__name__}: {e}")


def _lower_priority() -> None:
    with suppress(OSError, AttributeError):  # of this thread, on Linux alone
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def make_adapter_store(
    options: EngineConfig, config: ModelConfig, network: Network, prompts: PromptAdapters | None = None
) -> AdapterStore | None:
    """The store of a worker; None if adapters are not enabled."""
    if not options.enable_lora and prompts is None:
        return None
    return AdapterStore(network, AdapterTargets(config), options.max_lora_rank, prompts)


def adapter_bytes(network: Network) -> int:
    """Bytes that an adapter of the largest rank takes at most on this rank, if it adapts every layer."""
    total = 0
    for _, layer in network.lora_layers():
        low_rank = layer.low_rank
        if isinstance(low_rank, LowRank):
            numbers = low_rank.inputs * len(low_rank.outputs) + sum(low_rank.outputs)
        else:
            assert isinstance(low_rank, LowRankEmbedding)
            numbers = low_rank.rows + low_rank.outputs
        rank = -(-low_rank.max_rank // _RANK_UNIT) * _RANK_UNIT
        total += numbers * rank * low_rank.dtype.itemsize
    return total


def reserved_bytes(options: EngineConfig, network: Network, free: int) -> int:
    """Bytes of host memory that LoRA adapters may take, of ``free``.

    Raises:
        InsufficientMemoryError: that is more than there is.
    """
    each, count = adapter_bytes(network), options.num_host_loras
    if each * count > free:
        raise InsufficientMemoryError(
            f"{count} adapters of rank {options.max_lora_rank} take up to {each * count / (1 << 30):.2f} GiB of host "
            f"memory, but only {free / (1 << 30):.2f} GiB are free beside the weights; lower max_cpu_loras or "
            "max_lora_rank"
        )
    return each * count


def describe_adapters(options: EngineConfig, network: Network) -> str:
    """How many adapters there may be, and their memory; empty if adapters are not enabled."""
    if not options.enable_lora:
        return ""
    each, count = adapter_bytes(network), options.num_host_loras
    return (
        f"{options.max_loras} slots, at most {count} in host memory, of ranks up to {options.max_lora_rank}: "
        f"{each / (1 << 20):.1f} MiB each, {each * count / (1 << 30):.2f} GiB reserved"
    )
