"""The Llama family against transformers, and its bits however requests are scheduled."""

from __future__ import annotations

from tests.models.zoo import SMALL, Zoo


def test_llama(zoo: Zoo) -> None:
    from transformers import LlamaConfig

    zoo(LlamaConfig(**SMALL, tie_word_embeddings=True, attention_bias=True, mlp_bias=True))
