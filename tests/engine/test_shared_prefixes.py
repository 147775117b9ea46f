"""Prefixes that the operator gives: computed once, shared by all prompts that begin with them, and never evicted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from octavo import LLM, AsyncLLM, ConfigError, EngineStateError, InvalidRequestError, SamplingParams, StepStats
from octavo.config.engine_config import make_config

BLOCK = 8
OPTIONS: dict[str, Any] = {"block_size": BLOCK, "num_gpu_blocks_override": 24, "max_model_len": 96, "max_num_seqs": 4}
OPTIONS |= {"device": "cpu", "max_num_batched_tokens": 64}
SYSTEM = "You are a terse assistant who answers in verse."
NUM_BLOCKS = -(-len(SYSTEM) // BLOCK)
QUESTIONS = [SYSTEM + text for text in (" Why?", " How many rivers are there?", "")] + ["unlike all others"]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), **OPTIONS)


@pytest.fixture
def clean(llm: LLM) -> Iterator[LLM]:
    yield llm
    for prefix in llm.shared_prefixes():
        llm.remove_shared_prefix(prefix.name)
    llm.llm_engine.reset_prefix_cache()
    stats = llm.llm_engine.stats()
    assert (stats.blocks_used, stats.blocks_cached, stats.blocks_pinned) == (0, 0, 0)
    assert stats.blocks_free == 24


def answers(llm: LLM) -> list[Any]:
    params = SamplingParams(temperature=0.8, max_tokens=12, logprobs=2, ignore_eos=True, seed=3)
    outputs = llm.generate(QUESTIONS, params, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.outputs[0].text) for o in outputs]


def evict_all(llm: LLM) -> None:
    """Requests of other prompts that use every block that is not pinned."""
    for token in range(10, 14):
        llm.generate([[token] * 90], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)


def test_a_prefix_is_held_for_a_time_and_not_pinned(clean: LLM) -> None:
    alone = answers(clean)
    clean.llm_engine.reset_prefix_cache()
    name = clean.add_shared_prefix(SYSTEM, ttl=3600.0)
    stats = clean.llm_engine.stats()
    full = len(SYSTEM) // BLOCK
    assert stats.blocks_pinned == 0 and stats.retention is not None and stats.retention.held_blocks == full
    evict_all(clean)
    [output] = clean.generate([QUESTIONS[0]], PARAMS, use_tqdm=False)
    assert output.metrics.num_cached_tokens >= full * BLOCK
    assert answers(clean) == alone
    clean.remove_shared_prefix(name)
    evict_all(clean)
    assert clean.generate([QUESTIONS[0]], PARAMS, use_tqdm=False)[0].metrics.num_cached_tokens == 0
    assert clean.add_shared_prefix(SYSTEM, ttl=0.001)
    time.sleep(0.005)
    kept = clean.add_shared_prefix("x" * 95, ttl=60.0)
    with pytest.raises(ConfigError, match=r"cache_hold_share=0\.5"):
        clean.add_shared_prefix("y" * 95, ttl=60.0)
    assert [prefix.name for prefix in clean.shared_prefixes()] == [kept], (
        "neither what has expired nor what was refused"
    )


def test_answers_are_equal_in_bits_and_the_prefix_is_not_computed(clean: LLM) -> None:
    alone = answers(clean)
    clean.llm_engine.reset_prefix_cache()
    unseeded = clean.llm_engine.inputs._unseeded
    assert clean.add_shared_prefix(SYSTEM) == "prefix-1"
    num_tokens = len(SYSTEM)  # a token is a letter, and the last block is partly filled
    (prefix,) = clean.shared_prefixes()
    assert (len(prefix.token_ids), prefix.num_blocks) == (num_tokens, NUM_BLOCKS)
    assert clean.llm_engine.inputs._unseeded == unseeded, "requests without a seed would get other seeds"
    evict_all(clean)
    assert answers(clean) == alone
    clean.llm_engine.reset_prefix_cache()
    outputs = clean.generate(QUESTIONS, PARAMS, use_tqdm=False)
    assert all(o.metrics.num_cached_tokens >= num_tokens for o in outputs[:2])
    assert outputs[3].metrics.num_cached_tokens == 0


def test_its_blocks_are_counted_apart(clean: LLM) -> None:
    clean.add_shared_prefix(SYSTEM, "system")
    evict_all(clean)
    stats = clean.llm_engine.stats()
    assert stats.blocks_pinned == NUM_BLOCKS
    assert stats.blocks_used == 0
    assert stats.blocks_free + stats.blocks_cached + stats.blocks_pinned == 24
    clean.remove_shared_prefix("system")
    stats = clean.llm_engine.stats()
    assert stats.blocks_pinned == 0
    evict_all(clean)
    assert clean.generate(QUESTIONS[0], PARAMS, use_tqdm=False)[0].metrics.num_cached_tokens == 0


def test_it_is_computed_again_after_sleep(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), kernels="reference", **OPTIONS)  # whose weights can move
    llm.add_shared_prefix(SYSTEM, "system")
    before = llm.generate(QUESTIONS[0], PARAMS, use_tqdm=False)[0]
    llm.sleep()
    assert llm.llm_engine.stats().blocks_pinned == 0
    with pytest.raises(EngineStateError, match="sleeps"):
        llm.add_shared_prefix("another text of some length", "other")
    llm.wake_up()
    assert llm.llm_engine.stats().blocks_pinned == NUM_BLOCKS
    after = llm.generate(QUESTIONS[0], PARAMS, use_tqdm=False)[0]
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
    assert after.metrics.num_cached_tokens == before.metrics.num_cached_tokens == len(SYSTEM)


def test_a_prefix_that_cannot_be_kept_is_refused(clean: LLM) -> None:
    add = clean.add_shared_prefix
    add([9] * 8, "first")
    with pytest.raises(
        ConfigError, match=r"its 12 blocks would leave too few .* max_model_len=96 tokens, which needs 12"
    ):
        add([7] * 96, "long")  # 11 would be left
    assert [p.name for p in clean.shared_prefixes()] == ["first"]
    with pytest.raises(ConfigError, match="there is a shared prefix 'first' already"):
        add(SYSTEM, "first")
    with pytest.raises(ConfigError, match="no shared prefix 'none'; known: first"):
        clean.remove_shared_prefix("none")
    with pytest.raises(InvalidRequestError, match="97 tokens"):
        add([9] * 97)
    assert clean.llm_engine.stats().blocks_pinned == 1
    clean.llm_engine.add_request("open", "x")
    with pytest.raises(EngineStateError, match="unfinished"):
        add(SYSTEM)
    clean.llm_engine.abort_request("open")


def test_requests_that_share_it_may_be_larger_than_the_blocks_beside_it(clean: LLM) -> None:
    clean.add_shared_prefix([5] * 80, "ten blocks")  # 14 are left
    params = SamplingParams(n=4, max_tokens=4, temperature=0, ignore_eos=True)
    same, other = clean.generate([[5] * 80 + [6] * 9, [6] * 89], params, use_tqdm=False)
    assert [o.finish_reason for o in same.outputs] == ["length"] * 4
    assert "beside the 10 of shared prefixes" in (other.outputs[0].error or "")


def test_files_are_read_at_start(tiny_model: Path, tmp_path: Path) -> None:
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file, text in zip(files, (SYSTEM, "A quite different text of several blocks"), strict=True):
        file.write_text(text)
    llm = LLM(str(tiny_model), shared_prefix=[str(file) for file in files], **OPTIONS)
    assert [p.name for p in llm.shared_prefixes()] == [str(file) for file in files]
    assert llm.generate(QUESTIONS[0], PARAMS, use_tqdm=False)[0].metrics.num_cached_tokens >= 47
    with pytest.raises(ConfigError, match=r"cannot read shared prefix .*none.txt: No such file"):
        LLM(str(tiny_model), shared_prefix=str(tmp_path / "none.txt"), **OPTIONS)
    with pytest.raises(ConfigError, match="needs enable_prefix_caching"):
        LLM(str(tiny_model), shared_prefix=[str(files[0])], enable_prefix_caching=False, **OPTIONS)
    llm = LLM(str(tiny_model), enable_prefix_caching=False, **OPTIONS)
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        llm.add_shared_prefix(SYSTEM)


def test_a_served_engine_shares_prefixes_too(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "system.txt"
    file.write_text(SYSTEM)

    class Kept:
        steps: ClassVar[list[StepStats]] = []

        def log(self, stats: StepStats) -> None:
            self.steps.append(stats)

    async def run() -> None:
        config = make_config(model=str(tiny_model), shared_prefix=str(file), **OPTIONS)
        llm = await AsyncLLM.start(config, stat_loggers=[Kept()])
        try:
            assert (await llm.stats()).blocks_pinned == NUM_BLOCKS
            assert [p.name for p in llm.shared_prefixes()] == [str(file)]
            assert [(s.blocks_pinned, s.prefill_tokens) for s in Kept.steps] == [(6, 47)], "it is computed once"
            await llm.reset_prefix_cache()
            async for output in llm.generate("a", QUESTIONS[0], PARAMS):
                assert output.metrics.num_cached_tokens >= 47
            assert await llm.add_shared_prefix("One more text, not so short") == "prefix-1"
            with pytest.raises(ConfigError, match="too few for a request of max_model_len=96"):
                await llm.add_shared_prefix([5] * 80, "large")
            await llm.remove_shared_prefix(str(file))
            assert (await llm.stats()).blocks_pinned == 4
            adding = asyncio.create_task(llm.add_shared_prefix([7] * 24, "cancelled"))
            await asyncio.sleep(0)
            adding.cancel()
            with pytest.raises(asyncio.CancelledError):
                await adding
            stats = await llm.stats()
            assert (stats.blocks_pinned, stats.blocks_used) == (4, 0)
            assert [p.name for p in llm.shared_prefixes()] == ["prefix-1"]
        finally:
            await llm.shutdown()

    asyncio.run(run())
