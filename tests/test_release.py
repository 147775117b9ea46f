"""What a release is made with: the workflow, the settings of cibuildwheel, and the scripts that try it."""

from __future__ import annotations

import re
import shlex
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from octavo.cli import generate
from tests.test_package import ROOT, script


def project() -> dict[str, dict[str, dict[str, str]]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_wheels_are_built_for_each_python_that_the_package_says_it_runs_on() -> None:
    classifiers = project()["project"]["classifiers"]
    versions = [text.rsplit(" ", 1)[1].replace(".", "") for text in classifiers if "Python :: 3." in text]
    assert project()["tool"]["cibuildwheel"]["build"] == " ".join(f"cp{version}-*" for version in versions)


def test_a_wheel_is_tried_by_a_command_that_there_is() -> None:
    command = str(project()["tool"]["cibuildwheel"]["test-command"])
    assert "import octavo._cpu" in command, "the build succeeds without the kernels, too"
    words = shlex.split(command.split("&&")[1])
    assert words[:2] == ["octavo", "generate"]
    generate.make_parser().read(words[2:])


def test_the_workflow_builds_on_both_architectures_and_publishes_all_of_it() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))["jobs"]
    built = {each["arch"] for each in jobs["wheels"]["strategy"]["matrix"]["include"]}
    assert built == {"x86_64", "aarch64"}
    assert set(jobs["publish"]["needs"]) == {"wheels", "sdist"}
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    actions = [step["uses"] for job in jobs.values() for step in job["steps"] if "uses" in step]
    assert actions and all(re.fullmatch(r"[\w/.-]+@[0-9a-f]{40}", action) for action in actions), "tags can be moved"


@pytest.mark.parametrize(
    ("name", "files", "expected"),
    [
        ("octavo-0-cp311-cp311-manylinux_2_28_x86_64.whl", ["octavo/_cpu.so"], []),
        ("octavo-0-cp311-cp311-linux_x86_64.whl", ["octavo/_cpu.so"], ["for one system alone"]),
        ("octavo-0-cp311-cp311-manylinux_2_28_x86_64.whl", ["octavo/a.py"], ["lacks the compiled kernels"]),
        ("octavo-0-cp311-cp311-manylinux_2_28_x86_64.whl", ["octavo/_cpu.so", "tests/a.py"], ["tests/a.py"]),
    ],
)
def test_a_wheel_that_is_not_to_be_released_is_found(
    tmp_path: Path, name: str, files: list[str], expected: list[str]
) -> None:
    with zipfile.ZipFile(tmp_path / name, "w") as wheel:
        for file in files:
            wheel.writestr(file, "")
    found = script("release_wheel").problems(tmp_path / name)
    assert len(found) == len(expected)
    assert all(part in line for part, line in zip(expected, found, strict=True))


def test_the_seconds_of_the_first_ten_minutes_are_listed_with_their_sum() -> None:
    text = script("ten_minutes").report({"git clone": 0.4, "make demo": 55.2}, "Paris.")
    assert text.splitlines() == [
        "    0.4 s  git clone",
        "   55.2 s  make demo",
        "   55.6 s  in all; the server said: Paris.",
    ]


def test_arm64_is_not_tried_without_its_tools(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert script("try_arm64").main([]) == 2
    said = capsys.readouterr().err
    assert "aarch64-linux-gnu-g++" in said and "apt install g++-aarch64-linux-gnu qemu-user-static" in said


@pytest.mark.parametrize(("machine", "name"), [("x86_64", "generic"), ("aarch64", "generic aarch64")])
def test_answers_of_other_processors_than_x86_have_a_record_of_their_own(
    monkeypatch: pytest.MonkeyPatch, machine: str, name: str
) -> None:
    digests = script("answer_digests")
    monkeypatch.setattr(digests.platform, "machine", lambda: machine)
    assert digests.record_name("generic") == name
