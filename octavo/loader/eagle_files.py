"""Reads EAGLE heads: config.json and headers before the model is loaded, the weights after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from octavo.core.errors import ConfigError, WeightError
from octavo.core.model_config import ModelConfig
from octavo.layers.context import LayerContext
from octavo.loader.checkpoint_check import refuse_misfits
from octavo.loader.dummy import dummy_weights
from octavo.loader.stored import Stored
from octavo.loader.weights import load_weights, read_headers, read_safetensors
from octavo.models.checkpoint import Pairs
from octavo.models.config_files import read_json
from octavo.models.config_reader import ConfigReader
from octavo.models.eagle import EagleHead
from octavo.models.eagle_config import EagleConfig, EagleMethod, fit_to, read_eagle_config
from octavo.models.registry import make_network
from octavo.models.sizes import build_without_weights

#: Draft ids to tokens, as differences: the token of draft id i is i + d2t[i].
_TOKENS = "d2t"


def read_head_config(folder: Path, method: EagleMethod, target: ModelConfig) -> EagleConfig:
    """The configuration of the head in ``folder`` for the model ``target``; no weight is read.

    Raises:
        ConfigError: config.json is missing or impossible, or describes a head for another model.
        UnsupportedModelError: it describes no head of this method.
        WeightError: there are no safetensors, or a tensor is missing, unexpected or of the wrong shape or type; the
            message names it.
    """
    config, stored = read_dummy_config(folder, method, target), read_headers(folder)
    names = {name.removeprefix("model.") for name in stored}
    config = replace(
        config,
        fc_bias="fc.bias" in names,
        own_embedding=method == "eagle3" and ("embed_tokens.weight" in names or config.own_embedding),
    )
    head = build_without_weights(config, "float32")
    shapes = head.tensor_shapes()
    refuse_misfits(folder, config, head.checkpoint_map, shapes)
    _check_token_map(stored, config)
    return config


def read_dummy_config(folder: Path, method: EagleMethod, target: ModelConfig) -> EagleConfig:
    """As ``read_head_config``, of a folder without weights: what the head shares with the model it does share."""
    file = folder / "config.json"
    config = fit_to(read_eagle_config(method, ConfigReader(read_json(file), file)), target)
    return replace(config, own_embedding=config.hidden_size != target.hidden_size)


def make_dummy_head(config: EagleConfig, context: LayerContext, seed: int) -> EagleHead:
    """The head with random weights (see ``dummy_weights``); it drafts the first tokens of the vocabulary."""
    head = make_network(config, context)
    assert isinstance(head, EagleHead)
    load_weights(head, dummy_weights(head, context.dtype, seed))
    if config.draft_vocab_size != config.vocab_size:
        head.target_ids = context.kernels.array(np.arange(config.draft_vocab_size))
    return head


def load_head(folder: Path, config: EagleConfig, context: LayerContext) -> EagleHead:
    """The head in ``folder`` with this rank's share of its weights, of ``context.dtype``.

    Raises:
        WeightError: as ``read_head_config``; or d2t leads outside of the vocabulary.
    """
    head = make_network(config, context)
    assert isinstance(head, EagleHead)
    shapes = head.tensor_shapes()
    tensors: Pairs = _without_token_map(folder, head, context)
    for entry in head.checkpoint_map:
        tensors = entry.apply(tensors, shapes)
    load_weights(head, tensors)
    return head


def _check_token_map(stored: Mapping[str, Stored], config: EagleConfig) -> None:
    found = stored.get(_TOKENS)
    if found is None:
        if config.draft_vocab_size != config.vocab_size:
            raise WeightError(
                f"the checkpoint lacks the tensor {_TOKENS!r}: draft_vocab_size ({config.draft_vocab_size}) is not "
                f"vocab_size ({config.vocab_size}), so it must say which tokens the head drafts"
            )
    elif config.method == "eagle":
        raise ConfigError(f"the checkpoint has the tensor {_TOKENS!r}, which only heads of method 'eagle3' have")
    elif found.dtype != "I64" or found.shape != (config.draft_vocab_size,):
        raise WeightError(
            f"tensor {_TOKENS!r} does not fit: it is {found.dtype} {list(found.shape)}, expected I64 "
            f"[{config.draft_vocab_size}], draft_vocab_size of config.json"
        )


def _without_token_map(folder: Path, head: EagleHead, context: LayerContext) -> Pairs:
    """The tensors of the folder but d2t, which becomes ``target_ids``."""
    for name, tensor in read_safetensors(folder):
        if name == _TOKENS:
            head.target_ids = context.kernels.array(_target_ids(tensor, head.config.vocab_size))
        else:
            yield name, tensor


def _target_ids(differences: np.ndarray, vocab_size: int) -> np.ndarray:
    ids = np.arange(len(differences)) + differences
    if outside := int(((ids < 0) | (ids >= vocab_size)).sum()):
        raise WeightError(
            f"tensor {_TOKENS!r} leads to {outside} tokens outside of the vocabulary of {vocab_size}: it must hold "
            "token - draft id"
        )
    return ids
