"""Model files: the cache folder of converted and built-in models, and names of GGUF and CTranslate2 files."""

from __future__ import annotations

import logging
import os
import re
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from octavo.core.errors import DownloadError, OctavoError

logger = logging.getLogger(__name__)

#: Folders of the cache -> kinds of models; of GGUF files, configuration and tokenizer are converted.
_KINDS = {"builtin": "downloaded", "models": "converted", "shapes": "shape"}
#: A folder's name: the model, the dtype of weights that earlier versions converted, and a hash of the source.
_NAME = re.compile(r"(?P<name>.+?)(-(?P<dtype>float32|bfloat16))?-[0-9a-f]{16}")


def cache_dir() -> Path:
    """``OCTAVO_CACHE``, else ``octavo`` in the platform's folder for a user's caches."""
    if chosen := os.environ.get("OCTAVO_CACHE"):
        return Path(os.path.expanduser(chosen))
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "octavo"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "octavo"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"


def publish(target: Path, fill: Callable[[Path], None]) -> Path:
    """Creates the folder ``target`` unless it exists: ``fill`` writes to a temporary folder, which is then renamed.

    So a folder of that name is always complete. If several processes call this at once, one fills the folder and the
    others wait. Leftovers of killed processes are removed by the next call that fills a folder.

    Raises:
        DownloadError: the cache cannot be written to.
    """
    if target.is_dir():
        return target
    with _locked(target):
        if target.is_dir():  # made by another process while this one waited
            return target
        _clear_leftovers(target)
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            fill(partial)
            partial.rename(target)
        except OctavoError:
            raise
        except OSError as e:
            raise DownloadError(_cannot_write(target.parent, e)) from e
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def _clear_leftovers(target: Path) -> None:
    """Removes partial folders and stale locks of killed processes beside ``target``.

    A later call for another model does it, because a model whose file has changed has another folder name.
    """
    from filelock import FileLock, Timeout

    names = {path.stem for pattern in ("*.partial", "*.lock") for path in target.parent.glob(pattern)}
    for name in names - {target.name}:
        lock = FileLock(target.with_name(name + ".lock"))
        with suppress(Timeout, OSError), lock.acquire(timeout=0):
            shutil.rmtree(target.with_name(name + ".partial"), ignore_errors=True)
            os.unlink(lock.lock_file)


@dataclass(frozen=True)
class CachedModel:
    """A folder in the cache, or a model in the cache of huggingface_hub (``octavo.loader.hub``)."""

    #: The model, or the GGUF file that it was made of.
    name: str
    #: "downloaded", "converted", "shape" or "hub".
    kind: str
    #: Of weights that an earlier version converted.
    dtype: str | None
    folder: Path
    size: int
    #: Of a model of the hub: its files in ``folder``.
    files: tuple[str, ...] = ()
    #: The file of a GGUF model's image tower, which other models of the folder may share; ``size`` is without it.
    projector: str = ""


def cached_models() -> list[CachedModel]:
    """The models in the cache, by name."""
    models = []
    for parent, kind in _KINDS.items():
        root = cache_dir() / parent
        for folder in sorted(root.iterdir()) if root.is_dir() else ():
            name = _NAME.fullmatch(folder.name)
            if name is None or folder.is_symlink() or not folder.is_dir():
                continue
            files = (file for file in folder.rglob("*") if file.is_file() and file.name != PROJECTOR_LINK)
            size = sum(file.stat().st_size for file in files)
            models.append(CachedModel(name["name"], kind, name["dtype"], folder, size))
    return sorted(models, key=lambda model: model.name)


def remove(model: CachedModel) -> None:
    """Removes a model from the cache; an interrupted removal leaves nothing that counts as a model."""
    with _locked(model.folder):
        partial = model.folder.with_name(model.folder.name + ".partial")
        try:
            model.folder.rename(partial)
            shutil.rmtree(partial)
        except OSError as e:
            raise DownloadError(_cannot_write(model.folder.parent, e)) from e


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(target.with_name(target.name + ".lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            logger.info("waiting for another process that prepares %s", target.name)
            lock.acquire()
    except OSError as e:
        raise DownloadError(_cannot_write(target.parent, e)) from e
    try:
        yield
    finally:
        # While the lock is held: a waiting process sees that the file is gone, and makes a new one (from 3.24 on).
        with suppress(OSError):
            os.unlink(lock.lock_file)
        lock.release()


def _cannot_write(folder: Path, error: OSError) -> str:
    reason = error.strerror or error
    return f"cannot write to the cache folder {folder} ({reason}); set OCTAVO_CACHE to a folder that can hold the model"


def readable_size(number: float) -> str:
    """A number of bytes, with a unit."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"


# GGUF and CTranslate2 files, recognised without imports that would slow down a start

_PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_MAX_PARTS = 1024


def split_paths(path: Path) -> list[Path]:
    """All files of a split model, in order, by the name of one of them, ``NAME-00001-of-00003.gguf``."""
    match = _PART_NAME.fullmatch(path.name)
    if match is None or not 0 < int(match[2]) <= int(match[3]) <= _MAX_PARTS:
        return [path]
    return [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in range(1, int(match[3]) + 1)]


#: The link to the projector of images (``octavo.loader.projector``) in the converted folder of a GGUF file.
PROJECTOR_LINK = "mmproj.gguf"
#: The weights in a folder of CTranslate2.
MODEL_NAME = "model.bin"
#: Limits of the name and the version at the beginning.
_MAX_SPEC = 64
_MAX_VERSION = 255


def is_ctranslate2(path: Path) -> bool:
    """Whether a file begins like CTranslate2's."""
    try:
        with path.open("rb") as file:
            start = file.read(6)
            if len(start) < 6:
                return False
            version, length = struct.unpack("<IH", start)
            spec = file.read(length) if length <= _MAX_SPEC else b""
    except OSError:
        return False
    return version <= _MAX_VERSION and len(spec) == length > 4 and spec.endswith(b"Spec\0")
