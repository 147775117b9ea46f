"""Resolves a model name or path to a Hugging Face style folder on disk."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from octavo.core.errors import ConfigError, ModelNotFoundError
from octavo.loader.builtin import BUILTIN, SHAPES, fetch_builtin, shape_folder
from octavo.loader.files import MODEL_NAME as CTRANSLATE2_NAME
from octavo.loader.files import PROJECTOR_LINK, cache_dir, is_ctranslate2, publish, split_paths

if TYPE_CHECKING:
    from octavo.config.options import ModelOptions
    from octavo.core.model_config import CheckpointQuantization
    from octavo.loader.hub import HubFiles, HubModel
    from octavo.loader.local_models import LocalModel


#: Bytes of the largest file that is fetched whole for ``write_sketch``: tokenizers are larger.
_MAX_SKETCHED = 4 << 20
#: Incremented when the files written for a GGUF file change.
FOLDER_VERSION = 5
_WEIGHT_SUFFIXES = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".onnx", ".json")
_ACCEPTED = "a folder with config.json, a .gguf file, a built-in name or a hub id (owner/name, owner/name:Q4_K_M)"
#: Beginnings of names of other programs' models (``octavo.loader.local_models``).
_LOCAL = ("ollama:", "lmstudio:")


def resolve_model(
    name: str, *, revision: str | None = None, progress: bool = True, weights: bool = True, mmproj: str = "auto"
) -> Path:
    """The folder with config.json and tokenizer.json of a model, and its safetensors if it has no GGUF file.

    Args:
        name: a folder with config.json, a .gguf file, a built-in name, the name of a shape, a model of Ollama or LM
            Studio (``octavo.loader.local_models``) that is not in the hub's cache, or a model of the hub
            (``octavo.loader.hub``), tried in this order.
        revision: branch, tag or commit of a model of the hub.
        progress: shows downloads on standard error.
        weights: false: weights are not fetched from the hub (``load_format="dummy"``, or only a tokenizer is read).
        mmproj: the projector of a GGUF file's images, as the option of this name.

    Raises:
        ConfigError: a projector is named, and the model is no GGUF file.
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
        return _without_projector(path, mmproj)
    if os.path.isfile(path):  # unlike Path.is_file, false also for what cannot be a name at all
        return gguf_folder(path, projector=find_projector(path, mmproj))
    if name in BUILTIN:
        fetched = fetch_builtin(BUILTIN[name], progress=progress)
        if BUILTIN[name].transcribes:
            return ctranslate2_folder(fetched.parent, name)
        if BUILTIN[name].embeds:
            return _without_projector(fetched.parent, mmproj)
        return gguf_folder(fetched, name, BUILTIN[name].sampling, find_projector(fetched, mmproj))
    if name in SHAPES:
        return shape_folder(name)
    if (local := local_model(name, revision)) is not None:
        return gguf_folder(local.path, local.name, local.sampling, find_projector(local.path, mmproj, local.projector))
    if model := hub_model(name):
        from octavo.loader.hub import find_files, is_tag

        meant = find_files(model, revision, weights=weights, mmproj=mmproj if is_tag(mmproj) else "none")
        if meant.gguf is not None and not weights and not meant.is_fetched:
            return _gguf_folder_without_weights(meant)
        fetched = meant.fetch(progress=progress, weights=weights)
        if meant.gguf is None:
            return _without_projector(fetched, mmproj)
        return gguf_folder(fetched, projector=find_projector(fetched, mmproj, meant.within(meant.snapshot)))
    raise ModelNotFoundError(_not_found(name))


def resolve_tokenizer(name: str) -> Path:
    """The folder with the tokenizer of a folder, of which no more is needed, or of any other model."""
    path = Path(name).expanduser()
    return path if path.is_dir() else resolve_model(name, weights=False)


def find_projector(gguf: Path, mmproj: str = "auto", own: Path | None = None) -> Path | None:
    """The projector that the option ``mmproj`` means for a language model's GGUF file; None: text alone.

    "auto" and types take ``own``, which a manifest or a repository has, else the best one beside the file that fits.

    Raises:
        ModelNotFoundError: there is no such projector.
        DownloadError: it could not be fetched from the hub.
    """
    path = Path(os.path.expanduser(mmproj))
    if mmproj == "none":
        return None
    if mmproj != "auto" and path.is_file():
        return path
    beside = sorted(file.name for file in gguf.parent.glob("*.gguf"))
    if mmproj == "auto" and own is None and not any("mmproj" in name.lower() for name in beside):
        return None
    from octavo.loader import hub

    if hub.is_tag(mmproj):
        from octavo.loader.projector import first_fit

        names = hub.projectors_of(gguf.name, beside, mmproj)
        found = first_fit(gguf, [gguf.parent / name for name in names] if own is None else [own])
        if found is not None or mmproj == "auto":
            return found
    elif (model := hub_model(mmproj)) is not None:
        return _fetch_projector(model, mmproj)
    there = [name for name in beside if hub.is_projector(name)]
    raise ModelNotFoundError(
        f"no projector {mmproj!r}: mmproj is auto, none, a .gguf file, one of the hub (owner/name/FILE.gguf), or the "
        f"type of one beside {gguf.name} that fits it: there is {', '.join(there) or 'none'}"
    )


def _fetch_projector(model: HubModel, mmproj: str) -> Path:
    """The projector of the hub that ``mmproj`` names: a file, or one of a repository by its type or of any."""
    from octavo.loader import hub

    files = hub.find_files(replace(model, tag=None), weights=False, mmproj=model.tag or "auto")
    if files.gguf is None or not hub.is_projector(files.gguf.files[0]):
        paths = [files.projector] if files.projector else [path for path in files.files if hub.is_projector(path)]
        if not paths or (model.tag and files.projector is None):
            has = ", ".join(filter(hub.is_projector, files.files)) or "no mmproj-*.gguf"
            raise ModelNotFoundError(f"the hub model {model.repo!r} has no projector {mmproj!r}; it has {has}")
        files = hub.find_files(replace(model, tag=None, file=min(paths)))
    return replace(files, mmproj="none").fetch()


def _without_projector(folder: Path, mmproj: str) -> Path:
    if mmproj not in ("auto", "none"):
        raise ConfigError(f"mmproj={mmproj!r} is for a language model in a GGUF file; {folder} has all of its weights")
    return folder


def hub_model(name: str) -> HubModel | None:
    """The model of the hub that ``name`` means; None: it is a folder, a file, a built-in name, or no model."""
    if "/" not in name or os.path.exists(os.path.expanduser(name)):
        return None
    from octavo.loader.hub import parse_hub_model

    return parse_hub_model(name)


def local_model(name: str, revision: str | None = None) -> LocalModel | None:
    """The model of Ollama or LM Studio that ``name`` means; None: nothing of theirs, or something of Octavo's.

    Raises:
        ModelNotFoundError: ``ollama:NAME`` or ``lmstudio:NAME`` means nothing.
    """
    if not name or name in BUILTIN or name in SHAPES or os.path.exists(os.path.expanduser(name)):
        return None
    if not name.startswith(_LOCAL) and (model := hub_model(name)) is not None:
        from octavo.loader.hub import find_cached

        if revision or model.revision or find_cached(model) is not None:
            return None
    from octavo.loader.local_models import find_local_model

    return find_local_model(name)


def gguf_source(name: str, revision: str | None = None) -> Path | None:
    """The GGUF file with the weights of the model ``name``; None if the model is in another format.

    A model of the hub is looked for in the cache, to which ``resolve_model`` has fetched it.
    """
    path = Path(os.path.expanduser(name))
    if name and os.path.isdir(path):
        return None
    if os.path.isfile(path):
        return path
    if (local := local_model(name, revision)) is not None:
        return local.path
    if model := hub_model(name):
        from octavo.loader.hub import find_cached

        files = find_cached(model, revision)
        return None if files is None or files.gguf is None else files.path
    return fetch_builtin(BUILTIN[name]) if name in BUILTIN and not BUILTIN[name].is_folder else None


def weight_quantization(
    options: ModelOptions,
    kernels: str,
    checkpoint: CheckpointQuantization | None = None,
    *,
    is_gguf: bool | None = None,
) -> str | None:
    """The format of the matrices for ``options.quantization``, as in ``LayerContext.quantization``.

    "auto" is the checkpoint's own format where the backend computes with it, several times faster than widened and in
    a fraction of the memory: "gguf" for a GGUF file and the name of ``checkpoint`` with codes for ``kernels="cpu"``,
    "mxfp4" for ``kernels="triton"`` too.
    Built-in models are excepted: figures, digests and examples that name one mean it in dtype. So are random weights,
    but "mxfp4" makes random ones of that form. ``is_gguf``: whether the model is a GGUF file, if that
    is known.
    """
    if options.quantization in ("awq", "compressed-tensors", "gptq", "mxfp4"):  # the method of the checkpoint
        if checkpoint is None or checkpoint.method != options.quantization:
            raise ConfigError(
                f"quantization={options.quantization!r}, but the checkpoint is "
                f"{f'quantized with {checkpoint.method!r}' if checkpoint else 'not quantized'}; 'auto' takes what it is"
            )
    elif options.quantization != "auto":
        return None if options.quantization == "none" else options.quantization
    is_random = options.load_format == "dummy" and options.quantization != "mxfp4"
    computes = kernels == "cpu" or (kernels == "triton" and checkpoint is not None and checkpoint.method == "mxfp4")
    if not computes or is_random or options.model in BUILTIN:
        return None
    if checkpoint is not None and checkpoint.has_codes:
        return checkpoint.name
    if is_gguf is None:
        is_gguf = gguf_source(options.model, options.revision) is not None
    return "gguf" if is_gguf else None


def gguf_folder(
    path: Path,
    label: str | None = None,
    sampling: Mapping[str, float] | None = None,
    projector: Path | None = None,
) -> Path:
    """The cached folder with configuration and tokenizer of a GGUF file, and a link to the ``projector`` of its images.

    The key is a fingerprint of the file's content, so a moved file is recognised. ``label`` begins the folder's name
    (default: the file's name). ``sampling``: default sampling parameters where the file has none.
    """
    with path.open("rb") as f:
        magic = f.read(4)
    if magic != b"GGUF":
        raise ModelNotFoundError(f"{path} is a file but not a GGUF file; accepted: {_ACCEPTED}")

    def fill(folder: Path) -> None:
        from octavo.loader.gguf_config import write_gguf_folder

        write_gguf_folder(path, folder, sampling, projector)

    return publish(converted_folder(path, label, sampling, projector), fill)


def converted_folder(
    path: Path,
    label: str | None = None,
    sampling: Mapping[str, float] | None = None,
    projector: Path | None = None,
) -> Path:
    """Where ``gguf_folder`` puts, or has put, the folder of a GGUF file."""
    safe = re.sub(r"[^\w.-]", "_", label or re.sub(r"-\d{5}-of-\d{5}$", "", path.stem))[:80]
    return cache_dir() / "models" / f"{safe}-{_fingerprint(path, sampling, projector)}"


def _gguf_folder_without_weights(files: HubFiles) -> Path:
    """The folder with configuration and tokenizer of a GGUF file of the hub, of which only the header is fetched."""
    assert files.gguf is not None
    name = Path(files.gguf.name).name
    parts = (*files.gguf.files, *([] if files.projector is None else [files.projector]))
    digest = hashlib.sha256(f"{FOLDER_VERSION} {files.commit} {parts}".encode()).hexdigest()[:16]

    def fill(folder: Path) -> None:
        from octavo.loader.gguf_config import write_gguf_folder

        with tempfile.TemporaryDirectory() as scratch:
            gguf = write_sketch(files, Path(scratch))
            projector = find_projector(gguf, files.mmproj, files.within(Path(scratch)))
            write_gguf_folder(gguf, folder, projector=projector)
            (folder / PROJECTOR_LINK).unlink(missing_ok=True)

    return publish(cache_dir() / "models" / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)[:80]}-{digest}", fill)


def write_sketch(files: HubFiles, folder: Path) -> Path:
    """Writes what a model of the hub is, but no weights, to ``folder``; returns the folder, or its first GGUF file.

    Files of weights have their sizes and headers, and are otherwise holes, so that all that reads headers works.
    """
    from octavo.loader.download import fetch_files, write_headers
    from octavo.loader.gguf_file import GGUFHeader
    from octavo.loader.hub import is_weights

    def read_gguf(stream: BinaryIO, size: int, path: Path) -> None:
        header = GGUFHeader(stream, size, path)
        header.metadata()
        header.tensors()

    repo, commit, needed = files.repo, files.commit, files.needed()
    write_headers(repo, commit, {path: file for path, file in needed.items() if is_weights(path)}, folder, read_gguf)
    if files.gguf is not None:
        return folder / files.gguf.files[0]
    others = {
        path: file
        for path, file in needed.items()
        if not is_weights(path) and (file.size <= _MAX_SKETCHED or path.endswith(".index.json"))
    }
    snapshot = fetch_files(
        repo, commit, others, label=files.label, progress=False, revision=files.revision, are_all=False
    )
    for path in others:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(snapshot / path, folder / path)
    return folder


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


def _fingerprint(path: Path, written: Mapping[str, float] | None = None, linked: Path | None = None) -> str:
    """A hash of size, modification time, and 4 KiB at 66 offsets of the file, or of each file of a split model.

    Hashing all of a large file would take longer than loading it. Files that agree in all of these count as equal.
    ``written``: further content of the folder; ``linked``: a file to which it has a link.
    """
    digest = hashlib.sha256(f"{FOLDER_VERSION}{sorted((written or {}).items()) or ''}".encode())
    if linked is not None:
        digest.update(os.path.abspath(linked).encode("utf-8", "surrogateescape"))
    for part in [*split_paths(path), *([] if linked is None else [linked])]:
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
    begins = name.startswith((".", "~", os.sep))
    if begins or name.endswith((os.sep, *_WEIGHT_SUFFIXES)) or name.count(os.sep) > 1 or "\\" in name:
        path = Path(os.path.expanduser(name))
        try:
            near = difflib.get_close_matches(path.name, os.listdir(path.parent), n=1)
        except (OSError, ValueError):
            near = []
        return f"no such file or folder: {name}" + (f"; did you mean {path.with_name(near[0])}?" if near else "")
    # A shape has no weights, so it is suggested only for an almost equal name.
    from octavo.loader.local_models import local_models

    named = [*BUILTIN, *(model.name.removesuffix(":latest") for model in local_models())]
    near = difflib.get_close_matches(name, named, n=1) or difflib.get_close_matches(name, SHAPES, n=1, cutoff=0.9)
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


def checkpoint_digest(model: str, folder: Path, revision: str | None = None) -> str:
    """A digest of the names, sizes and modification times of a model's files, links followed.

    ``model`` and ``revision`` are the options' values, ``folder`` the resolved one. Contents are not read, which would
    take as long as a start: a rewritten file counts as another even with equal contents, which is the safe side.
    """
    source = gguf_source(model, revision)
    files = [path for path in folder.iterdir() if path.suffix in _SUFFIXES] if folder.is_dir() else []
    facts = []
    for path in [*files, *(split_paths(source) if source is not None else ())]:
        if path.is_file():
            stat = path.stat()
            facts.append((path.name, stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(repr(sorted(facts)).encode()).hexdigest()
