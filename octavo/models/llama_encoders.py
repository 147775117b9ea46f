"""Encoders with Llama's layers, whose attention is bidirectional: EuroBERT, and NVIDIA's models for vectors and ranks.

Decoders of ``octavo.models.llama`` that config.json calls bidirectional are encoders too, without a class of their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.core.model_config import ModelConfig
from octavo.layers.layer import LayerContext
from octavo.layers.vocabulary import ClassificationHead
from octavo.models.checkpoint import CheckpointEntry, Drop, Rename
from octavo.models.config_files import ConfigReader
from octavo.models.llama import LlamaForCausalLM


class LlamaBidirectionalModel(LlamaForCausalLM):
    """Llama without the causal mask (NV-Retriever, arXiv 2407.15831); vectors and scores are of the mean."""

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        config = super().read_config("LlamaForCausalLM", reader)
        return replace(config, architecture=architecture, is_encoder=True)


class EuroBertModel(LlamaBidirectionalModel):
    """EuroBERT (arXiv 2503.05500); class scores of texts have a dense layer before the last matrix."""

    head_map: tuple[CheckpointEntry, ...] = (
        Drop(r"^lm_head\."),
        Rename(r"^classifier\.", "score.out."),
        Rename(r"^dense\.", "score.dense."),
        Drop(r"^score\."),
    )

    def make_classifier(self, config: Any, context: LayerContext) -> ClassificationHead:
        has_dense = config.head == "sequence"
        classes = len(config.labels)
        return ClassificationHead(context, config.hidden_size, classes, dense="gelu" if has_dense else None)
