"""Which executor an engine has."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from octavo.config.engine_config import EngineConfig
from octavo.core.model_config import ModelConfig
from octavo.executor.executor import Executor
from octavo.executor.external import ExternalLauncherExecutor
from octavo.executor.worker import UniprocExecutor, WorkerSpec
from octavo.kernels import num_gpus, resolve_device


def make_executor(options: EngineConfig, config: ModelConfig, folder: Path, dtype: str, replica: int = 0) -> Executor:
    """The workers that ``options`` ask for, started.

    Args:
        config: the network's, with the context length that is wanted.
        folder: of the checkpoint.
        dtype: of weights and activations: float32, bfloat16 or float16.
        replica: number of this engine core among the ``data_parallel_size`` ones, which share the machine.

    Raises:
        OctavoError: see ``Executor.start``.
    """
    executor = choose_executor(options)(options, WorkerSpec.of(options, config, folder, dtype, replica), replica)
    try:
        executor.start()
    except BaseException:
        executor.shutdown()
        raise
    return executor


def choose_executor(options: EngineConfig) -> Callable[[EngineConfig, WorkerSpec, int], Executor]:
    """The class of the executor that ``options`` ask for, or that suits the machine."""
    backend = options.distributed_executor_backend
    if backend is None:
        # A replica on a GPU sees its own alone, which has to be said before its process looks for one.
        alone = options.world_size == 1 and (options.data_parallel_size == 1 or resolve_device(options.device) == "cpu")
        backend = "uni" if alone else "mp" if _machine_has_devices(options) else "ray"
    if backend == "uni":
        return UniprocExecutor
    if backend == "mp":
        from octavo.executor.remote import MultiprocExecutor

        return MultiprocExecutor
    if backend == "external_launcher":
        return ExternalLauncherExecutor
    from octavo.executor.ray_executor import RayExecutor

    return RayExecutor


def _machine_has_devices(options: EngineConfig) -> bool:
    """Whether this machine has a device for each worker, or there is no Ray that might know of other machines."""
    if resolve_device(options.device) == "cpu" or importlib.util.find_spec("ray") is None:
        return True
    return num_gpus() >= options.world_size * options.data_parallel_size
