"""Lets tests import their helper module as ``tests.kernels.triton.compiling``, however pytest was started."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[3])
if ROOT not in sys.path:
    sys.path.append(ROOT)  # after the installed package, if it is not this one
