"""``python -m octavo.compat.vllm script.py ...``: runs a script that imports vLLM."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from octavo.compat.vllm import install


def main(arguments: list[str]) -> None:
    """Runs the script that the first argument names, with the others as its own."""
    if not arguments or arguments[0].startswith("-"):
        sys.exit("usage: python -m octavo.compat.vllm SCRIPT [ARGUMENT ...]")
    install()
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
