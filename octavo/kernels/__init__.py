"""Kernel backends behind one interface; ``load_kernels`` chooses one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.core.errors import ConfigError

if TYPE_CHECKING:
    from octavo.kernels.interface import Kernels

#: Backends by name, the one that ``auto`` takes first.
BACKENDS = ("reference",)


def load_kernels(name: str, device: str) -> Kernels:
    """The backend called ``name`` ("auto": the fastest that this machine can run), computing on ``device``.

    Raises:
        ConfigError: there is no backend of that name.
    """
    if name not in ("auto", *BACKENDS):
        raise ConfigError(f"unknown kernel backend {name!r}; known: auto, {', '.join(BACKENDS)}")
    from octavo.kernels.reference import ReferenceKernels

    return ReferenceKernels(device)
