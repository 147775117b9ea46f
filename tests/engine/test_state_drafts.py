"""Drafts change no bit of an answer of networks with recurrent states, wherever blocks begin (CPU kernels)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from octavo import LLM
from octavo.core.errors import ConfigError
from octavo.engine import core
from octavo.speculation.speculator import Speculator
from tests.engine import test_drafts_engine as drafts
from tests.engine import test_grammars_engine as forms
from tests.engine.test_drafts_engine import PROMPTS, Remembering, load
from tests.grammar_cases import generate
from tests.models.eagle_heads import eagle1, eagle3
from tests.whole_outputs import all_of

pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")

SIZES = {
    **{"hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 160, "tie_word_embeddings": True},
}
#: So long that sequences preempt each other.
PARAMS = [structs.replace(params, max_tokens=70 if params.n == 1 else 30) for params in drafts.PARAMS]
#: Drafts end in a block or behind its end.
NEAR = {"block_size": 4, "state_checkpoint_tokens": 8}


def lfm2(vocab: int) -> Any:
    from transformers import Lfm2Config

    kinds = ["conv", "full_attention", "conv", "conv"]
    return Lfm2Config(**SIZES, vocab_size=vocab, layer_types=kinds, bos_token_id=0, eos_token_id=1)


def qwen3_5(vocab: int) -> Any:
    from transformers import Qwen3_5TextConfig

    kinds = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
    heads = {"linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_num_key_heads": 2}
    return Qwen3_5TextConfig(
        **SIZES, **heads, vocab_size=vocab, layer_types=kinds, head_dim=16, linear_num_value_heads=4, eos_token_id=1
    )


@pytest.fixture(scope="module", params=[lfm2, qwen3_5], ids=["lfm2", "qwen3_5"])
def model(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, with the tokenizer of the tiny model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("model")
    shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(request.param(AutoConfig.from_pretrained(tiny_model).vocab_size))
    for name, parameter in network.named_parameters():
        if parameter.dim() > 1:
            # Large embeddings, tied to the head: some tokens repeat, which drafters find.
            std = 0.6 if "embed" in name else 0.3 if name.endswith(("conv.weight", "conv1d.weight")) else 0.12
            torch.nn.init.normal_(parameter, std=std)
    network.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(model: Path) -> Any:
    """The answers without drafts."""
    return load(model).generate(PROMPTS, PARAMS, use_tqdm=False)


def drafting(model: Path, config: dict[str, Any], **options: Any) -> LLM:
    return load(model, speculative_config={"adaptive": False, **config}, **{**NEAR, **options})


def accepted(llm: LLM) -> tuple[int, int]:
    """Accepted draft tokens, and all."""
    stats = llm.llm_engine.core.scheduler.stats().speculation
    assert stats is not None and stats.failures == 0
    return stats.accepted_tokens, stats.draft_tokens


OPTIONS: list[dict[str, Any]] = [
    {},
    {"async_scheduling": True, "state_checkpoint_tokens": 4, "max_num_batched_tokens": 17},
    {"num_gpu_blocks_override": 20, "preemption_mode": "recompute"},
    {"num_gpu_blocks_override": 20, "preemption_mode": "swap", "num_host_blocks_override": 100},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ", ".join(options) or "plain")
def test_bit_for_bit_the_answers_without_drafts(
    model: Path, plain: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Any number of drafts is accepted; the second time with prompts in the prefix cache."""
    answers = {(tuple(o.prompt_token_ids), c.index): list(c.token_ids) for o in plain for c in o.outputs}
    drafter = Remembering(answers)
    monkeypatch.setattr(core, "make_speculator", lambda _: Speculator(drafter, 5, adaptive=False))
    llm = drafting(model, {"method": "prediction", "num_speculative_tokens": 5}, **options)
    for _ in range(2):
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert all_of(outputs) == all_of(plain)
    assert options or any(output.num_cached_tokens for output in outputs)
    some, all_ = accepted(llm)
    assert all_ / 5 < some < all_
    if "preemption_mode" in options:
        assert sum(output.metrics.num_preemptions for output in outputs) > 0


def test_a_turn_goes_on_from_the_end_of_an_answer_with_drafts(
    model: Path, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {(tuple(o.prompt_token_ids), c.index): list(c.token_ids) for o in plain for c in o.outputs}
    turns = [[*o.prompt_token_ids, *o.outputs[0].token_ids[:40], 7, 8, 9] for o in plain[2:4]]
    prompts, params = [{"prompt_token_ids": turn} for turn in turns], structs.replace(PARAMS[0], max_tokens=20)
    wanted = load(model).generate(prompts, params, use_tqdm=False)
    answers |= {(tuple(o.prompt_token_ids), 0): list(o.outputs[0].token_ids) for o in wanted}
    monkeypatch.setattr(core, "make_speculator", lambda _: Speculator(Remembering(answers), 5, adaptive=False))
    for cut in range(4):  # the answer ends with any number of drafts
        llm = drafting(model, {"method": "prediction", "num_speculative_tokens": 5})
        shorter = [structs.replace(PARAMS[i], max_tokens=40 - cut) for i in (2, 3)]
        llm.generate(PROMPTS[2:4], shorter, use_tqdm=False)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert all_of(outputs) == all_of(wanted)
        # Of the answer, the last token is not computed.
        assert [len(o.prompt_token_ids) - o.num_cached_tokens for o in outputs] == [3 + cut + 1] * 2


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_by_lookup(model: Path, plain: Any, method: str) -> None:
    llm = drafting(model, {"method": method, "prompt_lookup_min": 1})
    for _ in range(2):
        assert all_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == all_of(plain)
    some, all_ = accepted(llm)
    assert 0 < some < all_


def test_adaptive_lengths(model: Path, plain: Any) -> None:
    llm = drafting(model, {"method": "suffix", "adaptive": True})
    for _ in range(2):
        assert all_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == all_of(plain)


def test_a_draft_model(model: Path, plain: Any, tiny_model: Path) -> None:
    llm = drafting(model, {"method": "draft_model", "model": str(tiny_model), "num_speculative_tokens": 3})
    for _ in range(2):
        assert all_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == all_of(plain)
    assert accepted(llm)[1] > 100
    with pytest.raises(ConfigError, match=r"(Lfm2|Qwen3_5)ForCausalLM cannot draft, as it has recurrent states"):
        drafting(model, {"method": "draft_model", "model": str(model)})


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_heads(model: Path, plain: Any, tmp_path: Path, method: str) -> None:
    from transformers import AutoConfig

    vocab = AutoConfig.from_pretrained(model).vocab_size
    shape = {"vocab_size": vocab, "hidden_size": SIZES["hidden_size"], "num_attention_heads": 4}
    if method == "eagle3":
        shape["eagle_aux_hidden_state_layer_ids"] = [0, 1, 3]
    head = (eagle1 if method == "eagle" else eagle3)(**shape).save(tmp_path)
    llm = drafting(model, {"method": method, "model": str(head), "num_speculative_tokens": 3})
    for _ in range(2):
        assert all_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == all_of(plain)
    assert accepted(llm)[1] > 100


@pytest.mark.parametrize("model", [qwen3_5], indirect=True)
def test_grammars(model: Path) -> None:
    prompts, params, grammars = forms.PROMPTS[2:4], forms.PARAMS[2:4], forms.FORMS[2:4]
    wanted = all_of(generate(load(model), prompts, params, grammars))
    llm = drafting(model, {"method": "ngram", "prompt_lookup_min": 1})
    assert all_of(generate(llm, prompts, params, grammars)) == wanted
    assert accepted(llm)[0] > 0


def test_predictions_need_the_option(model: Path, plain: Any) -> None:
    """Without it, blocks have no room for drafts."""
    tokens, sizes = list(plain[0].outputs[0].token_ids), []
    for config in (None, {"method": "prediction", "adaptive": False}):
        llm = load(model, speculative_config=config, **NEAR)
        (output,) = llm.generate(PROMPTS[:1], PARAMS[0], prediction=[tokens], use_tqdm=False)
        assert all_of([output]) == all_of(plain[:1])
        assert bool(output.metrics.num_accepted_draft_tokens) == (config is not None)
        sizes.append([group.block_bytes for group in llm.llm_engine.core.blocks.groups])
    assert sizes[0][0] == sizes[1][0] and sizes[0][1] < sizes[1][1]


@pytest.mark.parametrize("model", [qwen3_5], indirect=True)
def test_two_workers(model: Path, plain: Any) -> None:
    llm = drafting(model, {"method": "suffix", "prompt_lookup_min": 1}, tensor_parallel_size=2)
    assert all_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == all_of(plain)
    assert accepted(llm)[0] > 0
