"""Kernels for GPUs, in Triton. Read ``backend.py`` first."""

from __future__ import annotations

import os


def interpreted() -> bool:
    """Whether Triton kernels run under its interpreter."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
