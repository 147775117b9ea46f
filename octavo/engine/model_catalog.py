"""The models on this machine, for a server that lists, describes, fetches and removes them; none is loaded.

Calls read headers of files, or the network, and are made in threads.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.errors import ModelNotFoundError, OctavoError, did_you_mean

if TYPE_CHECKING:
    from octavo.loader.files import CachedModel
    from octavo.loader.local_models import LocalModel

#: Most entries of an array of a GGUF file's metadata that is kept; vocabularies are larger.
_MAX_ARRAY = 64
#: Largest header of a safetensors file that is read, in bytes.
_MAX_HEADER = 64 << 20
#: Seconds between two reports of a download.
_INTERVAL = 0.25
#: config.json -> keys of GGUF below the architecture's name.
_GGUF_KEYS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "vocab_size": "vocab_size",
}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the headers of a model's files say."""

    #: "gguf" or "safetensors".
    format: str
    #: As GGUF names it: llama, qwen3.
    family: str
    #: Values of all tensors; 0: not known.
    num_parameters: int
    #: As in Ollama: Q4_K_M, BF16.
    quantization: str
    #: Metadata under GGUF's keys; long arrays, such as the vocabulary, are None.
    info: Mapping[str, Any] = field(default_factory=dict)
    #: None: the file has none.
    chat_template: str | None = None
    has_vectors: bool = False


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """A model on this machine."""

    #: The name that ``octavo serve`` takes.
    name: str
    #: Where it is: "cache", "hub", "ollama", "lmstudio", "file" or "folder".
    source: str
    #: A GGUF file, or a folder of safetensors.
    path: Path
    #: Bytes of the weights.
    size: int
    #: Seconds since 1970.
    modified: float
    #: 64 hexadecimal digits: Ollama's for its own models, else of names, sizes and times of the files.
    digest: str
    #: Default system prompt and stop texts, and the licence, if its files say so.
    system: str = ""
    stop: tuple[str, ...] = ()
    license: str = ""

    def facts(self) -> ModelFacts:
        """Reads the headers; the answer for unchanged files is kept.

        Raises:
            OctavoError: the files are damaged or missing.
        """
        return _facts(self.path, self.digest)


def list_models() -> list[CatalogModel]:
    """The models that can be served without a download, by name."""
    from octavo.loader.local_models import all_models, local_models

    local: dict[tuple[str, str], LocalModel] = {(model.source, model.name): model for model in local_models()}
    models: dict[str, CatalogModel] = {}
    for entry in all_models():
        if (theirs := local.get((entry.kind, entry.name))) is not None:
            model: CatalogModel | None = _of_files(
                entry.name, entry.kind, theirs.path, theirs.digest, theirs.system, theirs.stop, theirs.license
            )
        else:
            model = _of_cache(entry)
        if model is not None:
            models.setdefault(model.name, model)
    return list(models.values())


def is_here(name: str) -> bool:
    """Whether the engine's option ``model`` may have this value without a download."""
    return os.path.exists(os.path.expanduser(name)) or any(model.name == name for model in list_models())


def is_known(name: str) -> bool:
    """Whether a client's name may mean a model: of a cache, another program, built in, or of the hub; never a path."""
    from octavo.loader import resolve
    from octavo.loader.builtin import BUILTIN

    if os.path.exists(os.path.expanduser(name)) or name.startswith(("/", ".", "~")):
        return False
    try:
        return name in BUILTIN or resolve.hub_model(name) is not None or any(m.name == name for m in list_models())
    except OctavoError:
        return False


def find_model(name: str, revision: str | None = None) -> CatalogModel | None:
    """The model that ``name``, the engine's option, means on this machine."""
    from octavo.loader import hub, resolve
    from octavo.loader.builtin import BUILTIN, fetch_builtin

    path = Path(os.path.expanduser(name))
    if path.exists():
        return _of_files(name, "folder" if path.is_dir() else "file", path)
    if name in BUILTIN:
        fetched = fetch_builtin(BUILTIN[name])
        return _of_files(name, "cache", fetched.parent if BUILTIN[name].is_folder else fetched)
    if (local := resolve.local_model(name, revision)) is not None:
        return _of_files(local.name, local.source, local.path, local.digest, local.system, local.stop, local.license)
    if (model := resolve.hub_model(name)) is not None and (cached := hub.find_cached(model, revision)) is not None:
        return _of_files(name, "hub", cached.path)
    return None


def _of_cache(entry: CachedModel) -> CatalogModel | None:
    from octavo.loader.builtin import BUILTIN

    if entry.kind == "hub":
        is_gguf = ":" in entry.name
        return _of_files(entry.name, "hub", entry.folder / entry.files[0] if is_gguf else entry.folder)
    if entry.kind == "downloaded" and entry.name in BUILTIN and not BUILTIN[entry.name].transcribes:
        built_in = BUILTIN[entry.name]
        return _of_files(
            entry.name, "cache", entry.folder if built_in.is_folder else entry.folder / built_in.weights_name
        )
    return None  # what was made of another file, and shapes without weights


def _of_files(
    name: str,
    source: str,
    path: Path,
    digest: str = "",
    system: str = "",
    stop: tuple[str, ...] = (),
    licence: str = "",
) -> CatalogModel | None:
    from octavo.loader.files import split_paths

    try:
        weights = sorted(path.glob("*.safetensors")) if path.is_dir() else split_paths(path)
        stats = [(file.name, file.stat()) for file in weights]
    except OSError:  # removed meanwhile, or a part is missing
        return None
    if not stats:
        return None
    facts = [(file, each.st_size, each.st_mtime_ns) for file, each in stats]
    digest = digest or hashlib.sha256(repr(facts).encode()).hexdigest()
    modified = max(each.st_mtime for _, each in stats)
    return CatalogModel(name, source, path, sum(fact[1] for fact in facts), modified, digest, system, stop, licence)


# What headers say.


@functools.lru_cache(maxsize=256)
def _facts(path: Path, digest: str) -> ModelFacts:
    return _folder_facts(path) if path.is_dir() else _gguf_facts(path)


def _gguf_facts(path: Path) -> ModelFacts:
    from octavo.loader.gguf_file import GGUFFile

    file = GGUFFile(path)
    arch = str(file.metadata.get("general.architecture", ""))
    count = sum(prod(tensor.shape) for tensor in file.tensors.values())
    info = {key: _plain(value) for key, value in file.metadata.items() if key != "tokenizer.chat_template"}
    info["general.parameter_count"] = count
    template = file.metadata.get("tokenizer.chat_template")
    has_vectors = file.metadata.get(f"{arch}.pooling_type", 0) not in (0, 4)
    template = template if isinstance(template, str) else None
    return ModelFacts("gguf", arch, count, file.file_type, info, template, has_vectors)


def _plain(value: Any) -> Any:
    """A value of GGUF metadata as JSON; None for a long array."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list) and len(value) > _MAX_ARRAY:
        return None
    return value if not isinstance(value, float) or abs(value) < float("inf") else None


def _folder_facts(folder: Path) -> ModelFacts:
    raw = _read_object(folder / "config.json")
    nested = raw.get("text_config")
    text: dict[str, Any] = nested if isinstance(nested, dict) else raw
    family = str(raw.get("model_type") or "")
    count, types = 0, dict[str, int]()
    for path in sorted(folder.glob("*.safetensors")):
        for kind, shape in _tensors(path):
            count += prod(shape)
            types[kind] = types.get(kind, 0) + prod(shape)
    method = raw.get("quantization_config")
    quantization = max(types, key=lambda kind: types[kind], default="")
    if isinstance(method, dict):
        quantization = str(method.get("quant_method", quantization)).upper()
    info: dict[str, Any] = {"general.architecture": family, "general.parameter_count": count}
    info |= {f"{family}.{key}": text[name] for name, key in _GGUF_KEYS.items() if text.get(name) is not None}
    template = folder / "chat_template.jinja"
    chat = template.read_text(encoding="utf-8") if template.is_file() else None
    if chat is None:
        named = _read_object(folder / "tokenizer_config.json").get("chat_template")
        chat = named if isinstance(named, str) else None
    return ModelFacts("safetensors", family, count, quantization, info, chat, (folder / "modules.json").is_file())


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _tensors(path: Path) -> Iterator[tuple[str, list[int]]]:
    """Type and shape of each tensor in the header of a safetensors file; nothing of a damaged one."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length)) if length <= _MAX_HEADER else {}
        for name, entry in header.items():
            if name != "__metadata__":
                yield str(entry["dtype"]), [int(size) for size in entry["shape"]]
    except (OSError, ValueError, KeyError, TypeError, struct.error, RecursionError):
        return


# Downloads and removals.


@dataclass(frozen=True, slots=True)
class PullProgress:
    """A file on its way; without ``name`` a message alone."""

    status: str
    #: SHA-256 of the file in hexadecimal digits, or its name.
    name: str = ""
    total: int = 0
    completed: int = 0


def pull(name: str, stop: threading.Event) -> Iterator[PullProgress]:
    """Downloads a model as ``octavo pull`` does, unless it is cached; yields as it proceeds, until ``stop`` is set.

    An interrupted download is continued by the next call.

    Raises:
        OctavoError: there is no such model, or it cannot be fetched.
    """
    from octavo.loader import resolve
    from octavo.loader.builtin import BUILTIN
    from octavo.loader.local_models import find_local_model

    yield PullProgress("pulling manifest")
    if name in BUILTIN:
        resolve.resolve_model(name, progress=False)  # the sizes of its parts say little of the file made of them
    elif resolve.hub_model(name) is not None:
        yield from _pull_from_hub(name, stop)
    elif find_local_model(name) is None:  # files of this machine are none of a client's business
        hint = did_you_mean(name, BUILTIN, "models of the hub are named owner/name, or owner/name:Q4_K_M")
        raise ModelNotFoundError(f"pull model manifest: {name!r} does not exist; {hint}")
    if not stop.is_set():
        yield PullProgress("success")


def _pull_from_hub(name: str, stop: threading.Event) -> Iterator[PullProgress]:
    from octavo.loader import hub, resolve
    from octavo.loader.download import repository_folder

    model = resolve.hub_model(name)
    assert model is not None
    files = hub.find_files(model)
    errors: list[BaseException] = []

    def fetch() -> None:
        try:
            files.fetch(progress=False)
        except BaseException as e:
            errors.append(e)

    blobs = repository_folder(files.repo) / "blobs"
    worker = threading.Thread(target=fetch, name="pull", daemon=True)
    worker.start()
    last: dict[str, int] = {}
    is_over = False
    while not is_over and not stop.is_set():
        worker.join(_INTERVAL)
        is_over = not worker.is_alive()
        for path, file in files.needed().items():
            done = file.size if (files.snapshot / path).exists() else 0
            if not done and file.sha256:
                partial, blob = blobs / f"{file.sha256}.incomplete", blobs / file.sha256
                done = file.size if blob.exists() else partial.stat().st_size if partial.exists() else 0
            if last.get(path) != done:
                last[path] = done
                digest = f"sha256:{file.sha256}" if file.sha256 else path
                status = f"pulling {(file.sha256 or path)[:12]}"
                yield PullProgress(status, digest, file.size, min(done, file.size))
    if errors:
        raise errors[0]


def remove(name: str) -> None:
    """Removes a model from Octavo's or the hub's cache, as ``octavo rm`` does.

    Raises:
        ModelNotFoundError: there is no such model in a cache; models of other programs are not removed.
    """
    from octavo.loader import files, hub
    from octavo.loader.local_models import find_local_model

    own = [*files.cached_models(), *hub.cached_models()]
    chosen = [model for model in own if model.name == name]
    if not chosen:
        if find_local_model(name) is not None:
            raise OctavoError(f"{name!r} belongs to another program and is only read here: remove it there")
        hint = did_you_mean(name, [model.name for model in own], "no model of this name is in the cache")
        raise ModelNotFoundError(f"model {name!r} not found; {hint}")
    for model in chosen:
        (hub if model.kind == "hub" else files).remove(model)
