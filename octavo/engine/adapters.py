"""The adapters of an engine by name (``AdapterRegistry``), and finding more of them while a server runs."""

from __future__ import annotations

import functools
import itertools
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.config.engine_config import EngineConfig
from octavo.core.errors import AdapterConflictError, AdapterError, AdapterNotFoundError, did_you_mean
from octavo.core.model_config import ModelConfig
from octavo.core.plugins import load_class
from octavo.core.request import AdapterRef, LoRARequest, PromptAdapterRequest

if TYPE_CHECKING:
    from octavo.loader.adapters import AdapterTargets, VirtualTokenSizes


#: Most named adapters, and most characters of a name.
MAX_ADAPTERS = 65536
MAX_NAME = 256
#: Most names in a message.
_LISTED = 10

#: (name, path): reads the config and headers of an adapter, and the digest of its content.
Check = Callable[[str, str], AdapterRef]


@dataclass(slots=True)
class Adapter:
    ref: AdapterRef
    #: ``LoRARequest.lora_int_id``.
    number: int
    path: str
    num_requests: int = 0
    #: Whether it keeps its place in memory.
    pinned: bool = False
    #: Whether it refuses new requests, and is removed after its last one.
    leaving: bool = False
    #: Called when it is removed.
    when_gone: list[Callable[[], None]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.ref.name

    @property
    def request(self) -> LoRARequest:
        return LoRARequest(self.name, self.number)


class AdapterRegistry:
    """Owns the names of adapters, and which open requests use them.

    A name belongs to one adapter until it is removed, which fails while requests use it. ``read`` may run in any
    thread; all other methods are for one thread.
    """

    def __init__(self, check: Check, *, enabled: bool, reserved: Sequence[str] = ()) -> None:
        """``enabled``: whether the engine serves adapters; ``reserved``: the model's own names."""
        self._check = check
        self._enabled = enabled
        self.reserved = list(reserved)
        self._adapters: dict[str, Adapter] = {}
        self._by_number: dict[int, str] = {}
        #: Names by the digest of the content.
        self._by_key: dict[str, list[str]] = {}
        #: The adapter's name of each open request that has one, by group.
        self._open: dict[int, str] = {}
        self._last_number = 0
        #: Called with the digest of pinned content when its last pinned adapter is removed.
        self.on_unpin: Callable[[str], None] = lambda key: None

    def __iter__(self) -> Iterator[Adapter]:
        return iter(list(self._adapters.values()))

    def __len__(self) -> int:
        return len(self._adapters)

    def get(self, name: str) -> Adapter | None:
        """The adapter of this name, if there is one.

        Raises:
            AdapterConflictError: it is being unloaded.
        """
        adapter = self._adapters.get(name)
        if adapter is not None and adapter.leaving:
            raise AdapterConflictError(f"adapter {adapter.name!r} is being unloaded and takes no new requests")
        return adapter

    def numbered(self, number: int) -> Adapter | None:
        name = self._by_number.get(number)
        return None if name is None else self._adapters[name]

    def names_of(self, key: str) -> Sequence[str]:
        """The names of the adapters with this digest, oldest first."""
        return self._by_key.get(key, ())

    def find(self, request: LoRARequest) -> AdapterRef | None:
        """The adapter that a request names; None if it must be read from its path first.

        Raises:
            AdapterError: adapters are off, the request is no ``LoRARequest``, or its number is that of another name.
            AdapterNotFoundError: none of this name is loaded, and there is no path.
            AdapterConflictError: it is being unloaded.
        """
        self._check_request(request)
        adapter = self.get(request.lora_name)
        if adapter is None:
            if request.lora_path is None:
                self.named(request.lora_name)  # raises
            return None
        if adapter.number != request.lora_int_id:
            raise AdapterError(
                f"adapter {adapter.name!r} has lora_int_id {adapter.number}, not {request.lora_int_id}: each name has "
                "one number"
            )
        same = request.lora_path is None or os.fspath(request.lora_path) == adapter.path
        return _expected(request, adapter.ref) if same else None

    def read(self, request: LoRARequest) -> AdapterRef:
        """Reads the config and the headers of the adapter at ``lora_path``, and the digest of its files."""
        self._check_request(request)
        if request.lora_path is None:
            raise AdapterError(f"adapter {request.lora_name!r} cannot be loaded without a lora_path")
        if request.lora_name in self.reserved:
            raise AdapterConflictError(
                f"{request.lora_name!r} is a name of the model itself; give the adapter another name"
            )
        return _expected(request, self._check(request.lora_name, os.fspath(request.lora_path)))

    def add(self, request: LoRARequest, ref: AdapterRef, *, in_place: bool = False) -> bool:
        """Names an adapter that was ``read``; False if the name has the same content already.

        ``in_place`` replaces the content of a name in use: running requests keep the old one, and the new one is not
        pinned.
        """
        name, number, path = request.lora_name, request.lora_int_id, os.fspath(request.lora_path or ref.path)
        adapter = self.get(name)
        if adapter is not None:
            if adapter.ref.key == ref.key:
                adapter.path = path  # a copy of it, or the same place written otherwise
                return False
            if not in_place:
                raise AdapterConflictError(
                    f"there is an adapter {name!r} already, with other content; unload it first, replace it with "
                    "load_inplace, or choose another name"
                )
            self._unpin(adapter)
            self._unname(adapter)
            adapter.ref, adapter.path = ref, path
            self._by_key.setdefault(ref.key, []).append(name)
            return True
        if number in self._by_number:
            raise AdapterConflictError(f"lora_int_id {number} is that of adapter {self._by_number[number]!r}")
        if len(self._adapters) >= MAX_ADAPTERS:
            raise AdapterConflictError(f"there are {MAX_ADAPTERS} adapters, the most there may be; unload some")
        self._adapters[name] = Adapter(ref, number, path)
        self._by_number[number] = name
        self._by_key.setdefault(ref.key, []).append(name)
        return True

    def load(self, request: LoRARequest) -> AdapterRef:
        ref = self.find(request)
        if ref is None:
            self.add(request, self.read(request))
            ref = self._adapters[request.lora_name].ref
        return ref

    def new_number(self) -> int:
        """Returns an unused ``lora_int_id``; each call returns another one."""
        self._last_number = next(n for n in itertools.count(self._last_number + 1) if n not in self._by_number)
        return self._last_number

    def remove(self, name: str) -> None:
        """Removes an adapter; an ``AdapterConflictError`` if open requests use it."""
        adapter = self.named(name)
        if adapter.num_requests:
            raise AdapterConflictError(
                f"adapter {name!r} is in use by {adapter.num_requests} open requests; wait for them, or unload it with "
                "wait, which refuses new ones and returns when the last of them has ended"
            )
        self._forget(adapter)

    def retire(self, name: str, when_gone: Callable[[], None]) -> None:
        """Refuses new requests for an adapter and removes it after its last one; then calls ``when_gone``."""
        adapter = self.named(name)
        adapter.leaving = True
        adapter.when_gone.append(when_gone)
        if not adapter.num_requests:
            self._forget(adapter)

    def begin(self, group_id: int, ref: AdapterRef) -> None:
        self._open[group_id] = ref.name
        self._adapters[ref.name].num_requests += 1

    def end(self, group_id: int) -> None:
        """Counts the end of a request, which may have no adapter."""
        name = self._open.pop(group_id, None)
        if name is None:
            return
        adapter = self._adapters[name]
        adapter.num_requests -= 1
        if adapter.leaving and not adapter.num_requests:
            self._forget(adapter)

    def open_requests(self) -> Iterator[tuple[int, str]]:
        """Yields the group id and the adapter's name of each open request that has an adapter."""
        return iter(self._open.items())

    def _unpin(self, adapter: Adapter) -> None:
        was_pinned, adapter.pinned = adapter.pinned, False
        if was_pinned and not any(a.pinned and a.ref.key == adapter.ref.key for a in self):
            self.on_unpin(adapter.ref.key)

    def _unname(self, adapter: Adapter) -> None:
        names = self._by_key[adapter.ref.key]
        names.remove(adapter.name)
        if not names:
            del self._by_key[adapter.ref.key]

    def _forget(self, adapter: Adapter) -> None:
        del self._adapters[adapter.name], self._by_number[adapter.number]
        self._unpin(adapter)
        self._unname(adapter)
        for call in adapter.when_gone:
            call()

    def named(self, name: str) -> Adapter:
        adapter = self._adapters.get(name)
        if adapter is None:
            names = list(self._adapters)
            hint = did_you_mean(name, names if len(names) <= 1000 else [], f"loaded: {listed(names)}")
            raise AdapterNotFoundError(f"no adapter {name!r} is loaded; {hint}")
        return adapter

    def _check_request(self, request: LoRARequest) -> None:
        if not isinstance(request, LoRARequest):
            raise AdapterError(
                f"lora_request must be a LoRARequest(lora_name, lora_int_id, lora_path), not {request!r}"
            )
        check_name(request.lora_name)
        number = request.lora_int_id
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number < 1 << 31:
            raise AdapterError(f"lora_int_id must be an integer of at least 1, one for each name, not {number!r}")
        if request.lora_path is not None and not isinstance(request.lora_path, (str, os.PathLike)):
            raise AdapterError(f"lora_path must be a path, not {request.lora_path!r}")
        if not self._enabled:
            raise AdapterError(
                "lora_request needs an engine that serves adapters: set enable_lora=True, or enable_prompt_adapter=True"
            )


def make_registry(options: EngineConfig, config: ModelConfig) -> AdapterRegistry:
    """Makes an empty registry; the first check of an adapter imports the libraries that it needs."""

    @functools.cache
    def targets() -> AdapterTargets:
        from octavo.loader.adapters import AdapterTargets

        return AdapterTargets(config)

    @functools.cache
    def sizes() -> VirtualTokenSizes:
        from octavo.loader.adapters import VirtualTokenSizes

        return VirtualTokenSizes.of(config)

    def check(name: str, path: str) -> AdapterRef:
        from octavo.loader.adapters import check_adapter, check_prompt_adapter, is_prompt_adapter

        if is_prompt_adapter(path):
            return check_prompt_adapter(path, name, sizes(), options)
        if not options.enable_lora:
            raise AdapterError(f"adapter {name!r} is one of LoRA, which needs an engine with enable_lora=True")
        return check_adapter(path, name, targets(), options.max_lora_rank)

    return AdapterRegistry(check, enabled=options.enable_lora or options.enable_prompt_adapter)


def _expected(request: LoRARequest, ref: AdapterRef) -> AdapterRef:
    if isinstance(request, PromptAdapterRequest):
        expected, actual = request.num_virtual_tokens, ref.num_virtual_tokens
        if not actual:
            raise AdapterError(f"adapter {ref.name!r} is one of LoRA: name it by a LoRARequest in lora_request")
        if expected not in (None, actual):
            raise AdapterError(
                f"adapter {ref.name!r} has {actual} virtual tokens, not {expected} (prompt_adapter_num_virtual_tokens)"
            )
    return ref


def check_name(name: str) -> None:
    if not isinstance(name, str) or not name.strip() or len(name) > MAX_NAME or not name.isprintable():
        raise AdapterError(f"an adapter's name must be 1 to {MAX_NAME} printable characters, not {name!r:.300}")


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more if names else "none"


# How a server finds adapters while it runs: in one folder, and with a resolver

#: Most files in an adapter's folder.
_MAX_FILES = 1000
#: Path segments that are not names.
_STEPS = frozenset({"", ".", ".."})


def allowed_path(folder: Path, path: str) -> str:
    """Resolves an adapter's path, absolute or relative to ``folder``; a path or a link out of the folder is refused."""
    if "\0" in path:
        raise AdapterError("lora_path must not contain a null character", field="lora_path")
    root = Path(os.path.realpath(folder))
    real = Path(os.path.realpath(root / path))
    # The error does not tell whether a path outside exists.
    if not real.is_relative_to(root) or real == root:
        raise AdapterError(
            f"lora_path {path!r:.300} is not within the folder of adapters that this server allows", field="lora_path"
        )
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
    """Checks the adapters' paths before the model is loaded."""
    if paths:
        from octavo.loader.adapters import check_adapter_path

        for path in paths:
            check_adapter_path(path)


class AdapterResolver(ABC):
    """Finds an adapter when a request first names it. Runs in a thread, at most once at a time for a name."""

    def __init__(self, folder: Path | None) -> None:
        """``folder``: the server's option ``lora_folder``."""
        self.folder = folder

    @abstractmethod
    def resolve(self, name: str) -> str | None:
        """Returns the path of the adapter, or None if there is none.

        With ``lora_folder`` the path must be in that folder. The name is the client's: 1 to 256 printable characters,
        without empty parts, ``.`` or ``..`` between slashes.
        """


class FolderResolver(AdapterResolver):
    """Resolves NAME to ``lora_folder/NAME``, a folder, or to ``lora_folder/NAME.gguf``."""

    def resolve(self, name: str) -> str | None:
        if self.folder is None or name.startswith(".") or "/" in name or "\\" in name:
            return None
        for path in (self.folder / name, self.folder / f"{name}.gguf"):
            if len(os.fsencode(path.name)) <= 255 and path.exists():
                return str(path)
        return None


RESOLVERS: Mapping[str, type[AdapterResolver]] = {"folder": FolderResolver}


def make_resolver(name: str | None, folder: Path | None) -> AdapterResolver | None:
    if name is None:
        return None
    kind = load_class(name, RESOLVERS, AdapterResolver, "lora_resolver", "octavo.engine.adapters.AdapterResolver")
    return kind(folder)


def find_by_name(resolver: AdapterResolver, name: str) -> str | None:
    """Returns the real path of the adapter that a resolver finds, or None; a path outside its folder is refused."""
    # A resolver may join the name to a folder: the name must not lead out of it.
    if len(name) > MAX_NAME or not name.isprintable() or not _STEPS.isdisjoint(re.split(r"[/\\]", name)):
        return None
    path = resolver.resolve(name)
    if path is None or resolver.folder is None:
        return path
    return allowed_path(resolver.folder, path)
