"""How processes that an engine starts for itself are started, and how they ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

#: Variables that hold API keys of a server, which no other process needs.
SECRET_VARIABLES = ("OCTAVO_API_KEYS", "OCTAVO_API_KEY")


def start_process(
    module: str, *arguments: object, environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """Starts ``python -m module``, which finds modules where this process does and gets no API keys.

    ``options`` are those of ``Popen``.
    """
    # Modules that options name (scheduling policies) are found on the same path; -P adds nothing to it.
    path = os.pathsep.join(os.path.abspath(part) for part in sys.path)
    inherited = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *map(str, arguments)],
        env={**inherited, "PYTHONPATH": path, **(environment or {})},
        process_group=0,  # Ctrl-C is for this process alone, also before the other can say that it ignores it
        **options,
    )


def how_it_ended(code: int) -> str:
    """The exit code of a process in words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was ended by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was ended by signal {-code}"
