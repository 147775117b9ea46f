"""Bloom."""

from __future__ import annotations

from typing import Any

from tests.models.zoo import Zoo, edit_config, rename_tensors


def config(**values: Any) -> Any:
    from transformers import BloomConfig

    # Six heads: the slopes of a number that is no power of two.
    return BloomConfig(vocab_size=101, hidden_size=48, n_head=6, n_layer=3, bos_token_id=0, eos_token_id=1, **values)


def test_bloom(zoo: Zoo) -> None:
    zoo(config())


def test_bloom_with_residuals_after_norms_in_a_published_spelling(zoo: Zoo) -> None:
    model = zoo.save(config(apply_residual_connection_post_layernorm=True))
    edit_config(zoo.folder, hidden_size=None, n_embed=48, n_head=None, num_attention_heads=6)
    rename_tensors(zoo.folder, lambda name: name.removeprefix("transformer."))
    zoo.check_network(model)
