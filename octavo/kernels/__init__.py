"""Kernel backends behind one interface; ``load_kernels`` chooses one."""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING

from octavo.core.errors import ConfigError

if TYPE_CHECKING:
    from octavo.kernels.interface import Kernels

#: Backends by name, the one that ``auto`` takes first.
BACKENDS = ("cpu", "reference")

logger = logging.getLogger("octavo")


def load_kernels(name: str, device: str, *, head_dim: int = 8) -> Kernels:
    """The backend called ``name``, computing on ``device`` for a network of this head size.

    "auto" takes the compiled CPU kernels if they are there and can serve the network, else, with a warning, the
    reference.

    Raises:
        ConfigError: there is no backend of that name, or it cannot serve.
    """
    if name not in ("auto", *BACKENDS):
        raise ConfigError(f"unknown kernel backend {name!r}; known: auto, {', '.join(BACKENDS)}")
    obstacle = None if name == "reference" else _obstacle(head_dim)
    if obstacle is None and name != "reference":
        from octavo.kernels.cpu.backend import CpuKernels

        return CpuKernels()
    if name == "cpu":
        raise ConfigError(f"the CPU kernels cannot serve: {obstacle}")
    if obstacle is not None:
        logger.warning("the CPU kernels cannot serve (%s): the reference backend does, many times slower", obstacle)
    from octavo.kernels.reference import ReferenceKernels

    return ReferenceKernels(device)


def _obstacle(head_dim: int) -> str | None:
    """Why the CPU kernels cannot serve, or None."""
    if importlib.util.find_spec("octavo._cpu") is None:
        return "octavo._cpu was not built; install with a C++17 compiler at hand"
    return f"the head size, {head_dim}, is no multiple of 8" if head_dim % 8 else None
