"""Resolves a model name or path to a Hugging Face style folder on disk."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.core.errors import ConfigError, ModelNotFoundError
from octavo.loader.builtin import BUILTIN, SHAPES, fetch_builtin, shape_folder
from octavo.loader.files import MODEL_NAME as CTRANSLATE2_NAME
from octavo.loader.files import cache_dir, is_ctranslate2, publish, split_paths

if TYPE_CHECKING:
    from octavo.config.options import ModelOptions
    from octavo.core.model_config import CheckpointQuantization


#: Incremented when other files are written for the same GGUF file, so that old ones are not used.
FOLDER_VERSION = 5
#: Values of the option ``quantization`` that name the method of a checkpoint, as in other engines.
CHECKPOINT_METHODS = ("awq", "compressed-tensors", "gptq")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
#: A hub id with one of a repository's GGUF files, as llama.cpp and Ollama take it: ``owner/name:Q4_K_M``.
_GGUF_ID = re.compile(rf"(?:hf\.co/|huggingface\.co/)?({_HUB_ID.pattern}):([\w.-]+)")
_WEIGHT_SUFFIXES = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".onnx", ".json")
_ACCEPTED = "a folder with config.json, a .gguf file, a built-in name or a hub id (owner/name)"


def resolve_model(name: str, *, revision: str | None = None, progress: bool = True, weights: bool = True) -> Path:
    """The folder with config.json and tokenizer.json of a model, and its safetensors if it has no GGUF file.

    Args:
        name: a folder with config.json, a .gguf file, a built-in name, the name of a shape (see ``shapes``), or a hub
            id ``owner/name``, tried in this order.
        revision: branch, tag or commit of a hub id.
        progress: shows downloads on standard error.
        weights: false if they are not needed (``load_format="dummy"``): then they are not fetched from the hub.

    Raises:
        ModelNotFoundError: nothing of that name exists.
        DownloadError: it exists but could not be fetched, or the cache cannot be written.
        WeightError, UnsupportedModelError, TokenizerError: a GGUF file is damaged, or cannot be served.
    """
    path = Path(os.path.expanduser(name))
    if name and os.path.isdir(path):  # Path("") is the current folder
        return _checked_folder(path)
    if os.path.isfile(path):  # unlike Path.is_file, false also for what cannot be a name at all
        return gguf_folder(path)
    if name in BUILTIN:
        fetched = fetch_builtin(BUILTIN[name], progress=progress)
        if BUILTIN[name].transcribes:
            return ctranslate2_folder(fetched.parent, name)
        return fetched.parent if BUILTIN[name].embeds else gguf_folder(fetched, name, BUILTIN[name].sampling)
    if name in SHAPES:
        return shape_folder(name)
    if _HUB_ID.fullmatch(name) and path.suffix != ".gguf":
        from octavo.loader.files import fetch_hub

        return fetch_hub(name, revision=revision, progress=progress, weights=weights)
    raise ModelNotFoundError(_not_found(name))


def gguf_source(name: str) -> Path | None:
    """The GGUF file that holds the weights of the model ``name``; None if it is not one."""
    path = Path(os.path.expanduser(name))
    if name and os.path.isdir(path):
        return None
    if os.path.isfile(path):
        return path
    return fetch_builtin(BUILTIN[name]) if name in BUILTIN and not BUILTIN[name].is_folder else None


def weight_quantization(
    options: ModelOptions, kernels: str, checkpoint: CheckpointQuantization | None = None
) -> str | None:
    """The format of the matrices that ``options.quantization`` means, as in ``LayerContext.quantization``.

    "auto" is the checkpoint's own format on the backend ``kernels="cpu"`` where it computes with such bits, several
    times faster than widened and in a fraction of the memory: "gguf" for a GGUF file, and for integers of
    ``checkpoint`` its name. Built-in models are known by name and not by the bits of their files: figures, digests and
    examples that name one mean it in dtype.

    Raises:
        ConfigError: the option names another method than that of the checkpoint.
    """
    if options.quantization in CHECKPOINT_METHODS:
        if checkpoint is None or checkpoint.method != options.quantization:
            raise ConfigError(
                f"quantization={options.quantization!r}, but the checkpoint is "
                f"{f'quantized with {checkpoint.method!r}' if checkpoint else 'not quantized'}; 'auto' takes what it is"
            )
    elif options.quantization != "auto":
        return None if options.quantization == "none" else options.quantization
    if kernels != "cpu" or options.load_format == "dummy" or options.model in BUILTIN:
        return None
    if checkpoint is not None and checkpoint.has_integers:
        return checkpoint.name
    return None if gguf_source(options.model) is None else "gguf"


def gguf_folder(path: Path, label: str | None = None, sampling: Mapping[str, float] | None = None) -> Path:
    """The folder with configuration and tokenizer of a GGUF file, which are written if they are not in the cache.

    The cache key is a fingerprint of the file's content, so a moved file is recognised.

    Args:
        path: of the file.
        label: begins the folder's name; default: the file's name.
        sampling: sampling parameters for generation_config.json where the file has none.
    """
    with path.open("rb") as f:
        magic = f.read(4)
    if magic != b"GGUF":
        raise ModelNotFoundError(f"{path} is a file but not a GGUF file; accepted: {_ACCEPTED}")
    safe = re.sub(r"[^\w.-]", "_", label or re.sub(r"-\d{5}-of-\d{5}$", "", path.stem))[:80]
    target = cache_dir() / "models" / f"{safe}-{_fingerprint(path, sampling)}"

    def fill(folder: Path) -> None:
        from octavo.loader.gguf_config import write_gguf_folder

        write_gguf_folder(path, folder, sampling)

    return publish(target, fill)


def ctranslate2_folder(path: Path, label: str | None = None) -> Path:
    """The folder with configuration and tokenizer, as transformers has them, of a model of CTranslate2 in ``path``.

    Its weights are linked.
    """
    safe = re.sub(r"[^\w.-]", "_", label or path.resolve().name)[:80]
    target = cache_dir() / "models" / f"{safe}-{_fingerprint(path.resolve() / CTRANSLATE2_NAME)}"

    def fill(folder: Path) -> None:
        from octavo.loader.ctranslate2 import write_whisper_folder

        write_whisper_folder(path, folder)

    return publish(target, fill)


def _fingerprint(path: Path, written: Mapping[str, float] | None = None) -> str:
    """A hash of size, modification time, and 4 KiB at 66 offsets of the file, or of each file of a split model.

    Hashing all of a large file would take longer than loading it. Files that agree in all of these count as equal.
    ``written``: what else the folder is made of.
    """
    digest = hashlib.sha256(f"{FOLDER_VERSION}{sorted((written or {}).items()) or ''}".encode())
    for part in split_paths(path):
        if not part.is_file():  # named when the model is read
            continue
        stat = part.stat()
        digest.update(f" {stat.st_size} {stat.st_mtime_ns}".encode())
        with part.open("rb") as f:
            for i in range(66):
                f.seek(max(0, stat.st_size - 4096) * i // 65)
                digest.update(f.read(4096))
    return digest.hexdigest()[:16]


def _checked_folder(path: Path) -> Path:
    if (path / "config.json").is_file():
        return ctranslate2_folder(path) if _has_ctranslate2(path) else path
    files = sorted(p.name for p in path.glob("*.gguf"))
    hint = f"; it holds {', '.join(files[:5])}: give the path of that file" if files else ""
    raise ModelNotFoundError(f"the folder {path} has no config.json{hint}; accepted: {_ACCEPTED}")


def _has_ctranslate2(folder: Path) -> bool:
    """Whether a folder is as CTranslate2 makes it: config.json of ``ctranslate2_folder`` names the network, too."""
    return is_ctranslate2(folder / CTRANSLATE2_NAME) and b'"model_type"' not in (folder / "config.json").read_bytes()


def _is_path(name: str) -> bool:
    """Whether a name can only be meant as a path."""
    begins = name.startswith((".", "~", os.sep))
    return begins or name.endswith((os.sep, *_WEIGHT_SUFFIXES)) or name.count(os.sep) > 1 or "\\" in name


def _no_such_file(name: str) -> str:
    """The message for a path where nothing is, with the nearest name in its folder."""
    path = Path(os.path.expanduser(name))
    try:
        near = difflib.get_close_matches(path.name, os.listdir(path.parent), n=1)
    except (OSError, ValueError):
        near = []
    return f"no such file or folder: {name}" + (f"; did you mean {path.with_name(near[0])}?" if near else "")


def _not_found(name: str) -> str:
    if match := _GGUF_ID.fullmatch(name):
        from octavo.loader.files import gguf_advice

        return f"{name} names a GGUF file of the hub repository {match[1]}: {gguf_advice(match[1], match[2])}"
    if _is_path(name):
        return _no_such_file(name)
    # A shape has no weights, so it is suggested only to who has all but typed its name.
    near = difflib.get_close_matches(name, BUILTIN, n=1) or difflib.get_close_matches(name, SHAPES, n=1, cutoff=0.9)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return (
        f"no model {name!r}; {hint}accepted: {_ACCEPTED}; built in: {', '.join(BUILTIN)}; shapes without weights, "
        f"for measurements with load_format dummy: {', '.join(SHAPES)}"
    )


# What tells one state of a model's files from another, in milliseconds.

#: Files that decide what a network computes and what its tokens mean.
_SUFFIXES = {".safetensors", ".gguf", ".json", ".model", ".txt", ".bin", ".jinja"}


#: Of them, those that a front end reads.
_DESCRIPTIONS = {".json", ".model", ".txt", ".jinja"}


def description_digest(folder: Path) -> str:
    """A digest of the contents of a model's configuration and tokenizer, which an engine's front end has read once."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in _DESCRIPTIONS and not path.name.endswith(".index.json") and path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def checkpoint_digest(model: str, folder: Path) -> str:
    """A digest of the names, sizes and times of change of a model's files, links followed.

    ``model``: as the option names it; ``folder``: where it was found. The contents are not read, which would take as
    long as the start does: a file that was written again with the same contents counts as another, as it is better to
    refuse what could go on than to mix two models in one answer.
    """
    source = gguf_source(model)
    files = [path for path in folder.iterdir() if path.suffix in _SUFFIXES] if folder.is_dir() else []
    facts = []
    for path in [*files, *(split_paths(source) if source is not None else ())]:
        if path.is_file():
            stat = path.stat()
            facts.append((path.name, stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(repr(sorted(facts)).encode()).hexdigest()
