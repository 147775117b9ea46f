from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octavo.cli import chat
from octavo.cli.chat_lines import HistoryFile, Typed, default_path, read_messages
from octavo.core.sampling_params import DefaultMaxTokens
from tests.busy_machine import PATIENCE
from tests.cli.helpers import Capture, Run, converse
from tests.cli.scripted_engine import ScriptedEngine
from tests.cli.test_main import ENVIRON

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_answer_is_shown_as_it_grows_and_remembered(capsys: Capture) -> None:
    shown: list[str] = []
    engine = ScriptedEngine(["Pa", "ri", "s."], on_step=lambda n: shown.append(capsys.readouterr().out))
    conversation = converse(engine, "Be brief.")
    conversation.ask("Capital?")
    assert "".join(shown) + capsys.readouterr().out == "Paris.\n"
    assert shown == ["", "Pa", "ri"]
    conversation.ask("Why?")
    assert engine.conversations[-1] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Capital?"},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "Why?"},
    ]


def test_an_interrupt_stops_the_answer_and_keeps_the_conversation(capsys: Capture) -> None:
    def interrupt(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    engine = ScriptedEngine(["one", " two", " three"], on_step=interrupt)
    conversation = converse(engine)
    handler = signal.getsignal(signal.SIGINT)
    conversation.ask("Count.")
    assert engine.aborted == ["turn-1"]
    assert capsys.readouterr().out == "one two\n"
    assert conversation.messages[-1] == {"role": "assistant", "content": "one two"}
    assert conversation.failures == 0
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_second_interrupt_ends_the_program_and_frees_the_request() -> None:
    def interrupt(step: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)

    engine = ScriptedEngine(["one", " two"], on_step=interrupt)
    with pytest.raises(KeyboardInterrupt):
        converse(engine).ask("Count.")
    assert engine.aborted == ["turn-1"]


def test_a_question_that_is_too_long_is_forgotten(capsys: Capture) -> None:
    conversation = converse(ScriptedEngine(["fine"]))
    conversation.ask("x" * 200)
    assert "octavo: error: the prompt is too long" in capsys.readouterr().err
    assert (conversation.failures, conversation.messages) == (1, [])
    conversation.ask("short")
    assert capsys.readouterr().out == "fine\n"


def test_a_full_context_drops_the_oldest_turns_and_says_so(capsys: Capture) -> None:
    engine = ScriptedEngine(["a" * 10])
    conversation = converse(engine, "sys")
    for question in ("1" * 20, "2" * 20):
        conversation.ask(question)
    assert "dropped" not in capsys.readouterr().err
    conversation.ask("3" * 20)
    assert capsys.readouterr().err == (
        "octavo: the context of 100 tokens is full: 1 turn at the beginning of the conversation was dropped\n"
    )
    assert [m["content"][0] for m in conversation.messages] == ["s", "2", "a", "3", "a"]
    assert engine.conversations[-1] == conversation.messages[:-1]
    conversation.ask("4" * 70)
    assert "2 turns at the beginning of the conversation were dropped" in capsys.readouterr().err
    assert [m["content"][0] for m in conversation.messages] == ["s", "4", "a"]
    assert conversation.failures == 0
    conversation.ask("5" * 98)
    assert "the prompt is too long" in capsys.readouterr().err
    assert [m["content"][0] for m in conversation.messages] == ["s", "4", "a"], "what fails changes nothing"


def test_room_is_kept_for_an_answer_of_the_length_that_was_asked_for(capsys: Capture) -> None:
    engine = ScriptedEngine(["a" * 10])
    conversation = converse(engine, max_tokens=50)
    conversation.ask("1" * 20)
    conversation.ask("2" * 30)
    assert "1 turn at" in capsys.readouterr().err
    conversation.ask("3" * 70)
    assert [params.max_tokens for params in engine.params] == [50, 50, 30], (
        "a question that leaves less room has what there is"
    )


def test_an_answer_that_the_context_cuts_is_said_to_be_cut(capsys: Capture) -> None:
    engine = ScriptedEngine(["so", " far"])
    engine.finish_reason = "length"
    converse(engine).ask("Well?")
    assert capsys.readouterr().err == "octavo: the answer is cut: the context of 100 tokens is full\n"
    converse(engine, max_tokens=6).ask("Well?")
    assert capsys.readouterr().err == "", "as long as was asked for"
    converse(engine, max_tokens=DefaultMaxTokens(6)).ask("Well?")
    assert "cut at 6 tokens" in capsys.readouterr().err, "a limit that nobody has named"


def read(text: str) -> list[Typed]:
    lines = iter(text.splitlines())

    def next_line(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    return list(read_messages(next_line))


@pytest.mark.parametrize(
    ("typed", "messages"),
    [
        ("one\n  two  \n\nthree", ["one", "two", "three"]),
        ("a list:\\\nfirst\\\nlast\nnext", ["a list:\nfirst\nlast", "next"]),
        ('"""def f():\n    return 1\n"""\nnext', ["def f():\n    return 1", "next"]),
        ('"""\n  a\n\n/b\nc"""\nnext', ["  a\n\n/b\nc", "next"]),
        ('"""one line"""', ["one line"]),
        ('"""begun', ["begun"]),
        ("begun\\", ["begun"]),
    ],
)
def test_messages_of_several_lines(typed: str, messages: list[str]) -> None:
    assert read(typed) == [Typed(message) for message in messages]


def test_a_line_that_begins_with_a_slash_is_a_command_unless_it_is_quoted() -> None:
    assert read('/help\n"""/etc is what?"""\n/a\\\nb') == [Typed("/help", True), Typed("/etc is what?"), Typed("/a\nb")]


def test_a_failed_answer_is_reported_and_not_remembered(capsys: Capture) -> None:
    engine = ScriptedEngine(["so", " far"])
    engine.error = "the worker failed"
    conversation = converse(engine)
    conversation.ask("Well?")
    assert "the worker failed" in capsys.readouterr().err
    assert (conversation.failures, conversation.messages) == (1, [])


def test_a_piped_conversation_answers_each_line_until_it_is_told_to_leave(
    octavo: Run, capsys: Capture, tiny_model: Path
) -> None:
    flags = ("--temperature", "0", "--max-tokens", "5", "--ignore-eos", "--bad-words", "\n")
    assert octavo("chat", tiny_model, *flags, stdin="Hello\n\n/clear\nHello\n/exit\nnever asked\n") == 0
    captured = capsys.readouterr()
    assert captured.err == "a new conversation\n"
    half = len(captured.out) // 2
    assert captured.out.endswith("\n")
    assert captured.out[:half] == captured.out[half:]


def test_a_stream_is_the_text_that_generate_gives(octavo: Run, capsys: Capture, tiny_model: Path) -> None:
    flags = ("--temperature", "0", "--max-tokens", "40", "--ignore-eos")
    assert octavo("chat", tiny_model, *flags, stdin="Hello\n") == 0
    streamed = capsys.readouterr().out
    assert octavo("generate", tiny_model, "--chat", "Hello", *flags) == 0
    assert capsys.readouterr().out == streamed


def test_a_question_beyond_the_context_is_an_error_and_the_next_is_answered(
    octavo: Run, capsys: Capture, tiny_model: Path
) -> None:
    flags = ("--temperature", "0", "--max-tokens", "3")
    assert octavo("chat", tiny_model, *flags, stdin="x" * 1000 + "\nHello\n") == 1
    captured = capsys.readouterr()
    assert "octavo: error: prompt has" in captured.err
    assert captured.out.endswith("\n")


def test_what_is_typed_is_remembered_unless_it_should_not(
    octavo: Run, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    histories: list[HistoryFile | None] = []
    monkeypatch.setattr(chat, "talk", lambda conversation, history: histories.append(history))
    assert octavo("chat", tiny_model) == octavo("chat", tiny_model, "--no-history") == 0
    assert histories[0] is not None and histories[0].path == default_path() and histories[1] is None


def test_a_conversation_beyond_the_context_goes_on(octavo: Run, capsys: Capture, tiny_model: Path) -> None:
    flags = ("--temperature", "0", "--max-tokens", "40", "--ignore-eos", "--bad-words", "\n")
    question = "x" * 60
    assert octavo("chat", tiny_model, *flags, stdin=f"{question}\n" * 4) == 0
    captured = capsys.readouterr()
    assert captured.err.count("at the beginning of the conversation") == 2
    assert captured.out.count("\n") == 4


@pytest.mark.parametrize("stdin", ["</dev/null", "<&-"])
def test_it_ends_where_standard_input_is_empty_or_closed(tiny_model: Path, stdin: str) -> None:
    command = f'exec "{sys.executable}" -m octavo chat "{tiny_model}" --num-gpu-blocks-override 64 {stdin}'
    ended = subprocess.run(["sh", "-c", command], env=ENVIRON, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0 and ended.stdout == ""
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("model", "flags", "expected"),
    [
        ({}, "", (0.7, 0.95, 0, 2048)),
        # The model's recommendation is taken whole, as the API takes it.
        ({"temperature": 0.6}, "", (0.6, 1.0, 0, 2048)),
        ({"top_k": 64, "top_p": 0.9}, "", (1.0, 0.9, 64, 2048)),
        ({"repetition_penalty": 1.1}, "", (0.7, 0.95, 0, 2048)),
        ({"temperature": 0.6, "max_tokens": 9}, "--temperature 0.3 --top-p 0.5", (0.3, 0.5, 0, 9)),
    ],
)
def test_a_models_own_sampling_is_that_of_its_conversations(
    model: dict[str, float], flags: str, expected: tuple[float, ...]
) -> None:
    from octavo.cli.flags import read_sampling_params

    params = read_sampling_params(chat.make_parser().read(flags.split()), chat.with_own_defaults(model))
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == expected
