"""A request with an adapter gives the same bits alone, beside other adapters, after evictions and preemptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, RequestOutput, SamplingParams
from octavo.core.request import LoRARequest
from octavo.loader.adapters import AdapterTargets
from octavo.models.config_files import read_model_config
from tests.runner.plan_worker import make_adapter
from tests.small_llama import save_distinct_llama

pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")

NUM_ADAPTERS = 3
#: In turn: the model itself, then each adapter; prompts of less and more than a block.
NUM_REQUESTS = 8
PARAMS = [
    SamplingParams(
        temperature=(0.0, 0.9)[i % 2],
        seed=i,
        max_tokens=12 + 2 * i,
        ignore_eos=True,
        logprobs=2,
        prompt_logprobs=1,
    )
    for i in range(NUM_REQUESTS)
]
PROMPTS: list[Any] = [
    {"prompt_token_ids": [(7 * i + 13 * j * j) % 61 + 2 for j in range(3 + 5 * i)]} for i in range(NUM_REQUESTS)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama."""
    folder = tmp_path_factory.mktemp("model")
    return save_distinct_llama(folder, vocab_size=64, hidden_size=64, intermediate_size=160)


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest | None]:
    """The adapter of each request."""
    targets, folder = AdapterTargets(read_model_config(model)), tmp_path_factory.mktemp("adapters")
    refs = [make_adapter(folder / f"adapter-{i}", targets, i, rank=(4, 8, 16)[i]) for i in range(NUM_ADAPTERS)]
    given = [None, *(LoRARequest(ref.name, i, ref.path) for i, ref in enumerate(refs, start=1))]
    return [given[i % len(given)] for i in range(NUM_REQUESTS)]


def load(model: Path, **options: Any) -> LLM:
    defaults = {"num_gpu_blocks_override": 200, "max_num_seqs": 8, "max_model_len": 96, "block_size": 4}
    options = {**defaults, "enable_lora": True, "max_loras": NUM_ADAPTERS, **options}
    return LLM(str(model), kernels="cpu", dtype="bfloat16", skip_tokenizer_init=True, **options)


def everything(output: RequestOutput) -> Any:
    completion = output.outputs[0]
    assert completion.error is None
    assert completion.logprobs is not None
    assert output.prompt_logprobs is not None
    return (
        completion.token_ids,
        [{t: (p.logprob, p.rank) for t, p in position.items()} for position in completion.logprobs],
        [None if p is None else {t: (v.logprob, v.rank) for t, v in p.items()} for p in output.prompt_logprobs],
    )


@pytest.fixture(scope="module")
def alone(model: Path, adapters: list[LoRARequest | None]) -> list[Any]:
    """What each request gives alone, by one thread, its prompt computed at once."""
    llm = load(model, num_threads=1)
    return [
        everything(llm.generate(prompt, params, use_tqdm=False, lora_request=adapter)[0])
        for prompt, params, adapter in zip(PROMPTS, PARAMS, adapters, strict=True)
    ]


def run(llm: LLM, adapters: list[LoRARequest | None]) -> list[RequestOutput]:
    return llm.generate(PROMPTS, PARAMS, use_tqdm=False, lora_request=adapters)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16, "num_threads": 2},
        {"enable_prefix_caching": False, "enable_chunked_prefill": False},
    ],
    ids=str,
)
def test_beside_other_adapters(model: Path, adapters: Any, alone: list[Any], options: dict[str, Any]) -> None:
    llm = load(model, **options)
    assert [everything(output) for output in run(llm, adapters)] == alone
    # Once more, as far as prefixes are cached: those of one adapter are not those of another.
    assert [everything(output) for output in run(llm, adapters)] == alone
    same_prompt = [PROMPTS[5]] * NUM_REQUESTS
    outputs = llm.generate(same_prompt, PARAMS[5], use_tqdm=False, lora_request=adapters)
    assert everything(outputs[5]) == alone[5]
    assert len({str(output.outputs[0].token_ids) for output in outputs}) == NUM_ADAPTERS + 1


def test_after_eviction_from_slots_and_host_memory(model: Path, adapters: Any, alone: list[Any]) -> None:
    llm = load(model, max_loras=1, max_cpu_loras=1)
    for _ in range(2):
        assert [everything(output) for output in run(llm, adapters)] == alone
    stats = llm.llm_engine.core.scheduler.stats().adapters
    assert stats is not None
    assert stats.loads > NUM_ADAPTERS
    assert stats.host_evictions > 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_under_preemption(model: Path, adapters: Any, alone: list[Any], mode: str) -> None:
    options = {"num_gpu_blocks_override": 18, "watermark": 0.0, "preemption_mode": mode}
    if mode == "swap":
        options["num_host_blocks_override"] = 64
    outputs = run(load(model, max_loras=2, **options), adapters)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert [everything(output) for output in outputs] == alone


def test_requests_without_adapter_have_the_bits_of_an_engine_without_adapters(
    model: Path, adapters: Any, alone: list[Any]
) -> None:
    plain = LLM(str(model), kernels="cpu", dtype="bfloat16", skip_tokenizer_init=True, num_gpu_blocks_override=200)
    for i in (i for i, adapter in enumerate(adapters) if adapter is None):
        assert everything(plain.generate(PROMPTS[i], PARAMS[i], use_tqdm=False)[0]) == alone[i]
