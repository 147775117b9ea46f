"""Names of stored values: digests of all that decides their bits.

A namespace is the digest of facts (model, dtypes, layout, instruction sets, rank); a key that of a namespace, a KV
group and the content of a block. Two engines find each other's values if all their facts are equal, and only then.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

from octavo.core.errors import ConfigError
from octavo.kvstore import frames
from octavo.kvstore.store import KEY_BYTES

#: Bytes of a key that say to which namespace it belongs, for people: values are told apart by the others.
_NAME_BYTES = 8
#: Files of a folder that decide the bits of a KV cache: weights, configuration, and code of the model's own.
_WEIGHTS, _OTHERS = (".safetensors", ".gguf", ".bin"), (".json", ".py")
#: Configuration that decides which tokens there are, and not what is computed for them.
_NO_BITS = re.compile(r"(tokenizer|vocab|special_tokens|added_tokens|generation_config|chat_template|merges).*\.json")
#: A file that was changed in the last seconds may change again within the resolution of its times.
_SETTLED_SECONDS = 2.0
_HEX = re.compile(rb"[0-9a-f]{64}\n")


def namespace(facts: Mapping[str, Any]) -> bytes:
    """The digest of facts, 32 bytes: text, numbers, booleans, None, bytes, and lists and mappings of these.

    The order of a mapping does not count. Facts of other types raise TypeError.
    """
    text = json.dumps([frames.VERSION, _plain(facts)], sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES).digest()


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise TypeError(f"names of facts must be text, not those of {value!r:.100}")
        return {"facts": {name: _plain(each) for name, each in value.items()}}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TypeError(f"a fact must be text, a number, bytes, or a list or mapping of these, not {value!r:.100}")


def namespace_name(key: bytes) -> str:
    """What people call the namespace of a key: 16 hexadecimal digits; also of a namespace."""
    return key[:_NAME_BYTES].hex()


def store_key(namespace: bytes, group: int, digest: bytes) -> bytes:
    """The key of a block of a KV group: the name of its namespace, and a digest of all that it is, 24 bytes."""
    content = namespace + group.to_bytes(4, "little") + digest
    return namespace[:_NAME_BYTES] + hashlib.blake2b(content, digest_size=KEY_BYTES - _NAME_BYTES).digest()


def model_digest(paths: Iterable[str | Path], remembered: str | Path) -> str:
    """SHA-256 of the content of a model's files, in hexadecimal digits.

    Every byte is read once: a later call, in any process, takes the digest from ``remembered`` if path, size, times and
    inode of all files are the same. Processes that ask at once wait for the one that reads.

    Args:
        paths: files, and folders, whose weights and configuration count: all safetensors, or else other weights.
        remembered: folder for digests; made if it is missing.

    Raises:
        ConfigError: a file is missing or cannot be read.
    """
    files = [member for path in paths for member in _members(Path(path).expanduser().absolute())]
    try:
        before = _states(files)
        key = hashlib.sha256(repr(before).encode("utf-8", "surrogateescape")).hexdigest()
        with _locked_note(Path(remembered), key) as note:
            if note is not None and _HEX.fullmatch(content := os.pread(note, 80, 0)):
                return content.decode().strip()
            digest = hashlib.sha256()
            for name, file in files:
                with file.open("rb") as stream:
                    digest.update(name.encode("utf-8", "surrogateescape") + b"\0")
                    digest.update(hashlib.file_digest(stream, "sha256").digest())
            if note is not None and _states(files) == before and _have_settled(files):
                os.pwrite(note, digest.hexdigest().encode() + b"\n", 0)
            return digest.hexdigest()
    except OSError as e:
        raise ConfigError(f"cannot be read: {e.strerror}", file=e.filename) from None


def start_model_digest(paths: Iterable[str | Path], remembered: str | Path) -> Future[str]:
    """``model_digest`` in a thread of its own, which does not keep the process alive."""
    future: Future[str] = Future()
    paths = list(paths)

    def run() -> None:
        try:
            future.set_result(model_digest(paths, remembered))
        except BaseException as e:
            future.set_exception(e)

    Thread(target=run, name="model-digest", daemon=True).start()
    return future


def _members(path: Path) -> list[tuple[str, Path]]:
    """Files that count, with their names; that of a file which is a model by itself does not count."""
    if not path.is_dir():
        return [("", path)]
    files = sorted(file for file in path.iterdir() if not file.name.startswith(".") and file.is_file())
    weights = next((found for suffix in _WEIGHTS if (found := [file for file in files if file.suffix == suffix])), [])
    others = [file for file in files if file.suffix in _OTHERS and not _NO_BITS.fullmatch(file.name)]
    return [(file.name, file) for file in [*weights, *others]]


def _states(files: list[tuple[str, Path]]) -> list[tuple[str, str, int, int, int, int]]:
    """What changes if the content does. The time of the inode is one that nobody can set back."""
    return [
        (name, str(file), state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino)
        for name, file in files
        for state in [file.stat()]
    ]


def _have_settled(files: list[tuple[str, Path]]) -> bool:
    return max((file.stat().st_ctime for _, file in files), default=0.0) < time.time() - _SETTLED_SECONDS


@contextmanager
def _locked_note(folder: Path, name: str) -> Iterator[int | None]:
    """A file of this name that no other process has open here; None if the folder cannot be written."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        note = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        yield None
        return
    try:
        fcntl.flock(note, fcntl.LOCK_EX)
        yield note
    finally:
        os.close(note)
