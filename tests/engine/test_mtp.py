"""Multi-token prediction in the engine: on by default, no bit of an answer changes, and drafts are the reference's."""

from __future__ import annotations

import logging
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from octavo import LLM, RequestOutput, SamplingParams
from octavo.config.engine_config import make_config
from octavo.core.errors import ConfigError, InsufficientMemoryError
from octavo.core.request import LoRARequest
from octavo.engine import core
from octavo.loader.adapters import AdapterTargets
from octavo.models.config_files import read_model_config
from octavo.runner.drafters import Drafts, HeadDrafter
from octavo.speculation.speculator import Speculator
from tests.engine import test_grammars_engine as forms
from tests.grammar_cases import generate
from tests.models.mtp_models import FAMILIES, Reference, save_mtp
from tests.models.zoo import rename_tensors
from tests.random_mixes import random_params
from tests.runner.plan_worker import make_adapter
from tests.whole_outputs import all_of

pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")

PROMPTS = [[(i * i * 7 + 13 * j + i) % 101 for i in range(length)] for j, length in enumerate([1, 9, 22, 40, 13])]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, seed=1, n=3, max_tokens=25, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=1.0, seed=2, top_p=0.9, max_tokens=30, ignore_eos=True, logprobs=1, min_tokens=9),
    SamplingParams(temperature=0.7, seed=4, max_tokens=30, ignore_eos=True, logprobs=1, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, max_tokens=30, logprobs=1, stop_token_ids=[40, 41, 42], prompt_logprobs=1),
]
TIGHT = {"num_gpu_blocks_override": 40, "num_host_blocks_override": 100, "watermark": 0.0}
#: Of models with recurrent states, and the blocks of which they preempt each other.
STATES = {"state_checkpoint_tokens": 8}
FEW = {**TIGHT, "num_gpu_blocks_override": 18}
#: Two modules, beside attention and beside recurrent states; and one.
MODELS = {"glm": 2, "qwen3_5": 1}


def load(folder: Path, drafts: int | None = 4, **options: Any) -> LLM:
    """``drafts``: None of no method, not even the default."""
    if drafts is not None:
        options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": drafts, "adaptive": False}
    else:
        options.setdefault("speculative_config", "none")
    defaults = {"num_gpu_blocks_override": 300, "max_num_seqs": 12, "max_model_len": 128, "block_size": 4}
    states = STATES if "qwen" in folder.name else {}
    fixed = {"dtype": "float32", "skip_tokenizer_init": True, "kernels": "cpu"}
    return LLM(str(folder), **{**fixed, **defaults, **states, **options})


def run(llm: LLM, prompts: list[list[int]], params: Any) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Reference]]:
    """Folder and reference of each model."""
    root = tmp_path_factory.mktemp("mtp")
    return {name: (root / name, save_mtp(name, root / name, depth)) for name, depth in MODELS.items()}


@pytest.fixture(scope="module")
def plain(files: dict[str, tuple[Path, Reference]]) -> dict[str, Any]:
    """The answers without drafts."""
    return {name: all_of(run(load(folder, None), PROMPTS, PARAMS)) for name, (folder, _) in files.items()}


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """All that heads draft from now on: the tokens of a sequence, and those drafted to follow them."""
    found: list[tuple[list[int], list[int]]] = []
    draft = HeadDrafter.draft

    def recorded(self: HeadDrafter, counts: dict[int, int]) -> Drafts:
        drafts, table = draft(self, counts), self._batch.tokens
        for row, tokens in drafts.tokens.items():
            found.append((table.ids[row, : table.num_tokens[row]].tolist(), tokens))
        return drafts

    monkeypatch.setattr(HeadDrafter, "draft", recorded)
    return found


def check_proposals(found: list[tuple[list[int], list[int]]], reference: Reference) -> int:
    """Compares what was drafted with the reference as far as its best token is no tie; the tokens compared."""
    compared = 0
    for tokens, drafts in found[:: -(-len(found) // 5)]:
        wanted, margins = reference.draft(tokens, len(drafts))
        for token, right, margin in zip(drafts, wanted, margins, strict=True):
            if margin < 5e-3:
                break
            assert token == right
            compared += 1
    return compared


AHEAD = {"max_num_batched_tokens": 17, "async_scheduling": True}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "in chunks and ahead": ("glm", AHEAD),
    "recomputed": ("glm", {"max_num_batched_tokens": 24, **TIGHT, "preemption_mode": "recompute"}),
    "swapped": ("glm", {**TIGHT, "preemption_mode": "swap", "enable_prefix_caching": False}),
    "states, in chunks and ahead": ("qwen3_5", AHEAD),
    "states, swapped": ("qwen3_5", {**FEW, "preemption_mode": "swap", "enable_prefix_caching": False}),
}


@pytest.mark.parametrize(("name", "options"), OPTIONS.values(), ids=OPTIONS)
def test_bit_for_bit_the_answers_without_drafts(
    files: dict[str, tuple[Path, Reference]], plain: dict[str, Any], name: str, options: dict[str, Any]
) -> None:
    llm = load(files[name][0], **options)
    outputs = run(llm, PROMPTS, PARAMS)
    assert all_of(outputs) == plain[name]
    if "preemption_mode" in options:
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert all_of(run(llm, PROMPTS, PARAMS)) == plain[name]  # with hits in the prefix cache
    stats = llm.llm_engine.core.scheduler.stats().speculation
    assert stats is not None and stats.draft_tokens > 200 and stats.failures == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", set(FAMILIES) - set(MODELS))
def test_the_other_families(name: str, tmp_path: Path) -> None:
    save_mtp(name, tmp_path / name)
    wanted = all_of(run(load(tmp_path / name, None), PROMPTS, PARAMS))
    llm = load(tmp_path / name, max_num_batched_tokens=17)
    for _ in range(2):
        assert all_of(run(llm, PROMPTS, PARAMS)) == wanted
    stats = llm.llm_engine.core.scheduler.stats().speculation
    assert stats is not None and stats.draft_tokens > 200 and stats.failures == 0


@pytest.mark.parametrize(("name", "every"), [("glm", 1), ("glm", 19), ("qwen3_5", 19)])
def test_drafts_are_those_of_the_reference_over_the_whole_context(
    files: dict[str, tuple[Path, Reference]],
    proposals: list[tuple[list[int], list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    every: int,
) -> None:
    """Also of sequences that draft now and then, for which the modules have many positions to catch up with."""
    propose = Speculator.propose
    monkeypatch.setattr(
        Speculator, "propose", lambda self, seq, most: [] if len(seq.token_ids) % every else propose(self, seq, most)
    )
    folder, reference = files[name]
    llm = load(folder, drafts=3, max_num_batched_tokens=12 if every == 1 else 64)
    params = SamplingParams(temperature=0.0, max_tokens=8 if every == 1 else 60, ignore_eos=True)
    run(llm, PROMPTS, params)
    count = len(proposals)
    again = run(llm, PROMPTS, params)
    assert sum(output.metrics.num_cached_tokens for output in again) > 50 and len(proposals) > count
    assert check_proposals(proposals, reference) > 5


def test_next_turns_find_the_modules_keys_and_values_of_answers(
    files: dict[str, tuple[Path, Reference]], proposals: list[tuple[list[int], list[int]]]
) -> None:
    """Of answers that nothing was drafted for, too."""
    folder, reference = files["glm"]
    llm = load(folder, drafts=3)
    first = run(llm, PROMPTS[2:4], SamplingParams(temperature=0.0, max_tokens=21, ignore_eos=True))
    turns = [[*output.prompt_token_ids, *output.outputs[0].token_ids, 7, 8] for output in first]
    proposals.clear()
    second = run(llm, turns, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    assert sum(output.metrics.num_cached_tokens for output in second) > 80
    assert check_proposals(proposals, reference) > 3


def test_on_by_default_where_the_checkpoint_has_such_layers(
    files: dict[str, tuple[Path, Reference]],
    plain: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = files["glm"][0]
    defaults = {"speculative_config": None}
    with caplog.at_level(logging.INFO, "octavo.startup"):
        llm = load(folder, None, **defaults)
    drafts = llm.llm_engine.core.options.speculative_config
    assert drafts is not None and (drafts.method, drafts.num_speculative_tokens, drafts.adaptive) == ("mtp", 3, True)
    assert "drafts: mtp (2 of the checkpoint's own layers)" in caplog.text
    assert all_of(run(llm, PROMPTS, PARAMS)) == plain["glm"]
    assert load(folder, None).llm_engine.core.options.speculative_config is None

    # Not with other weights of the same names, and not where memory does not allow it.
    shutil.copytree(folder, tmp_path / "broken")
    rename_tensors(tmp_path / "broken", lambda name: None if name.endswith("hnorm.weight") else name)
    assert load(tmp_path / "broken", None, **defaults).llm_engine.core.options.speculative_config is None
    assert "are not used" in caplog.text
    make = core.make_executor

    def without_room(options: Any, *rest: Any) -> Any:
        if options.speculative_config is not None:
            raise InsufficientMemoryError("the weights need 1 GiB")
        return make(options, *rest)

    monkeypatch.setattr(core, "make_executor", without_room)
    assert load(folder, None, **defaults).llm_engine.core.options.speculative_config is None
    assert "are left out: the weights need 1 GiB" in caplog.text
    with pytest.raises(InsufficientMemoryError):
        load(folder)
    monkeypatch.undo()
    rename_tensors(tmp_path / "broken", lambda name: None if ".layers.3." in name or ".layers.4." in name else name)
    with pytest.raises(ConfigError, match="method 'mtp' needs layers"):
        load(tmp_path / "broken")


def test_names_of_the_method() -> None:
    for given in ("mtp", {"method": "deepseek_mtp"}, {"model": "qwen3_next_mtp"}, '{"method": "mimo_mtp"}'):
        config = make_config(model="m", speculative_config=given).speculative_config
        assert config is not None and (config.method, config.model) == ("mtp", None)
    drafts = make_config(model="m", speculative_config={"method": "none"}).speculative_config
    assert drafts is not None and drafts.method == "none"
    assert make_config(model="m", speculative_config="none").kept_draft_tokens == 0
    with pytest.raises(ConfigError, match="pipeline_parallel_size"):
        make_config(model="m", speculative_config="mtp", pipeline_parallel_size=2)


def test_a_sleep_and_adapters(files: dict[str, tuple[Path, Reference]], plain: dict[str, Any], tmp_path: Path) -> None:
    folder = files["glm"][0]
    ref = make_adapter(tmp_path / "adapter", AdapterTargets(read_model_config(folder)), 0, rank=4)
    adapted = [None, LoRARequest(ref.name, 1, ref.path)] * 3

    def answers(llm: LLM) -> Any:
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in [*PROMPTS, PROMPTS[2]]]
        return all_of(llm.generate(prompts, PARAMS[0], use_tqdm=False, lora_request=adapted))

    wanted = answers(load(folder, None, enable_lora=True))
    llm = load(folder, enable_lora=True)
    assert answers(llm) == wanted
    for level in (1, 2):
        llm.sleep(level=level)
        llm.wake_up()
    assert answers(llm) == wanted
    assert all_of(run(llm, PROMPTS, PARAMS)) == plain["glm"]


def test_grammars(tiny_model: Path, tmp_path: Path) -> None:
    vocab_size = read_model_config(tiny_model).vocab_size
    save_mtp("qwen3_5", tmp_path / "qwen3_5", vocab_size=vocab_size)
    for file in tiny_model.glob("*token*"):
        shutil.copy(file, tmp_path / "qwen3_5")
    prompts, params, grammars = forms.PROMPTS[2:4], forms.PARAMS[2:4], forms.FORMS[2:4]
    text = {"skip_tokenizer_init": False}
    wanted = all_of(generate(load(tmp_path / "qwen3_5", None, **text), prompts, params, grammars))
    llm = load(tmp_path / "qwen3_5", **text)
    assert all_of(generate(llm, prompts, params, grammars)) == wanted
    stats = llm.llm_engine.core.scheduler.stats().speculation
    assert stats is not None and stats.draft_tokens > 20 and stats.failures == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_draft_the_same(files: dict[str, tuple[Path, Reference]], plain: dict[str, Any], name: str) -> None:
    llm = load(files[name][0], tensor_parallel_size=2, num_threads=2, device="cpu")
    assert all_of(run(llm, PROMPTS, PARAMS)) == plain[name]
    stats = llm.llm_engine.core.scheduler.stats().speculation
    llm.llm_engine.core.shutdown()
    assert stats is not None and stats.draft_tokens > 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_random_mixes(files: dict[str, tuple[Path, Reference]], seed: int) -> None:
    rng = random.Random(seed)
    name = rng.choice(list(MODELS))
    kind: dict[str, Any] = {
        "dtype": rng.choice(["float32", "bfloat16"]),
        "quantization": rng.choice(["none", "int8"]),
        "num_gpu_blocks_override": rng.choice([50, 300]),
        "num_host_blocks_override": 100,
        "preemption_mode": rng.choice(["recompute", "swap"]),
        "max_num_batched_tokens": rng.choice([16, 40, 200]),
    }
    prompts = [[rng.randrange(101) for _ in range(rng.randint(1, 40))] for _ in range(8)]
    params = [structs.replace(random_params(rng, with_texts=False), max_tokens=rng.randint(1, 40)) for _ in prompts]
    wanted = all_of(run(load(files[name][0], None, **kind), prompts, params))
    llm = load(files[name][0], drafts=rng.randint(1, 6), async_scheduling=rng.random() < 0.5, **kind)
    for _ in range(2):
        assert all_of(run(llm, prompts, params)) == wanted
