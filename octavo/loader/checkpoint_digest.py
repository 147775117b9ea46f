"""What tells one state of a model's files from another, in milliseconds."""

from __future__ import annotations

import hashlib
from pathlib import Path

from octavo.loader.gguf_parts import split_paths
from octavo.loader.resolve import gguf_source

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
