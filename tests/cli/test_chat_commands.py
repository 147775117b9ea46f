"""The commands of a conversation, and conversations as files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from octavo.cli import chat
from octavo.cli.chat import COMMANDS, SETTINGS, Conversation, completions, help_text, run_command
from octavo.core.sampling_params import DefaultMaxTokens, SamplingParams
from tests.cli.helpers import Capture, converse
from tests.cli.scripted_engine import ScriptedEngine


def roles(conversation: Conversation) -> str:
    return "".join(message["role"][0] for message in conversation.messages)


def said(capsys: Capture, conversation: Conversation, line: str) -> str:
    """What a command says."""
    capsys.readouterr()
    run_command(conversation, line)
    return capsys.readouterr().err


def test_help_names_every_command() -> None:
    text = help_text()
    assert all(f"\n{command.name}" in f"\n{text}" and command.help in text for command in COMMANDS)
    assert '"""' in text and "backslash" in text


def test_a_new_conversation_keeps_the_system_message_and_a_new_system_message_the_conversation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    conversation = converse(ScriptedEngine(["yes"]), "old")
    conversation.ask("a")
    run_command(conversation, "/system Speak Latin.")
    assert roles(conversation) == "sua" and conversation.system == "Speak Latin."
    for name in ("/clear", "/reset"):
        conversation.ask("a")
        run_command(conversation, name)
        assert "new conversation" in capsys.readouterr().err
        assert conversation.messages == [{"role": "system", "content": "Speak Latin."}]
    conversation.ask("a")
    run_command(conversation, "/system")
    assert roles(conversation) == "ua" and conversation.system is None
    assert conversation.failures == 0


@pytest.mark.parametrize("name", ["/exit", "/bye", "/quit"])
def test_exit_is_the_end(name: str) -> None:
    conversation = converse(ScriptedEngine(["yes"]))
    run_command(conversation, name)
    assert conversation.over and not conversation.failures


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/cler", "unknown command /cler; did you mean /clear?"),
        ("/zzzzzz", "unknown command /zzzzzz; /help lists the commands"),
        ("/clear all", "/clear takes nothing more, not 'all'"),
        ("/save", "/save needs FILE"),
        ("/retry", "nothing has been asked yet"),
        ("/undo", "nothing has been asked yet"),
        ("/load missing.json", "missing.json is missing"),
        ("/image missing.png", "the model reads text alone: leave out the image missing.png"),
        ("/set warmth 1", "unknown setting 'warmth'; /set lists them"),
        ("/set temprature 1", "unknown setting 'temprature'; did you mean 'temperature'?"),
        ("/set temperature warm", "temperature takes a number, not 'warm': Divides the logits"),
        ("/set temperature -1", "temperature must be at least 0, not -1.0"),
        ("/set top_k 1.5", "top_k takes an integer, not '1.5'"),
        ("/set ignore_eos maybe", "ignore_eos takes true or false, not 'maybe'"),
        ("/set stop_token_ids a,b", "stop_token_ids takes token ids, as in 13,198, not 'a,b'"),
        ("/set logit_bias [1]", "logit_bias takes JSON, not '[1]'"),
        ("/set stop [1]", "stop must be a list of non-empty texts, not [1]"),
        ("/set min_tokens 9", "min_tokens must not be greater than max_tokens (8), not 9"),
        ("/set n 2", "unknown setting 'n'"),
    ],
)
def test_what_cannot_be_done_says_why_and_changes_nothing(capsys: Capture, line: str, message: str) -> None:
    conversation = converse(ScriptedEngine(["yes"]), "sys", max_tokens=8)
    before = conversation.params.clone()
    assert message in said(capsys, conversation, line)
    assert (conversation.failures, conversation.params, roles(conversation)) == (1, before, "s")


@pytest.mark.parametrize(
    ("typed", "name", "value"),
    [
        ("temperature 0.25", "temperature", 0.25),
        ("top-p 0.5", "top_p", 0.5),
        ("max_tokens none", "max_tokens", None),
        ("seed 7", "seed", 7),
        ("stop and so on", "stop", ["and so on"]),
        (r'stop ["\n", "x"]', "stop", ["\n", "x"]),
        ("ignore_eos on", "ignore_eos", True),
        ("stop_token_ids 1,2", "stop_token_ids", [1, 2]),
        ('logit_bias {"5": -2.5}', "logit_bias", {5: -2.5}),
    ],
)
def test_a_setting_is_that_of_the_next_answer(capsys: Capture, typed: str, name: str, value: object) -> None:
    engine = ScriptedEngine(["yes"])
    conversation = converse(engine, max_tokens=8)
    said(capsys, conversation, f"/set {typed}")
    conversation.ask("a")
    assert getattr(engine.params[-1], name) == value
    said(capsys, conversation, f"/set {name} default")
    conversation.ask("a")
    assert getattr(engine.params[-1], name) == getattr(SamplingParams(max_tokens=8), name)
    assert conversation.failures == 0


def test_settings_are_listed_and_shown(capsys: Capture) -> None:
    conversation = converse(ScriptedEngine(["so ", "it ", "is"]), "Be brief.", temperature=0.5)
    listed = said(capsys, conversation, "/set")
    assert all(f"{name} " in listed for name in SETTINGS) and "\nlogprobs " not in listed
    assert said(capsys, conversation, "/set temperature") == "temperature = 0.5\n"
    shown = said(capsys, conversation, "/show")
    assert "system       Be brief." in shown and "temperature 0.5, max_tokens none" in shown
    assert "last answer  none" in shown and "0 answers" in shown
    conversation.params.max_tokens = DefaultMaxTokens(2048)
    assert "temperature 0.5, max_tokens 2048" in said(capsys, conversation, "/show")
    conversation.ask("Is it?")
    shown = said(capsys, conversation, "/show")
    assert "turns        1" in shown and "100 tokens, 18 of them at the last answer" in shown
    assert "last answer  3 tokens, " in shown and "tokens/s; first after 0.0" in shown


def test_times_follow_an_answer_where_they_are_asked_for(capsys: Capture) -> None:
    conversation = converse(ScriptedEngine(["a", "b"]))
    conversation.ask("x")
    assert capsys.readouterr().err == ""
    conversation.show_times = True
    conversation.ask("x")
    assert capsys.readouterr().err.startswith("[2 tokens, ")


def test_a_question_is_answered_anew_and_taken_back(capsys: Capture) -> None:
    engine = ScriptedEngine(["one"])
    conversation = converse(engine, "sys")
    conversation.ask("a")
    conversation.ask("b")
    engine.texts = ["two"]
    run_command(conversation, "/retry")
    assert [m["content"] for m in conversation.messages] == ["sys", "a", "one", "b", "two"]
    assert engine.conversations[-1] == engine.conversations[-2]
    engine.error = "the worker failed"
    run_command(conversation, "/retry")
    assert conversation.failures == 1 and conversation.messages[-1]["content"] == "two", "it fails: the old one stays"
    assert said(capsys, conversation, "/undo") == "taken back: b\n"
    run_command(conversation, "/undo")
    assert roles(conversation) == "s"


def test_a_conversation_is_saved_and_goes_on(tmp_path: Path, capsys: Capture) -> None:
    conversation = converse(ScriptedEngine(["\x1b[2J é"]), "sys")
    conversation.ask("a\nb")
    path = tmp_path / "my talk.json"
    for written in (f"{path}", f'"{path}"', str(path).replace(" ", "\\ ")):
        assert said(capsys, conversation, f"/save {written}") == f"saved as {path}\n"
    assert path.stat().st_mode & 0o777 == 0o600
    saved = json.loads(path.read_text())
    assert saved == {"messages": conversation.messages, "model": "m"}
    assert [file.name for file in tmp_path.iterdir()] == ["my talk.json"]
    other = converse(ScriptedEngine(["yes"]), "other")
    other.ask("c")
    assert said(capsys, other, f"/load {path}") == "loaded 1 turn\n"
    assert other.messages == conversation.messages and other.system == "sys"
    other.ask("more")
    assert roles(other) == "suaua" and other.failures == 0


def test_another_file_is_never_written_over(tmp_path: Path, capsys: Capture) -> None:
    conversation = converse(ScriptedEngine(["yes"]))
    (tmp_path / "mine.txt").write_text("precious")
    assert "exists and is no saved conversation" in said(capsys, conversation, f"/save {tmp_path}/mine.txt")
    assert (tmp_path / "mine.txt").read_text() == "precious"
    assert "exists and is no saved conversation" in said(capsys, conversation, f"/save {tmp_path}")
    assert "cannot write" in said(capsys, conversation, f"/save {tmp_path}/no/such.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nonsense", "is no saved conversation"),
        ("[" * 100_000, "is no saved conversation"),
        ('{"model": "m"}', "missing required field `messages`"),
        ('{"messages": [{"role": "tool", "content": ""}]}', "Invalid enum value 'tool'"),
        ('{"messages": [{"role": "\\u001b[2J", "content": ""}]}', r"Invalid enum value '\x1b[2J'"),
        ('{"messages": [{"role": "user", "content": 3}]}', "got `int`"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "the last question has no answer"),
        (
            '{"messages": [{"role": "assistant", "content": "a"}]}',
            "message 1 must be of the user, not of the assistant",
        ),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y"}}]}, '
            '{"role": "assistant", "content": "a"}]}',
            "message 1: the URL of an image must begin with file:///, not 'http://x/y'",
        ),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///dev/zero"}}'
            ']}, {"role": "assistant", "content": "a"}]}',
            "the image /dev/zero is no file",
        ),
    ],
)
def test_what_is_no_conversation_is_not_loaded(tmp_path: Path, capsys: Capture, content: str, message: str) -> None:
    conversation = converse(ScriptedEngine(["yes"]))
    conversation.ask("a")
    path = tmp_path / "talk.json"
    path.write_text(content)
    answer = said(capsys, conversation, f"/load {path}")
    assert message in answer and "\x1b" not in answer
    assert (conversation.failures, roles(conversation)) == (1, "ua")


def test_files_that_are_loaded_are_bounded(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = converse(ScriptedEngine(["yes"]))
    os.mkfifo(tmp_path / "pipe")
    assert "is no file" in said(capsys, conversation, f"/load {tmp_path}/pipe")
    conversation.ask("a")
    run_command(conversation, f"/save {tmp_path}/talk.json")
    monkeypatch.setattr(chat, "MAX_MESSAGES", 1)
    assert "has 2 messages; at most 1" in said(capsys, conversation, f"/load {tmp_path}/talk.json")
    monkeypatch.setattr(chat, "MAX_BYTES", 20)
    assert "bytes; at most 20 are read" in said(capsys, conversation, f"/load {tmp_path}/talk.json")
    assert "bytes as a file; at most 20" in said(capsys, conversation, f"/save {tmp_path}/other.json")


def test_what_may_follow_is_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "talk.json").touch()
    (tmp_path / "talks").mkdir()
    assert [name for name, _ in completions("/s")] == ["/system", "/set", "/show", "/save"]
    assert [name for name, _ in completions("/set temp")] == ["temperature"]
    assert completions("/load ta") == [("talk.json", ""), ("talks/", "")]
    assert completions("what is /s") == completions("/help x") == completions("/set top_p 0") == []
