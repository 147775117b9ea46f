"""Answers of the demo model are the recorded ones, bit for bit, on every instruction set of floats and of integers."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

_cpu: Any = pytest.importorskip("octavo._cpu", reason="octavo._cpu is not built")

FILE = Path(__file__).resolve().parents[2] / "scripts" / "answer_digests.py"
KINDS = ("bfloat16", "float32", "int8 cache", "int8", "int4", "gguf")
EMULATED = "EMULATED_CPU_KERNELS" in os.environ
MORE = () if EMULATED else ("float32", "int8 cache")
FLOATS, INTEGERS = _cpu.available_isas().floats, _cpu.available_isas().integers
#: One greedy with a penalty, one sampled: as all others, they have the same digest alone as among others.
FEW = "5" if EMULATED else "5,6"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("answer_digests", FILE)
    if spec is None or spec.loader is None or not FILE.exists():
        pytest.skip("the script is not here")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OCTAVO_CPU_ISA", "")  # which the script sets
    before = _cpu.isa()
    yield
    _cpu.choose_isa(before)


#: All but generic, which takes long, unless the processor has no other.
QUICK_FLOATS, QUICK_INTEGERS = FLOATS[:-1] or FLOATS, INTEGERS[:-1] or INTEGERS
#: The machine's best; of the emulated ones all.
OWN = QUICK_FLOATS if EMULATED else QUICK_FLOATS[:1]


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.slow if kind in MORE else ()) for kind in KINDS])
@pytest.mark.parametrize("floats", OWN)
def test_a_few_answers(script: Any, floats: str, kind: str) -> None:
    options = ["--floats", floats, "--kinds", kind, "--requests", FEW, "--schedules", "one batch"]
    assert script.main(["compare", *options, "--integers", ",".join(QUICK_INTEGERS)]) == 0


@pytest.mark.skipif(EMULATED, reason="floats without any instruction set need no emulation")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind != "bfloat16" else ()) for kind in KINDS]
)
def test_an_answer_of_floats_without_any_instruction_set(script: Any, kind: str) -> None:
    options = ["--floats", "generic", "--kinds", kind, "--requests", "5", "--schedules", "one batch"]
    assert script.main(["compare", *options, "--integers", ",".join(QUICK_INTEGERS)]) == 0


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("floats", QUICK_FLOATS)
def test_all_answers_under_every_schedule(script: Any, floats: str, kind: str) -> None:
    assert script.main(["compare", "--floats", floats, "--kinds", kind]) == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ("int8", "int4", "gguf"))
def test_integers_without_any_instruction_set(script: Any, kind: str) -> None:
    few = ["--kinds", kind, "--requests", FEW, "--schedules", "one batch"]
    assert script.main(["compare", *few, "--floats", FLOATS[0], "--integers", "generic"]) == 0


@pytest.mark.parametrize("differing", [None, "a schedule", "a set of integers", "all"])
def test_what_differs_is_said(
    script: Any, differing: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = script.read()["avx2"]["int8"]

    def run(kind: str, way: str, sets: str, requests: list[int]) -> list[str]:
        of_run = {"a schedule": way == "swap", "a set of integers": sets == "avx2+avx_vnni", "all": True, None: False}
        return ["other" if of_run[differing] and i == 6 else recorded[i] for i in requests]

    monkeypatch.setattr(script, "run", run)
    options = ["--floats", "avx2", "--kinds", "int8", "--integers", "avx2,avx_vnni", "--requests", "5,6"]
    assert script.main(["compare", *options]) == (differing is not None)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(script.SCHEDULES) + 1
    said = [line for line in lines if "[6] from the record" in line]
    assert len(said) == {None: 0, "a schedule": 1, "a set of integers": 1, "all": len(lines)}[differing]
    assert len([line for line in lines if line.endswith(": same")]) == len(lines) - len(said)


def test_every_set_of_floats_has_a_record_of_every_kind(script: Any) -> None:
    recorded = script.read()
    assert set(recorded) == {"amx_bf16", "avx512_bf16", "avx512", "avx2", "generic", "generic aarch64"}
    for kinds in recorded.values():
        assert {kind: len(digests) for kind, digests in kinds.items()} == dict.fromkeys(KINDS, len(script.PROMPTS))


def test_what_is_not_recorded_is_refused(script: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(script, "read", lambda: {"avx2": {"int4": ["0"] * 12}})
    assert script.main(["compare", "--floats", "avx2", "--kinds", "int8", "--requests", FEW]) == 2
    assert "nothing is recorded for int8 on avx2" in capsys.readouterr().err
