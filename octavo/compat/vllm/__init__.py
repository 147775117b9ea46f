"""vLLM's offline interface: its modules and names, each of which is Octavo's own or a thin layer above it.

>>> import octavo.compat.vllm as vllm
>>> from octavo.compat.vllm.engine.arg_utils import EngineArgs

An unchanged script runs with ``python -m octavo.compat.vllm script.py``, or after ``install()``, which makes this
package importable as ``vllm``. ``importer.py`` has the table of modules and names: read it first.
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
