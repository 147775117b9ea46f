"""A smaller model drafts on the worker: the answers are bit for bit those without it (CPU kernels)."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.errors import ConfigError, ModelNotFoundError
from octavo.core.sampling_params import BeamSearchParams
from octavo.core.stats import SpeculationStats
from octavo.runner import loaded_model
from octavo.runner.drafters import DraftModel
from octavo.runner.model_runner import ModelRunner
from tests.engine import test_grammars_engine as forms
from tests.engine.test_drafts_engine import PARAMS, PROMPTS, load
from tests.grammar_cases import generate
from tests.random_mixes import random_mix
from tests.small_llama import make_llama
from tests.whole_outputs import all_of

pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")


@pytest.fixture(scope="module")
def tiny_draft(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network of other shapes, with other random weights and the tokenizer of the tiny model."""
    folder = tmp_path_factory.mktemp("draft")
    shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "max_position_embeddings": 100}
    make_llama(1, **sizes, num_attention_heads=2, num_key_value_heads=1).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Any:
    """The answers without drafts."""
    return all_of(load(tiny_model).generate(PROMPTS, PARAMS, use_tqdm=False))


def drafting(model: Path, draft: Path, k: int = 5, adaptive: bool = False, **options: Any) -> LLM:
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": k, "adaptive": adaptive}
    return load(model, speculative_config=config, **options)


def stats_of(llm: LLM) -> SpeculationStats:
    stats = llm.llm_engine.core.scheduler.stats().speculation
    assert stats is not None
    return stats


def runner_of(llm: LLM) -> ModelRunner:
    (runner,) = llm.collective_rpc(lambda worker: worker.runner)
    return runner


OPTIONS: list[dict[str, Any]] = [
    {},
    {"async_scheduling": True},
    {"batching": "prefill_first", "max_num_batched_tokens": 128},
    {"num_gpu_blocks_override": 40, "preemption_mode": "recompute", "enable_prefix_caching": False},
    {"num_gpu_blocks_override": 40, "preemption_mode": "swap", "num_host_blocks_override": 100},
    {"max_num_batched_tokens": 17, "kv_cache_dtype": "int8"},
]


@pytest.mark.parametrize(
    "options",
    [pytest.param(o, marks=pytest.mark.slow if o in (OPTIONS[0], OPTIONS[2]) else ()) for o in OPTIONS],
    ids=lambda options: ", ".join(f"{k}={v}" for k, v in options.items()) or "plain",
)
def test_bit_for_bit_the_answers_without_drafts(
    tiny_model: Path, tiny_draft: Path, plain: Any, options: dict[str, Any]
) -> None:
    wanted = plain
    if "kv_cache_dtype" in options:
        wanted = all_of(load(tiny_model, kv_cache_dtype="int8").generate(PROMPTS, PARAMS, use_tqdm=False))
    llm = drafting(tiny_model, tiny_draft, **options)
    for _ in range(2):  # the second time with prompts in the prefix cache
        assert all_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == wanted
    stats = stats_of(llm)
    assert 0 < stats.accepted_tokens < stats.draft_tokens / 2
    assert stats.failures == 0


@pytest.mark.parametrize("options", OPTIONS[:5], ids=lambda options: ", ".join(options) or "plain")
def test_the_model_itself_is_always_right(tiny_model: Path, plain: Any, options: dict[str, Any]) -> None:
    """At every temperature: it draws with the same noise, and its requests' penalties are applied to it, too."""
    llm = drafting(tiny_model, tiny_model, **options)
    for _ in range(2):  # the second time with prompts in the prefix cache
        assert all_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == plain
    stats = stats_of(llm)
    assert stats.draft_tokens == stats.accepted_tokens > 200


@pytest.fixture
def caught_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each step with drafts, the tokens that the draft model had to catch up with."""
    tokens: list[int] = []
    draft = DraftModel.draft

    def counting(self: DraftModel, counts: dict[int, int]) -> Any:
        found = draft(self, counts)
        tokens.append(found.catch_up_tokens)
        return found

    monkeypatch.setattr(DraftModel, "draft", counting)
    return tokens


@pytest.mark.parametrize("caching", [False, True])
def test_what_lies_in_the_prefix_cache_is_not_computed_again(
    tiny_model: Path, caught_up: list[int], caching: bool
) -> None:
    llm = drafting(tiny_model, tiny_model, enable_prefix_caching=caching)
    prompt, params = "once upon a time " * 3, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    totals: list[int] = []
    for text in (prompt, prompt, prompt + "!"):
        llm.generate([text], params, use_tqdm=False)
        totals.append(sum(caught_up) - sum(totals))
    assert totals[0] == len(prompt) - 1  # and a first token, but for the last two
    assert max(totals[1:]) <= 4 if caching else min(totals) >= totals[0]
    stats = stats_of(llm)
    assert stats.draft_tokens == stats.accepted_tokens


def test_what_was_swapped_is_not_computed_again(tiny_model: Path, caught_up: list[int]) -> None:
    totals: list[int] = []
    for mode in ("swap", "recompute"):
        options: dict[str, Any] = {
            "preemption_mode": mode,
            "num_gpu_blocks_override": 40,
            "num_host_blocks_override": 100,
        }
        llm = drafting(tiny_model, tiny_model, enable_prefix_caching=False, **options)
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        llm.generate(PROMPTS, params, use_tqdm=False)
        counts = llm.llm_engine.core.scheduler.stats()
        assert counts.preemptions_by_swap + counts.preemptions_by_recompute > 0
        totals.append(sum(caught_up) - sum(totals))
    assert totals[0] < totals[1]


def test_adaptive_lengths(tiny_model: Path, tiny_draft: Path, plain: Any) -> None:
    for draft in (tiny_draft, tiny_model):
        llm = drafting(tiny_model, draft, adaptive=True)
        assert all_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == plain


def test_beams_and_processors_are_not_drafted(tiny_model: Path, tiny_draft: Path) -> None:
    processed = SamplingParams(temperature=0.0, max_tokens=9, logits_processors=[lambda ids, logits: logits])
    work: list[Any] = [*PARAMS, BeamSearchParams(beam_width=3, max_tokens=20), processed]
    prompts = [*PROMPTS, "beams", "processors"]
    wanted = all_of(load(tiny_model).generate(prompts, work, use_tqdm=False))
    found = drafting(tiny_model, tiny_draft).generate(prompts, work, use_tqdm=False)
    assert all_of(found) == wanted
    assert [o.metrics.num_draft_tokens for o in found[-2:]] == [0, 0]


@pytest.mark.parametrize("jump_forward", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_grammars_bind_the_drafts_too(tiny_model: Path, tiny_draft: Path, jump_forward: bool) -> None:
    work = (forms.PROMPTS, forms.PARAMS, forms.FORMS)
    wanted = all_of(generate(forms.load(tiny_model), *work))
    for draft in (tiny_model, tiny_draft):
        config = {"model": str(draft), "adaptive": False}
        llm = forms.load(tiny_model, jump_forward=jump_forward, speculative_config=config)
        assert all_of(generate(llm, *work)) == wanted
        stats = stats_of(llm)
        assert stats.accepted_tokens > 0
        assert draft == tiny_draft or stats.accepted_tokens == stats.draft_tokens


def test_beyond_the_context_of_the_draft_model_nothing_is_drafted(tiny_model: Path, tiny_draft: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=110, ignore_eos=True)
    wanted = all_of(load(tiny_model).generate(["a story"], params, use_tqdm=False))
    llm = drafting(tiny_model, tiny_draft)
    assert all_of(llm.generate(["a story"], params, use_tqdm=False)) == wanted
    assert 0 < stats_of(llm).draft_tokens < 5 * 100


def test_a_drafter_that_fails_ends_no_request(
    tiny_model: Path, tiny_draft: Path, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    draft = DraftModel.draft

    def failing(self: DraftModel, counts: dict[int, int]) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("no idea")
        return draft(self, counts)

    monkeypatch.setattr(DraftModel, "draft", failing)
    llm = drafting(tiny_model, tiny_draft)
    assert all_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == plain
    assert calls >= 3 and stats_of(llm).failures > 0
    assert all_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == plain


@pytest.mark.parametrize("level", [1, 2])
def test_sleep(tiny_model: Path, plain: Any, level: int) -> None:
    llm = drafting(tiny_model, tiny_model)
    llm.sleep(level)
    llm.wake_up()
    assert all_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == plain
    stats = stats_of(llm)
    assert stats.draft_tokens == stats.accepted_tokens > 100


def test_its_layers_are_counted_in_the_blocks(tiny_model: Path, tiny_draft: Path) -> None:
    budget = 4 << 20
    without, with_drafts = (
        load(tiny_model, num_gpu_blocks_override=None, kv_cache_memory_bytes=budget, max_num_seqs=512, **more)
        for more in ({}, {"speculative_config": {"model": str(tiny_draft)}})
    )
    (size,), (larger,) = (llm.llm_engine.core.startup.groups for llm in (without, with_drafts))
    kernels = runner_of(with_drafts)._kernels
    drafter = runner_of(with_drafts).loaded.drafter
    assert drafter is not None and len(drafter.kv_specs) == 3
    own = sum(kernels.block_bytes(spec, 4) for spec in drafter.kv_specs)
    assert larger.block_bytes == size.block_bytes + own
    assert larger.num_blocks * larger.block_bytes <= budget < (larger.num_blocks + 1) * larger.block_bytes
    facts = with_drafts.llm_engine.core.startup
    assert facts.workers[0].cache_bytes == larger.num_blocks * larger.block_bytes
    held = sum(cache.key.nbytes + cache.value.nbytes for cache in runner_of(with_drafts)._cache.device)
    assert held == facts.workers[0].cache_bytes
    assert any(line.startswith("drafts: draft_model ") and "% of the KV cache" in line for line in facts.lines())


def changed_vocabulary(model: Path, folder: Path, change: Any) -> Path:
    shutil.copytree(model, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    change(tokenizer["model"]["vocab"])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_another_vocabulary_is_refused_before_weights_are_read(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swap(vocab: dict[str, int]) -> None:
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]

    vocab = json.loads((tiny_model / "tokenizer.json").read_text())["model"]["vocab"]
    other = changed_vocabulary(tiny_model, tmp_path / "other", swap)
    fewer = changed_vocabulary(tiny_model, tmp_path / "fewer", lambda v: v.pop(max(v, key=v.__getitem__)))
    monkeypatch.setattr(loaded_model, "load_network", lambda *_: pytest.fail("read"))
    with pytest.raises(ConfigError, match=rf"another vocabulary.*token {vocab['a']} is 'b' instead of 'a'"):
        drafting(tiny_model, other)
    with pytest.raises(ConfigError, match=rf"another vocabulary.*: {len(vocab) - 1} tokens instead of {len(vocab)}"):
        drafting(tiny_model, fewer)
    smaller = tmp_path / "smaller"
    shutil.copytree(tiny_model, smaller)
    config = json.loads((smaller / "config.json").read_text())
    (smaller / "config.json").write_text(json.dumps({**config, "vocab_size": len(vocab) - 8}))
    with pytest.raises(ConfigError, match=rf"{len(vocab) - 8} tokens instead of {len(vocab)}"):
        drafting(tiny_model, smaller, skip_tokenizer_init=True)
    with pytest.raises(ModelNotFoundError, match="no model 'nothing'"):
        drafting(tiny_model, Path("nothing"))


def test_padded_embeddings_are_no_difference(tiny_model: Path, tiny_draft: Path, plain: Any, tmp_path: Path) -> None:
    """Those of either model; what would edit logits is then left out for drafts."""
    from transformers import AutoModelForCausalLM

    def padded(source: Path) -> Path:
        folder = tmp_path / source.name
        shutil.copytree(source, folder)
        model = AutoModelForCausalLM.from_pretrained(source)
        model.resize_token_embeddings(model.config.vocab_size + 14, mean_resizing=False)
        model.save_pretrained(folder)
        return folder

    assert all_of(drafting(tiny_model, padded(tiny_draft)).generate(PROMPTS, PARAMS, use_tqdm=False)) == plain
    model = padded(tiny_model)
    wanted = all_of(load(model).generate(PROMPTS, PARAMS, use_tqdm=False))
    assert all_of(drafting(model, tiny_draft).generate(PROMPTS, PARAMS, use_tqdm=False)) == wanted


def test_pipelines_are_refused_by_name(tiny_model: Path, tiny_draft: Path) -> None:
    with pytest.raises(ConfigError, match="'draft_model' is not supported with pipeline_parallel_size"):
        drafting(tiny_model, tiny_draft, pipeline_parallel_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(16))
def test_random_mixes(tiny_model: Path, tiny_draft: Path, seed: int) -> None:
    rng = random.Random(seed)
    options, prompts, params = random_mix(rng)
    wanted = all_of(load(tiny_model).generate(prompts, params, use_tqdm=False))
    same = rng.random() < 0.5
    llm = drafting(
        tiny_model,
        tiny_model if same else tiny_draft,
        rng.choice([1, 3, 7, 12]),
        adaptive=rng.random() < 0.3,
        **options,
    )
    for _ in range(2):
        assert all_of(llm.generate(prompts, params, use_tqdm=False)) == wanted
    stats = stats_of(llm)
    assert stats.failures == 0
    if same:
        assert stats.accepted_tokens == stats.draft_tokens
