"""A prefix cache that outlives its engine: another one finds what was stored, and answers with the same bits."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, AsyncLLM, SamplingParams
from octavo.config.engine_config import make_config
from octavo.core.errors import ConfigError
from octavo.core.stats import StoreStats
from tests.small_llama import save_distinct_llama
from tests.whole_outputs import everything

pytestmark = pytest.mark.usefixtures("quick_collections")

BLOCK = 8
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "block_size": BLOCK,
    "num_gpu_blocks_override": 64,
    "max_num_batched_tokens": 32,
}
PROMPT = [3 + 5 * i % 250 for i in range(90)]
PARAMS = SamplingParams(temperature=0.8, seed=4, max_tokens=9, ignore_eos=True, logprobs=2)


SMALL: dict[str, Any] = {"vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 3, "initializer_range": 0.2}
HEADS: dict[str, Any] = {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
NEAR = {"state_checkpoint_tokens": 2 * BLOCK}


def lfm2() -> Any:
    from transformers import Lfm2Config

    return Lfm2Config(**SMALL, **HEADS, max_position_embeddings=128, layer_types=["conv", "full_attention", "conv"])


def qwen3_5() -> Any:
    from transformers import Qwen3_5TextConfig

    kinds = ["linear_attention", "full_attention", "linear_attention"]
    heads = {"linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_num_key_heads": 2}
    return Qwen3_5TextConfig(
        **SMALL, **HEADS, **heads, max_position_embeddings=128, layer_types=kinds, head_dim=16,
        linear_num_value_heads=4,
    )  # fmt: skip


def mamba() -> Any:
    from transformers import MambaConfig

    return MambaConfig(**SMALL, state_size=8, time_step_rank=6, pad_token_id=0)


def save_states(config: Any, folder: Path) -> Path:
    """A network with recurrent states and random weights."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers that see everything, and one with a window of three blocks."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("windowed")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    window = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=258, num_key_value_heads=2, max_position_embeddings=128, **shape, **window)
    model = Qwen2ForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.2)
    model.save_pretrained(folder)
    return folder


def stores_of(llm: LLM) -> StoreStats:
    stores = llm.llm_engine.stats().stores
    assert stores is not None
    return stores


def start(model: Path, folder: Path, **options: Any) -> LLM:
    """An engine whose store is open: until the digest of the weights is known, nothing is written or found."""
    llm = LLM(str(model), skip_tokenizer_init=True, kv_disk=str(folder), **OPTIONS | options)
    end = time.monotonic() + 30
    while not stores_of(llm).tiers:  # any step brings the statistics of stores that are open
        llm.generate([[9]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), use_tqdm=False)
        time.sleep(0.05)
        assert time.monotonic() < end, "the store was not opened"
    return llm


def answer(llm: LLM, prompt: list[int] = PROMPT) -> tuple[Any, int]:
    (output,) = llm.generate([prompt], PARAMS, use_tqdm=False)
    assert output.metrics is not None
    return everything(output), output.metrics.num_cached_tokens


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_cache_dtype": "int8"},
        {"async_scheduling": True},
        pytest.param({"pipeline_parallel_size": 2, "num_threads": 1}, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2, "num_threads": 1}, marks=pytest.mark.slow),
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "default",
)
def test_another_engine_finds_the_prompt(tiny_model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    check(tiny_model, tmp_path, **options)


def test_another_engine_finds_the_prompt_of_a_model_with_windows(windowed: Path, tmp_path: Path) -> None:
    check(windowed, tmp_path)


@pytest.mark.parametrize(
    ("config", "options", "found"),
    [
        (lfm2, NEAR, 80),
        (qwen3_5, NEAR, 80),
        (qwen3_5, NEAR | {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, 80),
        (qwen3_5, NEAR | {"async_scheduling": True}, 80),
        (mamba, {}, 88),
        pytest.param(lfm2, NEAR | {"pipeline_parallel_size": 2, "num_threads": 1}, 80, marks=pytest.mark.slow),
        pytest.param(qwen3_5, NEAR | {"tensor_parallel_size": 2, "num_threads": 1}, 80, marks=pytest.mark.slow),
    ],
)
def test_another_engine_finds_the_last_checkpoint_of_states(
    tmp_path: Path, config: Any, options: dict[str, Any], found: int
) -> None:
    check(save_states(config(), tmp_path / "model"), tmp_path / "kv", found, found, **options)


def test_damaged_states_are_not_used(tmp_path: Path) -> None:
    model, kept = save_states(qwen3_5(), tmp_path / "model"), tmp_path / "kv"
    first = start(model, kept, **NEAR)
    alone, _ = answer(first)
    first.llm_engine.core.shutdown()
    values = list(kept.glob("??/*"))
    size = max(file.stat().st_size for file in values)
    states = [file for file in values if file.stat().st_size == size]
    assert len(states) == 6 < len(values), "after every 16 of 98 tokens"
    for file in states:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    second = start(model, kept, **NEAR)
    assert answer(second) == (alone, 0)
    end = time.monotonic() + 30
    while not stores_of(second).tiers[0].damaged:  # until they are reported
        answer(second, [9])
        assert time.monotonic() < end, "no damage was found"
    second.llm_engine.core.shutdown()


def test_states_outlive_an_engine_that_is_killed(tmp_path: Path) -> None:
    model, kept = save_states(lfm2(), tmp_path / "model"), tmp_path / "kv"
    options = OPTIONS | NEAR | {"skip_tokenizer_init": True, "kv_disk": str(kept), "engine_restarts": 5}

    async def ask(llm: AsyncLLM) -> tuple[Any, int]:
        async for output in llm.generate("a", PROMPT, PARAMS):
            last = output
        assert last.metrics is not None
        return everything(last), last.metrics.num_cached_tokens

    async def until(holds: Callable[[], bool]) -> None:
        for _ in range(1500):
            if holds():
                return
            await asyncio.sleep(0.02)
        raise AssertionError("it did not happen")

    async def is_open(llm: AsyncLLM) -> None:
        for _ in range(300):
            stats = (await llm.replica_stats())[0].stores
            if stats is not None and stats.tiers:
                return
            async for _ in llm.generate("b", [9], SamplingParams(max_tokens=2)):
                pass

    async def serve() -> list[tuple[Any, int]]:
        llm = await AsyncLLM.start(make_config(model=str(model), **options))
        try:
            await is_open(llm)
            answers = [await ask(llm)]
            await until(lambda: len(list(kept.glob("??/*"))) >= 98 // 8 + 98 // 16)
            (before,) = llm.replica_states()
            assert before.pid is not None
            os.kill(before.pid, signal.SIGKILL)
            await until(
                lambda: (now := llm.replica_states()[0]).status == "ready" and now.pid not in (None, before.pid)
            )
            await is_open(llm)
            return [*answers, await ask(llm)]
        finally:
            await llm.shutdown()

    (alone, nothing), (again, cached) = asyncio.run(serve())
    assert alone == again and (nothing, cached) == (0, 80)


def check(model: Path, folder: Path, in_memory: int = 89, found: int = 88, **options: Any) -> None:
    llm = LLM(str(model), skip_tokenizer_init=True, **OPTIONS | options)
    alone, _ = answer(llm)
    assert answer(llm) == (alone, in_memory)
    llm.llm_engine.core.shutdown()

    first = start(model, folder, **options)
    assert answer(first) == (alone, 0)
    assert stores_of(first).fetched_tokens == 0
    first.llm_engine.core.shutdown()

    second = start(model, folder, **options)
    assert answer(second) == (alone, found)
    stats = stores_of(second)
    assert stats.fetched_tokens == found and stats.waiting == 0
    longer, cached = answer(second, [*PROMPT[:48], *PROMPT[70:]])
    assert cached == 48 and longer != alone, "fetched blocks are cached like others"
    second.llm_engine.core.shutdown()


def test_an_evicted_prompt_comes_back_from_disk(tiny_model: Path, tmp_path: Path) -> None:
    llm = start(tiny_model, tmp_path, num_gpu_blocks_override=16)
    alone, _ = answer(llm)
    for token in (100, 101):
        answer(llm, [token] * 90)
    assert answer(llm) == (alone, len(PROMPT) // BLOCK * BLOCK)
    assert stores_of(llm).fetched_tokens == len(PROMPT) // BLOCK * BLOCK
    llm.llm_engine.core.shutdown()


def test_a_served_engine_writes_when_it_is_idle(tiny_model: Path, tmp_path: Path) -> None:
    config = make_config(model=str(tiny_model), skip_tokenizer_init=True, kv_disk=str(tmp_path), **OPTIONS)

    async def ask(llm: AsyncLLM) -> tuple[Any, int]:
        async for output in llm.generate("a", PROMPT, PARAMS):
            last = output
        assert last.metrics is not None
        return everything(last), last.metrics.num_cached_tokens

    async def serve() -> list[tuple[Any, int]]:
        answers = []
        for _ in range(2):
            llm = await AsyncLLM.start(config)
            for _ in range(300):  # until the store is open
                stats = (await llm.replica_stats())[0].stores
                assert stats is not None
                if stats.tiers:
                    break
                async for _ in llm.generate("b", [9], SamplingParams(max_tokens=2)):
                    pass
            answers.append(await ask(llm))
            while (stats := (await llm.replica_stats())[0].stores) is not None and stats.queued_blocks:
                await asyncio.sleep(0.02)
            await llm.shutdown()
        return answers

    (alone, nothing), (again, cached) = asyncio.run(serve())
    assert alone == again and (nothing, cached) == (0, len(PROMPT) // BLOCK * BLOCK)


def test_other_weights_find_nothing(tiny_model: Path, windowed: Path, tmp_path: Path) -> None:
    first = start(tiny_model, tmp_path)
    answer(first)
    first.llm_engine.core.shutdown()
    for model, options in ((tiny_model, {"kv_cache_dtype": "int8"}), (windowed, {})):
        other = start(model, tmp_path, **options)
        assert answer(other)[1] == 0
        other.llm_engine.core.shutdown()


def test_sleep_ends_what_waits_and_the_prompt_is_found_afterwards(tiny_model: Path, tmp_path: Path) -> None:
    llm = start(tiny_model, tmp_path)
    alone, _ = answer(llm)
    llm.sleep(level=1)
    llm.wake_up()
    assert answer(llm) == (alone, len(PROMPT) // BLOCK * BLOCK)
    llm.llm_engine.core.shutdown()


def test_no_prefix_cache_no_store(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_disk"):
        LLM(str(tiny_model), kv_disk=str(tmp_path), enable_prefix_caching=False, **OPTIONS)


def test_one_replica_computes_a_prompt_and_another_decodes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.engine.replicas._SHORT_PROMPT", 64)
    model = save_distinct_llama(tmp_path / "model", max_position_embeddings=4096)
    options: dict[str, Any] = OPTIONS | {
        "max_model_len": 4096,
        "num_gpu_blocks_override": 1024,
        "skip_tokenizer_init": True,
    }
    options |= {"num_threads": 1}
    prompts = {str(i): [3 + (i + 5 * place) % 250 for place in range(90)] for i in range(3)} | {"short": [5, 6, 7]}
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=900, ignore_eos=True, logprobs=2)
    alone = LLM(str(model), **options).generate([*prompts.values()], params, use_tqdm=False)
    expected = dict(zip(prompts, map(everything, alone), strict=True))
    roles: dict[str, Any] = {
        "data_parallel_size": 2,
        "replica_roles": ["prefill", "decode"],
        "kv_disk": str(tmp_path / "kv"),
    }

    async def ask(engine: AsyncLLM, name: str) -> Any:
        async for output in engine.generate(name, prompts[name], params, streaming=False):
            last = output
        return everything(last)

    async def run() -> None:
        engine = await AsyncLLM.start(make_config(model=str(model), **options, **roles))
        try:
            answers = dict(zip(prompts, await asyncio.gather(*map(partial(ask, engine), prompts)), strict=True))
            assert answers == expected
            moved = engine.num_moved
            assert 0 < moved <= 3, "the short one begins where it is decoded; a slow disk may outlast an answer"
            assert engine.num_resumed == 0
            _, decoding = await engine.replica_stats()
            assert decoding.stores is not None and decoding.stores.fetched_tokens >= 80
            # A prompt that the decoding replica has is not computed elsewhere.
            assert await ask(engine, "1") == expected["1"]
            assert engine.num_moved == moved
        finally:
            await engine.shutdown()

    asyncio.run(run())
