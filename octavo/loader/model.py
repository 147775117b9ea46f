"""From a Hugging Face folder to a network that is ready to run."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.layers.context import LayerContext
from octavo.loader.dummy import dummy_weights
from octavo.loader.weights import load_weights, read_safetensors, read_safetensors_to
from octavo.models.registry import make_network

if TYPE_CHECKING:
    from octavo.models.llama import LlamaForCausalLM


def load_model(folder: Path, config: ModelConfig, context: LayerContext, gguf: Path | None = None) -> LlamaForCausalLM:
    """Builds the network of ``config`` and fills it with this rank's share of the weights in ``folder``.

    Weights are converted to ``context.dtype``, and matrices quantised as ``context.quantization`` says; "gguf" reads
    them from ``gguf``, the file that ``folder`` was converted from. On a GPU they go there straight from the file. The
    rotary table reaches to ``config.max_position``.

    Raises:
        UnsupportedModelError: no network serves the architecture.
        ConfigError: the configuration contradicts itself or the tensor-parallel size; or quantization is "gguf" and
            there is no such file.
        WeightError: the checkpoint is incomplete, damaged or does not fit the configuration.
    """
    network = make_network(config, context)

    def ignored(name: str) -> bool:
        # Old checkpoints saved the rotary table; tied ones may repeat the embedding as the head.
        return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)

    if context.quantization == "gguf":
        if gguf is None:
            raise ConfigError(f"quantization='gguf' needs a model in a GGUF file; {folder} was not made from one")
        from octavo.loader.gguf_convert import read_gguf

        load_weights(network, read_gguf(gguf), ignored)
    elif torch.device(context.device).type == "cpu":
        load_weights(network, read_safetensors(folder), ignored)
    else:
        with closing(read_safetensors_to(folder, context.device)) as tensors:
            load_weights(network, tensors, ignored)
    return network


def make_dummy_model(config: ModelConfig, context: LayerContext, seed: int) -> LlamaForCausalLM:
    """The network of ``config`` with random weights, see ``dummy_weights``; quantised as ``context`` says.

    Raises:
        UnsupportedModelError, ConfigError: as for ``load_model``; there is no GGUF file to compute with either.
    """
    if context.quantization == "gguf":
        raise ConfigError("quantization='gguf' computes with a GGUF file's own bits; load_format='dummy' has no file")
    network = make_network(config, context)
    load_weights(network, dummy_weights(network, context.dtype, context.device, seed), lambda name: False)
    return network
