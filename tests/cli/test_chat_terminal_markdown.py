"""Answers as Markdown: on the screen of a terminal stands in the end all that the model wrote, once."""

from __future__ import annotations

import io
import random
import re
from pathlib import Path

import pytest
from rich.console import Console

from octavo.cli import chat_terminal
from octavo.cli.chat import choose_display, markdown_display, plain_display
from octavo.cli.chat_terminal import GrowingMarkdown, Piece, Shown, split
from octavo.cli.inputs import printable
from tests.cli.terminal import Screen

DOCUMENT = (Path(__file__).parent / "answer.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def every_piece_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_terminal, "_PAUSE", 0)
    monkeypatch.setattr(chat_terminal, "_SHARE", 0)


def drawn(
    text: str, sizes: random.Random, width: int = 60, height: int = 10, longest: int = 12
) -> tuple[list[str], str]:
    """(lines of the terminal, what was written to it) where a text grows by pieces of random sizes."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, height=height, highlight=False)
    with GrowingMarkdown(console) as shown:
        at = 0
        while at < len(text):
            size = sizes.randint(1, longest)
            shown.add(text[at : at + size])
            at += size
    screen = Screen(width, height)
    screen.feed(file.getvalue().replace("\n", "\r\n").encode())
    return screen.lines, file.getvalue()


def at_once(text: str, width: int = 60) -> list[str]:
    """The lines of a text that is drawn whole, without a screen."""
    file = io.StringIO()
    Console(file=file, width=width, highlight=False).print(Shown("", text), end="")
    return [line.rstrip() for line in file.getvalue().splitlines()]


@pytest.mark.parametrize(("seed", "height"), [(1, 6), (2, 30)])
def test_a_text_that_grew_looks_like_one_that_was_there_at_once(seed: int, height: int) -> None:
    lines, _ = drawn(DOCUMENT, random.Random(seed), height=height, longest=40)
    whole = at_once(DOCUMENT)
    assert [line for line in lines if line] == [line for line in whole if line] and len(whole) > 80
    code = re.search("```python\n(.*?)```", DOCUMENT, re.DOTALL)
    assert code is not None and code[1] in "\n".join(lines)


def test_parts_are_printed_as_soon_as_nothing_can_change_them() -> None:
    def parts(text: str, most_lines: int = 3) -> list[tuple[str, bool]]:
        return [(piece.text, piece.goes_on) for piece in split(Piece(text, False), most_lines)]

    assert parts("one\n\ntwo") == [("one\n\ntwo", False)], "the last line may become anything"
    assert parts("one\n\ntwo\n") == [("one\n\n", False), ("two\n", False)]
    assert parts("- a\n- b\n  - c\n- d") == [("- a\n", False), ("- b\n  - c\n- d", True)]
    assert parts("x\n\n1. a\n2. b\n") == [("x\n\n", False), ("1. a\n", False), ("2. b\n", True)]
    code = "```py t=1\n1\n2\n3\n4\n5\n"
    assert parts(code) == [("```py t=1\n1\n2\n3\n```\n", False), ("```py\n4\n5\n", True)]
    assert parts("| a |\n|---|\n| 1 |\n") == [("| a |\n|---|\n| 1 |\n", False)]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a <b>tag</b> and\n<think>\nhm\n</think>", "a <b>tag</b> and\n<think>\nhm\n</think>"),
        ("two\nlines", "two\nlines"),
        ("see [here](https://x.y/z) ![a cat](cat.png)", "see here (https://x.y/z) ![a cat](cat.png)"),
        ("[1]: https://x.y", "[1]: https://x.y"),
        ("&#27;[31m &#13;&#155;", "�[31m �"),
        ("```sh title=a\nls\n```", "sh title=a\nls"),
        ("> " * 30 + "deep", "> " * 30 + "deep"),
        ("```no-such-language\nx\n```", "x"),
    ],
)
def test_nothing_is_hidden(text: str, shown: str) -> None:
    assert at_once(text, width=200) == [line.rstrip() for line in shown.splitlines()]


def test_words_of_narrow_tables_are_folded() -> None:
    text = "| name | value |\n|---|---|\n| averyveryverylongword | anotherverylongword |\n"
    letters = "".join(re.findall("[a-z]", "".join(at_once(text, width=24))))
    assert len(letters) == len("namevalueaveryveryverylongwordanotherverylongword")


#: Between words, with a space between them.
MARKS = r"\n \n\n -_ 1._ __ ____ ```\n ```py\n ~~~\n >_ |_ |---|---|\n ** * ` #_ [x]( ](url) ![ <b> --- === 日本"
ATOMS = [mark.replace(r"\n", "\n").replace("_", " ") for mark in MARKS.split()]
ATOMS += ["\x1b[31m", "&#27;", "\x9b2J", "\x07", "\r", "\\"]


@pytest.mark.parametrize("seed", range(6))
def test_no_mixture_of_marks_loses_a_word_or_reaches_the_terminal(seed: int) -> None:
    chance = random.Random(seed)
    words = [f"word{i}" for i in range(chance.randint(1, 25))]
    text = "".join(f"{''.join(chance.choices(ATOMS, k=chance.randint(0, 3)))}{word} " for word in words)
    lines, written = drawn(text, chance, width=chance.choice([20, 40, 80]))
    letters = re.sub(r"[^a-z0-9]", "", "".join(lines))
    assert [word for word in words if word not in letters] == []
    sequences = re.findall(r"\x1b(\[[0-9;?]*[A-Za-z]|.)", written)
    assert {sequence[-1] for sequence in sequences} <= set("mAKlh"), "styles, cursor up, wiping a line, the cursor"
    assert not re.search(r"[\x00-\x09\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]", written)


def test_control_characters_are_shown() -> None:
    assert printable("a\tb\n\x00\x1b[2J\x7f\r\x9b\u202e") == "a\tb\n␀␛[2J␡<U+009B><U+202E>"
    assert printable("naïve 日本 🌆 e\u0301") == "naïve 日本 🌆 e\u0301"


def test_markdown_is_for_terminals_that_can_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert choose_display(plain=False) is markdown_display
    assert choose_display(plain=True) is plain_display
    monkeypatch.setenv("NO_COLOR", "1")
    assert choose_display(plain=False) is plain_display
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("TERM", "dumb")
    assert choose_display(plain=False) is plain_display
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
    assert choose_display(plain=False) is plain_display


def test_what_goes_into_a_file_is_exactly_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    with plain_display() as show:
        show("**a** \x1b[2J")
    assert capsys.readouterr().out == "**a** \x1b[2J\n"
