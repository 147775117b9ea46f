"""Lets tests import their helper module as ``tests.kernels.triton.compiling``, however pytest was started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).resolve().parents[3])
if ROOT not in sys.path:
    sys.path.append(ROOT)  # after the installed package, if it is not this one


@pytest.fixture(scope="module", autouse=True)
def quickly(quick_interpreter: None) -> None:
    """All kernels here run under the quick interpreter, where they are interpreted."""
