"""The language-model head that the files of a checkpoint have, or lack, where config.json says something else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from octavo.core.errors import WeightError
from octavo.core.model_config import ModelConfig
from octavo.core.option_parts import ModelOptions
from octavo.kernels.quantized_rows import QuantizedRows
from octavo.loader.resolve import gguf_source
from octavo.loader.stored import Stored
from octavo.loader.weights import read_headers, read_safetensors
from octavo.models.checkpoint import CheckpointEntry, Drop, Pairs, Rename, Shapes, ZerosFor
from octavo.models.config_files import read_model_config
from octavo.models.sizes import build_without_weights

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
#: Bytes that are compared at once.
_PIECE = 8 << 20


@dataclass(frozen=True)
class EmbeddingFrom:
    """The tensor ``name`` of a checkpoint that has a tied head alone, as the embedding."""

    name: str

    def apply(self, pairs: Pairs, shapes: Shapes) -> Iterator[tuple[str, np.ndarray | QuantizedRows]]:
        """The tensors, with that one under the embedding's name."""
        return ((_EMBEDDING if name == self.name else name, tensor) for name, tensor in pairs)


def with_stored_head(config: ModelConfig, folder: Path) -> tuple[ModelConfig, list[CheckpointEntry]]:
    """The configuration with the head that a checkpoint has, and what comes before the network's checkpoint map.

    As transformers 5 loads a checkpoint whose ``tie_word_embeddings`` is true: a head in the file that differs from
    the embedding is kept, one with the same values is shared, and one without an embedding beside it is both.

    Raises:
        WeightError: the files cannot be read.
    """
    if not config.tie_word_embeddings or config.head != "lm":
        return config, []
    headers = read_headers(folder)
    head, embedding = _stored_names(config, headers)
    if head is None:
        # A base model has no bias of the head either; that of a language model that is made of it is zero.
        is_base = config.encoder_facts is None and not any("lm_head." in name for name in headers)
        return config, [ZerosFor(r"^lm_head\.bias$")] if is_base else []
    if embedding is None:
        return config, [EmbeddingFrom(head)]
    if headers[head].shape != headers[embedding].shape or _are_equal(folder, head, embedding):
        return config, []
    return replace(config, tie_word_embeddings=False), []


def read_config(folder: Path, options: ModelOptions) -> ModelConfig:
    """The configuration of the model in ``folder``, as far as its weights allow: see ``without_missing_head``.

    Raises:
        OctavoError: as ``read_model_config``.
    """
    config = read_model_config(folder, options.hf_overrides)
    has_files = options.load_format != "dummy" and gguf_source(options.model) is None
    return without_missing_head(config, folder) if has_files else config


def without_missing_head(config: ModelConfig, folder: Path) -> ModelConfig:
    """The configuration of a decoder whose files have no head, though it is neither tied nor optional: without one.

    So is the checkpoint of a base model under the name of its language model, such as a model that was trained for
    vectors: it has the tasks of a network without a head.
    """
    if config.tie_word_embeddings or config.head != "lm" or config.encoder_facts is not None:
        return config
    try:
        headers = read_headers(folder)
    except WeightError:  # no weights, or none that can be read: loading them says why
        return config
    quantized = any("lm_head." in name for name in headers)
    return config if quantized or _stored_names(config, headers)[0] is not None else replace(config, head="none")


def _stored_names(config: ModelConfig, headers: Mapping[str, Stored]) -> tuple[str | None, str | None]:
    """The checkpoint's names of the head's and the embedding's matrix, where it has them."""
    network = build_without_weights(replace(config, tie_word_embeddings=False), "float32")
    shapes, found = network.tensor_shapes(), dict[str, str]()
    for stored in headers:
        name = stored
        for entry in network.entries():
            if isinstance(entry, Rename):
                name = entry.renamed(name)
            elif isinstance(entry, Drop) and name not in shapes and re.search(entry.pattern, name):
                break
        if name in (_HEAD, _EMBEDDING):
            found.setdefault(name, stored)
    return found.get(_HEAD), found.get(_EMBEDDING)


def _are_equal(folder: Path, *names: str) -> bool:
    """Whether two tensors of one shape have the same values, as far as they differ not by their types alone."""
    first, second = (tensor for name, tensor in read_safetensors(folder) if name in names)
    rows = max(1, _PIECE // max(1, first[:1].nbytes))
    for start in range(0, len(first), rows):
        one, other = first[start : start + rows], second[start : start + rows]
        if one.dtype != other.dtype:
            one, other = one.astype(np.float32), other.astype(np.float32)
        if not np.array_equal(one, other):
            return False
    return True
