"""Resources that a worker loads beside its steps and keeps as plans say: grammars, adapters, images, encoder inputs."""

from __future__ import annotations

import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.config.engine_config import EngineConfig
from octavo.core.failures import SequenceFailure
from octavo.core.model_config import ModelConfig
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import KINDS, limits_of
from octavo.layers.layer import LayerContext
from octavo.models.network import Network
from octavo.runner.device import Device

#: Seconds that a step without other work waits for a resource, before the scheduler looks for new requests.
_WAIT = 0.02


@dataclass(frozen=True)
class PreparerContext:
    """The worker of a preparer."""

    options: EngineConfig
    config: ModelConfig
    folder: Path
    layers: LayerContext
    network: Network
    #: Whether this worker samples: in a pipeline, the last stage does.
    samples: bool
    device: Device


class Preparer(ABC):
    """Loads the resources of one kind on one worker; a failure is an error of the requests that need the resource.

    ``prepare`` runs in a thread beside the steps: each of its operations is short, or releases the interpreter's lock.
    All other methods are called between steps.
    """

    num_threads = 1
    #: Whether ``compute`` completes the resource on the device, between steps.
    computes = False

    def __init__(self) -> None:
        #: By key.
        self._resources: dict[str, Any] = {}

    @abstractmethod
    def prepare(self, payload: bytes) -> Any:
        """Makes the resource from a preparation's payload; ``message`` describes an exception."""

    def keep(self, key: str, resource: Any) -> None:
        """Takes a resource that ``prepare`` has made."""
        self._resources[key] = resource

    def find(self, key: str) -> Any:
        """A prepared resource."""
        if key not in self._resources:
            raise RuntimeError(f"{key} is not prepared")
        return self._resources[key]

    def drop(self, key: str) -> None:
        """Frees a resource, and empties its slot."""
        del self._resources[key]

    def compute(self, seconds: float) -> str | None:
        """If it ``computes``: works on the first resource for about ``seconds``; the key of a completed resource.

        Raises:
            Exception: the resource cannot be made; ``drop`` follows.
        """
        raise NotImplementedError(f"{type(self).__name__} computes nothing")

    def failure(self, payload: bytes, error: Exception) -> SequenceFailure:
        """Why the requests of a resource that could not be made end."""
        return SequenceFailure(f"{type(error).__name__}: {error}")

    def place(self, slot: int, key: str) -> None:
        """Puts a resource into a slot, in place of the one in it."""
        raise RuntimeError(f"{key} needs no slot")

    def reserved_bytes(self, free: int) -> int:
        """Bytes of host memory to reserve for resources.

        Raises:
            InsufficientMemoryError: more than ``free``.
        """
        return 0

    def describe(self) -> str:
        """A line about reserved memory for the start's log, if any."""
        return ""

    def begin_thread(self) -> None:  # noqa: B027
        """Called first in each thread."""

    def release(self) -> None:  # noqa: B027
        """Drops captured graphs, as weights may move."""

    def detach(self) -> None:  # noqa: B027
        """Drops the network, which is to be freed; resources stay in host memory."""

    def attach(self, network: Network) -> None:  # noqa: B027
        """Uses a network that was loaded again, with the same weights."""


class WorkerPreparations:
    """Prepares, keeps, places and drops resources as plans say."""

    def __init__(self, preparers: Mapping[str, Preparer]) -> None:
        self._preparers = preparers
        #: By key of the resource.
        self._kept: dict[str, Preparer] = {}
        self._preparing: dict[str, tuple[Preparer, bytes, Future[Any]]] = {}
        self._computing: dict[str, tuple[Preparer, bytes]] = {}
        # By kind; their threads end when they are garbage.
        self._pools: dict[str, ThreadPoolExecutor] = {}

    def apply(self, plan: StepPlan, result: StepResult, fetches: Sequence[Future[Any]] = ()) -> None:
        """Carries out the plan's preparations, and reports in the result those that have ended since the last plan.

        A step that waits for the first of them waits for the first of ``fetches`` too.
        """
        fetches = fetches if plan.awaits_prepared else ()
        if not (self._preparing or self._computing or plan.prepare or plan.drop or plan.place or fetches):
            return
        start = time.perf_counter()
        for key in plan.drop:
            if key in self._preparing:
                self._preparing.pop(key)[2].cancel()
            if key in self._kept:
                self._kept.pop(key).drop(key)
            if key in self._computing:
                self._computing.pop(key)[0].drop(key)
        for preparation in plan.prepare:
            if preparation.key in self._kept:
                result.prepared.append(preparation.key)
            elif preparation.key not in self._preparing and preparation.key not in self._computing:
                kind, preparer = preparation.kind, self._preparers[preparation.kind]
                if kind not in self._pools:
                    self._pools[kind] = ThreadPoolExecutor(
                        preparer.num_threads, kind, initializer=preparer.begin_thread
                    )
                future = self._pools[kind].submit(preparer.prepare, preparation.payload)
                self._preparing[preparation.key] = preparer, preparation.payload, future
        for slot, key in plan.place:
            if key in self._preparing:
                self._receive(key, result)
            if key not in self._kept:
                failure = result.prepare_errors.get(key)
                raise RuntimeError(f"{key} is not prepared: {failure.text if failure else 'it was not asked for'}")
            self._kept[key].place(slot, key)
        self._compute(result, _WAIT if plan.awaits_prepared else plan.compute_seconds)
        is_idle = plan.awaits_prepared and not self._computing
        if is_idle and (self._preparing or fetches) and not (result.prepared or result.prepare_errors):
            wait([*(future for _, _, future in self._preparing.values()), *fetches], _WAIT, FIRST_COMPLETED)
        for key in [key for key, (_, _, future) in self._preparing.items() if future.done()]:
            self._receive(key, result)
        if plan.place or plan.awaits_prepared:
            result.prepare_seconds += time.perf_counter() - start

    def _compute(self, result: StepResult, seconds: float) -> None:
        if not self._computing:
            return
        start = time.perf_counter()
        while self._computing and (left := start + seconds - time.perf_counter()) > 0:
            key, (preparer, payload) = next(iter(self._computing.items()))
            try:
                done = preparer.compute(left)
            except Exception as e:
                preparer.drop(key)
                del self._computing[key]
                result.prepare_errors[key] = preparer.failure(payload, e)
                continue
            if done is not None:
                del self._computing[done]
                self._kept[done] = preparer
                result.prepared.append(done)
        result.compute_seconds = time.perf_counter() - start

    def _receive(self, key: str, result: StepResult) -> None:
        """Waits for ``prepare``, and takes its resource or its error."""
        preparer, payload, future = self._preparing.pop(key)
        try:
            preparer.keep(key, future.result())
        except CancelledError:
            result.prepare_errors[key] = SequenceFailure("it was dropped before it was prepared")
        except Exception as e:
            result.prepare_errors[key] = preparer.failure(payload, e)
        else:
            if preparer.computes:
                self._computing[key] = preparer, payload
                return
            self._kept[key] = preparer
            result.prepared.append(key)

    def reserved_bytes(self, free: int) -> int:
        """Bytes of host memory to reserve for all kinds."""
        return sum(preparer.reserved_bytes(free) for preparer in self._preparers.values())

    def describe(self) -> list[str]:
        """The lines of all kinds for the start's log."""
        return [line for preparer in self._preparers.values() if (line := preparer.describe())]

    def release(self) -> None:
        """Drops captured graphs, as weights may move."""
        for preparer in self._preparers.values():
            preparer.release()

    def detach(self) -> None:
        """Waits for running ``prepare`` calls, and drops the network, which is to be freed."""
        wait([future for _, _, future in self._preparing.values()])
        for preparer in self._preparers.values():
            preparer.detach()

    def attach(self, network: Network) -> None:
        """Uses a network that was loaded again, with the same weights."""
        for preparer in self._preparers.values():
            preparer.attach(network)


def make_preparers(context: PreparerContext) -> dict[str, Preparer]:
    """The preparers of the enabled kinds, by kind."""
    preparers: dict[str, Preparer] = {}
    for name in limits_of(context.options):
        module, _, class_name = KINDS[name].preparer.partition(":")
        preparers[name] = getattr(importlib.import_module(module), class_name)(context)
    return preparers
