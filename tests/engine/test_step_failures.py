"""Steps that fail at one request, by a fault of the engine: that one ends with an error, and others lose nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.errors import EngineDeadError
from octavo.core.failures import STEP
from octavo.runner.model_runner import ModelRunner
from octavo.sampling.logits_processors import Penalties
from octavo.sampling.sampler import Sampler

PLAIN = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PENALTY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, n=2, repetition_penalty=1.5)


def make_llm(model: Path, **options: Any) -> LLM:
    return LLM(str(model), device="cpu", num_threads=1, num_gpu_blocks_override=64, **options)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return make_llm(tiny_model)


@pytest.mark.parametrize(
    ("where", "method"), [(Penalties, "apply"), (Sampler, "_set_processors")], ids=["sampled", "admitted"]
)
def test_a_request_at_which_a_step_fails_ends_and_the_others_go_on(
    llm: LLM, where: type, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = llm.generate(["a", "b"], [PLAIN, PENALTY], use_tqdm=False)
    original = getattr(where, method)

    def failing(self: Any, *args: Any) -> Any:
        if where is Penalties or args[1]:  # of a row that has processors
            raise ZeroDivisionError("of the engine")
        return original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(where, method, failing)
        outputs = llm.generate(["a", "b"], [PLAIN, PENALTY], use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == right[0].outputs[0].token_ids
    assert [(c.error, c.error_kind) for c in outputs[1].outputs] == [
        ("the engine failed at this request: ZeroDivisionError: of the engine", STEP)
    ] * 2
    again = llm.generate(["a", "b"], [PLAIN, PENALTY], use_tqdm=False)
    assert [[c.token_ids for c in o.outputs] for o in again] == [[c.token_ids for c in o.outputs] for o in right]


def test_an_engine_whose_every_step_fails_is_dead(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(tiny_model)

    def failing(self: Any, *args: Any) -> Any:
        raise ZeroDivisionError("of the device")

    monkeypatch.setattr(ModelRunner, "_compute", failing)
    with pytest.raises(EngineDeadError, match="every step fails, also one without any request: ZeroDivisionError: of"):
        llm.generate(["a", "b"], PLAIN, use_tqdm=False)
    with pytest.raises(EngineDeadError):
        llm.generate("a", PLAIN, use_tqdm=False)
