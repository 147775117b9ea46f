"""A conversation of many turns on networks with windows: it holds as many blocks at its end as at its beginning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.config.kv_spec import window_blocks
from octavo.core.stats import SchedulerStats

WINDOW, BLOCK, BUDGET = 8, 4, 16
ONE = window_blocks(WINDOW, BLOCK)
TURNS = 12
ASKED = [[3 + (7 * turn + 5 * i) % 59 for i in range(14 + turn % 5)] for turn in range(TURNS)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=1)

#: (windows of the KV groups, blocks for little memory)
KINDS: dict[str, tuple[list[int | None], int]] = {
    "windows alone": ([WINDOW], ONE + 2 * BUDGET // BLOCK),
    "five windows, one full": ([None, WINDOW], 30),
}


def _save(kind: str, folder: Path) -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, MistralConfig, MistralForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "sliding_window": WINDOW,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    if kind == "windows alone":
        model = MistralForCausalLM(MistralConfig(num_hidden_layers=2, **shape))
    else:
        layers = ["sliding_attention"] * 5 + ["full_attention"]
        model = Gemma3ForCausalLM(
            Gemma3TextConfig(num_hidden_layers=6, layer_types=layers, query_pre_attn_scalar=16, **shape)
        )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)


@pytest.fixture(scope="module", params=KINDS)
def load(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Any:
    pytest.importorskip("octavo._cpu")
    folder = tmp_path_factory.mktemp("windows")
    _save(request.param, folder)

    def make(**options: Any) -> LLM:
        defaults: dict[str, Any] = {"kernels": "cpu", "block_size": BLOCK, "max_num_seqs": 2, "dtype": "float32"}
        return LLM(
            str(folder),
            tokenizer=str(tiny_model),
            max_model_len=480,
            max_num_batched_tokens=BUDGET,
            **{**defaults, **options},
        )

    return request.param, make


def converse(llm: LLM) -> tuple[list[Any], list[list[int]], SchedulerStats]:
    """Each turn's answer, and the most blocks of each group that it held at once."""
    engine = llm.llm_engine
    said: list[int] = []
    answers, held = [], []
    for turn, asked in enumerate(ASKED):
        said += asked
        engine.add_request(f"turn-{turn}", {"prompt_token_ids": list(said)}, PARAMS, streaming=False)
        most = [0] * len(engine.core.blocks.groups)
        tokens: list[int] = []
        logprobs: list[Any] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens, logprobs = list(output.outputs[0].token_ids), list(output.outputs[0].logprobs or [])
            used = [group.device.num_used for group in engine.core.blocks.groups]
            most = [*map(max, zip(most, used, strict=True))]
        said += tokens
        answers.append((tokens, logprobs))
        held.append(most)
    return answers, held, engine.core.scheduler.stats()


def test_a_conversation_holds_a_constant_number_of_blocks_and_is_the_same_with_little_memory(
    load: tuple[str, Callable[..., LLM]],
) -> None:
    kind, make = load
    windows, few = KINDS[kind]
    plenty = make(num_gpu_blocks_override=400, enable_prefix_caching=False)
    assert [group.window for group in plenty.llm_engine.core.blocks.groups] == windows
    answers, _, stats = converse(plenty)
    assert stats.prefix_hit_tokens == 0
    assert all(len(tokens) == 9 for tokens, _ in answers)
    for caching in (False, True):
        llm = make(num_gpu_blocks_override=400 if kind != "windows alone" else few, enable_prefix_caching=caching)
        line = llm.llm_engine.core.startup.lines()[2]
        assert "for windows of 8 tokens, at most" in line and ("for all tokens" in line) == (None in windows)
        found, held, stats = converse(llm)
        assert found == answers, "bit for bit"
        assert stats.preemptions_by_recompute + stats.preemptions_by_swap == 0
        assert (stats.prefix_hit_tokens > 1000) == caching
        assert [group.window for group in stats.groups] == (windows if len(windows) > 1 else [])
        for group, window in enumerate(windows):
            blocks = [most[group] for most in held]
            if window is None:
                assert blocks[-1] == max(blocks) > 60, "all tokens"
            else:
                assert max(blocks) <= ONE + BUDGET // BLOCK
                assert max(blocks[2:]) == min(blocks[2:]) or caching, "as many at the end as at the beginning"
        assert all(group.device.num_used == 0 for group in llm.llm_engine.core.blocks.groups)
