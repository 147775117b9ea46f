"""Builds the wheel for this Python, with the kernels of all instruction sets, and tries it in an empty environment.

    python scripts/release_wheel.py FOLDER [--no-try]      # make wheel: into dist/

``python -m build`` makes it, auditwheel names the oldest system that it runs on (``manylinux_...``) and copies in what
a system may lack, and scripts/try_wheel.py installs the result, starts the server and asks it a question. Needs the
extra ``release``, and minutes for the kernels.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def build(folder: Path) -> Path:
    """The wheel as the compiler's machine makes it."""
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)], check=True)
    [wheel] = folder.glob("octavo-*.whl")
    if wheel.name.endswith("-any.whl"):  # without a compiler, or when it fails, the package is built without them
        raise SystemExit(f"{wheel.name} lacks the compiled kernels: a C++17 compiler is needed; see its messages above")
    return wheel


def repair(wheel: Path, folder: Path) -> Path:
    """The wheel for many systems."""
    before = set(folder.glob("*.whl"))
    command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(folder), str(wheel)]
    subprocess.run(command, check=True)
    made = sorted(set(folder.glob("*.whl")) - before or folder.glob(f"{'-'.join(wheel.name.split('-')[:4])}-*.whl"))
    return made[-1]


def problems(wheel: Path) -> list[str]:
    """What is wrong with a wheel that is to be released."""
    found = []
    if "manylinux" not in wheel.name:
        found.append(f"{wheel.name} is for one system alone")
    names = zipfile.ZipFile(wheel).namelist()
    if not any(name.startswith("octavo/_cpu") and name.endswith(".so") for name in names):
        found.append("it lacks the compiled kernels, octavo/_cpu*.so")
    if strays := [name for name in names if name.split("/")[0] in ("tests", "scripts", "docs", "csrc", "build")]:
        found.append(f"it holds what only a checkout needs: {strays[0]}")
    return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the repaired wheel goes")
    parser.add_argument("--wheel", type=Path, help="one that was built before: repair and try it")
    parser.add_argument("--no-try", action="store_true", help="do not install it")
    arguments = parser.parse_args(argv)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as raw:
        wheel = repair(arguments.wheel or build(Path(raw)), arguments.folder)
    print(f"== {wheel}, {wheel.stat().st_size / 1e6:.1f} MB")
    if found := problems(wheel):
        print("\n".join(found), file=sys.stderr)
        return 1
    if arguments.no_try:
        return 0
    return subprocess.run([sys.executable, str(ROOT / "scripts" / "try_wheel.py"), str(wheel)]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
