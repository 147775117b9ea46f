"""What bash offers after a part of a command line, from the script that octavo completion prints."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.cli.completion import SHELLS, tree
from octavo.cli.main import COMMANDS, main
from tests.busy_machine import PATIENCE

Complete = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Complete:
    """Runs bash: what the last word of a line, which may be empty, is completed to."""
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    folder = tmp_path_factory.mktemp("completion")
    script = folder / "octavo.bash"
    script.write_text(SHELLS["bash"](tree()))
    (folder / "mine.gguf").touch()

    def run(line: str) -> list[str]:
        words = line.split(" ")
        code = (
            f"source {script}; COMP_WORDS=({' '.join(repr(word) for word in words)}); COMP_CWORD={len(words) - 1}; "
            '_octavo; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        command = ["bash", "--norc", "-uc", code]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
        assert not done.stderr, done.stderr
        return done.stdout.split()

    return run


def test_commands_are_offered_first(complete: Complete) -> None:
    assert complete("octavo ") == [*COMMANDS]
    assert complete("octavo se") == ["serve"]


def test_flags_of_a_command_are_offered_after_a_hyphen(complete: Complete) -> None:
    offered = complete("octavo serve smollm2-135m --max-num")
    assert set(offered) == {
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--max-num-partial-prefills",
        "--max-num-encoder-input-tokens",
    }
    assert "--api-key-file" in complete("octavo serve --")
    assert "--api-key-file" not in complete("octavo generate --")


def test_values_are_offered_after_a_flag_that_has_some(complete: Complete) -> None:
    assert complete("octavo serve --batching ") == ["mixed", "prefill_first"]
    assert complete("octavo generate --quantization in") == ["int8", "int4"]


def test_files_are_offered_after_a_flag_that_takes_any_value(complete: Complete) -> None:
    assert complete("octavo serve --config ") == ["mine.gguf", "octavo.bash"]


def test_models_and_files_are_offered_as_words(complete: Complete) -> None:
    assert complete("octavo chat smol") == ["smollm2-135m"]
    assert complete("octavo chat mi") == ["mine.gguf"]


def test_kinds_of_a_command_have_flags_of_their_own(complete: Complete) -> None:
    assert "policies" in complete("octavo bench ")
    assert "--scenarios" in complete("octavo bench policies --sc")
    assert complete("octavo simulate plan --ttft-l") == ["--ttft-limit"]
    assert complete("octavo batch run --retry") == ["--retry-failed"]


@pytest.mark.parametrize("shell", [*SHELLS])
def test_a_script_is_printed_for_each_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "--max-num-seqs" in capsys.readouterr().out.replace("-l max-num-seqs", "--max-num-seqs")


def test_another_shell_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "takes one of bash, zsh, fish, not tcsh" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_shell_itself_reads_its_script(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    script.write_text(SHELLS[shell](tree()))
    subprocess.run([shell, "-n", str(script)], check=True, timeout=PATIENCE)
