"""Memory that processes share without a name for it, so that nothing is left of it when they have ended."""

from __future__ import annotations

import os
import tempfile


def shared_memory(size: int) -> int:
    """The descriptor of zeroed memory without a name, to be mapped by processes that inherit it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("octavo")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor
