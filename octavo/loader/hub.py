"""Models of the Hugging Face hub by the names that people type, and the choice among a repository's GGUF files.

``owner/name``, ``owner/name:Q4_K_M`` (as in llama.cpp and Ollama), ``owner/name/FILE.gguf``, each also behind
``hf.co/`` or as an address of the hub's site.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote

from octavo.core.errors import DownloadError, ModelNotFoundError, UnsupportedModelError
from octavo.loader.download import (
    HubFile,
    UnknownRevisionError,
    endpoint,
    fetch_files,
    hub_cache,
    read_repository,
    repository_folder,
)
from octavo.loader.files import CachedModel, readable_size, split_paths

logger = logging.getLogger(__name__)

_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"(?P<repo>{_PART}/{_PART})(?::(?P<tag>[\w.-]+)|/(?P<file>[^:?#]+\.gguf))?", re.ASCII)
_SITES = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://")
#: ``/resolve/REVISION/FILE`` and the like in addresses of the site.
_PAGE = re.compile(rf"({_PART}/{_PART})/(?:blob|resolve|tree|raw)/([^/?#]+)(/[^?#]+)?", re.ASCII)

# ---- which files of a repository are fetched: no executable ones, and no copies of weights in other layouts

_DESCRIPTION = re.compile(
    r"[^/]+\.(json|jinja|model|spm|tiktoken)|(merges|vocab)\.txt|additional_chat_templates/[^/]+\.jinja"
    r"|\d+_\w+/config\.json"
)
_WEIGHTS = re.compile(r"(?!consolidated)[^/]+\.safetensors(\.index\.json)?|\d+_\w+/model\.safetensors")


def is_weights(path: str) -> bool:
    return path.endswith((".gguf", ".safetensors"))


def is_no_model(file: str) -> bool:
    """Whether a GGUF file is an image encoder or the like by its name."""
    return _NO_MODEL.search(file) is not None


# ---- GGUF files

#: A quantisation in a file's name, such as Q4_K_M, UD-IQ2_XXS and bf16.
_QUANTISATION = re.compile(
    r"(?:^|(?<=[-._/ ]))((?:UD-)?(?:(?:IQ|TQ|Q)\d\w*|BF16|F16|F32|FP16|FP32|MXFP4\w*|NVFP4\w*))(?=$|[-./])", re.I
)
#: GGUF files that are no language models: image encoders, and statistics for quantisation.
_NO_MODEL = re.compile(r"mmproj|imatrix|ggml-vocab", re.I)
#: What a repository's name alone means, in this order.
_PREFERRED = ("Q4_K_M", "Q8_0")


@dataclass(frozen=True)
class HubModel:
    """What a name says of a model of the hub."""

    repo: str
    #: The quantisation.
    tag: str | None = None
    #: The path of a GGUF file in the repository.
    file: str | None = None
    revision: str | None = None


def parse_hub_model(name: str) -> HubModel | None:
    """The model of the hub that a name means; None if it is no such name.

    >>> parse_hub_model("hf.co/unsloth/Qwen3-0.6B-GGUF:Q4_K_M")
    HubModel(repo='unsloth/Qwen3-0.6B-GGUF', tag='Q4_K_M', file=None, revision=None)
    """
    short = _SITES.sub("", name, count=1) if (is_prefixed := _SITES.match(name) is not None) else name
    if is_prefixed and (page := _PAGE.fullmatch(short.partition("?")[0].rstrip("/"))):
        file = unquote((page[3] or "").strip("/"))
        return HubModel(page[1], None, file if file.endswith(".gguf") else None, unquote(page[2]))
    match = _NAME.fullmatch(short.rstrip("/") if is_prefixed else short)
    if match is None or (match["file"] is None and match["tag"] is None and match["repo"].endswith(".gguf")):
        return None
    if match["file"] and (not is_prefixed and os.path.isdir(match["repo"].partition("/")[0])):
        return None  # a path with a spelling mistake
    tag = None if match["tag"] in (None, "latest") else match["tag"]
    return HubModel(match["repo"], tag, match["file"])


@dataclass(frozen=True)
class GGUFModel:
    """A model of a repository in one GGUF file or in several parts."""

    #: In their order; paths in the repository.
    files: tuple[str, ...]
    #: Bytes.
    size: int

    @property
    def name(self) -> str:
        """The file's name without the part's number and suffix."""
        return re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", self.files[0])

    @property
    def label(self) -> str:
        """The quantisation, else the file's name."""
        found = [match[1] for match in _QUANTISATION.finditer(self.name)]
        return found[-1].upper() if found else self.name.rpartition("/")[2]

    @property
    def plain_label(self) -> str:
        """The label without the mark of unsloth's dynamic quantisations."""
        return self.label.removeprefix("UD-")


def gguf_models(files: Mapping[str, HubFile]) -> list[GGUFModel]:
    """The models in the GGUF files of a repository, by size; of split ones, those with all parts."""
    models = []
    for path in files:
        parts = [part.as_posix() for part in split_paths(Path(path))]
        if path.endswith(".gguf") and not is_no_model(path) and parts[0] == path and all(p in files for p in parts):
            models.append(GGUFModel(tuple(parts), sum(files[part].size for part in parts)))
    return sorted(models, key=lambda model: (model.size, model.name))


def choose_gguf(models: Iterable[GGUFModel], tag: str | None) -> GGUFModel | None:
    """The model that a tag means, in any case; without a tag Q4_K_M, else Q8_0, else the smallest of four bits or more.

    A tag is a quantisation, with or without ``UD-``, or another part of a file's name.
    """
    # The order is total: the choice among some of the models is that among all, if it is one of them.
    ordered = sorted(models, key=lambda model: (model.files[0].count("/"), len(model.name), model.name))
    for wanted in (tag,) if tag else _PREFERRED:
        part = re.compile(rf"(^|[-._/]){re.escape(wanted)}($|[-./])", re.I)
        exact = [model for model in ordered if model.label == wanted.upper()]
        plain = [model for model in ordered if model.plain_label == wanted.upper()]
        named = [model for model in ordered if part.search(model.name)] if tag else []
        if found := [*exact, *plain, *named]:
            return found[0]
    if tag or not ordered:
        return None
    return min(ordered, key=lambda model: (model.size, 0) if _bits(model) >= 4 else (1 << 62, -model.size))


#: Types of projectors, the nearest to what models were trained in first.
_PROJECTOR_TYPES = ("BF16", "F16", "FP16", "F32", "FP32", "Q8_0")


def is_projector(file: str) -> bool:
    """Whether a GGUF file has the tower of a model's images, by its name."""
    return file.endswith(".gguf") and "mmproj" in file.rpartition("/")[2].lower()


def projectors_of(model: str, files: Iterable[str], tag: str = "auto") -> list[str]:
    """The projectors among ``files`` that by their names may be of the GGUF file ``model``, the best first.

    They lie in the model's folder, or in one above it. Beside other models in the folder, their names must agree with
    the model's, but for quantisations. ``tag``: the type of their tensors, or "auto"; "none" means none.
    """
    paths, (folder, _, _), name = list(files), model.rpartition("/"), _stem(model)
    stems = {_stem(path) for path in paths if _is_language_model(path) and path.rpartition("/")[0] == folder}
    is_alone = all(_are_alike(stem, name) for stem in stems)
    found = []
    for path in filter(is_projector, paths):
        above, own, label = path.rpartition("/")[0], _stem(path), GGUFModel((path,), 0).label
        agrees = is_alone or _are_alike(own, name)
        if agrees and (not above or f"{folder}/".startswith(f"{above}/")) and tag.upper() in ("AUTO", label):
            rank = _PROJECTOR_TYPES.index(label) if label in _PROJECTOR_TYPES else len(_PROJECTOR_TYPES)
            found.append((-len(above), rank, path))
    return [path for _, _, path in sorted(found)]


def is_tag(name: str) -> bool:
    """Whether a value of the option ``mmproj`` chooses among the projectors beside a model."""
    return name in ("auto", "none") or _QUANTISATION.fullmatch(name) is not None


def _is_language_model(path: str) -> bool:
    return path.endswith(".gguf") and not is_no_model(path)


def _are_alike(stem: str, other: str) -> bool:
    return stem == other or ("" not in (stem, other) and (stem in other or other in stem))


def _stem(path: str) -> str:
    """The letters and digits of a file's name without its quantisation, its number as a part, and "mmproj"."""
    name = re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", path.rpartition("/")[2])
    return re.sub(r"[^a-z0-9]|mmproj|\bmodel\b", "", _QUANTISATION.sub("", name).lower())


def _bits(model: GGUFModel) -> int:
    """The number in the label; 4 or more of labels without one."""
    digits = re.search(r"\d+", model.plain_label)
    return int(digits[0]) if digits else 16


def _listed(models: Iterable[GGUFModel]) -> str:
    return ", ".join(f"{model.label} ({readable_size(model.size)})" for model in models)


# ---- what a name means


@dataclass(frozen=True)
class HubFiles:
    """The files of a repository that a name means."""

    repo: str
    commit: str
    revision: str | None
    #: All files of the repository; of a cached one, those that are there.
    files: Mapping[str, HubFile]
    #: None: configuration, tokenizer and safetensors.
    gguf: GGUFModel | None
    #: Why the cached files are used without asking the hub.
    offline_reason: str | None = None
    #: Which projector is used with the GGUF model: see ``projectors_of``.
    mmproj: str = "auto"

    @property
    def snapshot(self) -> Path:
        return repository_folder(self.repo) / "snapshots" / self.commit

    @property
    def label(self) -> str:
        return self.repo if self.gguf is None else f"{self.repo}:{self.gguf.label}"

    @property
    def path(self) -> Path:
        """Where the model is after ``fetch``: its folder, or the first of its GGUF files."""
        return self.snapshot if self.gguf is None else self.snapshot / self.gguf.files[0]

    @property
    def projector(self) -> str | None:
        """The path of the projector of the GGUF model's images; of equally good ones, one that is cached."""
        if self.gguf is None:
            return None
        paths = projectors_of(self.gguf.files[0], self.files, self.mmproj)
        return next((path for path in paths if (self.snapshot / path).exists()), paths[0] if paths else None)

    def within(self, folder: Path) -> Path | None:
        """The projector below a folder that has the repository's files."""
        return None if self.projector is None else folder / self.projector

    @property
    def is_fetched(self) -> bool:
        return all((self.snapshot / path).exists() for path in self.needed())

    def needed(self, *, weights: bool = True) -> dict[str, HubFile]:
        """The files to fetch; of GGUF models all are weights."""
        if self.gguf is not None:
            paths = [*self.gguf.files, *([] if self.projector is None else [self.projector])]
            return {path: self.files[path] for path in paths} if weights else {}
        return {
            path: file
            for path, file in self.files.items()
            if (weights and _WEIGHTS.fullmatch(path)) or (_DESCRIPTION.fullmatch(path) and not _WEIGHTS.fullmatch(path))
        }

    def fetch(self, *, progress: bool = True, weights: bool = True) -> Path:
        """Downloads what is not cached; returns ``path``."""
        if self.offline_reason is None:
            needed = self.needed(weights=weights)
            fetch_files(
                self.repo,
                self.commit,
                needed,
                label=self.label,
                progress=progress,
                revision=self.revision,
                are_all=weights,
            )
        else:
            logger.warning("%s; the files in %s are used", self.offline_reason, self.snapshot)
        return self.path


def find_files(model: HubModel, revision: str | None = None, *, weights: bool = True, mmproj: str = "auto") -> HubFiles:
    """Asks the hub which files a name means; if it cannot be reached or refuses, the cached files answer.

    ``weights``: false: a repository without weights will do. ``mmproj``: see ``HubFiles``.

    Raises:
        ModelNotFoundError: there is no such repository, revision or file; the message lists what there is.
        DownloadError: the hub cannot be reached or refuses access, and the files are not cached.
        UnsupportedModelError: the repository has no weights that can be read.
    """
    revision = revision or model.revision
    try:
        commit, files = read_repository(model.repo, revision)
    except UnknownRevisionError:
        raise
    except (DownloadError, ModelNotFoundError) as e:
        found = find_cached(model, revision, weights=weights)
        if found is None:
            if isinstance(e, ModelNotFoundError):
                raise
            raise DownloadError(_not_cached(model, revision, e.problem)) from e
        meant = replace(found, offline_reason=str(e), mmproj=mmproj)
    else:
        meant = HubFiles(model.repo, commit, revision, files, _choose(model, files, weights), mmproj=mmproj)
    models = gguf_models(meant.files)
    if meant.gguf is not None and model.tag is None and model.file is None and len(models) > 1:
        _tell(f"{meant.label} ({readable_size(meant.gguf.size)}) is used; there is {_listed(models)}")
    return meant


def _not_cached(model: HubModel, revision: str | None, problem: str) -> str:
    at = f" at revision {revision!r}" if revision else ""
    what = f":{model.tag}" if model.tag else f"/{model.file}" if model.file else ""
    cached = find_cached(HubModel(model.repo), revision)
    has = gguf_models(cached.files) if cached else []
    note = f" (there is {_listed(has)})" if has and what else ""
    place = f"the hub's cache {hub_cache()}{note}"
    return f"{problem}; the model {model.repo + what!r}{at} is not in {place}, nor is it a path"


def find_cached(model: HubModel, revision: str | None = None, *, weights: bool = False) -> HubFiles | None:
    """The cached files that a name means, without asking the hub; None if there are none, or none of ``weights``."""
    revision = revision or model.revision
    snapshot = _snapshot(model.repo, revision)
    if snapshot is None:
        return None
    files = _cached_files(snapshot)
    try:
        gguf = _choose(model, files, weights)
    except (ModelNotFoundError, UnsupportedModelError):
        return None
    return HubFiles(model.repo, snapshot.name, revision, files, gguf)


def _snapshot(repo: str, revision: str | None) -> Path | None:
    root = repository_folder(repo)
    commit = revision or "main"
    ref = root / "refs" / commit
    if ref.is_file():
        commit = ref.read_text().strip()
    snapshot = root / "snapshots" / commit
    return snapshot if commit and snapshot.is_dir() else None


def _cached_files(snapshot: Path) -> dict[str, HubFile]:
    return {
        path.relative_to(snapshot).as_posix(): HubFile(path.stat().st_size)
        for path in snapshot.rglob("*")
        if path.is_file()
    }


def _choose(model: HubModel, files: Mapping[str, HubFile], weights: bool) -> GGUFModel | None:
    """The GGUF model that a name means; None: the repository's safetensors."""
    repo = model.repo
    ggufs = gguf_models(files)
    if model.file is not None:
        parts = [part.as_posix() for part in split_paths(Path(model.file))]
        if all(part in files for part in parts):
            return GGUFModel(tuple(parts), sum(files[part].size for part in parts))
        has = ", ".join(f"{each.files[0]} ({readable_size(each.size)})" for each in ggufs) or "no GGUF files"
        raise ModelNotFoundError(f"the hub model {repo!r} has no file {model.file!r}; it has {has}")
    has_safetensors = any(_WEIGHTS.fullmatch(path) and path.endswith(".safetensors") for path in files)
    if model.tag is None and (has_safetensors or not ggufs) and ("config.json" in files or not weights):
        if weights and not has_safetensors:
            raise UnsupportedModelError(
                f"the hub model {repo!r} has no *.safetensors and no *.gguf weights (pickled weights are never loaded: "
                "convert them with transformers' from_pretrained(NAME).save_pretrained(FOLDER))"
            )
        return None
    if not ggufs:
        if model.tag is None:
            raise UnsupportedModelError(
                f"the hub model {repo!r} has neither config.json nor GGUF files: see {endpoint()}/{repo}"
            )
        instead = f"; its safetensors are {repo!r}" if has_safetensors else ""
        raise ModelNotFoundError(f"the hub model {repo!r} has no GGUF files, so {model.tag!r} names none{instead}")
    chosen = choose_gguf(ggufs, model.tag)
    if chosen is None:
        raise ModelNotFoundError(
            f"the hub model {repo!r} has no GGUF file {model.tag!r}; it has {_listed(ggufs)}: "
            f"choose one as {repo}:{ggufs[0].label}"
        )
    return chosen


@functools.cache
def _tell(message: str) -> None:
    """Logs a message once in a process, which may look for a model several times."""
    logger.info(message)


# ---- the cache


def cached_models() -> list[CachedModel]:
    """The models in huggingface_hub's cache that can be served: each GGUF model, and folders of safetensors."""
    root, models = hub_cache(), []
    for folder in sorted(root.glob("models--*--*")) if root.is_dir() else ():
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        revisions = ["main", *(path.name for path in sorted(folder.glob("snapshots/*")))]
        seen: set[tuple[str, ...]] = set()
        for snapshot in filter(None, (_snapshot(repo, revision) for revision in revisions)):
            files = _cached_files(snapshot)
            whole = {path for path in files if _WEIGHTS.fullmatch(path) or _DESCRIPTION.fullmatch(path)}
            kinds = [
                (f"{repo}:{each.label}", each.files, next(iter(projectors_of(each.files[0], files)), ""))
                for each in gguf_models(files)
            ]
            if "config.json" in files and any(path.endswith(".safetensors") for path in whole):
                kinds.append((repo, tuple(sorted(whole)), ""))
            for name, paths, projector in kinds:
                if paths not in seen:
                    seen.add(paths)
                    size = sum(files[path].size for path in paths)
                    models.append(CachedModel(name, "hub", None, snapshot, size, paths, projector))
    return models


def is_meant(name: HubModel, model: CachedModel) -> bool:
    """Whether a cached model is the one of this name, or one of a repository that is named alone."""
    repo, _, label = model.name.partition(":")
    if name.tag is None and name.file is None:
        return repo == name.repo
    tag = (name.tag or "").upper()
    return repo == name.repo and (name.file in model.files or (tag != "" and tag in (label, label.removeprefix("UD-"))))


def remove(model: CachedModel) -> None:
    """Removes a model's files from all snapshots, and what the cache has of a repository without models."""
    root = model.folder.parent.parent
    try:
        links = [link for path in model.files for link in root.glob(f"snapshots/*/{path}")]
        blobs = {link.resolve() for link in links}
        for link in links:
            link.unlink()
        for blob in blobs - {link.resolve() for link in root.glob("snapshots/**/*")}:
            blob.unlink(missing_ok=True)
        left = [link.name for link in root.glob("snapshots/**/*")]
        if not any(is_weights(name) and not is_no_model(name) for name in left):
            shutil.rmtree(root)
    except OSError as e:
        raise DownloadError(f"cannot remove {model.name} from {root}: {e.strerror or e}") from e
