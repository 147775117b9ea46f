"""Where a server finds adapters while it runs: one folder, and a resolver that finds them by name."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path

from octavo.core.errors import AdapterError, AdapterNotFoundError
from octavo.core.plugins import load_class
from octavo.engine.adapter_registry import MAX_NAME

#: Most files of an adapter's folder that are looked at.
_MAX_FILES = 1000
#: Parts of a path that are no names.
_STEPS = frozenset({"", ".", ".."})


def allowed_path(folder: Path, path: str) -> str:
    """The real path of an adapter given by a path in ``folder``, absolute or relative to it.

    Raises:
        AdapterError: it is outside of the folder, also by a link, or one of its files is.
        AdapterNotFoundError: there is nothing at it.
    """
    if "\0" in path:
        raise AdapterError("lora_path must not contain a null character")
    root = Path(os.path.realpath(folder))
    real = Path(os.path.realpath(root / path))
    # Whether a path outside exists is not said.
    if not real.is_relative_to(root) or real == root:
        raise AdapterError(f"lora_path {path!r:.300} is not within the folder of adapters that this server allows")
    if not real.exists():
        raise AdapterNotFoundError(f"there is no adapter at lora_path {path!r:.300}")
    for number, file in enumerate(os.scandir(real) if real.is_dir() else ()):
        if number >= _MAX_FILES:
            raise AdapterError(f"the folder of lora_path {path!r:.300} has more than {_MAX_FILES} files")
        if not Path(os.path.realpath(file.path)).is_relative_to(root):
            raise AdapterError(
                f"{file.name!r} of lora_path {path!r:.300} is a link out of the folder of adapters that this server "
                "allows"
            )
    return str(real)


def check_paths(paths: Collection[str]) -> None:
    """Refuses paths where no adapter lies, before the model that they are for is loaded.

    Raises:
        AdapterError: naming the first.
    """
    if paths:
        from octavo.loader.adapters.adapter_files import check_adapter_path

        for path in paths:
            check_adapter_path(path)


class AdapterResolver(ABC):
    """Finds an adapter by its name when a request first names it. Called in a thread, for one name once at a time."""

    def __init__(self, folder: Path | None) -> None:
        """``folder``: the server's option ``lora_folder``."""
        self.folder = folder

    @abstractmethod
    def resolve(self, name: str) -> str | None:
        """The path of the adapter of this name; None: there is none.

        With ``lora_folder`` the path must be in that folder. The name is what a client sent: 1 to 256 printable
        characters, without empty parts, ``.`` and ``..`` between slashes.
        """


class FolderResolver(AdapterResolver):
    """Takes ``lora_folder/NAME``, a folder, or ``lora_folder/NAME.gguf``."""

    def resolve(self, name: str) -> str | None:
        """See ``AdapterResolver``. A name with a separator, or that begins with a period, has no adapter."""
        if self.folder is None or name.startswith(".") or "/" in name or "\\" in name:
            return None
        for path in (self.folder / name, self.folder / f"{name}.gguf"):
            if len(os.fsencode(path.name)) <= 255 and path.exists():
                return str(path)
        return None


RESOLVERS: Mapping[str, type[AdapterResolver]] = {"folder": FolderResolver}


def make_resolver(name: str | None, folder: Path | None) -> AdapterResolver | None:
    """The resolver of this name, or of ``module:Class``.

    Raises:
        ConfigError: there is none.
    """
    if name is None:
        return None
    kind = load_class(name, RESOLVERS, AdapterResolver, "lora_resolver", "octavo.engine.adapter_folder.AdapterResolver")
    return kind(folder)


def find_by_name(resolver: AdapterResolver, name: str) -> str | None:
    """The real path of the adapter that a resolver finds; None: there is none.

    Raises:
        AdapterError: it lies outside of the resolver's folder.
    """
    # What a resolver joins to a folder must not lead out of it, whoever wrote the resolver.
    if len(name) > MAX_NAME or not name.isprintable() or not _STEPS.isdisjoint(re.split(r"[/\\]", name)):
        return None
    path = resolver.resolve(name)
    if path is None or resolver.folder is None:
        return path
    return allowed_path(resolver.folder, path)
