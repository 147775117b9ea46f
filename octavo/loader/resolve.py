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
from octavo.loader.files import cache_dir, fetch_hub, gguf_advice, is_ctranslate2, publish, split_paths

if TYPE_CHECKING:
    from octavo.config.options import ModelOptions
    from octavo.core.model_config import CheckpointQuantization


#: Incremented when the files written for a GGUF file change.
FOLDER_VERSION = 5
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
#: One of a hub repository's GGUF files, as in llama.cpp and Ollama: ``owner/name:Q4_K_M``.
_GGUF_ID = re.compile(rf"(?:hf\.co/|huggingface\.co/)?({_HUB_ID.pattern}):([\w.-]+)")
_WEIGHT_SUFFIXES = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".onnx", ".json")
_ACCEPTED = "a folder with config.json, a .gguf file, a built-in name or a hub id (owner/name)"


def resolve_model(name: str, *, revision: str | None = None, progress: bool = True, weights: bool = True) -> Path:
    """The folder with config.json and tokenizer.json of a model, and its safetensors if it has no GGUF file.

    Args:
        name: a folder with config.json, a .gguf file, a built-in name, the name of a shape, or a hub id ``owner/name``,
            tried in this order.
        revision: branch, tag or commit of a hub id.
        progress: shows downloads on standard error.
        weights: false: weights are not fetched from the hub (``load_format="dummy"``).

    Raises:
        ModelNotFoundError: nothing of that name exists.
        DownloadError: it exists but could not be fetched, or the cache cannot be written.
        WeightError, UnsupportedModelError, TokenizerError: a GGUF file is damaged, or cannot be served.
    """
    path = Path(os.path.expanduser(name))
    if name and os.path.isdir(path):  # Path("") is the current folder
        if not (path / "config.json").is_file():
            files = sorted(p.name for p in path.glob("*.gguf"))
            hint = f"; it holds {', '.join(files[:5])}: give the path of that file" if files else ""
            raise ModelNotFoundError(f"the folder {path} has no config.json{hint}; accepted: {_ACCEPTED}")
        # config.json of CTranslate2 itself does not name the network.
        if is_ctranslate2(path / CTRANSLATE2_NAME) and b'"model_type"' not in (path / "config.json").read_bytes():
            return ctranslate2_folder(path)
        return path
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
        return fetch_hub(name, revision=revision, progress=progress, weights=weights)
    raise ModelNotFoundError(_not_found(name))


def gguf_source(name: str) -> Path | None:
    """The GGUF file with the weights of the model ``name``; None if the model is in another format."""
    path = Path(os.path.expanduser(name))
    if name and os.path.isdir(path):
        return None
    if os.path.isfile(path):
        return path
    return fetch_builtin(BUILTIN[name]) if name in BUILTIN and not BUILTIN[name].is_folder else None


def weight_quantization(
    options: ModelOptions, kernels: str, checkpoint: CheckpointQuantization | None = None
) -> str | None:
    """The format of the matrices for ``options.quantization``, as in ``LayerContext.quantization``.

    "auto" is the checkpoint's own format where the backend ``kernels="cpu"`` computes with it, several times faster
    than widened and in a fraction of the memory: "gguf" for a GGUF file, else the name of ``checkpoint`` with integers.
    Built-in models are excepted: figures, digests and examples that name one mean it in dtype.
    """
    if options.quantization in ("awq", "compressed-tensors", "gptq"):  # the method of the checkpoint
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
    """The cached folder with configuration and tokenizer of a GGUF file.

    The key is a fingerprint of the file's content, so a moved file is recognised. ``label`` begins the folder's name
    (default: the file's name). ``sampling``: default sampling parameters where the file has none.
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
    """The cached folder with configuration and tokenizer, as transformers has them, of a CTranslate2 model; weights are
    linked.
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
    ``written``: further content of the folder.
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


def _not_found(name: str) -> str:
    if match := _GGUF_ID.fullmatch(name):
        return f"{name} names a GGUF file of the hub repository {match[1]}: {gguf_advice(match[1], match[2])}"
    begins = name.startswith((".", "~", os.sep))
    if begins or name.endswith((os.sep, *_WEIGHT_SUFFIXES)) or name.count(os.sep) > 1 or "\\" in name:
        path = Path(os.path.expanduser(name))
        try:
            near = difflib.get_close_matches(path.name, os.listdir(path.parent), n=1)
        except (OSError, ValueError):
            near = []
        return f"no such file or folder: {name}" + (f"; did you mean {path.with_name(near[0])}?" if near else "")
    # A shape has no weights, so it is suggested only for an almost equal name.
    near = difflib.get_close_matches(name, BUILTIN, n=1) or difflib.get_close_matches(name, SHAPES, n=1, cutoff=0.9)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return (
        f"no model {name!r}; {hint}accepted: {_ACCEPTED}; built in: {', '.join(BUILTIN)}; shapes without weights, "
        f"for measurements with load_format dummy: {', '.join(SHAPES)}"
    )


#: Files of weights, configuration and tokenizer; of the latter two.
_SUFFIXES = {".safetensors", ".gguf", ".json", ".model", ".txt", ".bin", ".jinja"}
_DESCRIPTIONS = {".json", ".model", ".txt", ".jinja"}


def description_digest(folder: Path) -> str:
    """A digest of the contents of a model's configuration and tokenizer files, which the front end has read."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in _DESCRIPTIONS and not path.name.endswith(".index.json") and path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def checkpoint_digest(model: str, folder: Path) -> str:
    """A digest of the names, sizes and modification times of a model's files, links followed.

    ``model`` is the option's value, ``folder`` the resolved one. Contents are not read, which would take as long as a
    start: a rewritten file counts as another even with equal contents, which is the safe side.
    """
    source = gguf_source(model)
    files = [path for path in folder.iterdir() if path.suffix in _SUFFIXES] if folder.is_dir() else []
    facts = []
    for path in [*files, *(split_paths(source) if source is not None else ())]:
        if path.is_file():
            stat = path.stat()
            facts.append((path.name, stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(repr(sorted(facts)).encode()).hexdigest()
