from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.core.errors import DownloadError
from octavo.core.sampling_params import SamplingParams
from octavo.loader.builtin import BUILTIN, BuiltinModel, Wheel, fetch_builtin
from tests.busy_machine import PATIENCE

CONTENT = bytes(range(256)) * 400


def test_the_sampling_of_a_built_in_model_is_valid() -> None:
    assert {"temperature": 0.2, "top_p": 0.9}.items() <= BUILTIN["smollm2-135m"].sampling.items()
    for model in BUILTIN.values():
        params = SamplingParams(**dict[str, Any](model.sampling))
        assert {name: getattr(params, name) for name in model.sampling} == model.sampling


def make_wheel(
    folder: Path, content: bytes = CONTENT, member: str = "tinymodel/tiny.gguf", name: str = "octavo_tinymodel"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return tmp_path / "cache"


@pytest.fixture
def tiny(tmp_path: Path) -> BuiltinModel:
    return model_of(pinned(make_wheel(tmp_path / "wheels"), CONTENT))


def pinned(wheel: Path, content: bytes, member: str = "tinymodel/tiny.gguf") -> Wheel:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    requirement = "==".join(wheel.name.replace("_", "-").rsplit("-", 4)[:2])
    return Wheel(requirement, digest, wheel.stat().st_size, member, len(content))


def model_of(*parts: Wheel, content: bytes = CONTENT, terms: Wheel | None = None) -> BuiltinModel:
    return BuiltinModel("tiny", "", "Apache-2.0", parts, hashlib.sha256(content).hexdigest(), terms)


def test_a_model_is_fetched_checked_and_recorded(cache: Path, tiny: BuiltinModel, capfd: Any) -> None:
    path = fetch_builtin(tiny)
    assert path.read_bytes() == CONTENT
    assert path.is_relative_to(cache)
    assert json.loads((path.parent / "source.json").read_text())["file_sha256"] == hashlib.sha256(CONTENT).hexdigest()
    assert sorted(p.name for p in path.parent.iterdir()) == ["model.gguf", "source.json"]
    assert "downloading tiny: 100%" in capfd.readouterr().err


def test_a_fetched_model_is_not_fetched_again(cache: Path, tiny: BuiltinModel, tmp_path: Path, capfd: Any) -> None:
    path = fetch_builtin(tiny, progress=False)
    assert capfd.readouterr().err == ""
    (tmp_path / "wheels" / "octavo_tinymodel-1.0-py3-none-any.whl").unlink()
    assert fetch_builtin(tiny) == path


@pytest.mark.parametrize("change", ["other", pytest.param("truncated", marks=pytest.mark.slow)])
def test_a_wheel_with_another_hash_is_refused(
    cache: Path, tiny: BuiltinModel, tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    wheel = tmp_path / "wheels" / "octavo_tinymodel-1.0-py3-none-any.whl"
    whole = wheel.read_bytes()
    if change == "other":
        make_wheel(wheel.parent, CONTENT[::-1])
    else:
        wheel.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DownloadError, match="tiny"):
        fetch_builtin(tiny, progress=False)
    assert len(caplog.records) == 2, "tried twice"
    assert [p for p in cache.rglob("*") if p.is_file()] == []
    wheel.write_bytes(whole)
    assert fetch_builtin(tiny, progress=False).read_bytes() == CONTENT


def test_a_download_is_tried_twice(
    cache: Path, tiny: BuiltinModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo.loader import builtin

    good, calls = builtin._run_pip, []

    def first_fails(*arguments: Any) -> str:
        calls.append(arguments)
        return "connection reset" if len(calls) == 1 else good(*arguments)

    monkeypatch.setattr(builtin, "_run_pip", first_fails)
    assert fetch_builtin(tiny, progress=False).read_bytes() == CONTENT
    assert len(calls) == 2


def test_what_pip_says_is_passed_on(cache: Path, tiny: BuiltinModel, tmp_path: Path) -> None:
    (tmp_path / "wheels" / "octavo_tinymodel-1.0-py3-none-any.whl").unlink()
    with pytest.raises(DownloadError, match="No matching distribution found for octavo-tinymodel"):
        fetch_builtin(tiny, progress=False)


def test_a_download_for_which_the_disk_has_no_room_is_not_begun(
    cache: Path, tiny: BuiltinModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = SimpleNamespace(free=tiny.parts[0].download_size + tiny.parts[0].size - 1)
    monkeypatch.setattr("octavo.loader.builtin.shutil.disk_usage", lambda folder: full)
    with pytest.raises(DownloadError, match=r"No space left on device.*OCTAVO_CACHE"):
        fetch_builtin(tiny, progress=False)
    assert [p for p in cache.rglob("*") if p.is_file()] == []


def test_a_download_that_the_disk_cannot_hold_says_so_and_leaves_nothing(cache: Path, tiny: BuiltinModel) -> None:
    script = (
        "import resource\n"
        "from octavo.loader import builtin\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "from octavo.loader.builtin import BuiltinModel, Wheel\n"
        f"builtin.fetch_builtin({tiny!r}, progress=False)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE)
    said = result.stderr.splitlines()[-1]
    assert "DownloadError: cannot write to the cache folder" in said
    assert "(File too large); set OCTAVO_CACHE to a folder that can hold the model" in said
    assert [p for p in cache.rglob("*") if p.is_file()] == []


def test_without_pip_the_message_says_what_to_do(
    cache: Path, tiny: BuiltinModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match=r"ensurepip.*\.gguf"):
        fetch_builtin(tiny)


def test_that_there_is_no_network_is_said_as_such_after_one_attempt(
    cache: Path, tiny: BuiltinModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(cache.parent / "wheels")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the port of "discard", where nothing listens
    with pytest.raises(DownloadError, match=r"could not fetch tiny: no network: .* cannot be reached") as e:
        fetch_builtin(tiny, progress=False)
    assert "Connection refused" in str(e.value) and "0x" not in str(e.value)
    assert "versions: none" not in str(e.value) + caplog.text


@pytest.mark.parametrize(
    "fact",
    [
        {"size": 10**9},
        *(pytest.param(fact, marks=pytest.mark.slow) for fact in ({"member": "tinymodel/other.gguf"}, {"size": 10})),
    ],
)
def test_an_archive_with_other_content_is_refused(cache: Path, tiny: BuiltinModel, fact: dict[str, Any]) -> None:
    with pytest.raises(DownloadError, match="tiny"):
        fetch_builtin(model_of(dataclasses.replace(tiny.parts[0], **fact)), progress=False)


def test_a_partial_left_by_a_killed_process_is_never_used(cache: Path, tiny: BuiltinModel) -> None:
    partial = cache / "builtin" / f"tiny-{tiny.parts[0].sha256[:16]}.partial"
    partial.mkdir(parents=True)
    (partial / "model.gguf").write_bytes(b"half")
    assert fetch_builtin(tiny, progress=False).read_bytes() == CONTENT
    assert not partial.exists()


def test_processes_at_once_download_once(cache: Path, tiny: BuiltinModel) -> None:
    script = (
        "from octavo.loader import builtin\n"
        "from octavo.loader.builtin import BuiltinModel, Wheel\n"
        f"model = {tiny!r}\n"
        "real = builtin._run_pip\n"
        "def counted(*a):\n    print('DOWNLOAD', flush=True)\n    return real(*a)\n"
        "builtin._run_pip = counted\n"
        f"assert builtin.fetch_builtin(model, progress=False).stat().st_size == {len(CONTENT)}\n"
    )
    command = [sys.executable, "-c", script]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert "".join(outputs).count("DOWNLOAD") == 1


def test_a_pip_module_in_the_current_folder_is_not_run(
    cache: Path, tiny: BuiltinModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.py").write_text("raise SystemExit('hijacked')")
    monkeypatch.chdir(tmp_path)
    assert fetch_builtin(tiny, progress=False).read_bytes() == CONTENT


def test_a_file_in_several_wheels_is_joined_and_its_terms_lie_beside_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(wheel: Wheel, folder: Path, *_: Any) -> str:
        shutil.copy(wheels / f"{wheel.requirement.replace('-', '_').replace('==', '-')}-py3-none-any.whl", folder)
        return ""

    monkeypatch.setattr("octavo.loader.builtin._run_pip", copy)
    wheels, cuts, terms = tmp_path / "wheels", (0, 1000, 60_000, len(CONTENT)), b"do no evil"
    parts = []
    for i, (start, end) in enumerate(pairwise(cuts)):
        piece = CONTENT[start:end]
        parts.append(pinned(make_wheel(wheels, piece, "p/model.part", f"octavo_part{i}"), piece, "p/model.part"))
    text = pinned(make_wheel(wheels, terms, "p/TERMS.html", "octavo_terms"), terms, "p/TERMS.html")
    path = fetch_builtin(model_of(*parts, terms=text))
    assert path.read_bytes() == CONTENT
    assert (path.parent / "TERMS.html").read_bytes() == terms
    assert sorted(p.name for p in path.parent.iterdir()) == ["TERMS.html", "model.gguf", "source.json"]
    with pytest.raises(DownloadError, match="joined file of tiny"):
        fetch_builtin(model_of(*parts[::-1]), progress=False)


def test_the_list_of_built_in_models_is_complete() -> None:
    for name, model in BUILTIN.items():
        assert model.name == name
        assert model.licence
        assert model.description
        for digest in (model.sha256, *(wheel.sha256 for wheel in model.wheels)):
            assert len(bytes.fromhex(digest)) == 32
        assert all(wheel.size > 0 and wheel.download_size > 0 for wheel in model.wheels)
