"""The language model of a network that sees images: what ``text_config`` says of it, and names of its tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.core.errors import UnsupportedModelError
from octavo.core.model_config import ModelConfig
from octavo.models.checkpoint import CheckpointEntry, Drop, Rename
from octavo.models.config_reader import ConfigReader
from octavo.models.llama import LlamaForCausalLM

#: Language models that a tower is put before, by their model_type.
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
#: What config.json leaves out if it is the default of transformers.
_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: Values that the whole says where the language model's part does not.
_OF_ALL = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id")

#: Leads the names of transformers 4 and 5 to those of a decoder; comes last in a map. Of the tower remains what the
#: network has: a later stage has none.
TEXT_NAMES: tuple[CheckpointEntry, ...] = (
    Rename(r"^(model\.)?(language_model|text_model)\.(model\.)?", "model."),
    Rename(r"^model\.lm_head\.", "lm_head."),
    Drop(r"^tower\."),
    *LlamaForCausalLM.checkpoint_map,
)


def read_text_part(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The configuration of the language model, with ``architecture`` as that of the whole.

    Raises:
        ConfigError: a value is missing, of the wrong type or impossible.
        UnsupportedModelError: there is no such language model, or one of its values is not supported.
    """
    text = reader.table("text_config")
    kind = str(text.get("model_type") or "llama")
    if kind not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{reader.file}: text_config has model_type {kind!r}; {architecture} has one of {', '.join(_ARCHITECTURES)}"
        )
    whole = {name: reader.raw.get(name) for name in _OF_ALL}
    given = {name: value for name, value in (whole | _without_null(text)).items() if value is not None}
    text_reader = replace(reader, raw={**(_LLAMA if kind == "llama" else {}), **given})
    config = LlamaForCausalLM.read_config(_ARCHITECTURES[kind], text_reader)
    return replace(config, architecture=architecture)


def fields_of(config: ModelConfig) -> dict[str, Any]:
    """Its fields by name, to make a configuration of a family of it."""
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def _without_null(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
