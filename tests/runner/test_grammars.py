"""The grammars of a worker: compiled beside its steps, kept and dropped as plans say."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from octavo.config.engine_config import EngineConfig
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import Generate, grammar_preparation
from octavo.core.sampling_params import Grammar, SamplingParams
from octavo.grammar import matcher
from octavo.models.config_files import read_model_config
from octavo.runner.grammars import GrammarPreparer
from octavo.runner.preparers import PreparerContext, WorkerPreparations
from tests.busy_machine import eventually

A, B = (Grammar(key, LLMatcher.grammar_from_regex(f"{key}+")) for key in "ab")
BAD = Grammar("bad", LLMatcher.grammar_from_regex("(b"))


class Store:
    """The grammars of a worker without a network."""

    def __init__(self, folder: Path, samples: bool = True, **options: Any) -> None:
        config: Any = EngineConfig(model=str(folder), **options)
        none: Any = None
        context = PreparerContext(config, read_model_config(folder), folder, none, none, samples, none)
        self.preparer = GrammarPreparer(context)
        self.preparations = WorkerPreparations({"grammar": self.preparer})
        self.find = self.preparer.find_for


make = Store


def step(store: Store, **plan: Any) -> StepResult:
    result = StepResult(1)
    store.preparations.apply(StepPlan(1, **plan), result)
    return result


def compile_all(store: Store, *wanted: Grammar) -> dict[str, str]:
    """Steps until all are known: by key the error, empty for none."""
    known: dict[str, str] = {}
    result = step(store, prepare=list(map(grammar_preparation, wanted)))
    while True:
        known |= {
            **{key: failure.text for key, failure in result.prepare_errors.items()},
            **dict.fromkeys(result.prepared, ""),
        }
        if len(known) >= len(wanted):
            return known
        result = step(store, awaits_prepared=True)


def task(grammar: Grammar | None) -> Generate:
    return Generate(SamplingParams(), 0, grammar=grammar)


def test_compiled_found_and_dropped(tiny_model: Path) -> None:
    store = make(tiny_model)
    assert store.find(task(None)) is None
    assert compile_all(store, A, B) == {"a": "", "b": ""}
    found = store.find(task(A))
    assert found is not None and store.find(task(A)) is found
    again = step(store, prepare=[grammar_preparation(A)])
    assert again.prepared == ["a"], "after a step that failed the plan repeats it"
    step(store, drop=["a"])
    with pytest.raises(RuntimeError, match="not prepared"):
        store.find(task(A))
    assert store.find(task(B)) is not None


def test_an_error_is_of_one_grammar(tiny_model: Path) -> None:
    store = make(tiny_model)
    seen = compile_all(store, BAD, A)
    assert "unclosed group" in seen["bad"] and seen["a"] == ""


def test_a_step_waits_for_a_while_and_others_do_not(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, compile_ = threading.Event(), matcher.compile_grammar

    def slow(*args: Any) -> Any:
        go.wait()
        return compile_(*args)

    monkeypatch.setattr(matcher, "compile_grammar", slow)
    store = make(tiny_model)
    assert step(store, prepare=[grammar_preparation(A)]).prepared == []
    assert step(store).prepared == []
    assert step(store, awaits_prepared=True).prepared == [], "not for ever"
    step(store, drop=["a"])
    go.set()
    assert compile_all(store, B) == {"b": ""}, "what was dropped meanwhile is not reported"


def test_what_is_dropped_before_it_begins_is_not_compiled(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, begun, compile_ = threading.Event(), list[str](), matcher.compile_grammar

    def slow(source: str, *args: Any) -> Any:
        begun.append(source)
        go.wait()
        return compile_(source, *args)

    monkeypatch.setattr(matcher, "compile_grammar", slow)
    store = make(tiny_model)
    many = [Grammar(key, LLMatcher.grammar_from_regex(f"{key}+")) for key in "abcdef"]
    step(store, prepare=list(map(grammar_preparation, many)))
    eventually(lambda: len(begun) == 2)
    step(store, drop=["c", "d", "e"])
    go.set()
    compiled: list[str] = []
    while len(compiled) < 3:
        compiled += step(store, awaits_prepared=True).prepared
    assert sorted(compiled) == ["a", "b", "f"] and len(begun) == 3, "what was dropped before it began never begins"


def test_a_stage_that_does_not_sample_compiles_nothing(tiny_model: Path) -> None:
    store = make(tiny_model, samples=False)
    assert compile_all(store, A, BAD) == {"a": "", "bad": ""}
    assert store.find(task(A)) is None


def test_the_tokenizer_of_the_option_and_none(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    store = make(tmp_path, tokenizer=str(tiny_model))
    assert compile_all(store, A) == {"a": ""}
    assert "no tokenizer.json" in compile_all(make(tmp_path), A)["a"]
