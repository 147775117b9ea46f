"""Downloads packages into .site for the Python of a GPU machine without a network.

    python3 scripts/gpu_site.py [--python 3.12] [NAME ...]

Without names: the requirements of Octavo that images with torch, Triton and transformers usually lack. The folder is
ignored by git; ``make gpu-test`` and ``make gpu-bench`` use it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / ".site"
MISSING = ("msgspec", "pydantic", "starlette", "uvicorn", "pyzmq", "ml_dtypes", "gguf")
#: Installed without their requirements, which the machine has.
WITHOUT_REQUIREMENTS = ("gguf", "ml_dtypes")
#: Platform tags of wheels; pip matches each exactly.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="version of the machine's Python (3.12)")
    parser.add_argument("names", nargs="*", default=MISSING, metavar="NAME")
    arguments = parser.parse_args(argv)
    requirements = pinned(list(arguments.names))
    shutil.rmtree(SITE, ignore_errors=True)
    whole = [text for name, text in requirements.items() if name not in WITHOUT_REQUIREMENTS]
    alone = [text for name, text in requirements.items() if name in WITHOUT_REQUIREMENTS]
    for options, wanted in (([], whole), (["--no-deps"], alone)):
        if wanted and (code := unpack(wanted, options, arguments.python)):
            return code
    print(f"{SITE}: {', '.join(requirements)} for Python {arguments.python}")
    return 0


def pinned(names: list[str]) -> dict[str, str]:
    """Each name with the range of versions that pyproject.toml gives it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known = {re.split(r"[<>=~! ;\[]", text)[0]: text for text in project["dependencies"]}
    return {name: known.get(name, name) for name in names}


def unpack(wanted: list[str], options: list[str], python: str) -> int:
    """Installs wheels for another Python and platform into the folder; pip's exit code."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    command += ["--target", str(SITE), "--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    return subprocess.run([*command, *options, *wanted]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
