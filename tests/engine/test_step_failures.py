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
from tests.whole_outputs import everything

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


def test_with_several_workers_the_guilty_request_is_found_by_restarts(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed step ends all workers, and the front end sends the requests to the next ones."""
    monkeypatch.setattr("octavo.executor.remote._GRACE", 0.2)
    prompts = ["a", "b", "the quick brown fox", "d"]
    params = [SamplingParams(temperature=1, seed=i, max_tokens=12, ignore_eos=True, logprobs=1) for i in range(4)]
    right = make_llm(tiny_model).generate(prompts, params, use_tqdm=False)
    params[1] = PENALTY
    llm = make_llm(tiny_model, tensor_parallel_size=2, logits_processors=["tests.engine.faulty_steps:Faulty"])
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [everything(outputs[i]) for i in (0, 2, 3)] == [everything(right[i]) for i in (0, 2, 3)]
    assert all(c.error is not None and "ZeroDivisionError: of the engine" in c.error for c in outputs[1].outputs)
    again = llm.generate(prompts[0], params[0], use_tqdm=False)[0]
    assert everything(again) == everything(right[0]), "the engine lives"
