"""What a worker process is told: the configuration arrives as the class of its family."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import transformers

from octavo.config.engine_config import make_config
from octavo.executor.worker import WorkerSpec
from octavo.models.config_files import read_model_config

FAMILIES = {
    "LlamaForCausalLM": "LlamaConfig",
    "GPT2LMHeadModel": "GPT2Config",
    "OPTForCausalLM": "OPTConfig",
    "FalconForCausalLM": "FalconConfig",
    "Gemma3ForCausalLM": "Gemma3TextConfig",
    "MixtralForCausalLM": "MixtralConfig",
    "DeepseekV3ForCausalLM": "DeepseekV3Config",
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_configurations_survive_the_way_to_another_process(architecture: str, tmp_path: Path) -> None:
    content = getattr(transformers, FAMILIES[architecture])().to_dict() | {"architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = read_model_config(tmp_path)
    spec = WorkerSpec.of(make_config(model="m"), config, tmp_path, "float32")
    sent = msgspec.msgpack.encode(spec)
    received = msgspec.msgpack.decode(sent, type=WorkerSpec).model_config()
    assert type(received) is type(config) and received == config
