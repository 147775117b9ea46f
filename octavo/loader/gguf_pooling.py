"""How a GGUF file's model makes vectors, as the files of sentence-transformers."""

from __future__ import annotations

from typing import Any

from octavo.core.errors import UnsupportedModelError
from octavo.loader.gguf_file import GGUFFile

#: By ``pooling_type`` in the metadata, as llama.cpp numbers them. 0: none, of models that were not made for vectors; 4:
#: class scores.
_KINDS = {1: "mean", 2: "cls", 3: "lasttoken"}


def pooling_files(file: GGUFFile) -> dict[str, Any]:
    """modules.json and what it names; nothing of a file that does not say how vectors are made.

    llama.cpp gives vectors of length 1 unless it is told otherwise, and so does this.

    Raises:
        UnsupportedModelError: the kind of pooling is not known.
    """
    kind = file.metadata.get(f"{file.metadata.get('general.architecture')}.pooling_type", 0)
    if kind in (0, 4):
        return {}
    if kind not in _KINDS:
        raise UnsupportedModelError(f"{file.path}: pooling_type {kind} is not supported; supported: {_KINDS}")
    modules = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    return {
        "modules.json": [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
            for index, (path, name) in enumerate(modules.items())
        ],
        "1_Pooling/config.json": {"pooling_mode": _KINDS[kind]},
    }
