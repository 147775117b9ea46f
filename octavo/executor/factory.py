"""Chooses and starts the executor of an engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from octavo.config.engine_config import EngineConfig
from octavo.core.model_config import ModelConfig
from octavo.executor.executor import Executor
from octavo.executor.external import ExternalLauncherExecutor, UniprocExecutor
from octavo.executor.worker import WorkerSpec
from octavo.kernels import num_gpus, resolve_device


def make_executor(options: EngineConfig, config: ModelConfig, folder: Path, dtype: str, replica: int = 0) -> Executor:
    """Makes the executor that ``options`` ask for, and starts its workers.

    ``config``: of the model, with the requested context length; ``dtype``: of weights and activations; ``replica``:
    number of this engine core among the ``data_parallel_size`` ones, which share the machine.
    """
    executor = choose_executor(options)(options, WorkerSpec.of(options, config, folder, dtype, replica), replica)
    try:
        executor.start()
    except BaseException:
        executor.shutdown()
        raise
    return executor


def choose_executor(options: EngineConfig) -> Callable[[EngineConfig, WorkerSpec, int], Executor]:
    """The class of the executor that ``options`` ask for; by default, the one that suits the machine."""
    backend = options.distributed_executor_backend
    if backend is None:
        # A replica may see its own GPU alone, which must be set before its process looks for one.
        alone = options.world_size == 1 and (options.data_parallel_size == 1 or resolve_device(options.device) == "cpu")
        # Ray may know of more GPUs than this machine has.
        fits = resolve_device(options.device) == "cpu" or importlib.util.find_spec("ray") is None
        fits = fits or num_gpus() >= options.world_size * options.data_parallel_size
        backend = "uni" if alone else "mp" if fits else "ray"
    if backend == "uni":
        return UniprocExecutor
    if backend == "mp":
        from octavo.executor.remote import MultiprocExecutor

        return MultiprocExecutor
    if backend == "external_launcher":
        return ExternalLauncherExecutor
    from octavo.executor.remote import RayExecutor

    return RayExecutor
