"""Chooses the device of a worker; what a GPU needs is imported for one only."""

from __future__ import annotations

from octavo.core.config import EngineConfig
from octavo.core.model_config import ModelConfig
from octavo.kernels import resolve_device
from octavo.runner.device import Device, HostDevice
from octavo.runner.memory import WorkerShare


def make_device(options: EngineConfig, config: ModelConfig, share: WorkerShare) -> Device:
    """The device that ``options.device`` means.

    Raises:
        ConfigError: a GPU was asked for and torch sees none.
    """
    if resolve_device(options.device) == "cpu":
        return HostDevice(options, config, share)
    from octavo.runner.cuda_device import CudaDevice

    return CudaDevice(options, config, share)
