"""Tokens and logprobs of engines with 1, 2 and 4 workers, in bfloat16 with the compiled kernels, bit for bit."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from tests.executor.small_engines import TIGHT, WORK, answers
from tests.small_llama import make_llama

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("octavo._cpu") is None, reason="the compiled kernels were not built"),
]


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network whose sizes 4 workers divide, wide enough that another order of sums shows after rounding."""
    import torch

    folder = tmp_path_factory.mktemp("wide")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "max_position_embeddings": 256}
    model = make_llama(1, **sizes, num_attention_heads=8, num_key_value_heads=4, initializer_range=0.1)
    model.to(torch.bfloat16).save_pretrained(folder)
    for file in tiny_model.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def alone(model: Path) -> list[Any]:
    return answers(LLM(str(model), device="cpu", block_size=4, num_gpu_blocks_override=400), WORK)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (4, 1), (1, 2), (1, 4), (2, 2)])
def test_the_number_of_workers_changes_no_bit(
    ranks: int, stages: int, preemption: str, model: Path, alone: list[Any]
) -> None:
    llm = LLM(
        str(model),
        device="cpu",
        tensor_parallel_size=ranks,
        pipeline_parallel_size=stages,
        preemption_mode=preemption,
        num_host_blocks_override=100,
        **TIGHT,
    )
    assert answers(llm, WORK) == alone
    llm.llm_engine.core.shutdown()


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (1, 2), (2, 2)])
def test_drafts_change_no_bit(ranks: int, stages: int, model: Path, alone: list[Any]) -> None:
    llm = LLM(
        str(model),
        device="cpu",
        tensor_parallel_size=ranks,
        pipeline_parallel_size=stages,
        speculative_config={"method": "ngram", "prompt_lookup_min": 1, "adaptive": False},
        **TIGHT,
    )
    assert answers(llm, WORK) == alone
    stats = llm.llm_engine.core.scheduler.stats().speculation
    assert stats is not None and 0 < stats.accepted_tokens < stats.draft_tokens
    llm.llm_engine.core.shutdown()


def test_a_draft_model_on_several_ranks_changes_no_bit(model: Path, alone: list[Any]) -> None:
    """Each rank has its share of the draft model, and all draft the same: here what the model itself says."""
    llm = LLM(
        str(model),
        device="cpu",
        tensor_parallel_size=2,
        speculative_config={"model": str(model), "num_speculative_tokens": 3, "adaptive": False},
        **TIGHT,
    )
    assert answers(llm, WORK) == alone
    stats = llm.llm_engine.core.scheduler.stats().speculation
    assert stats is not None and 0 < stats.accepted_tokens == stats.draft_tokens
    llm.llm_engine.core.shutdown()
