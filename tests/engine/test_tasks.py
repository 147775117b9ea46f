"""Requests that generate nothing, and what keeps the blocks of requests apart."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from octavo import LLM, InvalidRequestError, SamplingParams
from octavo.core.outputs import PoolingParams
from octavo.core.request import EngineCoreRequest, Generate, Pool
from octavo.engine.core import EngineCore
from octavo.engine.llm_engine import LLMEngine

EMBED = Pool(PoolingParams(task="embed", use_activation=False))
_RNG = random.Random(7)
PROMPTS = [[_RNG.randrange(2, 258) for _ in range(n)] for n in (1, 2, 15, 16, 17, 33, 80, 41)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
MakeEngine = Callable[..., LLMEngine]


@pytest.fixture(scope="module")
def make(tiny_model: Path) -> MakeEngine:
    pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")

    def load(**options: Any) -> LLMEngine:
        options = {"dtype": "bfloat16", "num_gpu_blocks_override": 60, "max_num_seqs": 8, **options}
        return LLM(str(tiny_model), **options).llm_engine

    return load


def pool(core: EngineCore, prompts: list[list[int]], neighbours: int = 0) -> list[NDArray[np.float32]]:
    """The vectors of prompts that arrive together, with so many requests that generate."""
    for i, prompt in enumerate(prompts):
        core.scheduler.add(EngineCoreRequest(group_id=i, prompt_token_ids=prompt, task=EMBED))
    for i in range(neighbours):
        core.scheduler.add(
            EngineCoreRequest(group_id=100 + i, prompt_token_ids=PROMPTS[i][::-1], task=Generate(GREEDY, i))
        )
    found: dict[int, bytes] = {}
    ends: dict[int, str] = {}
    while core.scheduler.has_work:
        outputs = core.step()
        for update in outputs.each_sequence():
            assert update.finish_reason != "error", update.extra
            if update.group_id < 100:
                assert not update.token_ids and update.extra is not None and update.extra.pooled is not None
                assert update.group_id not in found, "a second vector"
                found[update.group_id] = update.extra.pooled
        ends.update((end.group_id, end.finish_reason) for end in outputs.groups)
    assert ends == {i: "length" for i in range(len(prompts))}
    assert core.blocks.state.used == 0
    return [np.frombuffer(found[i], np.float32) for i in range(len(prompts))]


def test_a_pooled_vector_is_the_hidden_state_of_the_last_token(make: MakeEngine, tiny_model: Path) -> None:
    from transformers import AutoModel

    network = AutoModel.from_pretrained(tiny_model, dtype=torch.float32)
    for kernels in ("cpu", "reference"):
        vectors = pool(make(kernels=kernels, dtype="float32").core, PROMPTS)
        for prompt, vector in zip(PROMPTS, vectors, strict=True):
            with torch.inference_mode():
                expected = network(torch.tensor([prompt])).last_hidden_state[0, -1]
            np.testing.assert_allclose(vector, expected.numpy(), rtol=1e-3, atol=1e-3)


def test_a_pooled_vector_is_the_same_in_any_company(make: MakeEngine) -> None:
    core = make().core
    alone = [pool(core, [prompt])[0].tobytes() for prompt in PROMPTS]
    assert len(set(alone)) == len(PROMPTS)
    ways: list[tuple[dict[str, Any], int]] = [
        ({}, 0),
        ({}, 6),
        ({"max_num_batched_tokens": 8}, 0),
        ({"max_num_batched_tokens": 9, "enable_prefix_caching": False}, 6),
        ({"batching": "prefill_first", "async_scheduling": True}, 6),
        ({"num_gpu_blocks_override": 9, "max_model_len": 130, "preemption_mode": "recompute"}, 6),
    ]
    for options, neighbours in ways:
        other = make(**options).core
        for _ in range(2):  # the second time with what the prefix cache has
            assert [v.tobytes() for v in pool(other, PROMPTS, neighbours)] == alone, options


def test_without_tokens_a_prompt_has_the_logprobs_that_it_has_with_some(make: MakeEngine) -> None:
    def run(engine: LLMEngine, max_tokens: int, streaming: bool, **more: Any) -> list[Any]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, prompt_logprobs=2, ignore_eos=True, **more)
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(str(i), {"prompt_token_ids": prompt}, params, streaming=streaming)
        parts: dict[str, Any] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                parts[output.request_id] = output
        return [parts[str(i)] for i in range(len(PROMPTS))]

    expected = run(make(), 3, False)
    for options in ({}, {"max_num_batched_tokens": 8}, {"async_scheduling": True}):
        for streaming in (False, True):
            outputs = run(make(**options), 0, streaming, n=2, logprobs=1)
            for output, other in zip(outputs, expected, strict=True):
                assert output.prompt_logprobs == other.prompt_logprobs
                assert [(c.token_ids, c.text, c.finish_reason, c.logprobs) for c in output.outputs] == [
                    ([], "", "length", [])
                ] * 2
                assert output.metrics.first_token_time is None


def test_a_prompt_alone_may_be_as_long_as_the_context(make: MakeEngine) -> None:
    engine = make(max_model_len=64, num_gpu_blocks_override=4)
    prompt = {"prompt_token_ids": (PROMPTS[6] * 2)[:64]}
    with pytest.raises(InvalidRequestError, match="64 tokens"):
        engine.add_request("a", prompt, SamplingParams(max_tokens=1))
    engine.add_request("a", prompt, SamplingParams(max_tokens=0, prompt_logprobs=0))
    [output] = engine.step()
    assert output.finished and output.outputs[0].finish_reason == "length"
    assert len(output.prompt_logprobs or []) == 64


def test_salts_separate_what_is_found(make: MakeEngine) -> None:
    engine, prompt = make(), PROMPTS[6]

    def cached(salt: str) -> int:
        engine.add_request("a", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=2), cache_salt=salt)
        found = 0
        while engine.has_unfinished_requests():
            found = max([found, *(o.metrics.num_cached_tokens for o in engine.step())])
        return found

    assert [cached(salt) for salt in ("", "x", "", "x", "y")] == [0, 0, len(prompt) - 1, len(prompt) - 1, 0]
