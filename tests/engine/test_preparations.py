"""A further kind of preparation: one function, one class and one registration. Here tables, of which users have one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from octavo.config.engine_config import make_config
from octavo.core.outputs import CompletionOutput
from octavo.core.request import KINDS, EngineCoreRequest, Limits, Preparation, PreparationKind
from octavo.core.sampling_params import SamplingParams
from octavo.engine.llm_engine import LLMEngine
from octavo.runner.preparers import Preparer, PreparerContext

#: By key, on the worker, which is in this process.
kept: dict[str, str] = {}
#: Set while tables may be made.
go = threading.Event()


class TablePreparer(Preparer):
    """Makes a table of its text."""

    def __init__(self, context: PreparerContext) -> None:
        kept.clear()

    def prepare(self, payload: bytes) -> str:
        assert go.wait(timeout=60)
        if payload == b"nobody":
            raise ValueError("nobody has no table")
        return payload.decode().upper()

    def keep(self, key: str, thing: str) -> None:
        kept[key] = thing

    def drop(self, key: str) -> None:
        del kept[key]


def table_of(request: EngineCoreRequest) -> Sequence[Preparation]:
    user = request.options.user
    return [Preparation("table", f"table of {user}", user.encode())] if user else []


@pytest.fixture
def engine(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> LLMEngine:
    preparer = f"{__name__}:TablePreparer"
    monkeypatch.setitem(KINDS, "table", PreparationKind(table_of, lambda options: Limits(host=2), preparer))
    go.set()
    return LLMEngine.from_config(make_config(model=str(tiny_model), num_gpu_blocks_override=64, num_threads=1))


def add(engine: LLMEngine, name: str, user: str | None) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    engine.add_request(name, {"prompt_token_ids": [5, 6, 7]}, params, user=user, streaming=False)


def run(engine: LLMEngine) -> dict[str, CompletionOutput]:
    """What ends, in this order."""
    outputs: dict[str, CompletionOutput] = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output.outputs[0] for output in engine.step()}
    return outputs


def test_a_request_waits_without_blocks_until_its_table_is_made_and_others_pass_it(engine: LLMEngine) -> None:
    go.clear()
    add(engine, "with", "ada")
    add(engine, "without", None)
    while engine.core.scheduler.stats().num_running or not engine.stats().decode_tokens:
        (output, *_) = [*engine.step(), None]
        assert output is None or output.request_id == "without"
        assert not kept
    engine.step()
    assert engine.stats().blocks_used == 0 and engine.stats().num_waiting == 1
    go.set()
    outputs = run(engine)
    assert kept == {"table of ada": "ADA"} and len(outputs["with"].token_ids) == 4


def test_one_that_cannot_be_made_ends_its_requests_alone(engine: LLMEngine) -> None:
    add(engine, "good", "ada")
    add(engine, "bad", "nobody")
    outputs = run(engine)
    assert outputs["bad"].finish_reason == "error" and outputs["bad"].error == "ValueError: nobody has no table"
    assert outputs["good"].finish_reason == "length"


def test_the_least_recently_used_goes_first(engine: LLMEngine) -> None:
    for number, user in enumerate(["ada", "bob", "ada", "cem"]):
        add(engine, str(number), user)
        run(engine)
    assert set(kept) == {"table of ada", "table of cem"}
    for number, user in enumerate(["dan", "eve", "fay", "gus", "ada"]):
        add(engine, str(number), user)
    assert len(run(engine)) == 5, "more than there is room for, one after the other"
    assert len(kept) == 2
