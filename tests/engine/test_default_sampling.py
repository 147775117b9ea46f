"""Default sampling parameters from the model's generation_config.json, offline."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.config.engine_config import make_config
from octavo.core.errors import ConfigError
from octavo.data.stage import Columns, Generator
from octavo.engine.async_llm import AsyncLLM

SMALL: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_num_seqs": 4}
OWN = {"temperature": 0.0, "top_k": 7, "max_new_tokens": 5}


@pytest.fixture(scope="module")
def own_defaults(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, greedy and of five tokens where a request does not say otherwise."""
    folder = tmp_path_factory.mktemp("own") / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]} | OWN))
    return folder


def test_a_call_without_parameters_has_the_models_defaults(own_defaults: Path) -> None:
    llm = LLM(str(own_defaults), **SMALL)
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_k, params.max_tokens, params.top_p) == (0.0, 7, 5, 1.0)
    ids = [llm.generate("Hello", use_tqdm=False)[0].outputs[0].token_ids for _ in range(2)]
    assert ids[0] == ids[1]
    assert len(ids[0]) == 5
    chat = llm.chat([{"role": "user", "content": "Hello"}], use_tqdm=False)[0]
    assert len(chat.outputs[0].token_ids) == 5
    longest = llm.generate([3] * 254, use_tqdm=False)[0]
    assert len(longest.outputs[0].token_ids) == 2, "a default is cut where the context ends"
    given = llm.generate("Hello", SamplingParams(max_tokens=3, seed=1), use_tqdm=False)[0].outputs[0]
    again = llm.generate("Hello", SamplingParams(max_tokens=3, seed=1, temperature=1.0), use_tqdm=False)[0].outputs[0]
    assert given.token_ids == again.token_ids != ids[0][:3], "parameters that are given are taken as they are"
    params.max_tokens = 1
    assert llm.get_default_sampling_params().max_tokens == 5


def test_a_stage_over_a_data_set_has_the_models_defaults(own_defaults: Path) -> None:
    generator = Generator({"model": str(own_defaults), **SMALL}, None, Columns("prompt", "generated"))
    expected = LLM(str(own_defaults), **SMALL).generate("Hello", use_tqdm=False)[0].outputs[0].text
    assert [answer.output for answer in generator.answer(["Hello", "Hello"])] == [expected, expected]


def test_the_demo_model_answers_a_simple_question_without_parameters() -> None:
    llm = LLM("smollm2-135m", num_gpu_blocks_override=200)
    answers = llm.chat(["What is the capital of France?"] * 20, use_tqdm=False)
    assert all("Paris" in answer.outputs[0].text for answer in answers)


def test_the_models_defaults_can_be_turned_off_or_come_from_another_folder(
    tiny_model: Path, own_defaults: Path, tmp_path: Path
) -> None:
    plain = LLM(str(own_defaults), generation_config="none", **SMALL)
    assert plain.get_default_sampling_params() == SamplingParams()
    assert plain.llm_engine.core.model_config.eos_token_ids == (1,), "what ends a text is read in any case"
    elsewhere = LLM(str(tiny_model), generation_config=str(own_defaults), **SMALL)
    assert elsewhere.get_default_sampling_params().top_k == 7
    with pytest.raises(ConfigError, match=r"there is no .*generation_config\.json"):
        LLM(str(tiny_model), generation_config=str(tmp_path), **SMALL)


def test_an_engine_beside_its_core_has_the_models_defaults_too(own_defaults: Path) -> None:
    async def length() -> int:
        llm = await AsyncLLM.start(make_config(model=str(own_defaults), num_threads=1, **SMALL))
        try:
            return len([output async for output in llm.generate("a", "Hello")][-1].outputs[0].token_ids)
        finally:
            await llm.shutdown()

    assert asyncio.run(length()) == 5
