"""What a worker prepares beside its steps, and keeps as the plans say, of every kind of preparation."""

from __future__ import annotations

import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.config.engine_config import EngineConfig
from octavo.core.model_config import ModelConfig
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import KINDS, limits_of
from octavo.layers.layer import LayerContext
from octavo.models.network import Network
from octavo.runner.device import Device

#: Seconds that a step without other work waits for something, after which the scheduler looks for new requests.
_WAIT = 0.02


@dataclass(frozen=True)
class PreparerContext:
    """What preparers know of their worker."""

    options: EngineConfig
    config: ModelConfig
    folder: Path
    layers: LayerContext
    #: The worker's share.
    network: Network
    #: Whether this worker samples: in a pipeline, the last stage does.
    samples: bool
    device: Device


class Preparer(ABC):
    """Prepares the things of one kind on one worker; each is an error of its own if that fails.

    ``prepare`` runs in a thread beside the steps: each of its operations is short, or leaves the interpreter to them.
    All else is called between steps.
    """

    #: Threads that prepare.
    num_threads = 1
    #: Whether what is kept has to be computed on the device, between steps, before it can be used.
    computes = False

    @abstractmethod
    def prepare(self, payload: bytes) -> Any:
        """Makes a thing of a preparation's payload.

        Raises:
            Exception: it cannot be made; see ``message``.
        """

    @abstractmethod
    def keep(self, key: str, thing: Any) -> None:
        """Takes a thing that is prepared."""

    @abstractmethod
    def drop(self, key: str) -> None:
        """Forgets a thing that it keeps, and empties its slot."""

    def compute(self, seconds: float) -> str | None:
        """Where it ``computes``: goes on with the first thing for about so many seconds; its key, if it is done.

        Raises:
            Exception: the thing cannot be made; ``drop`` follows.
        """
        raise NotImplementedError(f"{type(self).__name__} computes nothing")

    def message(self, payload: bytes, error: Exception) -> str:
        """Why a thing could not be prepared, for its requests."""
        return f"{type(error).__name__}: {error}"

    def place(self, slot: int, key: str) -> None:
        """Puts a thing that it keeps into a slot, in place of what is in it."""
        raise RuntimeError(f"{key} needs no slot")

    def reserved_bytes(self, free: int) -> int:
        """Bytes of host memory, of ``free``, that are kept for its things and what makes them.

        Raises:
            InsufficientMemoryError: they would be more than there are.
        """
        return 0

    def describe(self) -> str:
        """A line that says at a start how much it keeps; empty: nothing that is worth a line."""
        return ""

    def begin_thread(self) -> None:  # noqa: B027
        """Called first in each thread."""

    def detach(self) -> None:  # noqa: B027
        """Forgets the network, which is to be freed; what it keeps stays in host memory."""

    def attach(self, network: Network) -> None:  # noqa: B027
        """Goes on with a network that was loaded again, with the same weights."""


class WorkerPreparations:
    """Obeys the plans: what is prepared, kept, and in which slot, is decided there."""

    def __init__(self, preparers: Mapping[str, Preparer], seconds: float) -> None:
        """``seconds``: of a step that computes other things, most that are spent on what is prepared."""
        self._preparers, self._seconds = preparers, seconds
        #: By key: who keeps it.
        self._kept: dict[str, Preparer] = {}
        self._preparing: dict[str, tuple[Preparer, bytes, Future[Any]]] = {}
        #: By key, in the order in which they are computed.
        self._computing: dict[str, tuple[Preparer, bytes]] = {}
        # They end their threads when this is no longer referred to.
        self._pools: dict[str, ThreadPoolExecutor] = {}

    def apply(self, plan: StepPlan, result: StepResult) -> None:
        """Does what the plan says, and adds to the result what is known since the last one.

        Raises:
            RuntimeError: something is to be placed that is not prepared.
        """
        if not (self._preparing or self._computing or plan.prepare or plan.drop or plan.place):
            return
        start = time.perf_counter()
        for key in plan.drop:
            self._drop(key)
        for preparation in plan.prepare:
            if preparation.key in self._kept:
                result.prepared.append(preparation.key)
            elif preparation.key not in self._preparing and preparation.key not in self._computing:
                self._begin(preparation.kind, preparation.key, preparation.payload)
        for slot, key in plan.place:
            if key in self._preparing:
                self._receive(key, result)
            if key not in self._kept:
                raise RuntimeError(f"{key} is not prepared: {result.prepare_errors.get(key, 'it was not asked for')}")
            self._kept[key].place(slot, key)
        self._compute(result, _WAIT if plan.awaits_prepared else self._seconds)
        is_idle = plan.awaits_prepared and not self._computing
        if is_idle and self._preparing and not (result.prepared or result.prepare_errors):
            wait([future for _, _, future in self._preparing.values()], _WAIT, FIRST_COMPLETED)
        for key in [key for key, (_, _, future) in self._preparing.items() if future.done()]:
            self._receive(key, result)
        if plan.place or plan.awaits_prepared:
            result.prepare_seconds += time.perf_counter() - start

    def _compute(self, result: StepResult, seconds: float) -> None:
        """Goes on with what is to be computed on the device."""
        end = time.perf_counter() + seconds
        while self._computing and (left := end - time.perf_counter()) > 0:
            key, (preparer, payload) = next(iter(self._computing.items()))
            try:
                done = preparer.compute(left)
            except Exception as e:
                preparer.drop(key)
                del self._computing[key]
                result.prepare_errors[key] = preparer.message(payload, e)
                continue
            if done is not None:
                del self._computing[done]
                self._kept[done] = preparer
                result.prepared.append(done)

    def _begin(self, kind: str, key: str, payload: bytes) -> None:
        preparer = self._preparers[kind]
        if kind not in self._pools:
            self._pools[kind] = ThreadPoolExecutor(preparer.num_threads, kind, initializer=preparer.begin_thread)
        self._preparing[key] = preparer, payload, self._pools[kind].submit(preparer.prepare, payload)

    def _drop(self, key: str) -> None:
        if key in self._preparing:
            self._preparing.pop(key)[2].cancel()
        if key in self._kept:
            self._kept.pop(key).drop(key)
        if key in self._computing:
            self._computing.pop(key)[0].drop(key)

    def _receive(self, key: str, result: StepResult) -> None:
        """Takes what has been prepared, or why it has not; waits for it."""
        preparer, payload, future = self._preparing.pop(key)
        try:
            preparer.keep(key, future.result())
        except CancelledError:
            result.prepare_errors[key] = "it was dropped before it was prepared"
        except Exception as e:
            result.prepare_errors[key] = preparer.message(payload, e)
        else:
            if preparer.computes:
                self._computing[key] = preparer, payload
                return
            self._kept[key] = preparer
            result.prepared.append(key)

    def reserved_bytes(self, free: int) -> int:
        """Bytes of host memory, of ``free``, that are kept for all kinds.

        Raises:
            InsufficientMemoryError: there are not so many.
        """
        return sum(preparer.reserved_bytes(free) for preparer in self._preparers.values())

    def describe(self) -> list[str]:
        """What the kinds have to say of how much they keep."""
        return [line for preparer in self._preparers.values() if (line := preparer.describe())]

    def detach(self) -> None:
        """Forgets the network, which is to be freed; what is prepared stays in host memory."""
        wait([future for _, _, future in self._preparing.values()])
        for preparer in self._preparers.values():
            preparer.detach()

    def attach(self, network: Network) -> None:
        """Goes on with a network that was loaded again."""
        for preparer in self._preparers.values():
            preparer.attach(network)


def make_preparers(context: PreparerContext) -> dict[str, Preparer]:
    """By kind, the preparers of the kinds that are enabled."""
    preparers: dict[str, Preparer] = {}
    for name in limits_of(context.options):
        module, _, class_name = KINDS[name].preparer.partition(":")
        preparers[name] = getattr(importlib.import_module(module), class_name)(context)
    return preparers
