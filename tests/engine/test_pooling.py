"""Vectors and scores: right, and the same bits whatever happens around a request."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import LLM, AsyncLLM, ConfigError, InvalidRequestError, PoolingParams, SamplingParams
from octavo.scheduler.policies import POLICIES
from tests.embedding_models import MAX_TOKENS, make_encoder

pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")

_RNG = random.Random(3)
LENGTHS = (1, 2, 7, 15, 16, 17, 30, 44, 5, 60, 60, 3)
TEXTS = ["".join(_RNG.choice("abc def ghi") for _ in range(length)) for length in LENGTHS]
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
KINDS = ("cls", "mean", "max", "lasttoken", "weightedmean", "mean_sqrt_len_tokens")
RAW = PoolingParams(use_activation=False)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("cross-encoder"), labels=1)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("classifier"), labels=3)


def vectors(llm: LLM, prompts: Sequence[Any], params: PoolingParams | None = None, **options: Any) -> list[bytes]:
    outputs = llm.encode(list(prompts), params, use_tqdm=False, **options)
    errors = [error for output in outputs if (error := output.outputs.error)]
    assert not errors
    return [output.outputs.data.tobytes() for output in outputs]


def pooled_as(kind: str, model: Path, folder: Path) -> Path:
    """A copy of a model whose files say how vectors are made."""
    shutil.copytree(model, folder)
    parts = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
    parts.append({"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"})
    (folder / "modules.json").write_text(json.dumps(parts))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": kind}))
    return folder


def expected(kind: str, states: np.ndarray) -> np.ndarray:
    """The vector of hidden states float64 [n, E]."""
    weights = np.arange(1, len(states) + 1)[:, None]
    kinds: dict[str, Callable[[], np.ndarray]] = {
        "cls": lambda: states[0],
        "mean": lambda: states.mean(0),
        "max": lambda: states.max(0),
        "lasttoken": lambda: states[-1],
        "weightedmean": lambda: (states * weights).sum(0) / weights.sum(),
        "mean_sqrt_len_tokens": lambda: states.sum(0) / np.sqrt(len(states)),
    }
    return kinds[kind]()


# --- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vectors_of_an_encoder_are_the_same_in_any_company(encoder: Path, dtype: str) -> None:
    llm = LLM(str(encoder), dtype=dtype)
    alone = [vectors(llm, [text])[0] for text in TEXTS]
    assert len(set(alone)) == len(set(TEXTS))
    order = list(range(len(TEXTS)))
    random.Random(1).shuffle(order)
    for options in ({}, {"max_num_batched_tokens": 20}, {"num_threads": 1}, {"block_size": 5, "max_num_seqs": 3}):
        other = LLM(str(encoder), dtype=dtype, **options)  # type: ignore[arg-type]
        assert vectors(other, TEXTS * 3) == alone * 3
        assert vectors(other, [TEXTS[i] for i in order]) == [alone[i] for i in order]


@pytest.mark.parametrize("kind", ["cls", "mean", "lasttoken"])
def test_vectors_of_a_decoder_are_the_same_in_any_company(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    folder = pooled_as(kind, tiny_model, tmp_path / kind)
    llm = LLM(str(folder), dtype="bfloat16", num_gpu_blocks_override=200)
    alone = [vectors(llm, [text], RAW)[0] for text in TEXTS]
    # A prompt whose beginning is in the prefix cache, in chunks, and preempted by requests that generate.
    assert vectors(llm, TEXTS, RAW) == alone
    tight = LLM(
        str(folder), dtype="bfloat16", max_num_batched_tokens=8, block_size=4, num_gpu_blocks_override=18, watermark=0.0
    )
    engine = tight.llm_engine
    for i, text in enumerate(TEXTS):
        engine.add_request(f"g{i}", text[:20], GREEDY, streaming=False)
        engine.add_request(f"v{i}", text, PoolingParams(use_activation=False, task="embed"), streaming=False)
    found: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output for output in engine.step()}
    assert [found[f"v{i}"].outputs.data.tobytes() for i in range(len(TEXTS))] == alone
    assert sum(output.metrics.num_preemptions for output in found.values()) > 0
    generated = [found[f"g{i}"].outputs[0].token_ids for i in range(len(TEXTS))]
    without = llm.generate([text[:20] for text in TEXTS], GREEDY, use_tqdm=False)
    assert generated == [output.outputs[0].token_ids for output in without]


def test_replicas_and_another_process_give_the_same_bits(encoder: Path) -> None:
    alone = vectors(LLM(str(encoder)), TEXTS)

    async def served() -> list[bytes]:
        async with AsyncLLM(str(encoder), data_parallel_size=2) as llm:
            params = PoolingParams(task="embed")
            outputs = await asyncio.gather(*(llm.pool(f"{i}", text, params) for i, text in enumerate(TEXTS * 4)))
            return [output.outputs.data.tobytes() for output in outputs]

    assert asyncio.run(served()) == alone * 4


# --- right ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_pooling(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModel

    folder = pooled_as(kind, tiny_model, tmp_path / kind)
    network = AutoModel.from_pretrained(tiny_model, dtype=torch.float64)
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=200)
    for output in llm.encode(TEXTS[:6], RAW, use_tqdm=False):
        with torch.inference_mode():
            states = network(torch.tensor([output.prompt_token_ids])).last_hidden_state[0].numpy()
        data = output.outputs.data
        np.testing.assert_allclose(data, expected(kind, states), rtol=1e-3, atol=1e-4)
        normal = llm.embed({"prompt_token_ids": output.prompt_token_ids}, use_tqdm=False)[0].outputs
        assert not np.allclose(np.linalg.norm(normal.embedding), 1.0), "the files name no Normalize"
        one = llm.embed(output.prompt_token_ids, pooling_params=PoolingParams(use_activation=True), use_tqdm=False)
        np.testing.assert_allclose(one[0].outputs.embedding, data / np.linalg.norm(data), rtol=1e-5)


def test_a_cross_encoder_reads_both_texts(judge: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    network, tokenizer = AutoModelForSequenceClassification.from_pretrained(judge), AutoTokenizer.from_pretrained(judge)
    documents = ["a bed", "cab dad", "fig", "a" * 30]
    llm = LLM(str(judge), dtype="float32")
    outputs = llm.score("deaf", documents, use_tqdm=False)
    with torch.inference_mode():
        batch = tokenizer(["deaf"] * 4, documents, return_tensors="pt", padding=True, return_token_type_ids=True)
        theirs = network(**batch).logits[:, 0].sigmoid().tolist()
    ours = [output.outputs.score for output in outputs]
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    assert len({round(score, 4) for score in ours}) == 4
    ranked = llm.rerank("deaf", documents, top_n=3, use_tqdm=False)
    assert [index for index, _ in ranked] == sorted(range(4), key=lambda i: -theirs[i])[:3]
    with pytest.raises(InvalidRequestError, match="cannot embed; it can: classify, score pairs"):
        llm.encode("deaf", PoolingParams(task="embed"))
    raw = llm.score("deaf", documents, pooling_params=RAW, use_tqdm=False)
    assert [o.outputs.score for o in raw] != ours
    with pytest.raises(InvalidRequestError, match="2 texts cannot be scored with 4"):
        llm.score(["a", "b"], documents)


def test_a_query_is_computed_once_where_vectors_are_compared(encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, documents = LLM(str(encoder)), ["a bed", "cab dad", "fig", "a bed"]
    alone = [llm.score("deaf", document, use_tqdm=False)[0] for document in documents]
    computed: list[Any] = []
    add = llm.add_request

    def counting(request_id: str, prompt: Any, *args: Any, **options: Any) -> None:
        computed.append(prompt)
        add(request_id, prompt, *args, **options)

    monkeypatch.setattr(llm, "add_request", counting)
    together = llm.score("deaf", documents, use_tqdm=False, priority=0)
    assert [output.outputs for output in together] == [output.outputs for output in alone]
    assert [output.prompt_token_ids for output in together] == [output.prompt_token_ids for output in alone]
    assert [computed.count(each) for each in computed] == [1] * 4
    assert llm.score("deaf", documents, use_tqdm=False, user=["a", "b", "a", "b"])[3].outputs == alone[3].outputs


@pytest.mark.parametrize("kind", ["encoder", "judge"])
def test_a_bad_pair_fails_alone(kind: str, request: pytest.FixtureRequest) -> None:
    llm = LLM(str(request.getfixturevalue(kind)))
    documents: list[Any] = ["a bed", "a b " * 50, None, "fig"]
    outputs = [output.outputs for output in llm.score("deaf", documents, use_tqdm=False)]
    good = [output.outputs for output in llm.score("deaf", ["a bed", "fig"], use_tqdm=False)]
    assert [outputs[0], outputs[3]] == good
    assert "at most 64" in str(outputs[1].error) and "must be text, not None" in str(outputs[2].error)
    assert len(llm.score("deaf", ["a b " * 50], use_tqdm=False)) == 1
    with pytest.raises(InvalidRequestError, match="at most 64"):
        llm.score("deaf", "a b " * 50, use_tqdm=False)


def test_a_long_pair_is_cut_as_other_libraries_cut_it(judge: Path) -> None:
    from transformers import AutoTokenizer

    theirs, llm = AutoTokenizer.from_pretrained(judge), LLM(str(judge))
    ours = llm.get_tokenizer()
    for first, second in (("a" * 9, "b" * 90), ("a" * 90, "b" * 9), ("a" * 70, "b" * 70), ("a" * 71, "b" * 60)):
        for most in (20, 21, 40):
            cut = theirs(first, second, truncation="longest_first", max_length=most, return_token_type_ids=True)
            ids, second_at = ours.encode_pair(first, second, most)
            assert (ids, [int(i >= second_at) for i in range(len(ids))]) == (cut["input_ids"], cut["token_type_ids"])
        assert ours.encode_cut(first, 20) == theirs(first, truncation=True, max_length=20)["input_ids"]
    with pytest.raises(InvalidRequestError, match="the model takes at most 64; truncate_prompt_tokens=-1 cuts it"):
        llm.score("a" * 90, "b")
    cut_params = PoolingParams(truncate_prompt_tokens=-1)
    [output] = llm.score("a" * 90, "b", pooling_params=cut_params, use_tqdm=False)
    assert len(output.prompt_token_ids) == MAX_TOKENS


def test_class_scores(classifier: Path) -> None:
    llm = LLM(str(classifier), dtype="float32")
    assert llm.front_end.pooling.tasks == ("classify",)
    outputs = [output.outputs for output in llm.classify(TEXTS, use_tqdm=False)]
    for output in outputs:
        assert abs(sum(output.probs) - 1) < 1e-6 and output.num_classes == 3
    assert llm.front_end.files.model_config.labels == ("label 0", "label 1", "label 2")
    with pytest.raises(InvalidRequestError, match="cannot score pairs; it can: classify"):
        llm.score("a", "b")


def test_a_language_model_judges_pairs(tiny_model: Path) -> None:
    words = ["a", "b"]
    longer: dict[str, Any] = {"max_position_embeddings": 512}
    overrides = longer | {"classifier_from_token": words}
    llm = LLM(str(tiny_model), task="score", hf_overrides=overrides, num_gpu_blocks_override=300)
    no, yes = (llm.get_tokenizer().encode(word, add_special_tokens=False)[0] for word in words)
    params = PoolingParams(truncate_prompt_tokens=-1)
    [output] = llm.score("river", "bank" * 20, pooling_params=params, use_tqdm=False)
    plain = LLM(str(tiny_model), hf_overrides=longer, num_gpu_blocks_override=300)
    both = SamplingParams(max_tokens=1, temperature=0.0, logprob_token_ids=[no, yes])
    [place] = plain.generate(output.prompt_token_ids, both, use_tqdm=False)[0].outputs[0].logprobs or []
    odds = np.exp(place[yes].logprob - place[no].logprob)
    assert abs(output.outputs.score - odds / (1 + odds)) < 1e-5
    with pytest.raises(InvalidRequestError, match="cannot generate text; it can: score pairs"):
        llm.generate("x")
    with pytest.raises(ConfigError, match="needs two tokens as answers"):
        LLM(str(tiny_model), task="score", hf_overrides={"classifier_from_token": ["a", "no such token"]})


# --- bad input --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_served_fails_alone(encoder: Path) -> None:
    llm = LLM(str(encoder), hf_overrides={"matryoshka_dimensions": [8, 16]})
    good = vectors(llm, ["abc"])[0]
    prompts: list[Any] = ["abc", "a" * 80, [5, 99_999], [], {"prompt_token_ids": [2, 3]}, "abc"]
    outputs = llm.embed(prompts, use_tqdm=False)
    errors = [output.outputs.error for output in outputs]
    assert errors[0] is errors[4] is errors[5] is None
    assert "prompt has 82 tokens, but the model takes at most 64" in str(errors[1])
    assert "must be integers from 0 to" in str(errors[2]) and "prompt is empty" in str(errors[3])
    assert np.array(outputs[5].outputs.embedding, np.float32).tobytes() == good
    for dimensions in (8, 16, 32):
        params = PoolingParams(dimensions=dimensions)
        vector = llm.embed("abc", pooling_params=params, use_tqdm=False)[0].outputs.embedding
        assert len(vector) == dimensions and abs(np.linalg.norm(vector) - 1) < 1e-6
    with pytest.raises(InvalidRequestError, match=r"one of the model's \(8, 16, 32\), not 12"):
        llm.embed("abc", pooling_params=PoolingParams(dimensions=12))
    with pytest.raises(InvalidRequestError, match=r"one of the model's prompts \('query', 'document'\), not 'passage'"):
        llm.embed("abc", prompt_name="passage")
    named = llm.embed("abc", prompt_name="query", use_tqdm=False)[0]
    assert named.prompt_token_ids == llm.get_tokenizer().encode("query: abc")
    with pytest.raises(InvalidRequestError, match="cannot generate text; it can: embed, embed tokens, score pairs"):
        llm.generate("abc")
    cut = llm.embed("a" * 80, pooling_params=PoolingParams(truncate_prompt_tokens=10), use_tqdm=False)[0]
    assert cut.prompt_token_ids == llm.get_tokenizer().encode("a" * 8)


@pytest.mark.parametrize("where", ["the embedding", "layer 1"])
def test_what_is_not_finite_is_an_error_that_names_the_layer(where: str, encoder: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    folder = tmp_path / "broken"
    shutil.copytree(encoder, folder)
    tensors = load_file(folder / "model.safetensors")
    if where == "the embedding":  # of one letter: other texts are not concerned
        letter = LLM(str(encoder)).get_tokenizer().convert_tokens_to_ids("z")
        tensors["embeddings.word_embeddings.weight"][letter] = np.inf
    else:
        tensors["encoder.layer.1.output.dense.bias"][3] = np.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    llm = LLM(str(folder))
    outputs = llm.embed(["abc", "a z", "def"], use_tqdm=False)
    errors = [output.outputs.error for output in outputs]
    assert f"the result is not finite (NaN or infinite), first in {where}" in str(errors[1])
    if where == "the embedding":
        assert errors[0] is errors[2] is None
        assert outputs[0].outputs == LLM(str(encoder)).embed("abc", use_tqdm=False)[0].outputs


def test_an_encoder_refuses_what_needs_generation(encoder: Path) -> None:
    for options in (
        {"enable_prompt_adapter": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    ):
        with pytest.raises(ConfigError, match="is for models that generate text"):
            LLM(str(encoder), **options)
    with pytest.raises(ConfigError, match="max_model_len \\(65\\) is longer than the model's context length"):
        LLM(str(encoder), max_model_len=65)


def test_a_cancelled_request_leaves_nothing(encoder: Path) -> None:
    async def run() -> None:
        async with AsyncLLM(str(encoder)) as llm:
            params = PoolingParams(task="embed")
            tasks = [asyncio.create_task(llm.pool(str(i), TEXTS[-3], params)) for i in range(200)]
            await asyncio.sleep(0.01)
            for task in tasks[::2]:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert sum(isinstance(result, BaseException) for result in done) <= 100
            assert llm.num_open == 0
            stats = await llm.stats()
            assert stats.num_running == stats.num_waiting == 0

    asyncio.run(run())


# --- among other requests ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_order_vectors_too(policy: str, encoder: Path) -> None:
    expected_bits = vectors(LLM(str(encoder)), TEXTS)
    llm = LLM(str(encoder), scheduling_policy=policy, max_num_batched_tokens=32, max_num_seqs=4)
    options: dict[str, Any] = {"user": [f"user {i % 3}" for i in range(len(TEXTS))]}
    if POLICIES[policy].uses_priority:
        options["priority"] = list(range(len(TEXTS)))
    if POLICIES[policy].uses_targets:
        options["ttft_target"] = 0.5
    assert vectors(llm, TEXTS, **options) == expected_bits


def test_decodes_go_on_beside_long_prompts_for_vectors(tiny_model: Path) -> None:
    engine = LLM(str(tiny_model), max_num_batched_tokens=16, num_gpu_blocks_override=200).llm_engine
    engine.add_request("g", "ab", SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.0))
    engine.step()
    for i in range(3):
        engine.add_request(f"v{i}", "abc"[i] * 200, PoolingParams(task="embed"))
    tokens: list[int] = []
    ended: set[str] = set()
    while len(ended) < 3:
        outputs = {output.request_id: output for output in engine.step()}
        tokens.append(len(outputs["g"].outputs[0].token_ids))
        ended |= {name for name in outputs if name != "g"}
    assert len(tokens) > 30
    assert all(after == before + 1 for before, after in itertools.pairwise(tokens)), "each step had its token"


def test_an_encoder_sleeps_and_wakes(encoder: Path) -> None:
    llm = LLM(str(encoder))
    before = vectors(llm, TEXTS)
    for level in (1, 2):
        llm.sleep(level)
        assert llm.is_sleeping and llm.wake_up() and vectors(llm, TEXTS) == before


def test_statistics_of_an_encoder(encoder: Path) -> None:
    llm = LLM(str(encoder))
    vectors(llm, TEXTS)
    stats = llm.stats()
    assert stats.blocks_used == stats.blocks_free == stats.num_running == 0
    assert {metric.name for metric in llm.get_metrics()}
    facts = llm.core.startup
    assert not facts.groups and any("no KV cache: texts of up to 64 tokens" in line for line in facts.lines())
