"""Encoder-decoder models: transformers' answers, and one answer whatever happens around a request."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, AsyncLLM, BeamSearchParams, InvalidRequestError, SamplingParams
from octavo.core.errors import ConfigError
from tests.engine.test_recovery import Killer
from tests.engine.test_restarts import kill, stream
from tests.engine_state import replace_core
from tests.models.seq2seq import save_seq2seq
from tests.models.test_bart import bart
from tests.whole_outputs import everything

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "num_gpu_blocks_override": 300,
    "max_num_seqs": 16,
    "block_size": 4,
    "max_model_len": 64,
    "num_threads": 1,
}
DOCUMENT = [(i * 37 + 11) % 99 + 2 for i in range(40)]
PROMPTS: list[Any] = [
    {"prompt_token_ids": [3]},
    {"encoder_prompt": DOCUMENT, "decoder_prompt": None},
    DOCUMENT[5:22],
    {"encoder_prompt": {"prompt_token_ids": DOCUMENT}, "decoder_prompt": [2, *DOCUMENT[3:20]]},
    {"encoder_prompt": DOCUMENT[::-1], "decoder_prompt": DOCUMENT[8:17]},
    DOCUMENT[9:33],
    {"encoder_prompt": DOCUMENT[:13]},
    DOCUMENT[:4],
]
PARAMS: list[Any] = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2, detokenize=False),
    SamplingParams(temperature=0.9, seed=3, n=4, max_tokens=25, logprobs=0, detokenize=False),
    BeamSearchParams(beam_width=4, max_tokens=18, ignore_eos=True),
    SamplingParams(temperature=1.1, seed=5, max_tokens=30, prompt_logprobs=2, min_tokens=9, detokenize=False),
    SamplingParams(temperature=1.0, seed=7, n=2, best_of=3, max_tokens=20, ignore_eos=True, detokenize=False),
    BeamSearchParams(beam_width=2, max_tokens=25, length_penalty=0.5),
    SamplingParams(temperature=0.8, seed=8, max_tokens=30, repetition_penalty=1.2, ignore_eos=True, detokenize=False),
    SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1, detokenize=False),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bart")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    """transformers' model, whose logits differ clearly, and tell texts apart."""
    return save_seq2seq(folder, bart())


@pytest.fixture(scope="module")
def llm(folder: Path, model: Any) -> LLM:
    """One engine with the usual options."""
    return make(folder)


@pytest.fixture(scope="module")
def alone(folder: Path, model: Any) -> list[Any]:
    """The answer to each prompt alone in an engine that caches nothing."""
    engine = make(folder, enable_prefix_caching=False)
    return [answers(engine, [number])[0] for number in range(len(PROMPTS))]


def make(folder: Path, killer: Killer | None = None, **options: Any) -> LLM:
    engine = LLM(str(folder), **{**OPTIONS, **options}, stat_loggers=[killer] if killer else [])
    if killer is not None:
        killer.llm = engine
    return engine


def answers(engine: LLM, numbers: list[int]) -> list[Any]:
    outputs = engine.generate([PROMPTS[i] for i in numbers], [PARAMS[i] for i in numbers], use_tqdm=False)
    return [everything(output) for output in outputs]


# --- transformers ---------------------------------------------------------------------------------------------------


def test_greedy_tokens_and_logprobs_are_those_of_transformers(llm: LLM, model: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1, detokenize=False)
    texts = [DOCUMENT, DOCUMENT[:1], DOCUMENT[7:15], DOCUMENT[::-1][:30]]
    for text, output in zip(texts, llm.generate(texts, params, use_tqdm=False), strict=True):
        completion = output.outputs[0]
        assert completion.logprobs is not None
        tokens = completion.token_ids
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([text]), decoder_input_ids=torch.tensor([[2, *tokens]])).logits[0]
        scores = logits[:-1].log_softmax(-1)
        ours = [place[token].logprob for token, place in zip(tokens, completion.logprobs, strict=True)]
        theirs = scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (theirs - torch.tensor(ours)).abs().max() < 1e-3
        assert tokens == scores.argmax(-1).tolist()
        assert output.prompt_token_ids == [2]
        assert output.encoder_prompt_token_ids == text
        assert output.num_prompt_tokens == len(text) + 1


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"length_penalty": 2.0},
        {"length_penalty": 0.3, "early_stopping": True},
        {"length_penalty": 1.5, "early_stopping": "never"},
    ],
)
@pytest.mark.parametrize("forced", [None, 45])
def test_beams_are_those_of_transformers(
    values: dict[str, Any], forced: int | None, model: Any, folder: Path, llm: LLM, tmp_path: Path
) -> None:
    """With tokens that an answer begins with in any case, too: they count where lengths are scored."""
    engine = llm
    if forced is not None:
        model.save_pretrained(tmp_path)
        from tests.models.zoo import edit_config

        edit_config(tmp_path, forced_bos_token_id=forced)
        engine = make(tmp_path)
    for text in (DOCUMENT, DOCUMENT[4:9]):
        params = BeamSearchParams(beam_width=4, max_tokens=12 - (forced is not None), **values)
        [output] = engine.generate([text], params, use_tqdm=False)
        theirs = model.generate(
            torch.tensor([text]),
            attention_mask=torch.ones(1, len(text), dtype=torch.long),
            max_new_tokens=12,
            num_beams=4,
            num_return_sequences=4,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            forced_bos_token_id=forced,
            **values,
        )
        first = 1 if forced is None else 2
        expected = [[t for t in row[first:].tolist() if t != 0] for row in theirs.sequences]
        assert [[t for t in c.token_ids if t != 0] for c in output.outputs] == expected
        ours = torch.tensor([c.score for c in output.outputs])
        torch.testing.assert_close(ours, theirs.sequences_scores, atol=1e-3, rtol=0)


# --- one answer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "happens"),
    [
        ({}, None),
        pytest.param({"enable_prefix_caching": False}, None, marks=pytest.mark.slow),
        ({"max_num_batched_tokens": 16}, None),
        ({"max_num_encoder_input_tokens": 8}, None),
        ({"batching": "prefill_first", "max_num_batched_tokens": 64}, None),
        ({"async_scheduling": True}, None),
        ({"num_gpu_blocks_override": 44, "watermark": 0.0, "preemption_mode": "recompute"}, "recompute"),
        (
            {
                "num_gpu_blocks_override": 44,
                "watermark": 0.0,
                "preemption_mode": "swap",
                "num_host_blocks_override": 90,
            },
            "swap",
        ),
        ({"num_gpu_blocks_override": 44, "watermark": 0.0, "enable_prefix_caching": False}, None),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, None),
        pytest.param({"num_threads": 2, "block_size": 16}, None, marks=pytest.mark.slow),
    ],
)
def test_one_answer(options: dict[str, Any], happens: str | None, folder: Path, alone: list[Any]) -> None:
    engine = make(folder, **options)
    everyone = [*range(len(PROMPTS)), *range(len(PROMPTS) - 1, -1, -1)]
    outputs = engine.generate([PROMPTS[i] for i in everyone], [PARAMS[i] for i in everyone], use_tqdm=False)
    assert [everything(output) for output in outputs] == [alone[i] for i in everyone]
    swaps = sum(output.metrics.num_preemptions_by_swap for output in outputs)
    others = sum(output.metrics.num_preemptions for output in outputs) - swaps
    assert happens != "recompute" or (others > 0 and not swaps)
    assert happens != "swap" or swaps > 0
    state = engine.core.scheduler.stats()
    assert state.blocks_used == state.host_blocks_used == 0
    assert engine.core.blocks.num_tables == 0


def test_an_input_that_was_read_is_found_again(folder: Path, alone: list[Any]) -> None:
    engine = make(folder)
    [first] = engine.generate([PROMPTS[1]], [PARAMS[1]], use_tqdm=False)
    [second] = engine.generate([PROMPTS[1]], [PARAMS[1]], use_tqdm=False)
    assert everything(first) == everything(second) == alone[1]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, len(DOCUMENT))
    [other] = engine.generate([{**PROMPTS[1], "cache_salt": "mine"}], [PARAMS[1]], use_tqdm=False)
    assert other.num_cached_tokens == 0
    shorter = {"encoder_prompt": DOCUMENT[:-1], "decoder_prompt": None}
    [another] = engine.generate([shorter], [PARAMS[1]], use_tqdm=False)
    assert another.num_cached_tokens == 0  # an encoder's output depends on all of its input


def test_requests_that_come_together_read_one_input_once(folder: Path) -> None:
    engine = make(folder)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False)
    outputs = engine.generate([DOCUMENT] * 5, params, use_tqdm=False)
    assert sorted(output.num_cached_tokens for output in outputs) == [0] + [len(DOCUMENT)] * 4
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


def test_sequences_share_the_blocks_of_the_input(folder: Path) -> None:
    engine = make(folder, enable_prefix_caching=False)
    for params in (
        SamplingParams(temperature=1.0, seed=1, n=4, max_tokens=8, ignore_eos=True, detokenize=False),
        BeamSearchParams(beam_width=4, max_tokens=8, ignore_eos=True),
    ):
        engine.add_request("0", {"encoder_prompt": DOCUMENT}, params)
        most = 0
        while engine.has_unfinished_requests():
            engine.step()
            most = max(most, engine.core.blocks.state.used)
        # Ten blocks of the input once, and at most three of each of four sequences.
        assert 10 < most <= 10 + 4 * 3


def test_decodes_go_on_beside_long_inputs(folder: Path) -> None:
    """With a budget for inputs no step reads more of them, and sequences that run have a token from each step."""
    engine = make(folder, max_num_encoder_input_tokens=45, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    engine.add_request("runs", [5, 6, 7], params)
    for _ in range(4):
        engine.step()
    for number in range(6):
        engine.add_request(str(number), DOCUMENT[number:], params)
    read, tokens = [], []
    executor: Any = engine.core.executor
    submit = executor.submit

    def watch(plan: Any) -> Any:
        read.append(sum(context.num_tokens for context in plan.contexts if context.encode is not None))
        return submit(plan)

    executor.submit = watch
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.request_id == "runs":
                tokens.append(len(output.outputs[0].token_ids))
    assert sum(map(bool, read)) == 6 and max(read) <= 45
    first = next(i for i, count in enumerate(read) if count)
    last = max(i for i, count in enumerate(read) if count)
    assert last - first < 10, "one input a step"


@pytest.mark.parametrize("steps", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_another_core_goes_on(steps: int, folder: Path, alone: list[Any]) -> None:
    llm = make(folder)
    for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        llm.add_request(str(number), prompt, params, streaming=False)
    outputs: dict[str, Any] = {}
    count = 0
    while llm.has_unfinished_requests():
        for output in llm.step():
            outputs[output.request_id] = output
        count += 1
        if count % (4 * steps) == 0:
            replace_core(llm)
    assert [everything(outputs[str(i)]) for i in range(len(PROMPTS))] == alone


def test_it_goes_on_after_sleep(folder: Path, alone: list[Any]) -> None:
    engine = make(folder)
    for level in (1, 2):
        assert answers(engine, [1, 2]) == [alone[1], alone[2]]
        engine.sleep(level)
        engine.wake_up()
    assert answers(engine, [1, 2]) == [alone[1], alone[2]]


@pytest.mark.slow
def test_two_ranks_and_a_killed_worker(folder: Path, alone: list[Any]) -> None:
    killer = Killer(9)
    engine = make(folder, killer, tensor_parallel_size=2)
    try:
        assert answers(engine, [*range(len(PROMPTS))]) == alone
        assert killer.lost
    finally:
        engine.core.shutdown()


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt_token_ids": []}, "encoder_prompt is empty"),
        ({"encoder_prompt": [], "decoder_prompt": [2]}, "encoder_prompt is empty"),
        ({"encoder_prompt": [3] * 97}, "has 97 tokens, but may have at most 96"),
        ({"encoder_prompt": [101]}, "encoder_prompt: token ids must be integers from 0 to 100, not 101"),
        ({"encoder_prompt": [3], "decoder_prompt": [-1]}, "decoder_prompt: token ids must be integers"),
        ({"encoder_prompt": [3], "decoder_prompt": [5] * 64}, "prompt has 65 tokens"),
        ({"decoder_prompt": [3]}, "needs 'encoder_prompt'"),
        ({"encoder_prompt": [3], "prompt": "x"}, "not 'prompt'"),
        ({"prompt_token_ids": [3], "multi_modal_data": {"audio": 1}}, "the model takes text alone"),
        ({"encoder_prompt": 7}, "prompt must be text"),
        ({"prompt_token_ids": [3], "encoder_input": 5}, "unknown key 'encoder_input'"),
        (7, "prompts must be text"),
    ],
)
def test_bad_prompts(prompt: Any, message: str, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, detokenize=False)
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompt, params, use_tqdm=False)
    if not isinstance(prompt, int):  # in a list it fails alone
        bad, good = llm.generate([prompt, [5]], params, use_tqdm=False)
        assert bad.outputs[0].error is not None and message in bad.outputs[0].error
        assert len(good.outputs[0].token_ids) == 2


def test_an_input_that_never_fits_is_ignored(folder: Path) -> None:
    engine = make(folder, num_gpu_blocks_override=16, max_model_len=16)
    params = SamplingParams(temperature=0, max_tokens=2, detokenize=False)
    bad, good = engine.generate([[3] * 70, [5]], params, use_tqdm=False)
    assert bad.outputs[0].finish_reason == "ignored"
    assert "an encoder's input of 70" in str(bad.outputs[0].error)
    assert len(good.outputs[0].token_ids) == 2


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"data_parallel_size": 2}, marks=pytest.mark.slow)],
    ids=["one core", "two replicas"],
)
def test_a_killed_core_is_a_pause(folder: Path, model: Any, alone: list[Any], options: dict[str, Any]) -> None:
    async def main() -> list[Any]:
        async with AsyncLLM(str(folder), **OPTIONS, **options) as llm:
            taken = 0

            def took() -> None:
                nonlocal taken
                taken += 1
                if taken == 25:
                    kill(llm)

            work = enumerate(zip(PROMPTS, PARAMS, strict=True))
            outputs = await asyncio.gather(*(stream(llm, str(i), prompt, params, took) for i, (prompt, params) in work))
            assert sum(state.num_restarts for state in llm.replica_states()) == 1
            return [everything(output) for output in outputs]

    assert asyncio.run(main()) == alone


def test_there_are_no_vectors(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="cannot embed; it can: generate text"):
        llm.embed([[5]])


def test_truncation_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="truncate_prompt_tokens must be left out"):
        llm.generate([5], SamplingParams(max_tokens=2, truncate_prompt_tokens=3, detokenize=False), use_tqdm=False)


def test_both_parts_are_refused_by_a_decoder(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), num_gpu_blocks_override=20, max_model_len=32)
    with pytest.raises(InvalidRequestError, match="'encoder_prompt' must be None: the model has a decoder"):
        llm.generate({"encoder_prompt": "a", "decoder_prompt": "b"}, SamplingParams(max_tokens=1), use_tqdm=False)


@pytest.mark.parametrize(
    "options",
    [
        {"enable_lora": True},
        {"host_prefix_cache": True},
        {"pipeline_parallel_size": 2},
    ],
)
def test_options_that_are_refused(options: dict[str, Any], folder: Path, model: Any) -> None:
    with pytest.raises(ConfigError, match="is not supported with encoder-decoder models"):
        make(folder, **options)
