"""``Worker``: one rank. Calls give it its device, model and KV cache, and import the runner and torch only then."""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.config.engine_config import EngineConfig, make_config
from octavo.config.options import ParallelLayout
from octavo.core.errors import ConfigError, EngineStateError
from octavo.core.model_config import ModelConfig
from octavo.core.plan import StepResult
from octavo.kernels import require_torch
from octavo.process.start_process import LocalConnections
from octavo.process.startup import ProcessProfile, profile

if TYPE_CHECKING:
    from octavo.runner.loaded_model import LoadedModel, Ranks
    from octavo.runner.memory import CacheSizing
    from octavo.runner.model_runner import ModelRunner


logger = logging.getLogger("octavo")

#: The user of torch in an error that torch is missing.
_APART = "workers that share no memory"


class Worker:
    """One rank: owns its model, its runner, and its connections with the other ranks (vLLM's ``GPUWorker``)."""

    def __init__(self, spec: WorkerSpec, connections: LocalConnections | None = None) -> None:
        """``connections``: to workers of the same machine; None: by torch.distributed, through the store of rank 0."""
        self.spec = spec
        self.options: EngineConfig = make_config(**spec.options)
        self.layout = ParallelLayout.of(self.options, spec.rank)
        self._connections = connections
        self._store: Any = None
        self._loaded: LoadedModel | None = None
        self._sizing: CacheSizing | None = None
        self._runner: ModelRunner | None = None
        self._ranks: Ranks | None = None

    @property
    def rank(self) -> int:
        return self.spec.rank

    @property
    def runner(self) -> ModelRunner:
        if self._runner is None:
            raise EngineStateError(f"worker {self.rank} has no KV cache yet: load_model and make_cache come first")
        return self._runner

    def call(self, method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls a method of the worker, its runner or its ``CacheSizing``, or a function (also by ``module:name``)."""
        if self._runner is not None and (callable(method) or ":" in method):
            name = method if isinstance(method, str) else getattr(method, "__qualname__", repr(method))
            self._runner.distrust_weights(f"{name} was called on the workers, and may have changed the weights")
        if callable(method):
            return method(self, *args, **kwargs)
        if ":" in method:
            return find_function(method)(self, *args, **kwargs)
        owners = (self, self._runner, self._sizing)
        target = next((member for owner in owners if (member := getattr(owner, method, None)) is not None), None)
        if target is None or method.startswith("_"):
            raise ConfigError(f"workers have no method {method!r}")
        return target(*args, **kwargs)

    def startup_profile(self) -> ProcessProfile:
        return profile(f"worker {self.rank}")

    def open_store(self) -> tuple[str, int] | None:
        """On rank 0, opens the store through which torch.distributed connects all ranks: its host and port."""
        if self.rank:
            return None
        require_torch(_APART)
        from octavo.executor.torch_connections import open_store

        host = own_address()
        self._store = open_store(host)
        return host, self._store.port

    def init_device(self, store: tuple[str, int] | None = None) -> None:
        """Connects the worker with the other ranks; ``store``: the address from rank 0's ``open_store``."""
        if self._connections is not None:
            from octavo.executor.channels import connect_local

            self._ranks = connect_local(self.layout, self._connections)
        elif self.layout.world_size > 1:
            require_torch(_APART)
            from octavo.executor.torch_connections import connect_torch

            self._ranks = connect_torch(self.layout, self.options.device, store, self._store)

    def load_model(self) -> None:
        from octavo.runner.loaded_model import LoadedModel
        from octavo.runner.memory import CacheSizing, WorkerShare

        spec = self.spec
        share = WorkerShare(spec.local_rank, spec.local_size)
        if self.options.pin_threads and spec.local_size > 1:
            _pin_to_processors(spec.local_rank, spec.local_size)
        self._loaded = LoadedModel(self.options, spec.model_config(), Path(spec.folder), spec.dtype, share, self._ranks)
        self._sizing = CacheSizing(self._loaded)

    def make_cache(self, num_blocks: list[int], num_host_blocks: list[int], max_model_len: int) -> None:
        from octavo.runner.model_runner import ModelRunner

        if self._loaded is None:
            raise EngineStateError(f"worker {self.rank} has no model yet: load_model comes first")
        self._runner = ModelRunner(self._loaded, num_blocks, num_host_blocks, max_model_len)

    def close(self) -> None:
        """Ends what outlives steps: the KV stores, once blocks that wait are written. No other call follows."""
        if self._runner is not None and self.options.has_stores:
            self._runner.close_stores()


class WorkerSpec(msgspec.Struct):
    """The arguments of a worker in any process on any machine."""

    #: Fields of ``EngineConfig``.
    options: dict[str, Any]
    #: "module:class" of the model's configuration, which model families extend, and its fields.
    config_class: str
    config_fields: dict[str, Any]
    folder: str
    dtype: str
    #: "module:class" of its tower's configuration; "": it has none.
    tower_class: str = ""
    rank: int = 0
    #: Number of this worker on its machine, and the number of workers there.
    local_rank: int = 0
    local_size: int = 1

    @classmethod
    def of(cls, options: EngineConfig, config: ModelConfig, folder: Path, dtype: str, replica: int = 0) -> WorkerSpec:
        """The spec of rank 0. Replicas divide the machine as workers do."""
        return cls(
            options.model_dump(),
            _class_name(config),
            msgspec.to_builtins(config),
            str(folder),
            dtype,
            tower_class="" if config.tower is None else _class_name(config.tower),
            local_rank=replica,
            local_size=options.data_parallel_size,
        )

    def model_config(self) -> ModelConfig:
        fields = self.config_fields
        if self.tower_class:
            fields = {**fields, "tower": msgspec.convert(fields["tower"], _find_class(self.tower_class))}
        config: ModelConfig = msgspec.convert(fields, _find_class(self.config_class))
        return config


def _class_name(value: object) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _find_class(name: str) -> type[Any]:
    module, _, qualname = name.partition(":")
    found: type[Any] = getattr(importlib.import_module(module), qualname)
    return found


def function_name(function: Callable[..., Any]) -> str:
    """``module:name`` of a function; refuses functions that a worker cannot import, as code is not sent."""
    name = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', '')}"
    try:
        importable = find_function(name)
    except (ImportError, ConfigError):
        importable = None
    if importable is not function or name.startswith("__main__:"):
        raise ConfigError(
            f"{function!r} cannot be called on workers of other processes: it must be a function of a module that "
            "they can import"
        )
    return name


def find_function(name: str) -> Callable[..., Any]:
    module, _, path = name.partition(":")
    target: Any = importlib.import_module(module)
    for part in path.split("."):
        target = getattr(target, part, None)
    if not callable(target):
        raise ConfigError(f"{name!r} is no function: module:name is needed")
    function: Callable[..., Any] = target
    return function


def _pin_to_processors(local_rank: int, local_size: int) -> None:
    """Keeps this process and its future threads on its share of the processors."""
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        share = allowed[local_rank * len(allowed) // local_size : (local_rank + 1) * len(allowed) // local_size]
        os.sched_setaffinity(0, share or [allowed[local_rank % len(allowed)]])


def own_address() -> str:
    """This machine's address as others reach it; the loopback address if it has no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: a documentation address (RFC 5737)
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


# --- checks that tensor-parallel ranks sample the same tokens: each samples for itself --------------------------------

DIGEST_BYTES = 16


def digest(content: object) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(content), digest_size=DIGEST_BYTES).digest()


class RankCheck:
    """Collects the tokens that one rank samples, for a comparison every ``interval`` steps; 0: never."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._steps: list[tuple[int, list[int], list[int], list[int]]] = []

    def add(self, result: StepResult) -> None:
        if self._interval:
            self._steps.append((result.step, result.seq_ids, result.num_tokens, result.token_ids))

    def take(self) -> tuple[int, int, bytes]:
        """The first and last step to be compared now, and their digest; an empty digest if no comparison is due."""
        if not self._steps or len(self._steps) < self._interval:
            return 0, 0, b""
        steps, self._steps = self._steps, []
        return steps[0][0], steps[-1][0], digest(steps)


def find_difference(digests: Mapping[int, bytes], first_step: int, last_step: int) -> str | None:
    """An error message if the ``digests`` of these steps, by rank, differ from the lowest rank's."""
    first = min(digests)
    others = sorted(rank for rank, other in digests.items() if other != digests[first])
    if not others:
        return None
    steps = f"step {last_step}" if first_step == last_step else f"one of the steps {first_step} to {last_step}"
    return (
        f"in {steps} ranks {others} have sampled other tokens than rank {first}: their machines, libraries or weights "
        "differ, or memory fails"
    )
