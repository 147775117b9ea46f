"""The cache folder of fetched and converted models; entries are created atomically."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from octavo.core.errors import DownloadError, OctavoError

logger = logging.getLogger(__name__)

#: Folders of the cache, and how their models came there: of GGUF files configuration and tokenizer are converted.
_KINDS = {"builtin": "downloaded", "models": "converted", "shapes": "shape"}
#: Name of a folder: that of the model, the type of weights that earlier versions converted, and a hash of its source.
_NAME = re.compile(r"(?P<name>.+?)(-(?P<dtype>float32|bfloat16))?-[0-9a-f]{16}")


def cache_dir() -> Path:
    """``OCTAVO_CACHE`` if set, else ``octavo`` in the platform's folder for a user's caches."""
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
    others wait. Nothing is left beside the folder, nor where ``fill`` fails; what killed processes left there, of any
    model, the next call that fills a folder removes.

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
    """Removes what killed processes left beside ``target``: folders that were begun, and locks that nobody holds.

    A model whose file has changed, or that is not asked for again, has another name than the folder that was begun, so
    nothing else would ever remove gigabytes of it.
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
    """A folder that ``publish`` made in the cache."""

    #: As it was named, or the name of the GGUF file that it was made of.
    name: str
    #: "downloaded", "converted" or "shape".
    kind: str
    #: Of weights that an earlier version converted; None: there are none.
    dtype: str | None
    folder: Path
    #: Bytes of its files.
    size: int


def cached_models() -> list[CachedModel]:
    """The models in the cache, by name; nothing else that lies there, and no symbolic links."""
    found = []
    for parent, kind in _KINDS.items():
        root = cache_dir() / parent
        for folder in sorted(root.iterdir()) if root.is_dir() else ():
            name = _NAME.fullmatch(folder.name)
            if name is None or folder.is_symlink() or not folder.is_dir():
                continue
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            found.append(CachedModel(name["name"], kind, name["dtype"], folder, size))
    return sorted(found, key=lambda model: model.name)


def remove(model: CachedModel) -> None:
    """Removes a model from the cache; if this is interrupted, what is left does not count as a model.

    Raises:
        DownloadError: the cache cannot be written to.
    """
    with _locked(model.folder):
        partial = model.folder.with_name(model.folder.name + ".partial")
        try:
            model.folder.rename(partial)
            shutil.rmtree(partial)
        except OSError as e:
            raise DownloadError(_cannot_write(model.folder.parent, e)) from e


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Holds the file lock of ``target``, whose file is removed at the end."""
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
        # While it is held: a process that waits for it sees that the file is gone, and makes a new one (from 3.24 on).
        with suppress(OSError):
            os.unlink(lock.lock_file)
        lock.release()


def _cannot_write(folder: Path, error: OSError) -> str:
    reason = error.strerror or error
    return f"cannot write to the cache folder {folder} ({reason}); set OCTAVO_CACHE to a folder that can hold the model"
