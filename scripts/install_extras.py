"""Installs the requirements of extras into this Python by name: scripts/install_extras.py test dev

Not by ``pip install -e '.[test]'``, which would install, and so build, the package itself once more.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirements(extras: Iterable[str], pyproject: Path = PYPROJECT) -> list[str]:
    """The requirements of these extras, and of those that they name as ``octavo[...]``."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    found: list[str] = []
    for extra in extras:
        for requirement in project["optional-dependencies"][extra]:
            own = re.fullmatch(rf"{project['name']}\[(.+)\]", requirement)
            found += requirements(re.split(r"\s*,\s*", own[1]), pyproject) if own else [requirement]
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    sys.exit(subprocess.run([sys.executable, "-m", "pip", "install", *requirements(sys.argv[1:])]).returncode)
