"""What a stream adds up to, and whether two answers are the same bit for bit.

The chunks of an answer may be cut anywhere; what they add up to is determined: texts, token ids, logprobs, finish
reasons and usage. Left out are counts of how it was computed: cached tokens, and drafts.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.lab.bench.serve_client import ERROR_BYTES, EventReader, ResponseError

#: Of the usage: what depends on what was computed before.
_NOT_DETERMINED = ("prompt_tokens_details", "completion_tokens_details")
#: Fields of chunks that must be the same in all chunks of an answer.
_CONSTANT = ("id", "created", "model", "object")

Answer = dict[str, Any]


class AnswerReader(EventReader):
    """Adds the chunks of a stream up to an answer: ``{"choices": {"0": {..}, ..}, "usage": {..}}``."""

    def __init__(self) -> None:
        super().__init__()
        #: Arrival of each chunk with a part of a choice (``time.perf_counter()``).
        self.chunks: array[float] = array("d")
        self._choices: dict[str, Any] = {}
        self._usage: dict[str, Any] | None = None
        self._constant: dict[str, Any] | None = None
        self._done = False

    def read_event(self, data: bytes, now: float) -> None:
        """Adds a chunk.

        Raises:
            ResponseError: it is an error, no JSON, comes after the end, or belongs to another answer.
        """
        if self._done:
            raise ResponseError("bad event", f"after the end of the stream: {data[:200]!r}")
        if data == b"[DONE]":
            self._done = True
            return
        try:
            event: dict[str, Any] = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            raise ResponseError("bad event", str(e)) from None
        if event.get("error") is not None:
            raise ResponseError("error in stream", msgspec.json.encode(event["error"]).decode()[:ERROR_BYTES])
        constant = {name: event.get(name) for name in _CONSTANT}
        if self._constant not in (None, constant):
            raise ResponseError("bad event", f"a chunk of another answer: {constant}, not {self._constant}")
        self._constant = constant
        for choice in event["choices"]:
            index = str(choice.pop("index"))
            self._choices[index] = _joined(self._choices.get(index), choice)
            if not self.chunks or self.chunks[-1] != now:
                self.chunks.append(now)
        if event.get("usage") is not None:
            if self._usage is not None:
                raise ResponseError("bad event", "a second usage")
            self._usage = {name: n for name, n in event["usage"].items() if name not in _NOT_DETERMINED}

    def end(self, status: int) -> None:
        """As of the base class.

        Raises:
            ResponseError: the status is an error, or the stream has no end, no usage, or a choice without a reason.
        """
        super().end(status)
        if not self._done:
            raise ResponseError("cut off", "the stream ended without [DONE]")
        if self._usage is None or not self._choices:
            raise ResponseError("cut off", "the stream ended without a choice or without usage")
        for index, choice in self._choices.items():
            if choice.get("finish_reason") is None:
                raise ResponseError("cut off", f"choice {index} ended without a finish reason")

    def answer(self) -> Answer:
        """The whole answer; only after ``end``."""
        return {"choices": _without_empty(self._choices), "usage": self._usage}


def _joined(old: Any, new: Any) -> Any:
    """Texts, lists and objects are joined; so a word that should come once and comes twice makes an answer differ."""
    if old is None or new is None:
        return new if old is None else old
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{name: _joined(old.get(name), value) for name, value in new.items()}}
    if isinstance(old, str) and isinstance(new, str):
        return old + new
    if isinstance(old, list) and isinstance(new, list):
        return [*old, *new]
    return [old, new]


def _without_empty(value: Any) -> Any:
    """Without null, empty texts and empty lists as values of objects: whether they come depends on the cuts."""
    if not isinstance(value, dict):
        return value
    kept = {name: _without_empty(item) for name, item in value.items()}
    return {name: item for name, item in kept.items() if item is not None and item not in ("", [], {})}


def digest(answer: Answer) -> bytes:
    """JSON by which answers are compared: equal only if every float has the same bits."""
    return msgspec.json.encode(answer, order="sorted")


def difference(truth: Any, answer: Any, where: str = "answer") -> str | None:
    """Where an answer first differs from the truth, and how; None if it does not."""
    if isinstance(truth, Mapping) and isinstance(answer, Mapping):
        for name in sorted(truth.keys() | answer.keys()):
            if name not in truth or name not in answer:
                return f"{where}.{name}: {'not in the truth' if name in answer else 'missing'}"
            if found := difference(truth[name], answer[name], f"{where}.{name}"):
                return found
        return None
    if isinstance(truth, list) and isinstance(answer, list):
        for number, (right, got) in enumerate(zip(truth, answer, strict=False)):
            if found := difference(right, got, f"{where}[{number}]"):
                return found
        return None if len(truth) == len(answer) else f"{where}: {len(answer)} elements, not {len(truth)}"
    if isinstance(truth, str) and isinstance(answer, str) and truth != answer:
        at = next(
            (i for i, (a, b) in enumerate(zip(truth, answer, strict=False)) if a != b), min(len(truth), len(answer))
        )
        return f"{where} from character {at}: {answer[at : at + 40]!r}, not {truth[at : at + 40]!r}"
    return None if msgspec.json.encode(truth) == msgspec.json.encode(answer) else f"{where}: {answer!r}, not {truth!r}"
