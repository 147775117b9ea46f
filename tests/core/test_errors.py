"""Errors of requests: a problem, a path and a value, and the messages made of them."""

from __future__ import annotations

import pickle
from pathlib import Path

import msgspec
import pytest

from octavo.core.errors import (
    AdapterError,
    AudioError,
    ClientLimitError,
    InvalidRequestError,
    ModelNotFoundError,
    WeightError,
)
from octavo.process.children import Failure


def test_a_message_is_the_path_the_problem_and_the_value() -> None:
    assert str(InvalidRequestError("must be at least 0", path="seed", got=-1)) == "seed must be at least 0, not -1"
    assert str(InvalidRequestError("there is no call", path="input[2].id")) == "input[2].id: there is no call"
    assert str(InvalidRequestError("the line is no JSON")) == "the line is no JSON"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("messages[1].content", "prompt[1].content"),
        ("structured_outputs.json.a", "text.format.schema.a"),
        ("structured_outputs.regex", "form.regex"),
        ("messages_of", "messages_of"),
        (None, None),
    ],
)
def test_the_longest_beginning_of_a_path_is_renamed(path: str | None, expected: str | None) -> None:
    names = {"messages": "prompt", "structured_outputs": "form", "structured_outputs.json": "text.format.schema"}
    error = InvalidRequestError("is wrong", path=path, got=5, kind="bad").renamed(names)
    assert (error.path, error.problem, error.got, error.kind) == (expected, "is wrong", 5, "bad")


def test_an_error_of_several_fields_names_them_all() -> None:
    error = InvalidRequestError("together exclude every token", path="bad_words", also=["structured_outputs.regex"])
    assert str(error) == "bad_words and structured_outputs.regex together exclude every token"
    renamed = error.renamed({"structured_outputs.regex": "guided_regex"})
    assert (renamed.path, renamed.also) == ("bad_words", ["guided_regex"])
    assert str(InvalidRequestError(**renamed.data)) == "bad_words and guided_regex together exclude every token"


def test_an_error_keeps_its_data_in_other_processes() -> None:
    error = AudioError("must be a text", path="file.name", got=[1], kind="bad")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is AudioError
    assert (copy.path, copy.problem, copy.got, copy.kind) == ("file.name", "must be a text", [1], "bad")
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(Failure.of(error)), type=Failure).error()
    assert type(sent) is AudioError and str(sent) == str(error)
    assert (sent.path, sent.field, sent.kind) == ("file.name", "file", "bad")
    assert pickle.loads(pickle.dumps(InvalidRequestError("is wrong"))).got is ...


def test_an_error_about_a_file_has_it_as_data_in_other_processes_too() -> None:
    assert str(WeightError("cannot be read", file=Path("/a/b"))) == "/a/b cannot be read"
    assert str(WeightError("tensor 'x' is missing", file="b")) == "b: tensor 'x' is missing"
    assert str(ModelNotFoundError("there is none")) == "there is none"
    for error in (AdapterError("has no config", file=Path("/a/b"), field="lora_path"), WeightError("is", file="/a")):
        sent = Failure.of(error).error()
        assert type(sent) is type(error) and (sent.problem, sent.file) == (error.problem, str(error.file))
    limit = Failure.of(ClientLimitError("too many", 7)).error()
    assert isinstance(limit, ClientLimitError) and (limit.problem, limit.retry_after) == ("too many", 7)
