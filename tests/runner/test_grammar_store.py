"""The grammars of a worker: compiled beside its steps, kept and dropped as plans say."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from octavo.core.config import EngineConfig
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import Generate
from octavo.core.sampling_params import SamplingParams
from octavo.core.structured_outputs import Grammar
from octavo.models.config import read_model_config
from octavo.runner import grammars
from octavo.runner.grammars import GrammarStore
from tests.busy_machine import eventually

A, B = (Grammar(key, LLMatcher.grammar_from_regex(f"{key}+")) for key in "ab")
BAD = Grammar("bad", LLMatcher.grammar_from_regex("(b"))


def make(folder: Path, **options: Any) -> GrammarStore:
    samples = options.pop("samples", True)
    return GrammarStore(EngineConfig(model=str(folder), **options), read_model_config(folder), folder, samples=samples)


def step(store: GrammarStore, **plan: Any) -> StepResult:
    result = StepResult(1)
    store.apply(StepPlan(1, **plan), result)
    return result


def compile_all(store: GrammarStore, *wanted: Grammar) -> dict[str, str]:
    """Steps until all are known: by key the error, empty for none."""
    known: dict[str, str] = {}
    result = step(store, grammars_to_compile=list(wanted))
    while True:
        known |= {**result.grammar_errors, **dict.fromkeys(result.compiled_grammars, "")}
        if len(known) >= len(wanted):
            return known
        result = step(store, awaits_grammar=True)


def task(grammar: Grammar | None) -> Generate:
    return Generate(SamplingParams(), 0, grammar=grammar)


def test_compiled_found_and_dropped(tiny_model: Path) -> None:
    store = make(tiny_model)
    assert store.find(task(None)) is None
    assert compile_all(store, A, B) == {"a": "", "b": ""}
    found = store.find(task(A))
    assert found is not None and store.find(task(A)) is found
    again = step(store, grammars_to_compile=[A])
    assert again.compiled_grammars == ["a"], "after a step that failed the plan repeats it"
    step(store, grammars_to_drop=["a"])
    with pytest.raises(RuntimeError, match="not compiled"):
        store.find(task(A))
    assert store.find(task(B)) is not None


def test_an_error_is_of_one_grammar(tiny_model: Path) -> None:
    store = make(tiny_model)
    seen = compile_all(store, BAD, A)
    assert "unclosed group" in seen["bad"] and seen["a"] == ""


def test_a_step_waits_for_a_while_and_others_do_not(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, compile_ = threading.Event(), grammars.compile_grammar

    def slow(*args: Any) -> Any:
        go.wait()
        return compile_(*args)

    monkeypatch.setattr(grammars, "compile_grammar", slow)
    store = make(tiny_model)
    assert step(store, grammars_to_compile=[A]).compiled_grammars == []
    assert step(store).compiled_grammars == []
    assert step(store, awaits_grammar=True).compiled_grammars == [], "not for ever"
    step(store, grammars_to_drop=["a"])
    go.set()
    assert compile_all(store, B) == {"b": ""}, "what was dropped meanwhile is not reported"


def test_what_has_not_begun_can_be_cancelled(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, begun, compile_ = threading.Event(), list[str](), grammars.compile_grammar

    def slow(source: str, *args: Any) -> Any:
        begun.append(source)
        go.wait()
        return compile_(source, *args)

    monkeypatch.setattr(grammars, "compile_grammar", slow)
    store = make(tiny_model)
    many = [Grammar(key, LLMatcher.grammar_from_regex(f"{key}+")) for key in "abcdef"]
    step(store, grammars_to_compile=many)
    eventually(lambda: len(begun) == 2)
    cancelled = step(store, grammars_to_cancel=["a", "c", "d"])
    assert {*cancelled.grammar_errors} == {"c", "d"}, "the first has begun"
    step(store, grammars_to_drop=["e"])
    go.set()
    compiled: list[str] = []
    while len(compiled) < 3:
        compiled += step(store, awaits_grammar=True).compiled_grammars
    assert sorted(compiled) == ["a", "b", "f"] and len(begun) == 3


def test_a_stage_that_does_not_sample_compiles_nothing(tiny_model: Path) -> None:
    store = make(tiny_model, samples=False)
    assert step(store, grammars_to_compile=[A, BAD]).compiled_grammars == ["a", "bad"]
    assert store.find(task(A)) is None


def test_the_tokenizer_of_the_option_and_none(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    store = make(tmp_path, tokenizer=str(tiny_model))
    assert compile_all(store, A) == {"a": ""}
    assert "no tokenizer.json" in compile_all(make(tmp_path), A)["a"]
