"""Adapters in Python: named by requests, loaded on first use, gone from disk, unloaded; computed end to end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, AdapterConflictError, AdapterError, AsyncLLM, BeamSearchParams, LoRARequest, SamplingParams
from octavo.core.failures import ADAPTER
from tests.adapters import write_adapter

OPTIONS: dict[str, Any] = {
    "device": "cpu", "kernels": "reference", "num_threads": 1, "num_gpu_blocks_override": 100, "enable_lora": True,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def paths(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three adapters."""
    root = tmp_path_factory.mktemp("adapters")
    return [str(write_adapter(root / name, tiny_model, seed=seed)) for seed, name in enumerate("abc")]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    """One slot, and room for one adapter: each other one takes its place."""
    return LLM(str(tiny_model), max_loras=1, max_cpu_loras=1, **OPTIONS)


def ids(llm: LLM, adapter: Any = None, prompts: Any = "hello") -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=adapter)
    return [output.outputs[0].token_ids for output in outputs]


def test_requests_name_their_adapters(llm: LLM, paths: list[str]) -> None:
    a, b = LoRARequest("a", 1, paths[0]), LoRARequest("b", 2, paths[1])
    [base], [first], [second] = ids(llm), ids(llm, a), ids(llm, b)
    assert len({tuple(base), tuple(first), tuple(second)}) == 3
    adapters = [a, None, b, a]
    assert ids(llm, adapters, ["hello"] * 4) == [first, base, second, first]
    assert ids(llm, LoRARequest("a", 1)) == [first]  # loaded already
    messages = [{"role": "user", "content": "hello"}]
    chats = [llm.chat(messages, GREEDY, lora_request=x, use_tqdm=False)[0].outputs[0].token_ids for x in (None, a)]
    assert chats[0] != chats[1]
    beam = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)
    beams = [llm.beam_search("hello", beam, lora_request=x, use_tqdm=False)[0].sequences for x in (None, a)]
    assert beams[0][0].tokens != beams[1][0].tokens
    assert llm.llm_engine.list_loras() == {1, 2}


def test_a_bad_adapter_fails_its_own_requests_alone(llm: LLM, paths: list[str]) -> None:
    good, bad = LoRARequest("a", 1, paths[0]), LoRARequest("bad", 9, "/nothing/here")
    outputs = llm.generate(["x", "y"], GREEDY, use_tqdm=False, lora_request=[good, bad])
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error"]
    assert "/nothing/here" in (outputs[1].outputs[0].error or "")
    with pytest.raises(AdapterError) as raised:
        llm.generate("x", GREEDY, lora_request=bad)
    assert str(raised.value.file) == "/nothing/here"
    assert not llm.llm_engine.has_unfinished_requests()


def test_files_that_change_after_loading_are_an_error_until_loaded_again(
    llm: LLM, tiny_model: Path, paths: list[str], tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "moving", tiny_model, seed=5)
    moving = LoRARequest("moving", 7, str(folder))
    [before] = ids(llm, moving)
    other = LoRARequest("c", 3, paths[2])
    [expected] = ids(llm, other)  # takes the place of the first
    write_adapter(folder, tiny_model, seed=6)
    outputs = llm.generate(["hello"] * 2, GREEDY, use_tqdm=False, lora_request=[moving, other])
    failed = outputs[0].outputs[0]
    assert (failed.finish_reason, failed.error_kind) == ("error", ADAPTER) and failed.adapter_failed
    assert "'moving'" in (failed.error or "") and str(tmp_path) not in (failed.error or "")
    assert outputs[1].outputs[0].token_ids == expected
    engine = llm.llm_engine
    with pytest.raises(AdapterConflictError, match="with other content"):
        engine.add_lora(moving)
    assert engine.add_lora(moving, load_inplace=True)
    assert not engine.add_lora(moving)
    assert ids(llm, moving)[0] not in (before, expected)
    assert engine.remove_lora(7) and not engine.remove_lora(7)
    write_adapter(folder, tiny_model, seed=5)
    assert ids(llm, moving) == [before]


def test_an_adapter_in_use_is_not_removed(llm: LLM, paths: list[str]) -> None:
    engine = llm.llm_engine
    request = LoRARequest("a", 1, paths[0])
    engine.add_request("r", "hello", GREEDY, lora_request=request)
    with pytest.raises(AdapterConflictError, match="in use by 1 open requests"):
        engine.remove_lora(1)
    engine.abort_request("r")
    assert engine.remove_lora(1)
    engine.add_request("r", "hello", GREEDY, lora_request=request)
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.remove_lora(1)


def test_many_replicas_and_tasks_share_one_registry(tiny_model: Path, paths: list[str]) -> None:
    a, b = (LoRARequest(name, number, path) for name, number, path in zip("ab", (1, 2), paths, strict=False))
    options = {
        **OPTIONS,
        "kernels": "auto",
        "data_parallel_size": 2,
        "max_loras": 2,
        "data_parallel_routing": "round_robin",
    }

    async def converse() -> None:
        async with AsyncLLM(str(tiny_model), **options) as llm:
            reads: list[str] = []
            read = llm.adapters.read

            def counted(request: LoRARequest) -> Any:
                reads.append(request.lora_name)
                return read(request)

            llm.adapters.read = counted  # type: ignore[method-assign]

            async def ask(name: str, adapter: LoRARequest | None) -> list[int]:
                [output] = [o async for o in llm.generate(name, "hello", GREEDY, lora_request=adapter, streaming=False)]
                return output.outputs[0].token_ids

            adapters = [None, a, b] * 4
            answers = await asyncio.gather(*(ask(str(i), adapter) for i, adapter in enumerate(adapters)))
            assert sorted(reads) == ["a", "b"]
            assert answers == answers[:3] * 4 and len(set(map(tuple, answers))) == 3
            assert await llm.list_loras() == {1, 2}
            assert await llm.pin_lora(1) and not await llm.pin_lora(5)
            with pytest.raises(AdapterError, match="cannot be pinned"):
                await llm.pin_lora(2)
            assert await ask("again", b) == answers[2]
            # Unloading waits for what runs, also when nobody waits for it any more.
            long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
            stream = await llm.submit("long", "hello", long, lora_request=a)
            with pytest.raises(AdapterConflictError, match="in use"):
                await llm.remove_lora(1)
            waiting = asyncio.create_task(llm.remove_lora(1, wait=True))
            await asyncio.sleep(0)
            with pytest.raises(AdapterConflictError, match="being unloaded"):
                await llm.submit("late", "hello", GREEDY, lora_request=a)
            waiting.cancel()
            tokens = [token async for output in stream for token in output.outputs[0].token_ids]
            assert len(tokens) == 200 and tokens[:8] == answers[1]
            assert await llm.list_loras() == {2}
            assert await llm.pin_lora(2)  # the place of the other is free
            assert await llm.remove_lora(2, wait=True)
            assert not await llm.remove_lora(2)

    asyncio.run(converse())


def test_without_the_option_it_is_named(tiny_model: Path, paths: list[str]) -> None:
    llm = LLM(str(tiny_model), **{**OPTIONS, "enable_lora": False})
    with pytest.raises(AdapterError, match="enable_lora=True"):
        llm.generate("x", GREEDY, lora_request=LoRARequest("a", 1, paths[0]))
