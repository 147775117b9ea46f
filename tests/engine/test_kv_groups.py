"""A network with full and windowed layers: each kind has blocks of its own, and answers are the same in any company."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from tests.whole_outputs import everything

WINDOW, BLOCK = 8, 4
_RNG = random.Random(4)
_SHARED = [_RNG.randrange(3, 64) for _ in range(30)]
PROMPTS = [
    (_SHARED if i % 3 == 0 else []) + [_RNG.randrange(3, 64) for _ in range(n)]
    for i, n in enumerate((5, 40, 17, 9, 33, 26))
]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, seed=1, n=3, max_tokens=25, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.8, seed=2, top_p=0.9, max_tokens=40, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=1, prompt_logprobs=1),
    SamplingParams(temperature=0.7, seed=4, max_tokens=45, ignore_eos=True, logprobs=1, repetition_penalty=1.2),
    SamplingParams(temperature=0.6, seed=5, n=2, max_tokens=30, ignore_eos=True, logprobs=1),
]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers see everything, two a window."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("windowed")
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=2,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.2)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def load(windowed: Path, tiny_model: Path) -> Callable[..., LLM]:
    def make(**options: Any) -> LLM:
        defaults: dict[str, Any] = {
            "kernels": "cpu",
            "block_size": BLOCK,
            "num_gpu_blocks_override": 400,
            "max_num_seqs": 40,
            "max_num_batched_tokens": 64,
            "watermark": 0.0,
            "dtype": "float32",
        }
        return LLM(str(windowed), tokenizer=str(tiny_model), max_model_len=128, **{**defaults, **options})

    pytest.importorskip("octavo._cpu")
    return make


def generate(llm: LLM, which: list[int]) -> list[Any]:
    outputs = llm.generate(
        [{"prompt_token_ids": PROMPTS[i]} for i in which], [PARAMS[i] for i in which], use_tqdm=False
    )
    return [everything(output) for output in outputs]


@pytest.fixture(scope="module")
def alone(load: Callable[..., LLM]) -> list[Any]:
    llm = load(enable_prefix_caching=False)
    return [generate(llm, [i])[0] for i in range(len(PROMPTS))]


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 40, "long_prefill_token_threshold": 7},
        {"num_gpu_blocks_override": 34, "preemption_mode": "recompute"},
        {"num_gpu_blocks_override": 34, "preemption_mode": "swap", "num_host_blocks_override": 100},
        {"async_scheduling": True, "num_gpu_blocks_override": 40, "num_host_blocks_override": 100},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in ({}, {"batching": "prefill_first", "enable_prefix_caching": False})
        ),
    ],
    ids=lambda options: ", ".join(f"{k}={v}" for k, v in options.items()) or "one batch",
)
def test_bit_for_bit_the_same_in_any_company(load: Callable[..., LLM], alone: list[Any], options: Any) -> None:
    llm = load(**options)
    core = llm.llm_engine.core
    assert [group.window for group in core.blocks.groups] == [None, WINDOW]
    for _ in range(2):  # the second time with prefixes in the cache
        assert generate(llm, list(range(len(PROMPTS)))) == alone
    stats = core.scheduler.stats()
    if options.get("num_gpu_blocks_override") == 34:
        assert stats.preemptions_by_recompute + stats.preemptions_by_swap > 0
    if "num_gpu_blocks_override" not in options and options.get("enable_prefix_caching", True):
        assert stats.prefix_hit_tokens > 0
    assert [group.device.num_used for group in core.blocks.groups] == [0, 0]


def test_a_windowed_group_holds_no_more_than_the_window(load: Callable[..., LLM]) -> None:
    llm = load(enable_prefix_caching=False)
    engine = llm.llm_engine
    engine.add_request("a", {"prompt_token_ids": PROMPTS[1]}, SamplingParams(max_tokens=60, ignore_eos=True))
    held = []
    while engine.has_unfinished_requests():
        engine.step()
        held.append([group.device.num_used for group in engine.core.blocks.groups])
    full, windowed = zip(*held[1:-1], strict=True)
    assert max(full) == -(-(40 + 59) // BLOCK)
    assert max(windowed) <= WINDOW // BLOCK + 2


def test_greedy_tokens_are_those_of_transformers(load: Callable[..., LLM], windowed: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(windowed, dtype=torch.float32, attn_implementation="eager")
    output = load().generate({"prompt_token_ids": PROMPTS[0]}, PARAMS[0], use_tqdm=False)[0].outputs[0]
    tokens = PROMPTS[0] + output.token_ids
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0]
    assert output.logprobs is not None
    for i, (token, found) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        expected = logits[len(PROMPTS[0]) - 1 + i].log_softmax(-1)
        assert token == int(expected.argmax())
        assert found[token].logprob == pytest.approx(float(expected[token]), abs=1e-3)
