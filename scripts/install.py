"""Installs what a checkout needs into this Python: scripts/install.py [--editable] EXTRA...

The requirements of extras are installed by name, and the package itself with ``--editable`` only and without its
kernels, which scripts/build_cpu.sh builds: pip would build them anew each time. uv fetches packages in parallel; it
is one itself, and where it cannot be had, pip does it. Of torch it is the CPU build, which avoids gigabytes of GPU
libraries on Linux. Needs the standard library only, as it runs before anything is installed. Variables:
    OCTAVO_TORCH=cuda   install the default build of torch, with GPU libraries
    TORCH_INDEX_URL     index of CPU builds of torch, instead of that of the PyTorch project
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = ROOT / "pyproject.toml"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PIP = [sys.executable, "-m", "pip"]
UV = "uv>=0.8,<1"

#: pip's settings, and the options of uv that do the same; those with several values name each.
SAME_OPTION = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}
#: pip's settings that change nothing of what is installed.
OF_NO_MATTER = {
    *("cache-dir", "cert", "default-timeout", "disable-pip-version-check", "no-cache-dir", "no-color", "no-input"),
    *("no-warn-script-location", "progress-bar", "quiet", "retries", "root-user-action", "timeout", "verbose"),
}


def requirements(extras: Iterable[str], pyproject: Path = PYPROJECT) -> list[str]:
    """The requirements of these extras, and of those that they name as ``octavo[...]``."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    found: list[str] = []
    for extra in extras:
        for requirement in project["optional-dependencies"][extra]:
            own = re.fullmatch(rf"{project['name']}\[(.+)\]", requirement)
            found += requirements(re.split(r"\s*,\s*", own[1]), pyproject) if own else [requirement]
    return list(dict.fromkeys(found))


# ---- with uv, or with pip -------------------------------------------------------------------------------------------


def install(*arguments: str) -> int:
    """``pip install`` of these arguments, by uv where it can be had; the exit code."""
    settings = pip_settings()
    options = uv_options(settings)
    if options is not None and (uv := find_uv()) is not None:
        # The environment's certificates, as pip's setting is the machine's.
        environ = {**os.environ, **({"SSL_CERT_FILE": settings["cert"]} if "cert" in settings else {})}
        command = [uv, "pip", "install", "--python", sys.executable, *options, *arguments]
        if subprocess.run(command, cwd=ROOT, env=environ).returncode == 0:
            return 0
        print("== once more with pip, as uv could not", flush=True)
    return subprocess.run([*PIP, "install", *arguments], cwd=ROOT).returncode


def find_uv() -> str | None:
    """The program uv, which is installed if there is none; None if it cannot be had."""
    beside = Path(sys.executable).with_name("uv")
    if not beside.exists():
        if (found := shutil.which("uv")) is not None:
            return found
        # Compiling uv would take longer than pip does.
        command = [*PIP, "install", "--quiet", "--only-binary=uv", UV]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return str(beside) if beside.exists() else None


def pip_settings() -> dict[str, str]:
    """What pip was told by its files and variables, as ``pip install`` sees it."""
    listed = subprocess.run(
        [*PIP, "config", "list"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ).stdout
    settings: dict[str, str] = {}
    for section in ("global.", "install.", ":env:."):
        for line in listed.splitlines():
            name, _, value = line.removeprefix(section).partition("=")
            if line.startswith(section):
                settings[name] = str(ast.literal_eval(value))
    return settings


def uv_options(settings: Mapping[str, str]) -> list[str] | None:
    """Options that let uv install what pip with these settings would; None if there are none for some setting."""
    if not settings.keys() <= SAME_OPTION.keys() | OF_NO_MATTER:
        return None
    # The best version from all indexes, as pip takes it.
    options = ["--index-strategy", "unsafe-best-match"]
    for name, option in SAME_OPTION.items():
        for value in settings.get(name, "").split():
            options += [option, value]
    return options


# ---- torch ----------------------------------------------------------------------------------------------------------


def torch_requirement(among: Iterable[str]) -> str | None:
    """The requirement of torch itself, as in ``torch>=2.11``."""
    return next((requirement for requirement in among if re.match(r"torch(?![\w-])", requirement)), None)


def install_torch(wanted: str) -> int:
    """Installs torch within this range, unless it is there; the exit code."""
    if os.environ.get("OCTAVO_TORCH", "cpu") not in ("", "cpu", "cuda"):
        print(f"OCTAVO_TORCH must be cpu or cuda, not {os.environ['OCTAVO_TORCH']!r}", file=sys.stderr)
        return 2
    if torch_fits(wanted):
        return 0
    offered = offered_version(wanted)
    extra = torch_options(offered, sys.platform, os.environ)
    what = offered if offered is not None and not extra else f"{wanted} {' '.join(extra)}"
    print(f"== installing torch: {what} (the largest download, some 200 MB for the CPU build)", flush=True)
    return install(*extra, wanted)


def torch_options(offered: str | None, platform: str, environ: Mapping[str, str]) -> list[str]:
    """Options of ``pip install`` that select the build.

    Args:
        offered: the version that pip would install without further options; None if it finds none.
        platform: ``sys.platform``.
        environ: environment variables.
    """
    if environ.get("TORCH_INDEX_URL"):
        return ["--extra-index-url", environ["TORCH_INDEX_URL"]]
    if offered is not None and (
        offered.endswith("+cpu")
        # On other platforms the default builds are for the CPU.
        or not platform.startswith("linux")
        or environ.get("OCTAVO_TORCH") == "cuda"
    ):
        return []
    return ["--extra-index-url", CPU_INDEX]


def offered_version(wanted: str) -> str | None:
    """The version that ``pip install`` without further options would install."""
    command = [*PIP, "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed", "--report", "-", wanted]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    if result.returncode != 0:
        return None
    version: str = json.loads(result.stdout)["install"][0]["metadata"]["version"]
    return version


def torch_fits(wanted: str) -> bool:
    """Whether an installed torch satisfies the requirement."""
    try:
        importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    check = [*PIP, "install", "--quiet", "--dry-run", "--no-index", "--no-deps", wanted]
    return subprocess.run(check, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def main(arguments: Sequence[str]) -> int:
    """Installs torch first, if any of it needs that, then all else at once."""
    editable = "--editable" in arguments
    wanted = requirements(argument for argument in arguments if argument != "--editable")
    torch = torch_requirement(wanted)
    if torch is not None and (code := install_torch(torch)):
        return code
    package = ["--editable", ".", "--config-settings=wheel.cmake=false"] if editable else []
    others = [*package, *(requirement for requirement in wanted if requirement != torch)]
    return install(*others) if others else 0


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        sys.exit()
    sys.exit(main(sys.argv[1:]))
