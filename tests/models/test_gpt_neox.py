"""GPT-NeoX and Pythia."""

from __future__ import annotations

from typing import Any

from tests.models.zoo import SMALL, Zoo, edit_config, rename_tensors


def config(**values: Any) -> Any:
    from transformers import GPTNeoXConfig

    shape = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
    # A quarter of the 16 dimensions of a head is rotated.
    return GPTNeoXConfig(**{**shape, "num_attention_heads": 3, **values})


def test_gpt_neox(zoo: Zoo) -> None:
    zoo(config())


def test_gpt_neox_with_parts_in_sequence_in_an_older_checkpoint(zoo: Zoo) -> None:
    rope = {"rope_theta": 500.0, "partial_rotary_factor": 0.5, "rope_type": "default"}
    model = zoo.save(config(use_parallel_residual=False, rope_parameters=rope))
    edit_config(zoo.folder, rope_parameters=None, rotary_pct=0.5, rotary_emb_base=500)
    rename_tensors(zoo.folder, lambda name: name.removeprefix("gpt_neox.").replace("lm_head", "embed_out"))
    zoo.check_network(model)
