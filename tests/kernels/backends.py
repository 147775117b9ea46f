"""The backends that compute on a CPU, and the settings of the compiled one."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator

from octavo.kernels.interface import Kernels
from octavo.kernels.reference import ReferenceKernels


def host_backends() -> list[Kernels]:
    """The reference, and the compiled kernels if they are built."""
    backends: list[Kernels] = [ReferenceKernels()]
    with contextlib.suppress(ImportError):
        backends.append(importlib.import_module("octavo.kernels.cpu.backend").CpuKernels())
    return backends


@contextlib.contextmanager
def cpu_settings(isa: str | None = None, threads: int | None = None) -> Iterator[None]:
    """Sets the instruction set and threads of the compiled kernels, if given, and restores both at the end."""
    cpu = importlib.import_module("octavo._cpu")
    isa_before, threads_before = cpu.isa(), cpu.num_threads()
    if isa is not None:
        cpu.choose_isa(isa)
    if threads is not None:
        cpu.set_threads(threads)
    yield
    cpu.choose_isa(isa_before)
    cpu.set_threads(threads_before)
