"""Engines that share a Redis server: one finds what another computed; failures of the server change no answer."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from octavo import LLM, SamplingParams
from octavo.core.outputs import RequestOutput
from octavo.kvstore import breaker
from tests.kvstore.redis_server import redis_server

PARAMS = SamplingParams(max_tokens=6, temperature=0.8, seed=3, logprobs=2, ignore_eos=True)
PROMPTS = [[random.Random(n).randrange(3, 90) for _ in range(100)] for n in range(4)]


def make_engine(model: Path, url: str | None = None) -> LLM:
    return LLM(str(model), max_model_len=128, block_size=16, num_gpu_blocks_override=40, kv_store=url)


def answer(llm: LLM) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False)


def bits(outputs: list[RequestOutput]) -> list[object]:
    completions = [output.outputs[0] for output in outputs]
    assert all(completion.logprobs for completion in completions)
    return [(completion.token_ids, str(completion.logprobs)) for completion in completions]


def wait_until(condition: Callable[[], object], seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> list[object]:
    return bits(answer(make_engine(tiny_model)))


def test_an_engine_finds_the_prefixes_that_another_has_computed(tiny_model: Path, alone: list[object]) -> None:
    with redis_server() as server:
        first = make_engine(tiny_model, server.url)
        assert bits(answer(first)) == alone
        second = make_engine(tiny_model, server.url)

        def is_found() -> bool:
            second.reset_prefix_cache()
            outputs = answer(second)
            assert bits(outputs) == alone
            return all(output.num_cached_tokens == 96 for output in outputs)

        wait_until(is_found)  # the first one writes beside its steps
        stores = second.stats().stores
        assert stores is not None and stores.fetched_tokens >= 4 * 96


@pytest.mark.parametrize("fault", ["killed", "frozen", "emptied", "started again"])
def test_a_failing_store_changes_no_answer(
    tiny_model: Path, alone: list[object], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault happens while an engine answers; the store is of use after it."""
    monkeypatch.setattr(breaker, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(breaker, "LONGEST_PAUSE", 0.1)
    with redis_server() as server:
        faults: dict[str, Callable[[], None]] = {
            "killed": server.kill,
            "frozen": server.freeze,
            "emptied": redis.Redis.from_url(server.url).flushall,
            "started again": server.restart,
        }
        llm = make_engine(tiny_model, f"{server.url}?socket_timeout=0.2")
        breaks = threading.Timer(0.02, faults[fault])
        breaks.start()
        for _ in range(5):
            llm.reset_prefix_cache()
            assert bits(answer(llm)) == alone
        breaks.join()
        if fault == "killed":
            server.start()
        server.thaw()

        def is_found() -> bool:
            llm.reset_prefix_cache()
            outputs = answer(llm)
            assert bits(outputs) == alone
            return any(output.num_cached_tokens == 96 for output in outputs)

        wait_until(is_found)


def test_a_full_store_changes_no_answer_and_says_so(tiny_model: Path, alone: list[object]) -> None:
    with redis_server(maxmemory="1kb", maxmemory_policy="noeviction") as server:
        llm = make_engine(tiny_model, server.url)

        def has_trouble() -> bool:
            llm.reset_prefix_cache()
            assert bits(answer(llm)) == alone
            stores = llm.stats().stores
            return stores is not None and any("maxmemory" in tier.trouble for tier in stores.tiers)

        wait_until(has_trouble)
