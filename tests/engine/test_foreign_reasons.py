"""The reasons for which options of other engines are refused or without effect, compared with what the engine does."""

from __future__ import annotations

import json
import re
import shutil
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, AsyncLLM, BeamSearchParams, SamplingParams, TokensPrompt
from octavo.config.engine_config import EngineConfig
from octavo.config.options import SpeculativeConfig
from octavo.core.foreign import FOREIGN, FOREIGN_OPTIONS
from octavo.core.request import KEYWORDS

DOCS = Path(__file__).parents[2] / "docs"
OPTIONS: dict[str, Any] = {"num_gpu_blocks_override": 64, "block_size": 4, "num_threads": 1}
REASONS = {
    **{name: option.reason for name, option in FOREIGN_OPTIONS.items()},
    **{name: option.reason for name, option in FOREIGN["keywords"].items()},
    **{name: option.reason for name, option in FOREIGN["SamplingParams"].items()},
}
#: Names that a reason may send its reader to.
NAMES = {
    *EngineConfig.model_fields, *SamplingParams.__struct_fields__, *TokensPrompt.__annotations__, *KEYWORDS, *dir(LLM),
    "HF_HOME", "HF_TOKEN", "OCTAVO_CACHE",
}  # fmt: skip


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(tiny_model, **OPTIONS, max_logprobs=300)


@pytest.mark.parametrize("name", [name for name, reason in REASONS.items() if "_" in reason])
def test_what_a_reason_names_exists(name: str) -> None:
    named = set(re.findall(r"\w+_\w+", REASONS[name]))
    assert named <= NAMES


def test_no_code_of_a_checkpoint_is_run(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    automatic = {"AutoConfig": "ours.Config", "AutoModelForCausalLM": "ours.Model"}
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": automatic}))
    (folder / "ours.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w').close()\n")
    assert LLM(folder, trust_remote_code=True, **OPTIONS).generate("a", use_tqdm=False)[0].finished
    assert not (tmp_path / "was_run").exists()


def test_logprobs_are_the_models_own(llm: LLM) -> None:
    plain = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    edited = SamplingParams(temperature=1.7, top_k=3, max_tokens=1, logprobs=5, repetition_penalty=1.9, seed=1)
    first, second = (llm.generate("abc", p, use_tqdm=False)[0].outputs[0].logprobs for p in (plain, edited))
    assert first is not None and second is not None
    likeliest = [token for token, entry in first[0].items() if entry.rank <= 5]
    assert len(likeliest) == 5 and all(first[0][token] == second[0][token] for token in likeliest)


def test_the_logprobs_of_a_prompt_score_an_answer_that_is_known(llm: LLM) -> None:
    """What ``trace_decode_token_ids`` of vLLM is for."""
    sampled = SamplingParams(seed=3, max_tokens=6, ignore_eos=True, logprobs=0)
    output = llm.generate("abc", sampled, use_tqdm=False)[0]
    answer, logprobs = output.outputs[0].token_ids, output.outputs[0].logprobs
    scored = llm.generate(
        TokensPrompt(prompt_token_ids=output.prompt_token_ids + answer),
        SamplingParams(max_tokens=0, prompt_logprobs=0), use_tqdm=False,
    )[0].prompt_logprobs  # fmt: skip
    assert scored is not None and scored[-6:] == logprobs


def test_functions_are_called_with_each_worker(llm: LLM) -> None:
    assert llm.collective_rpc(lambda worker, more: type(worker).__name__ + more, ("!",)) == ["Worker!"]
    page = (DOCS / "coming-from.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| `collective_rpc("))
    for kind in (LLM, AsyncLLM):
        named = set(re.findall(r"(\w+)=?[,)]", row.split("|")[1]))
        assert named <= set(typing.get_type_hints(kind.collective_rpc)), kind


def test_the_page_names_the_drafters_that_there_are() -> None:
    page = (DOCS / "coming-from.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| `speculative_model`"))
    methods = set(re.findall(r"`(\w+)`", row.split("methods")[1]))
    assert methods == set(typing.get_args(SpeculativeConfig.model_fields["method"].annotation)) - {"none"}


def dropping(ids: list[int], logits: Any) -> Any:
    logits[:100] = float("-inf")
    return logits


@pytest.mark.parametrize(
    ("params", "ahead"),
    [
        (lambda: SamplingParams(), True),
        (lambda: SamplingParams(presence_penalty=1.0, repetition_penalty=1.3, bad_words=["a"]), True),
        (lambda: SamplingParams(logits_processors=[dropping]), True),
        (lambda: BeamSearchParams(beam_width=2, max_tokens=20, ignore_eos=True), False),
    ],
)
def test_only_a_beam_search_is_not_planned_ahead(
    tiny_model: Path, params: Callable[[], SamplingParams | BeamSearchParams], ahead: bool
) -> None:
    """As docs/scheduling.md says."""
    engine = LLM(tiny_model, **OPTIONS, async_scheduling=True).llm_engine
    asked = params()
    asked.max_tokens, asked.ignore_eos = 20, True
    engine.add_request("a", [5, 6, 7], asked)
    planned: list[int] = []
    while engine.has_unfinished_requests():
        engine.step()
        planned.append(engine.core.scheduler.stats().steps - len(planned) - 1)  # steps whose result is not known
    assert (max(planned[2:15]) > 0) is ahead
