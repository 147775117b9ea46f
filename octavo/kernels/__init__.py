"""Kernel backends behind one interface: ``load_kernels`` chooses one, ``interface.py`` is to be read first."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.core.errors import ConfigError
from octavo.core.plugins import how_to_install
from octavo.kernels.triton import interpreted

if TYPE_CHECKING:
    from octavo.kernels.interface import Kernels

BACKENDS = ("cpu", "triton", "reference")

logger = logging.getLogger("octavo")

#: Files of GPU drivers: of Linux, of its guest on Windows, of Tegra boards.
_GPU_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/proc/driver/nvidia", "/dev/dxg", "/dev/nvmap")


def require_torch(what: str) -> None:
    """Raises ConfigError if torch is not installed; the message names ``what`` needs it and how to install it."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(f"{what} need torch, which is not installed: {how_to_install('torch')}")


def check_kernel_packages(kernels: str, device: str) -> None:
    """Refuses a device or kernels whose packages are not installed, before a model is fetched; imports none of them.

    Raises:
        ConfigError: the message says how to install the package.
    """
    if importlib.util.find_spec("torch") is not None:
        return
    if device not in ("auto", "cpu"):
        require_torch(f"device={device!r}: GPUs")
    if kernels in ("auto", *BACKENDS):
        _choose("cpu" if kernels == "auto" else kernels, gpu=False, head_dim=8, name=kernels)


def num_gpus() -> int:
    """GPUs that torch sees; 0 without it. torch is imported only if there is a GPU driver."""
    if not any(Path(file).exists() for file in _GPU_FILES) or importlib.util.find_spec("torch") is None:
        return 0
    return int(importlib.import_module("octavo.kernels.torch_backend").num_gpus())


def gpu_name() -> str:
    """Name of the process's current GPU; there must be one."""
    return str(importlib.import_module("octavo.kernels.torch_backend").gpu_name())


def resolve_device(name: str) -> str:
    """The device for ``EngineConfig.device``: "cpu" or "cuda" (the process's current GPU).

    Raises:
        ConfigError: a GPU was asked for and torch sees none.
    """
    if name == "cpu":
        return "cpu"
    if num_gpus():
        return "cuda"
    if name == "auto":
        return "cpu"
    require_torch(f"device={name!r}: GPUs")
    why = importlib.import_module("octavo.kernels.torch_backend").why_no_gpu()
    raise ConfigError(f"device={name!r}: {why}")


def load_kernels(
    name: str,
    device: str,
    *,
    head_dim: int = 8,
    deterministic: bool = False,
    enforce_eager: bool = False,
    graph_capture: str = "lazy",
    cudagraph_capture_sizes: Sequence[int] | None = None,
) -> Kernels:
    """The backend called ``name`` on ``device``, for a network of this head size.

    "auto" selects Triton on a GPU and the compiled kernels on a CPU if they are available and support the network, else
    the reference, with a warning.

    Args:
        name: "auto" or one of ``BACKENDS``.
        head_dim: head size of the network, or the greatest common divisor of those of its layers.
        deterministic, enforce_eager, graph_capture, cudagraph_capture_sizes: see ``EngineConfig``.

    Raises:
        ConfigError: the name is unknown, or the backend cannot be used.
    """
    if name not in ("auto", *BACKENDS):
        raise ConfigError(f"unknown kernel backend {name!r}; known: auto, {', '.join(BACKENDS)}")
    gpu = not device.startswith("cpu")
    chosen = _choose(("triton" if gpu else "cpu") if name == "auto" else name, gpu, head_dim, name)
    if chosen == "reference" and gpu and deterministic:
        raise ConfigError("deterministic=True on a GPU needs kernels='triton': torch's products depend on the batch")
    if chosen == "cpu":
        from octavo.kernels.cpu.backend import CpuKernels

        return CpuKernels()
    if chosen == "triton":
        from octavo.kernels.triton.backend import TritonKernels

        return TritonKernels(
            device,
            deterministic=deterministic,
            enforce_eager=enforce_eager,
            graph_capture=graph_capture,
            cudagraph_capture_sizes=cudagraph_capture_sizes,
        )
    from octavo.kernels.reference import ReferenceKernels

    return ReferenceKernels(device)


def _choose(backend: str, gpu: bool, head_dim: int, name: str) -> str:
    """``backend``, or the reference if that cannot serve and the option, ``name``, is "auto"."""
    obstacle = _obstacle(backend, gpu, head_dim)
    if obstacle is None:
        return backend
    if name != "auto":
        raise ConfigError(f"the {name} kernels cannot serve: {obstacle}")
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            f"the {backend} kernels cannot serve: {obstacle}. The reference kernels can, many times slower, with "
            f"torch: {how_to_install('torch')}"
        )
    logger.warning("the %s kernels cannot serve (%s): the reference does, many times slower", backend, obstacle)
    return "reference"


def _obstacle(name: str, gpu: bool, head_dim: int) -> str | None:
    if name != "cpu" and importlib.util.find_spec("torch") is None:
        return f"torch is not installed: {how_to_install('torch')}"
    if name == "reference":
        return None
    if head_dim % 8:
        return f"the head size, {head_dim}, is no multiple of 8"
    if name == "cpu":
        if gpu:
            return "they compute on a CPU; leave kernels at auto or set device='cpu'"
        if importlib.util.find_spec("octavo._cpu") is None:
            return "octavo._cpu was not built; install octavo again with a C++17 compiler at hand"
        return None
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; torch's CUDA builds bring it"
    if not gpu and not interpreted():
        return (
            "they need a GPU (or TRITON_INTERPRET=1, which runs them on a CPU to test them, thousands of times slower)"
        )
    return None
