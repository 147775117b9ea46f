"""Networks with recurrent states under the engine: the same answers whatever happens, and adapters.

A network is a line of ``HYBRIDS``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from octavo import LLM
from octavo.cli.main import main
from octavo.config.kv_spec import STATE_WINDOW, window_blocks
from octavo.core.errors import ConfigError
from octavo.core.sampling_params import RequestOutputKind, SamplingParams
from octavo.engine.llm_engine import LLMEngine
from octavo.memory.block_map import block_maps
from tests.engine.test_adapters_against_peft import Adapted, check
from tests.engine.test_recovery import Killer
from tests.engine.test_resumption import PARAMS, PROMPTS, finish
from tests.engine_state import check_nothing_held, workers_of
from tests.whole_outputs import all_of, everything

pytest.importorskip("octavo._cpu", reason="octavo._cpu is not built")


class Hybrid(NamedTuple):
    #: Configuration class of transformers, and what it has beside ``COMMON``.
    config: str
    values: dict[str, Any]
    #: Modules that take adapters, without experts.
    adapted: tuple[str, ...]
    #: ``num_gpu_blocks_override`` with which requests preempt each other.
    tight: int
    slow: bool = False

    def make(self, **values: Any) -> Any:
        import transformers

        return getattr(transformers, self.config)(**{**COMMON, **self.values, **values})


#: Sizes that 2 ranks divide, and the vocabulary of ``tiny_model``.
COMMON: dict[str, Any] = {
    **{"vocab_size": 258, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 256},
    **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False},
}
_ATTENTION = ("q_proj", "k_proj", "v_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_LINEAR = {
    **{"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"], "head_dim": 16},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
_EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"shared_expert_intermediate_size": 32, "decoder_sparse_step": 2},
}
HYBRIDS = {
    "lfm2": Hybrid(
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention", "conv", "conv"], "block_multiple_of": 32},
        (*_ATTENTION, "out_proj", "in_proj", "w1", "w2", "w3", "embed_tokens"),
        tight=30,
    ),
    "qwen3_5": Hybrid(
        "Qwen3_5TextConfig",
        _LINEAR,
        (*_ATTENTION, "o_proj", *_MLP, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
        tight=12,
        slow=True,
    ),
    "qwen3_next": Hybrid(
        "Qwen3NextConfig",
        {**_LINEAR, **_EXPERTS},
        (*_ATTENTION, "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj", "lm_head"),
        tight=12,
    ),
}

OPTIONS: dict[str, Any] = {
    **{"device": "cpu", "kernels": "cpu", "dtype": "float32", "num_threads": 1, "max_model_len": 160},
    **{"block_size": 4, "state_checkpoint_tokens": 16, "num_gpu_blocks_override": 200, "watermark": 0.0},
}
NAMES = [pytest.param(name, marks=[pytest.mark.slow] * hybrid.slow) for name, hybrid in HYBRIDS.items()]


@pytest.fixture(scope="module", params=NAMES)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A folder with random weights and a tokenizer of bytes."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("hybrid") / request.param
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(HYBRIDS[request.param].make())
    for name, parameter in model.named_parameters():
        is_norm = parameter.dim() == 1 and not name.endswith("bias")
        torch.nn.init.normal_(parameter, mean=1.0 if is_norm else 0.0, std=0.2)
    model.save_pretrained(folder)
    for file in tiny_model.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def load(model: Path, **options: Any) -> LLM:
    """``tight``: with room for a few sequences, which preempt each other; 2: for twice as many."""
    if tight := options.pop("tight", 0):
        few = {"num_gpu_blocks_override": tight * HYBRIDS[model.name].tight, "max_num_batched_tokens": 24}
        options = {**few, "num_host_blocks_override": 60, **options}
    return LLM(str(model), **{**OPTIONS, **options})


def answers(llm: LLM) -> list[Any]:
    return all_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.fixture(scope="module")
def alone(hybrid: Path) -> list[Any]:
    """Samples, beams, scores of prompts and JSON, each request alone and without a prefix cache."""
    llm = load(hybrid, enable_prefix_caching=False)
    return [all_of(llm.generate([p], [s], use_tqdm=False))[0] for p, s in zip(PROMPTS, PARAMS, strict=True)]


def with_cached_prefixes(llm: LLM) -> list[Any]:
    first = answers(llm)
    assert answers(llm) == first
    assert llm.stats().prefix_hit_tokens > 0
    return first


def with_preemptions(llm: LLM) -> list[Any]:
    found = answers(llm)
    stats = llm.stats()
    by_swap = llm.llm_engine.core.options.preemption_mode == "swap"
    assert (stats.preemptions_by_swap if by_swap else stats.preemptions_by_recompute) > 0
    return found


def through_sleep(llm: LLM) -> list[Any]:
    found = answers(llm)
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        assert answers(llm) == found
    return found


def with_another_core_every_4_steps(llm: LLM) -> list[Any]:
    engine: LLMEngine = llm.llm_engine
    for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        if isinstance(params, SamplingParams):
            params = msgspec.structs.replace(params, output_kind=RequestOutputKind.DELTA)
        engine.add_request(str(number), prompt, params)
    return [everything(output) for output, _ in finish(engine, 4)]


@pytest.mark.parametrize(
    ("run", "options"),
    [
        (with_cached_prefixes, {"max_num_batched_tokens": 24, "long_prefill_token_threshold": 7}),
        (with_preemptions, {"tight": 1, "preemption_mode": "recompute"}),
        (with_preemptions, {"tight": 1, "preemption_mode": "swap", "async_scheduling": True}),
        (through_sleep, {"state_checkpoint_tokens": 4}),
        (with_another_core_every_4_steps, {"max_num_batched_tokens": 24}),
    ],
    ids=["cached", "recomputed", "swapped", "slept", "other cores"],
)
def test_answers_are_the_same(
    hybrid: Path, alone: list[Any], run: Callable[[LLM], list[Any]], options: dict[str, Any]
) -> None:
    llm = load(hybrid, **options)
    assert any(group.has_states for group in llm.llm_engine.core.blocks.groups)
    assert run(llm) == alone
    check_nothing_held(llm)


def test_two_ranks_give_the_same_bits_though_one_is_killed(hybrid: Path, alone: list[Any]) -> None:
    killer = Killer(9)
    llm = load(hybrid, tight=2, tensor_parallel_size=2, stat_loggers=[killer])
    killer.llm = llm
    assert answers(llm) == alone
    assert len(killer.lost) == len(workers_of(llm)) == 2
    llm.llm_engine.core.shutdown()


def test_two_stages_give_the_same_bits(hybrid: Path, alone: list[Any]) -> None:
    llm = load(hybrid, tight=2, pipeline_parallel_size=2)
    assert answers(llm) == alone
    llm.llm_engine.core.shutdown()


def test_facts_and_block_maps_tell_states_from_tokens(hybrid: Path, capsys: Any) -> None:
    llm = load(hybrid)
    blocks = llm.llm_engine.core.blocks
    maps = [shown for shown in block_maps(blocks, []) if not shown.on_host]
    assert [shown.has_states for shown in maps] == [False, True]
    assert [group.kind for group in llm.stats().groups] == ["all", "states"]
    assert main(["info", str(hybrid), "--dtype", "float32", "--state-checkpoint-tokens", "32", "--json", "-"]) == 0
    facts = json.loads(capsys.readouterr().out)["model"]
    (states,) = (group for group in facts["kv_groups"] if "state_bytes" in group)
    held = blocks.groups[1].block_bytes
    assert held - 64 * states["layers"] < states["state_bytes"] <= held
    assert states["state_checkpoint_tokens"] == 32
    context = facts["memory"]["context"]
    tokens = facts["kv_bytes_per_token"] * context
    at_once = window_blocks(STATE_WINDOW, 32) + 1
    assert facts["memory"]["kv_cache_bytes"] == tokens + states["state_bytes"] * at_once
    assert main(["info", str(hybrid)]) == 0
    assert f"{states['layers']} layers keep a recurrent state" in capsys.readouterr().out


def test_checkpoints_are_refused_where_there_is_no_state(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"state_checkpoint_tokens \(64\).*LlamaForCausalLM has none: leave it out"):
        load(tiny_model, state_checkpoint_tokens=64)


@pytest.mark.parametrize("name", NAMES)
def test_adapters_on_the_projections_of_states(tmp_path: Path, name: str) -> None:
    hybrid = HYBRIDS[name]
    check(Adapted(tmp_path, hybrid.make(vocab_size=101), hybrid.adapted), state_checkpoint_tokens=16)
