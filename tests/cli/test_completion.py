"""What shells offer after a part of a command line, from the scripts that octavo completion prints."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from octavo.cli.completion import SHELLS, tree
from octavo.cli.main import COMMANDS, main
from tests.busy_machine import PATIENCE

Complete = Callable[[str], list[str]]


class Bash:
    """Completes the last word of a line, which may be empty; words are separated by one space."""

    def __init__(self, script: Path, folder: Path) -> None:
        self.script, self.folder = script, folder

    def __call__(self, line: str) -> list[str]:
        words = re.sub("=", " = ", line).split(" ")  # as readline does
        code = (
            f"source {self.script}; COMP_WORDS=({' '.join(repr(word) for word in words)}); "
            f"COMP_CWORD={len(words) - 1}; "
            '_octavo; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        command = ["bash", "--norc", "-uc", code]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=PATIENCE)
        assert not done.stderr, done.stderr
        return [each for each in done.stdout.splitlines() if each]

    def close(self) -> None:
        """Nothing is kept."""


class Fish(Bash):
    """The same by fish itself, which prints each with its help."""

    def __call__(self, line: str) -> list[str]:
        command = ["fish", "--no-config", "-c", f"source {self.script}; complete -C {line!r}"]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=PATIENCE)
        assert not done.stderr, done.stderr
        found = [each.split("\t")[0] for each in done.stdout.splitlines()]
        return [each.split("=")[-1] for each in found]  # of --flag=value all of it


#: An interactive zsh that completes the line of a file when it is sent Control-X, and writes what it would offer.
ZSHRC = """\
fpath=($ZDOTDIR/functions $fpath)
autoload -Uz compinit
compinit -u -D
setopt no_auto_list
compadd() { local -a each; builtin compadd -O each "$@"; print -rC1 -- $each >> $ZDOTDIR/offered; builtin compadd "$@" }
answer() { BUFFER=$(<$ZDOTDIR/line); CURSOR=$#BUFFER; zle complete-word; BUFFER=; print > $ZDOTDIR/ready }
zle -N answer
bindkey '^X' answer
zle-line-init() { print > $ZDOTDIR/ready }
zle -N zle-line-init
"""


class Zsh:
    """The same by an interactive zsh, which finds the script as a user's does."""

    def __init__(self, script: Path, folder: Path) -> None:
        self.home = script.parent / "zsh"
        (self.home / "functions").mkdir(parents=True)
        (self.home / "functions" / "_octavo").write_text(script.read_text())
        (self.home / ".zshrc").write_text(ZSHRC)
        self.terminal, slave = pty.openpty()
        environ = {**os.environ, "TERM": "dumb", "ZDOTDIR": str(self.home)}
        ends = {"stdin": slave, "stdout": slave, "stderr": slave}
        command = ["zsh", "-d", "-i"]
        self.zsh = subprocess.Popen(command, **ends, cwd=folder, env=environ, start_new_session=True)  # type: ignore[call-overload]
        os.close(slave)
        self.wait()

    def wait(self) -> None:
        """Until the shell waits for a key."""
        said, end = b"", time.monotonic() + PATIENCE
        while not (self.home / "ready").exists():
            assert time.monotonic() < end, said.decode()
            if select.select([self.terminal], [], [], 0.01)[0]:
                said += os.read(self.terminal, 65536)
        assert b"_octavo:" not in said, said.decode()

    def __call__(self, line: str) -> list[str]:
        (self.home / "ready").unlink()
        (self.home / "offered").write_text("")
        (self.home / "line").write_text(line)
        os.write(self.terminal, b"\x18")
        self.wait()
        offered = (self.home / "offered").read_text().replace("\\ ", " ").split("\n")
        return list(dict.fromkeys(offered[:-1]))

    def close(self) -> None:
        self.zsh.kill()
        self.zsh.wait()
        os.close(self.terminal)


DRIVERS: dict[str, type[Bash] | type[Zsh]] = {"bash": Bash, "zsh": Zsh, "fish": Fish}


@pytest.fixture(scope="module", params=[*SHELLS])
def complete(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Complete]:
    """What a shell that is installed completes a line's last word to."""
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    made = tmp_path_factory.mktemp("completion")
    (made / "here").mkdir()
    for name in ("mine.gguf", "my model.gguf"):
        (made / "here" / name).touch()
    (made / "script").write_text(SHELLS[shell](tree()))
    driver = DRIVERS[shell](made / "script", made / "here")
    yield driver
    driver.close()


def test_commands_are_offered_first(complete: Complete) -> None:
    assert complete("octavo se") == ["serve"]
    assert sorted(complete("octavo ")) == sorted(COMMANDS)
    assert complete("octavo --he") == ["--help"]


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
    assert set(complete("octavo generate --quantization in")) == {"int8", "int4"}
    assert complete("octavo serve --batching=mi") == ["mixed"]


def test_files_are_offered_after_a_flag_that_takes_any_value(complete: Complete) -> None:
    assert complete("octavo serve --config ") == ["mine.gguf", "my model.gguf"]
    assert complete("octavo serve --config=min") == ["mine.gguf"]


def test_models_and_files_are_offered_as_words(complete: Complete) -> None:
    assert complete("octavo chat smol") == ["smollm2-135m"]
    assert complete("octavo chat min") == ["mine.gguf"]
    assert {"smollm2-135m", "mine.gguf"} <= set(complete("octavo chat "))


def test_kinds_of_a_command_have_flags_of_their_own(complete: Complete) -> None:
    assert "policies" in complete("octavo bench ")
    assert "--scenarios" in complete("octavo bench policies --sc")
    assert complete("octavo simulate plan --ttft-l") == ["--ttft-limit"]
    assert complete("octavo bench --scen") == []
    assert complete("octavo batch run --retry") == ["--retry-failed"]


@pytest.mark.parametrize("shell", [*SHELLS])
def test_a_script_is_printed_for_each_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "--max-num-seqs" in capsys.readouterr().out.replace("-l max-num-seqs", "--max-num-seqs")


def test_another_shell_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "takes one of bash, zsh, fish, not tcsh" in capsys.readouterr().err
