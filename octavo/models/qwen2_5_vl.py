"""Qwen2.5-VL (Bai et al. 2025, arXiv 2502.13923): a Qwen2 whose tokens of images have positions in time and space."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from octavo.core.errors import ConfigError
from octavo.core.image_input import ImageFacts
from octavo.core.model_config import ModelConfig
from octavo.layers.context import LayerContext
from octavo.models.config_reader import ConfigReader
from octavo.models.llama import LlamaForCausalLM
from octavo.models.vision.qwen2_5 import QWEN_VISION_NAMES, QwenTower, QwenVisionConfig, read_qwen_vision
from octavo.models.vision.text_part import TEXT_NAMES, fields_of
from octavo.models.vision.tower import tower_context

#: What config.json leaves out if it is the default of transformers.
_DEFAULTS = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_window_layers": 80,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}


@dataclass(frozen=True, kw_only=True)
class Qwen25VLConfig(ModelConfig):
    """That of the language model, and the tower's."""

    vision: QwenVisionConfig


class Qwen25VLForConditionalGeneration(LlamaForCausalLM):
    """The language model, with the tower on its first stage."""

    checkpoint_map = (*QWEN_VISION_NAMES, *TEXT_NAMES)

    def __init__(self, config: Qwen25VLConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        if self.is_first:
            self.tower = self.attach("tower", QwenTower(config.vision, tower_context(context)))

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        """The facts of a config.json, in which the language model's may be a part of their own, ``text_config``."""
        given = {name: value for name, value in reader.table("text_config").items() if value is not None}
        if reader.raw.get("tie_word_embeddings") is not None:
            given.pop("tie_word_embeddings", None)  # that of the whole counts
        text_reader = replace(reader, raw=reader.raw | given).with_defaults(**_DEFAULTS)
        text_reader, sections = _without_sections(text_reader)
        text = LlamaForCausalLM.read_config("Qwen2ForCausalLM", text_reader)
        if len(sections) != 3 or 2 * sum(sections) != text.head_dim:
            raise ConfigError(
                f"{reader.file}: mrope_section must be three numbers with the sum {text.head_dim // 2}, half of a "
                f"head, not {list(sections)}"
            )
        vision = read_qwen_vision(replace(reader, raw=reader.table("vision_config")))
        if vision.outputs != text.hidden_size:
            raise ConfigError(
                f"{reader.file}: out_hidden_size ({vision.outputs}) of the tower must be hidden_size "
                f"({text.hidden_size})"
            )
        facts = ImageFacts("qwen2_5_vl", reader.positive("image_token_id", 151655))
        changes = {"architecture": architecture, "image_facts": facts, "rope": replace(text.rope, sections=sections)}
        return Qwen25VLConfig(vision=vision, **(fields_of(text) | changes))


def _without_sections(reader: ConfigReader) -> tuple[ConfigReader, tuple[int, ...]]:
    """The reader of a rope as other networks have it, and the sections of a head."""
    rope: dict[str, Any] = reader.table("rope_parameters") or reader.table("rope_scaling")
    sections = rope.pop("mrope_section", (16, 24, 24))
    if not isinstance(sections, list | tuple) or not all(isinstance(size, int) and size >= 0 for size in sections):
        raise ConfigError(f"{reader.file}: mrope_section must be a list of numbers of pairs, not {sections!r}")
    # The name that transformers 4 has for rows that are not scaled.
    rope.update({name: "default" for name in ("type", "rope_type") if rope.get(name) == "mrope"})
    return replace(reader, raw=reader.raw | {"rope_parameters": rope, "rope_scaling": None}), tuple(sections)
