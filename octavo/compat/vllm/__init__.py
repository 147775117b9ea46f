"""vLLM's offline interface: its modules and names, each of which is Octavo's own or a thin layer above it.

>>> import octavo.compat.vllm as vllm
>>> from octavo.compat.vllm.engine.arg_utils import EngineArgs

A script that is left as it is runs with ``python -m octavo.compat.vllm script.py``, or after ``install()``, from which
on ``vllm`` is this package. What it serves is the table of ``served_modules``; what has no counterpart is refused with
what Octavo has instead.
"""

from __future__ import annotations

from typing import Any

from octavo.compat.vllm.importer import install as install
from octavo.compat.vllm.importer import register, value_of

register()


def __getattr__(name: str) -> Any:
    value = value_of("", name)
    globals()[name] = value
    return value
