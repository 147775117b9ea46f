"""``octavo chat`` as a person has it: in a terminal, with its keys and its screen."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from tests.cli.terminal import CTRL_C, CTRL_D, ENTER, ROOT, UP, Terminal, pasted

SCRIPTED = [sys.executable, str(ROOT / "tests" / "cli" / "scripted_chat.py")]


def at_prompt(*seen: str) -> Callable[[str], bool]:
    """Whether these texts are there, and the next message can be typed."""
    return lambda text: all(each in text for each in seen) and text.endswith("\n>")


def messages(terminal: Terminal, path: Path) -> list[str]:
    """What was said, from the file that /save writes."""
    path.unlink(missing_ok=True)
    terminal.type(f"/save {path}{ENTER}")
    terminal.wait(lambda text: path.exists() and text.endswith("\n>"))
    return [message["content"] for message in json.loads(path.read_text())["messages"]]


def test_lines_that_are_typed_and_pasted(tmp_path: Path) -> None:
    history, saved = tmp_path / "history", tmp_path / "talk.json"
    with Terminal([*SCRIPTED, "--plain", "--history", str(history)]) as terminal:
        terminal.wait(at_prompt())
        terminal.type(f"one\\{ENTER}")
        terminal.wait("> one\n...")
        terminal.type(f"two{ENTER}")
        terminal.wait(at_prompt("you said: one\ntwo"))
        terminal.type(f'"""a{ENTER}')
        terminal.wait('> """a\n...')
        terminal.type(f'  /b\\{ENTER}c"""{ENTER}')
        terminal.wait(at_prompt("  /b\\\nc"))
        terminal.type(pasted("def f():\n    return 1 \\\n\n# end"))
        terminal.wait("... # end")
        terminal.type(ENTER)
        terminal.wait(at_prompt("you said: def f():"))
        assert messages(terminal, saved)[::2] == ["one\ntwo", "a\n  /b\\\nc", "def f():\n    return 1 \\\n\n# end"]
        terminal.type(f"{UP}{UP}{UP}{UP}{UP}{UP}{UP}{ENTER}")  # over the lines of the paste, to the message before it
        terminal.wait(lambda text: text.count("you said: a\n") == 2 and text.endswith("\n>"))
        terminal.type("never asked")
        terminal.wait("> never asked")
        terminal.type(CTRL_C)
        terminal.wait(at_prompt("(Ctrl-D or /exit leaves)"))
        terminal.type(CTRL_D)
        assert terminal.end() == 0
    assert history.stat().st_mode & 0o777 == 0o600
    with Terminal([*SCRIPTED, "--history", str(history)]) as terminal:
        terminal.wait(at_prompt())
        terminal.type(UP)
        terminal.wait('> """a\n...   /b\\\n... c"""')
        terminal.type(CTRL_C)
        terminal.wait(at_prompt("leaves"))
        terminal.type(f"/ex\t{ENTER}")
        assert terminal.end() == 0


def test_answers_longer_than_the_screen_are_shown_whole_and_once(tmp_path: Path) -> None:
    with Terminal(SCRIPTED, height=12) as terminal:
        terminal.wait(at_prompt())
        terminal.type(f"long{ENTER}")
        terminal.wait(at_prompt("the end"))
        rows = [line.split() for line in terminal.screen.lines]
        assert [row for row in rows if "item" in row] == [[str(i), "item", str(i)] for i in range(1, 61)]
        assert "A long answer" in terminal.screen.lines and "**" not in terminal.screen.text
        terminal.type(f"code{ENTER}")
        terminal.wait(at_prompt("x59 = 59"))
        code = [line for line in terminal.screen.lines if re.match(r"x\d", line)]
        assert code == [f"x{i} = {i}" for i in range(60)]
        # No drawing is higher than the screen: nothing is wiped that has left it.
        assert max(len(ups) // 8 for ups in re.findall(rb"(?:\x1b\[1A\x1b\[2K)+", terminal.output)) < 12
        terminal.type(CTRL_D)
        assert terminal.end() == 0


def test_ctrl_c_stops_an_answer_and_keeps_it(tmp_path: Path) -> None:
    with Terminal(SCRIPTED) as terminal:
        terminal.wait(at_prompt())
        terminal.type(f"slow{ENTER}")
        terminal.wait("word40")
        terminal.type(CTRL_C)
        terminal.wait(at_prompt())
        terminal.type(f"more{ENTER}")
        terminal.wait(at_prompt("you said: more"))
        slow, answer, *_ = messages(terminal, tmp_path / "talk.json")
        assert slow == "slow" and answer.startswith("word0 word1") and " word40" in answer and len(answer) < 60_000
        terminal.type(f"/exit{ENTER}")
        assert terminal.end() == 0


def test_what_is_typed_during_an_answer_stands_at_the_next_prompt() -> None:
    with Terminal(SCRIPTED) as terminal:
        terminal.wait(at_prompt())
        terminal.type(f"steady{ENTER}")
        terminal.wait("word3")
        terminal.type("typed meanwhile")
        text = terminal.wait(lambda text: text.endswith("\n> typed meanwhile"))
        assert text.count("typed meanwhile") == 1 and "word59" in text
        terminal.type(CTRL_C)
        terminal.wait(at_prompt("leaves"))
        terminal.type(CTRL_D)
        assert terminal.end() == 0


def test_nothing_that_a_model_writes_is_obeyed() -> None:
    for kind, shown in (("xterm", "bold"), ("dumb", "**bold**")):
        with Terminal(SCRIPTED, TERM=kind) as terminal:
            terminal.wait(at_prompt())
            before = len(terminal.output)
            terminal.type("evil\n")
            text = terminal.wait(at_prompt("over"))
            assert f"␛]0;title␇␛[2J{shown}<U+009B>5n␡" in text
            answer = terminal.output[before:]
            assert b"\x1b]0;" not in answer and b"\x1b[2J" not in answer and b"\xc2\x9b" not in answer
            assert b"\x1b[31m" not in answer and b"\x07" not in answer
            terminal.type(CTRL_D)
            assert terminal.end() == 0


def test_the_program_with_a_model(tiny_model: Path, tmp_path: Path) -> None:
    flags = ["--temperature", "0", "--max-tokens", "9", "--ignore-eos", "--stats"]
    command = [sys.executable, "-m", "octavo", "chat", str(tiny_model), *flags]
    with Terminal(command, width=200, XDG_STATE_HOME=str(tmp_path)) as terminal:  # names of folders are long
        terminal.wait(at_prompt("type a question and press Enter; /help shows commands"))
        terminal.type(f"Hello{ENTER}")
        terminal.wait(at_prompt("[9 tokens, ", "tokens/s; first after "))
        terminal.type(f"/retry{ENTER}")
        terminal.wait(lambda text: text.count("[9 tokens, ") == 2 and text.endswith("\n>"))
        hello, answer = messages(terminal, tmp_path / "talk.json")
        assert hello == "Hello" and answer
        terminal.type(CTRL_D)
        assert terminal.end() == 0
    typed = (tmp_path / "octavo" / "chat_history.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in typed][:2] == ["Hello", "/retry"]
