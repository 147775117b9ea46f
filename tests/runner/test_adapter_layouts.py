"""More adapters than slots and host memory hold: the same answers in every layout of workers and both batchings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.core.request import LoRARequest
from octavo.core.sampling_params import SamplingParams
from octavo.loader.adapters import AdapterTargets
from octavo.models.config_files import read_model_config
from tests.runner.test_adapter_store import make_adapter

LAYOUTS: list[dict[str, Any]] = [
    {"async_scheduling": True},
    {"batching": "prefill_first"},
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
]


def answers(network: Path, adapters: list[LoRARequest], **options: Any) -> list[list[int]]:
    """Ten prompts with four adapters and none, two slots, and three places in host memory."""
    defaults = {"dtype": "float32", "num_threads": 1, "skip_tokenizer_init": True}
    kept = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 3, "num_gpu_blocks_override": 64}
    llm = LLM(str(network), **{**defaults, **kept, **options})
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
    which = [adapters[i % 5] if i % 5 < 4 else None for i in range(10)]
    found = llm.generate([[1 + i % 7, 2, 3, 4 + i] for i in range(10)], params, lora_request=which)
    stats = llm.llm_engine.stats().adapters
    assert stats is not None and (stats.in_slots, stats.in_host, stats.loads) == (2, 3, 4)
    return [list(output.outputs[0].token_ids) for output in found]


@pytest.mark.parametrize("layout", [*LAYOUTS[:-1], pytest.param(LAYOUTS[-1], marks=pytest.mark.slow)], ids=str)
def test_answers_with_adapters_are_the_same_in_every_layout(
    network: Path, tmp_path: Path, layout: dict[str, Any]
) -> None:
    targets = AdapterTargets(read_model_config(network))
    adapters = [LoRARequest(f"a{i}", i + 1, str(tmp_path / f"a{i}")) for i in range(4)]
    for i in range(4):
        make_adapter(tmp_path / f"a{i}", targets, i)
    alone = answers(network, adapters)
    assert len(set(map(tuple, alone))) > 5
    assert answers(network, adapters, **layout) == alone
