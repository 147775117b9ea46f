"""Checks an adapter before its first request, and reads it in a worker."""

from __future__ import annotations

import os
from pathlib import Path

from octavo.core.adapters import AdapterRef
from octavo.core.errors import AdapterError
from octavo.loader.adapters import peft_folder
from octavo.loader.adapters.lora_pairs import LoraWeights, assemble, check_pairs
from octavo.loader.adapters.targets import AdapterTargets
from octavo.loader.adapters.tensor_file import digest_file, new_digest, read_tensors, unreadable


def check_adapter(path: str | Path, name: str, targets: AdapterTargets, max_rank: int) -> AdapterRef:
    """Checks all of a LoRA adapter but the values of its matrices, and computes the digest of its files.

    The headers say which matrices it has; the files are read once for the digest, in small pieces: another thread may
    do this beside an event loop.

    Args:
        path: a folder of PEFT, or a GGUF file.
        name: of the adapter.
        targets: of the model's network.
        max_rank: the largest rank that is served.

    Raises:
        AdapterError: it is missing, damaged, not supported, or does not fit; the message names file and tensor.
    """
    path = Path(os.path.expanduser(path))
    if path.is_file():
        _refuse_other_files(path)
        from octavo.loader.adapters import gguf_lora  # brings the gguf package

        pairs = gguf_lora.read_pairs(gguf_lora.open_adapter(path), targets)
        file = path
    else:
        raw = peft_folder.read_config(path)[1]
        file, pairs = peft_folder.weights_file(path), peft_folder.read_pairs(path, raw, targets)
    rank = check_pairs(pairs, targets, max_rank, str(file))
    return AdapterRef(_key(path), name, str(path.absolute()), rank)


def check_adapter_path(path: str | Path) -> None:
    """Refuses a path where no adapter lies, before the model that it is for is loaded.

    Raises:
        AdapterError: there is neither a folder with an adapter's configuration nor a GGUF file.
    """
    path = Path(os.path.expanduser(path))
    if path.is_file():
        _refuse_other_files(path)
    else:
        peft_folder.read_config(path)


def read_adapter(ref: AdapterRef, targets: AdapterTargets, max_rank: int) -> LoraWeights:
    """The weights of an adapter that ``check_adapter`` has checked, if its files are the same.

    Raises:
        AdapterError: they are not, or cannot be read; or a value is infinite or not a number.
    """
    try:
        key, weights = _read(Path(ref.path), targets, max_rank)
    except AdapterError:
        if _is_unchanged(ref):
            raise
        key = ""
    if key != ref.key:
        raise AdapterError(
            f"the files of adapter {ref.name!r} changed on disk after it was loaded; load it again: {ref.path}"
        )
    return weights


def _read(path: Path, targets: AdapterTargets, max_rank: int) -> tuple[str, LoraWeights]:
    """The digest of an adapter's files, and its weights."""
    if path.is_file():
        before = _version(path)
        from octavo.loader.adapters import gguf_lora

        opened = gguf_lora.open_adapter(path)
        pairs, tensors = gguf_lora.read_pairs(opened, targets), gguf_lora.read_values(opened)
        file, digest = path, new_digest()
        digest_file(path, digest)
        if _version(path) != before:
            raise AdapterError(f"{path} changed while it was read")
    else:
        text, raw = peft_folder.read_config(path)
        pairs = peft_folder.read_pairs(path, raw, targets)
        wanted = {name for pair in pairs for name in (pair.down, pair.up)}
        file, digest = peft_folder.weights_file(path), new_digest(text)
        tensors = read_tensors(file, wanted, digest)
    check_pairs(pairs, targets, max_rank, str(file))
    return digest.hexdigest(), assemble(pairs, tensors, targets, str(file))


def _is_unchanged(ref: AdapterRef) -> bool:
    try:
        return _key(Path(ref.path)) == ref.key
    except AdapterError:
        return False


def _key(path: Path) -> str:
    """The digest of an adapter's files."""
    if path.is_file():
        file, digest = path, new_digest()
    else:
        file, digest = peft_folder.weights_file(path), new_digest(peft_folder.read_config(path)[0])
    digest_file(file, digest)
    return digest.hexdigest()


def _version(path: Path) -> tuple[int, int, int]:
    """What changes when a file is replaced or written."""
    try:
        stat = path.stat()
    except OSError as e:
        raise unreadable(path, e) from None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _refuse_other_files(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as e:
        raise unreadable(path, e) from None
    if magic != b"GGUF":
        raise AdapterError(f"{path} is no adapter: expected a folder with {peft_folder.CONFIG_FILE}, or a GGUF file")
