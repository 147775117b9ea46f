"""How to install the packages that only some of Octavo's functions need."""

from __future__ import annotations

import re
import shlex
import sys

#: The marker of a requirement that belongs to an extra, as the metadata of packages write it.
_EXTRA = re.compile(r"""\bextra\s*==\s*['"]([\w-]+)['"]""")


def install_extra(extra: str) -> str:
    """The pip command that installs an extra's packages where the running Python finds them.

    It names the packages themselves, as pip would look for ``octavo[extra]`` on an index, where Octavo may not be.
    """
    return f"{pip_install(*_requirements(extra))} (the extra octavo[{extra}])"


def pip_install(*requirements: str) -> str:
    """The pip command of the running Python for some packages."""
    return shlex.join([sys.executable or "python", "-m", "pip", "install", *requirements])


def _requirements(extra: str) -> list[str]:
    """The requirements of an extra, without what they depend on."""
    from importlib import metadata  # slow, and needed for an error only

    try:
        given = metadata.requires("octavo") or []
    except metadata.PackageNotFoundError:  # its folder without its metadata
        given = []
    parts = [requirement.partition(";") for requirement in given]
    named = [name.strip() for name, _, marker in parts if (of := _EXTRA.search(marker)) is not None and of[1] == extra]
    return named or [f"octavo[{extra}]"]
