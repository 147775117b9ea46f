"""``hf_overrides``: values in place of those of config.json, for the engine and for its front end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams
from octavo.models.config_files import read_model_config

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


def test_objects_are_merged_and_other_values_replaced(tiny_model: Path) -> None:
    plain = read_model_config(tiny_model)
    changed = read_model_config(tiny_model, {"max_position_embeddings": 1024, "rope_parameters": YARN})
    assert plain.max_position == 256 and changed.max_position == 1024
    assert read_model_config(tiny_model, {}) == plain != changed


def test_a_stretched_model_answers_as_one_whose_config_says_so(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stretched"
    shutil.copytree(tiny_model, folder)
    overrides: dict[str, Any] = {"max_position_embeddings": 1024, "rope_parameters": YARN}
    config = json.loads((folder / "config.json").read_text())
    config |= {**overrides, "rope_parameters": {**config.get("rope_parameters", {}), **YARN}}
    (folder / "config.json").write_text(json.dumps(config))
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=2)
    prompt = list(range(3, 200)) * 2  # longer than the context without it
    answers = []
    for model, overriding in ((folder, None), (tiny_model, json.dumps(overrides))):
        llm = LLM(str(model), num_gpu_blocks_override=128, hf_overrides=overriding)
        [output] = llm.generate([prompt], params, use_tqdm=False)
        answers.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
    assert answers[0] == answers[1] and len(answers[0][0]) == 8
