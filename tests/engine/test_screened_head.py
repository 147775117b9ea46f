"""A screened head changes no bit of an answer, whatever else is in the step (CPU kernels, a small model)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, RequestOutput, SamplingParams
from octavo.core.errors import ConfigError
from octavo.kernels.forward_batch import ForwardBatch, ForwardOutput

pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")

VOCABULARY = 4000
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
#: Requests that want more than the most likely token, or the most likely of some.
OTHERS = [
    SamplingParams(temperature=0.9, seed=1, n=2, max_tokens=7, ignore_eos=True),
    SamplingParams(temperature=0.0, logprobs=2, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.0, allowed_token_ids=[5, 6, 7], max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=0.0, prompt_logprobs=1, max_tokens=3, ignore_eos=True),
]
PROMPTS: list[Any] = [{"prompt_token_ids": [7 * i + j for j in range(3 + 5 * i)]} for i in range(10)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with a vocabulary that is worth a copy, and with logits that differ clearly."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("network")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
    model.save_pretrained(folder)
    return folder


def load(folder: Path, **options: Any) -> LLM:
    defaults: dict[str, Any] = {"max_num_seqs": 16, "num_gpu_blocks_override": 100, "dtype": "bfloat16"}
    return LLM(str(folder), kernels="cpu", skip_tokenizer_init=True, max_model_len=128, **{**defaults, **options})


def answers(outputs: list[RequestOutput]) -> Any:
    return [
        (
            output.prompt_logprobs,
            [(o.token_ids, o.finish_reason, o.cumulative_logprob, o.logprobs) for o in output.outputs],
        )
        for output in outputs
    ]


def screened_steps(llm: LLM) -> list[bool]:
    """Whether each step from now on is screened."""
    runner = llm.llm_engine.core.executor._worker.runner  # type: ignore[attr-defined]
    steps: list[bool] = []
    forward = runner._forward

    def watched(batch: ForwardBatch) -> ForwardOutput:
        output: ForwardOutput = forward(batch)
        steps.append(output.most_likely is not None)
        return output

    runner._forward = watched
    return steps


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "float32"},
        {"async_scheduling": True},
        {"max_num_batched_tokens": 17},
        {"num_gpu_blocks_override": 20, "preemption_mode": "recompute"},
        {"speculative_config": {"method": "ngram", "adaptive": False}},
        {"speculative_config": {"method": "draft_model", "model": "", "adaptive": False}},
    ],
    ids=lambda options: ", ".join(f"{k}={v}" for k, v in options.items()) or "plain",
)
def test_bit_for_bit_the_answers_of_the_whole_head(folder: Path, options: dict[str, Any]) -> None:
    drafts = options.get("speculative_config", {})
    if "model" in drafts:  # it drafts for itself
        options = {"speculative_config": drafts | {"model": str(folder)}}
    plain = load(folder, **options)
    llm = load(folder, screen_lm_head=True, **options)
    steps = screened_steps(llm)
    params = [GREEDY] * 5 + OTHERS
    for these, given in ((PROMPTS[:5], [GREEDY] * 5), (PROMPTS, params), (PROMPTS[:1], [GREEDY])):
        expected = answers(plain.generate(these, given, use_tqdm=False))
        assert answers(llm.generate(these, given, use_tqdm=False)) == expected
    assert {True, False} <= set(steps)


def test_the_copy_is_counted(folder: Path) -> None:
    plain, llm = load(folder), load(folder, screen_lm_head=True)
    grown = [engine.llm_engine.core.executor._worker.runner.startup_facts().weight_bytes for engine in (llm, plain)]  # type: ignore[attr-defined]
    assert grown[0] - grown[1] == VOCABULARY * 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int8"}, "needs a head that is not quantised"),
        ({"enable_lora": True}, "needs a head without adapters"),
        ({"kernels": "reference"}, "is for the CPU kernels, not for 'reference'"),
    ],
)
def test_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(folder), **{"kernels": "cpu", "skip_tokenizer_init": True, "screen_lm_head": True, **options})
