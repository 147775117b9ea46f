"""Programs in the manner of vLLM's examples for embedding, classification and scores, and its options of pooling."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import octavo
from octavo.compat.vllm import (
    LLM,
    AsyncEngineArgs,
    AsyncLLMEngine,
    EmbeddingRequestOutput,
    EngineArgs,
    LLMEngine,
    PoolingParams,
    PoolingRequestOutput,
)
from octavo.compat.vllm.engines import PoolerConfig, print_embeddings
from octavo.core.errors import ConfigError, InvalidRequestError
from tests.embedding_models import HIDDEN_SIZE, make_encoder

OPTIONS: dict[str, Any] = {"num_threads": 1}
DECODER: dict[str, Any] = {**OPTIONS, "num_gpu_blocks_override": 96, "block_size": 4}
TEXTS = ["Hello, my name is", "The president of the United States is", "The capital of France is"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("classifier"), labels=3)


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("cross-encoder"), labels=1)


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("tagger"), labels=3, by_token=True)


def vectors(outputs: list[Any]) -> list[list[float]]:
    return [output.outputs.embedding for output in outputs]


@pytest.mark.parametrize(
    ("kind", "option", "call", "shown"),
    [
        ("encoder", "runner='pooling'", "print_embeddings(llm.embed(prompts)[0].outputs.embedding)", "Embeddings: ["),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("classifier", "task='classify'", "print(llm.classify(prompts)[0].outputs.num_classes)", "3"),
                ("encoder", "task='embed'", "print(len(llm.embed(prompts)), 'outputs')", "3 outputs"),
                (
                    "cross_encoder",
                    "runner='pooling'",
                    "print(type(llm.score(prompts[0], prompts)[2].outputs.score))",
                    "float",
                ),
                ("tagger", "runner='pooling'", "print(llm.reward(prompts)[0].outputs.data.size(1))", "3"),
            )
        ),
    ],
)
def test_an_example_runs_as_it_is(
    kind: str, option: str, call: str, shown: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        from vllm import LLM, EngineArgs
        from vllm.utils import FlexibleArgumentParser
        from vllm.utils.print_utils import print_embeddings

        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        parser.set_defaults({option}, enforce_eager=True, trust_remote_code=True, max_model_len=60)
        llm = LLM(**vars(parser.parse_args()))
        prompts = {TEXTS!r}
        {call}
        """)
    )
    model = request.getfixturevalue(kind)
    run = subprocess.run(
        [sys.executable, "-m", "octavo.compat.vllm", str(script), "--model", str(model)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0 and shown in run.stdout, run.stderr


def test_outputs_are_octavos(encoder: Path) -> None:
    llm = LLM(str(encoder), runner="pooling", **OPTIONS)
    outputs = llm.embed(TEXTS, use_tqdm=False)
    assert all(isinstance(output, PoolingRequestOutput) for output in outputs)
    assert EmbeddingRequestOutput is PoolingRequestOutput
    assert vectors(outputs) == vectors(octavo.LLM(encoder, **OPTIONS).embed(TEXTS, use_tqdm=False))
    [encoded] = llm.encode(TEXTS[:1], use_tqdm=False, pooling_task="embed")
    assert isinstance(encoded.outputs.data, torch.Tensor)
    assert encoded.outputs.data.tolist() == vectors(outputs)[0]
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    assert metrics["vllm:prompt_tokens"].value == sum(map(len, (o.prompt_token_ids for o in [*outputs, encoded])))
    assert metrics["vllm:e2e_request_latency_seconds"].count == 4


def test_labels_are_found_where_scripts_look(tagger: Path) -> None:
    llm = LLM(str(tagger), runner="pooling", **OPTIONS)
    names = llm.llm_engine.vllm_config.model_config.hf_config.id2label
    output = llm.encode(TEXTS, pooling_task="token_classify", use_tqdm=False)[0]
    labels = [names[index.item()] for index in output.outputs.data.argmax(dim=-1)]
    assert len(labels) == len(output.prompt_token_ids) and set(labels) <= {"label 0", "label 1", "label 2"}
    assert llm.llm_engine.vllm_config.model_config.hf_config.hidden_size == HIDDEN_SIZE


def test_engines_take_pooling_params(encoder: Path) -> None:
    [expected] = vectors(octavo.LLM(encoder, **OPTIONS).embed([TEXTS[0]], use_tqdm=False))
    engine = LLMEngine.from_engine_args(EngineArgs(model=str(encoder), **OPTIONS))
    engine.add_request("a", TEXTS[0], PoolingParams(task="embed"))
    [output] = engine.step()
    assert output.outputs.data.tolist() == expected

    async def encode() -> list[Any]:
        asynchronous = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=str(encoder), **OPTIONS))
        params = PoolingParams(task="embed")
        try:
            return [output async for output in asynchronous.encode(TEXTS[0], params, request_id="a")]
        finally:
            asynchronous.shutdown()

    [output] = asyncio.run(encode())
    assert output.outputs.data.tolist() == expected


def test_parameters_have_vllms_names(encoder: Path) -> None:
    llm = LLM(str(encoder), **OPTIONS)
    [whole] = vectors(llm.embed(TEXTS[:1], use_tqdm=False))
    params = PoolingParams(
        normalize=False, dimensions=8, requires_token_ids=True, skip_reading_prefix_cache=True, extra_kwargs={}
    )
    [plain] = vectors(llm.embed(TEXTS[:1], pooling_params=params.clone(), use_tqdm=False))
    assert len(plain) == 8
    assert np.allclose(np.array(plain) / np.linalg.norm(plain), np.array(whole[:8]) / np.linalg.norm(whole[:8]))
    assert params == PoolingParams(use_activation=False, dimensions=8)
    assert PoolingParams(softmax=True).use_activation and PoolingParams(activation=False).use_activation is False
    for fields, said in (
        ({"step_tag_id": 5}, "step_tag_id must be left out, not 5"),
        ({"returned_token_ids": [1]}, "returned_token_ids"),
        ({"extra_kwargs": {"a": 1}}, "extra_kwargs"),
        ({"normalize": True, "use_activation": False}, "must not differ"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ):
        with pytest.raises(InvalidRequestError, match=said):
            PoolingParams(**fields)


def test_prompts_are_cut_by_keywords(encoder: Path, classifier: Path, cross_encoder: Path) -> None:
    llm, params = LLM(str(encoder), **OPTIONS), PoolingParams(dimensions=8)
    for keywords in ({"truncate_prompt_tokens": 5}, {"tokenization_kwargs": {"truncate_prompt_tokens": 5}}):
        outputs = llm.embed(TEXTS, pooling_params=[params] * 3, use_tqdm=False, **keywords)
        assert [(len(o.prompt_token_ids), o.outputs.hidden_size) for o in outputs] == [(5, 8)] * 3
        assert len(llm.encode(TEXTS, params, use_tqdm=False, **keywords)[1].prompt_token_ids) == 5
    [output] = LLM(str(classifier), **OPTIONS).classify(TEXTS[0], truncate_prompt_tokens=4, use_tqdm=False)
    assert len(output.prompt_token_ids) == 4
    scorer = LLM(str(cross_encoder), **OPTIONS)
    assert len(scorer.score("a river", "x " * 99, truncate_prompt_tokens=20)[0].prompt_token_ids) == 20
    with pytest.raises(InvalidRequestError, match="chat_template must be None"):
        scorer.score("a", "b", chat_template="{{ messages }}")
    with pytest.raises(InvalidRequestError, match="tokenization_kwargs"):
        llm.embed("a", tokenization_kwargs={"padding": True})


def test_a_configuration_says_how_vectors_are_made(encoder: Path, tmp_path: Path) -> None:
    text = TEXTS[0]
    by_first = tmp_path / "by-first"
    shutil.copytree(encoder, by_first)
    (by_first / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": HIDDEN_SIZE, "pooling_mode_cls_token": True})
    )
    expected = vectors(octavo.LLM(by_first, **OPTIONS).embed([text], use_tqdm=False))
    for given in (
        {"pooler_config": PoolerConfig(pooling_type="CLS")},
        {"override_pooler_config": {"pooling_type": "CLS", "normalize": True}},
        {"pooler_config": PoolerConfig(task="embed", seq_pooling_type="CLS", tok_pooling_type="ALL")},
    ):
        assert vectors(LLM(str(encoder), **OPTIONS, **given).embed([text], use_tqdm=False)) == expected
    args = EngineArgs(model=str(encoder), pooler_config=PoolerConfig(normalize=False, dimensions=16), **OPTIONS)
    [found] = vectors(LLM.from_engine_args(args).embed([text], use_tqdm=False))
    assert len(found) == 16 and abs(np.linalg.norm(found) - 1) > 0.01
    for fields, said in (
        ({"pooling_type": "STEP"}, "pooling_type must be one of CLS, LAST, MEAN, not 'STEP'"),
        ({"tok_pooling_type": "STEP"}, "tok_pooling_type must be one of ALL"),
        ({"enable_chunked_processing": True}, "enable_chunked_processing"),
        ({"logit_bias": 0.5}, "logit_bias must be left out"),
        ({"step_tag_id": 3}, "step_tag_id"),
        ({"task": "token_classify"}, "cannot classify tokens"),
        ({"dimensions": 0}, "dimensions"),
        ({"pooling": "CLS"}, "must be a PoolerConfig or have its fields"),
    ):
        with pytest.raises(ConfigError, match=said):
            LLM(str(encoder), override_pooler_config=fields, **OPTIONS)
    with pytest.raises(ConfigError, match="give one of them"):
        LLM(str(encoder), pooler_config=PoolerConfig(), override_pooler_config={}, **OPTIONS)


@pytest.mark.parametrize("option", [{"runner": "pooling"}, {"convert": "embed"}, {"task": "embedding"}])
def test_a_language_model_embeds_where_it_is_asked_to(tiny_model: Path, option: dict[str, str]) -> None:
    llm = LLM(str(tiny_model), **option, **DECODER)
    [first, second] = vectors(llm.embed(TEXTS[:2], use_tqdm=False))
    [scored] = llm.score(*TEXTS[:2], use_tqdm=False)
    assert scored.outputs.score == pytest.approx(float(np.dot(first, second)), abs=1e-6)
    with pytest.raises(InvalidRequestError, match="cannot generate"):
        llm.generate("a")


def test_a_language_model_judges_with_the_options_of_a_reranker(tiny_model: Path, tmp_path: Path) -> None:
    overrides = {
        "architectures": ["LlamaForSequenceClassification"],
        "classifier_from_token": ["n", "y"],
        "is_original_qwen3_reranker": True,
    }
    folder = tmp_path / "long"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    found = LLM(str(folder), runner="pooling", hf_overrides=overrides, num_gpu_blocks_override=300, **OPTIONS)
    [output] = found.score("a", "b", use_tqdm=False)
    assert 0 < output.outputs.score < 1
    with pytest.raises(InvalidRequestError, match="cannot embed"):
        found.embed("a")


def test_vectors_are_printed_in_short(capsys: pytest.CaptureFixture[str]) -> None:
    print_embeddings([1.0, 2.0], prefix="Reward")
    print_embeddings([0.5] * 9)
    assert capsys.readouterr().out == "Reward: [1.0, 2.0] (size=2)\nEmbeddings: [0.5, 0.5, 0.5, 0.5, ...] (size=9)\n"
