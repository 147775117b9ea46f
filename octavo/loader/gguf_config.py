"""config.json and generation_config.json from a GGUF file's metadata."""

from __future__ import annotations

from typing import Any

from octavo.loader.gguf_architectures import Architecture
from octavo.loader.gguf_file import GGUFFile
from octavo.loader.gguf_keys import Keys


def model_config(keys: Keys, architecture: Architecture, dtype: str) -> dict[str, Any]:
    """The content of config.json, for weights written as ``dtype``.

    Raises:
        UnsupportedModelError: one of the settings is not supported.
        WeightError: the metadata is incomplete or contradicts itself.
    """
    config = {
        "architectures": [architecture.architecture],
        "model_type": architecture.model_type,
        "dtype": dtype,
        "vocab_size": keys.sizes["V"],
        **architecture.config(keys),
        "tie_word_embeddings": not keys.holds("output.weight"),
        "bos_token_id": keys.token("bos"),
        "eos_token_id": keys.token("eos"),
        "pad_token_id": keys.token("padding"),
    }
    keys.refuse_unread()
    return config


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """The content of generation_config.json: the BOS token and all EOS tokens."""
    ends = [file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    config: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(end for end in ends if end is not None))}
    for ours, theirs in (("bos", "bos"), ("pad", "padding")):
        if (token := file.metadata.get(f"tokenizer.ggml.{theirs}_token_id")) is not None:
            config[f"{ours}_token_id"] = token
    return config
