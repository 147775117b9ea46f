"""Models in the folders of Ollama and of LM Studio, which are found by name and only read.

Ollama's store (``OLLAMA_MODELS``, else ``~/.ollama/models`` and that of its Linux service) has a manifest for each
name, ``manifests/HOST/NAMESPACE/MODEL/TAG``, which names the blobs of its layers by their SHA-256. LM Studio's folders
hold ``OWNER/REPOSITORY/FILE.gguf``. Nothing is written there, and nothing removed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from octavo.core.errors import ModelNotFoundError, OctavoError, did_you_mean
from octavo.loader import files, hub
from octavo.loader.files import CachedModel, split_paths

logger = logging.getLogger(__name__)

Source = Literal["ollama", "lmstudio"]

#: Largest manifest, and largest layer of text (parameters, system prompt, template, licence), in bytes.
_MAX_MANIFEST, _MAX_TEXT = 1 << 20, 1 << 20
#: Most manifests or GGUF files that are looked at in a folder.
_MAX_MODELS = 4096
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_LAYER = "application/vnd.ollama.image."
#: Ollama's parameters -> names in generation_config.json.
_SAMPLING = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p")},
    "repeat_penalty": "repetition_penalty",
}
#: Where Ollama's Linux service keeps its models.
_SERVICE_STORE = "/usr/share/ollama/.ollama/models"


@dataclass(frozen=True)
class LocalModel:
    """A GGUF model of Ollama's or LM Studio's, with what its manifest says."""

    #: As its program names it: ``llama3.2:latest``, ``owner/repository/FILE.gguf``.
    name: str
    source: Source
    #: The GGUF file, or the first of its parts.
    path: Path
    #: Bytes of all parts.
    size: int
    #: SHA-256 of Ollama's manifest, in hexadecimal digits; of a file of LM Studio's, of its path, size and time.
    digest: str
    #: Default sampling parameters under their names in generation_config.json.
    sampling: Mapping[str, float] = field(default_factory=dict)
    #: Texts that end an answer by default, and the default system prompt.
    stop: tuple[str, ...] = ()
    system: str = ""
    license: str = ""
    #: The file of the image tower that comes with the model; ``size`` is without it.
    projector: Path | None = None

    @property
    def cached(self) -> CachedModel:
        """As an entry of ``octavo list``."""
        projector = "" if self.projector is None else self.projector.name
        return CachedModel(self.name, self.source, None, self.path, self.size, projector=projector)


class DamagedModelError(OctavoError):
    """A manifest, or what it names, cannot be used; the message says why."""


def all_models() -> list[CachedModel]:
    """Octavo's own cache, the hub's, and the folders of Ollama and LM Studio, by name."""
    own = [*files.cached_models(), *hub.cached_models()]
    return sorted([*own, *(model.cached for model in local_models())], key=lambda model: model.name)


def local_models() -> list[LocalModel]:
    """The models of Ollama and LM Studio. Damaged ones are logged, once, and skipped."""
    models: dict[tuple[Source, str], LocalModel] = {}
    for root in _ollama_stores():
        for manifest in islice(sorted(root.glob("manifests/*/*/*/*")), _MAX_MODELS):
            try:
                model = _read_manifest(root, manifest)
            except (DamagedModelError, OSError) as e:
                _tell(f"a model of Ollama is skipped: {manifest}: {e}")
                continue
            models.setdefault((model.source, model.name), model)
    for model in _lmstudio_models():
        models.setdefault((model.source, model.name), model)
    return list(models.values())


def find_local_model(name: str, models: list[LocalModel] | None = None) -> LocalModel | None:
    """The model that ``name`` means, of ``models`` (default: all); None: none, or ``name`` is no such name.

    ``ollama:NAME`` and ``lmstudio:NAME`` mean a model of that program alone. The tag ``latest`` may be left out, and of
    LM Studio's models the name of the file, if its folder has one model, or the owner.

    Raises:
        ModelNotFoundError: a name with a prefix means no model.
    """
    source, bare = split_source(name)
    of_source = [m for m in (local_models() if models is None else models) if source in (None, m.source)]
    found = [model for model in of_source if bare in _names(model)]
    if found:
        return found[0]
    if source is None:
        return None
    there = [model.name for model in of_source]
    folders = ", ".join(map(str, _ollama_stores() if source == "ollama" else _lmstudio_folders()))
    hint = did_you_mean(bare, there, f"there is {', '.join(there)}" if there else "none is there", cutoff=0.5)
    raise ModelNotFoundError(f"no model {bare!r} in {folders}; {hint}")


def split_source(name: str) -> tuple[Source | None, str]:
    """``ollama:llama3.2`` -> ("ollama", "llama3.2"); a name without such a prefix has no source."""
    prefix, _, rest = name.partition(":")
    source: Source | None = "ollama" if prefix == "ollama" else "lmstudio" if prefix == "lmstudio" else None
    return (source, rest) if source and rest else (None, name)


def _names(model: LocalModel) -> set[str]:
    if model.source == "ollama":
        return {model.name, model.name.removesuffix(":latest")}
    owner, repository, file = model.name.split("/", 2)
    names = {model.name, f"{repository}/{file}"}
    # A folder with one model stands for it; files of image towers are not counted.
    others = [path for path in model.path.parent.glob("*.gguf") if _is_model(path)]
    return names | ({f"{owner}/{repository}", repository} if len(others) == 1 else set())


# Ollama's store.


def _ollama_stores() -> list[Path]:
    if chosen := os.environ.get("OLLAMA_MODELS"):
        return [Path(os.path.expanduser(chosen))]
    return [Path.home() / ".ollama" / "models", Path(_SERVICE_STORE)]


def _read_manifest(root: Path, manifest: Path) -> LocalModel:
    content = _read_plain(manifest, _MAX_MANIFEST)
    try:
        value = json.loads(content)
        layers = [(layer["mediaType"], layer["digest"], layer["size"]) for layer in value["layers"]]
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise DamagedModelError(f"it is no manifest with layers ({type(e).__name__}: {str(e)[:80]})") from None
    blobs: dict[str, list[Path]] = {}
    for media_type, digest, size in layers:
        kind = str(media_type).removeprefix(_LAYER)
        if kind in ("model", "params", "system", "license", "adapter", "projector"):
            blobs.setdefault(kind, []).append(_blob(root, digest, size))
    if len(blobs.get("model", ())) != 1:
        raise DamagedModelError(f"it has {len(blobs.get('model', ()))} layers of GGUF weights; one can be served")
    if "adapter" in blobs:
        raise DamagedModelError("it has an adapter: serve the model that it is for, with --enable-lora --lora-modules")
    if len(projectors := blobs.get("projector", [])) > 1:
        raise DamagedModelError(f"it has {len(projectors)} layers of image towers; one can be served")
    sampling, stop = _read_parameters([_read_plain(path, _MAX_TEXT) for path in blobs.get("params", ())])
    [path] = blobs["model"]
    texts = {
        kind: "\n".join(_read_plain(blob, _MAX_TEXT).decode("utf-8", "replace") for blob in blobs.get(kind, ()))
        for kind in ("system", "license")
    }
    digest = hashlib.sha256(content).hexdigest()
    name, projector = _ollama_name(root, manifest), next(iter(projectors), None)
    size = path.stat().st_size
    return LocalModel(name, "ollama", path, size, digest, sampling, stop, projector=projector, **texts)


def _ollama_name(root: Path, manifest: Path) -> str:
    """``llama3.2:latest`` of the library, ``user/model:tag`` of others there, ``hf.co/user/model:tag`` elsewhere."""
    host, namespace, model, tag = manifest.relative_to(root / "manifests").parts
    parts = [host, namespace, model] if host != "registry.ollama.ai" else [namespace, model]
    if parts[0] == "library":
        parts = parts[1:]
    return f"{'/'.join(parts)}:{tag}"


def _blob(root: Path, digest: object, size: object) -> Path:
    """The file of a layer, which must be a plain file of the manifest's size."""
    match = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    if match is None:
        raise DamagedModelError(f"the digest {digest!r:.100} is none of sha256")
    path = root / "blobs" / f"sha256-{match[1]}"
    _check_plain(path)
    if path.stat().st_size != size:
        raise DamagedModelError(f"{path.name} has {path.stat().st_size} bytes, not {size!r:.30}")
    return path


def _check_plain(path: Path) -> None:
    """Refuses links, which may lead anywhere, and what is no file."""
    try:
        mode = path.lstat().st_mode
    except OSError as e:
        raise DamagedModelError(f"{path.name} cannot be read: {e.strerror or e}") from None
    if not stat.S_ISREG(mode):
        raise DamagedModelError(
            f"{path.name} is {'a link' if stat.S_ISLNK(mode) else 'no file'}; links are not followed"
        )


def _read_plain(path: Path, limit: int) -> bytes:
    _check_plain(path)
    with path.open("rb") as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise DamagedModelError(f"{path.name} has more than {limit} bytes")
    return content


def _read_parameters(layers: list[bytes]) -> tuple[dict[str, float], tuple[str, ...]]:
    """Sampling defaults and stop texts; parameters of other kinds, such as num_ctx, have no effect here."""
    sampling: dict[str, float] = {}
    stop: list[str] = []
    for content in layers:
        try:
            values: Any = json.loads(content)
        except (ValueError, RecursionError):
            raise DamagedModelError("its parameters are no JSON") from None
        if not isinstance(values, dict):
            raise DamagedModelError("its parameters are no object")
        for theirs, name in _SAMPLING.items():
            value = values.get(theirs)
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                sampling[name] = int(value) if name == "top_k" else float(value)
        texts = values.get("stop", [])
        stop += [text for text in (texts if isinstance(texts, list) else [texts]) if isinstance(text, str) and text]
    return sampling, tuple(dict.fromkeys(stop))


# LM Studio's folders.


def _lmstudio_folders() -> list[Path]:
    return [Path.home() / ".lmstudio" / "models", Path.home() / ".cache" / "lm-studio" / "models"]


def _lmstudio_models() -> Iterator[LocalModel]:
    for root in _lmstudio_folders():
        for path in islice(sorted(root.glob("*/*/*.gguf")), _MAX_MODELS):
            if not _is_model(path):
                continue
            try:
                parts = split_paths(path)
                for part in parts:
                    _check_plain(part)
                facts = [(part.stat().st_size, part.stat().st_mtime_ns) for part in parts]
            except (DamagedModelError, OSError) as e:
                _tell(f"a model of LM Studio is skipped: {path}: {e}")
                continue
            name = path.relative_to(root).as_posix()
            digest = hashlib.sha256(f"{name} {facts}".encode()).hexdigest()
            beside = hub.projectors_of(path.name, (each.name for each in path.parent.glob("*.gguf")))
            projector = path.with_name(beside[0]) if beside else None
            size = sum(size for size, _ in facts)
            yield LocalModel(name, "lmstudio", path, size, digest, projector=projector)


def _is_model(path: Path) -> bool:
    """Whether a GGUF file is a language model, or its first part; not an image tower."""
    return split_paths(path)[0] == path and not hub.is_no_model(path.name)


@functools.cache
def _tell(message: str) -> None:
    logger.warning("%s", message)
