"""Steps that fail at one request, by a fault of the engine: its neighbours know that it was not theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.sampling.logits_processors import Penalties
from octavo.sampling.sampler import Sampler

PLAIN = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PENALTY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, n=2, repetition_penalty=1.5)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), device="cpu", num_threads=1, num_gpu_blocks_override=64)


@pytest.mark.parametrize(
    ("where", "method"), [(Penalties, "apply"), (Sampler, "_set_processors")], ids=["sampled", "admitted"]
)
def test_the_error_of_a_step_says_at_which_request_it_was_raised(
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
    assert [[completion.error for completion in output.outputs] for output in outputs] == [
        ["the step failed at another request: ZeroDivisionError: of the engine"],
        ["the step failed at this request: ZeroDivisionError: of the engine"] * 2,
    ]
    again = llm.generate(["a", "b"], [PLAIN, PENALTY], use_tqdm=False)
    assert [[c.token_ids for c in o.outputs] for o in again] == [[c.token_ids for c in o.outputs] for o in right]
