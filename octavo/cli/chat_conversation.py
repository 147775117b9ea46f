"""The conversation of ``octavo chat``: its messages, and how a question gets its answer."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.cli.chat_display import Display, PlainDisplay
from octavo.cli.chat_times import AnswerTimes
from octavo.cli.terminal_text import notice
from octavo.core.adapters import LoRARequest
from octavo.core.errors import InvalidRequestError
from octavo.core.prompts import TokensPrompt
from octavo.core.sampling_params import DefaultMaxTokens, RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from octavo.engine.llm_engine import LLMEngine

#: Tokens of the context kept free for an answer where nobody has named ``max_tokens``; a quarter of it if that is less.
ANSWER_ROOM = 256

Message = dict[str, Any]


class Conversation:
    """Owns the messages exchanged so far. Invariant: after the system message, questions and answers alternate."""

    def __init__(
        self,
        engine: LLMEngine,
        params: SamplingParams,
        system: str | None,
        lora: LoRARequest | None = None,
        *,
        model: str = "",
        display: Display | None = None,
        show_times: bool = False,
    ) -> None:
        self.engine = engine
        self.lora = lora
        self.model = model
        self.display = display or PlainDisplay()
        self.show_times = show_times
        #: What the next answer is sampled with, and what the first one was.
        self.params = self.first_params = params
        self.failures = 0
        #: Whether no further question will come.
        self.over = False
        #: The answers since the program began.
        self.times: list[AnswerTimes] = []
        #: Parts of the next question.
        self.images: list[dict[str, Any]] = []
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self._turn = 0

    @property
    def system(self) -> str | None:
        """The system message."""
        return self.messages[0]["content"] if self._first else None

    @property
    def turns(self) -> list[Message]:
        """Questions and answers."""
        return self.messages[self._first :]

    @property
    def _first(self) -> int:
        """Where the turns begin."""
        return int(bool(self.messages) and self.messages[0]["role"] == "system")

    def set_system(self, system: str | None) -> None:
        """Sets or removes the system message; the turns stay."""
        self.messages = [*([{"role": "system", "content": system}] if system else []), *self.turns]

    def clear(self) -> None:
        """Begins a new conversation under the same system message."""
        self.messages, self.images = self.messages[: self._first], []

    def replace(self, messages: list[Message]) -> None:
        """Goes on with another conversation, in which a system message may come first and turns alternate."""
        self.messages, self.images = messages, []

    def undo(self) -> str:
        """Takes the last question back, with its answer: its text.

        Raises:
            InvalidRequestError: there is none.
        """
        question = self._last_question()
        self.messages = self.messages[:-2]
        return question_text(question)

    def retry(self) -> None:
        """Asks the last question again; its answer takes the place of the one before, unless it fails.

        Raises:
            InvalidRequestError: there is none.
        """
        question = self._last_question()
        self._answer(self.messages[:-2], question["content"])

    def ask(self, question: str) -> None:
        """Shows the answer as it grows. A question that fails is reported and not kept.

        Where the context has no room for question and answer, the oldest turns are dropped.
        """
        content = [*self.images, {"type": "text", "text": question}] if self.images else question
        if self._answer(self.messages, content):
            self.images = []

    def report(self, message: str) -> None:
        """Says that something failed, which the exit code will say too."""
        self.failures += 1
        notice(f"octavo: error: {message}")

    def _last_question(self) -> Message:
        if not self.turns:
            raise InvalidRequestError("nothing has been asked yet")
        return self.messages[-2]

    def _answer(self, before: list[Message], content: str | list[dict[str, Any]]) -> bool:
        """Answers a question after these messages; whether it did, and the messages are those with the answer."""
        self._turn += 1
        request_id = f"turn-{self._turn}"
        context = self.engine.inputs.max_model_len
        try:
            messages, prompt, dropped = self._fitted([*before, {"role": "user", "content": content}], context)
            room, limit = context - len(prompt["prompt_token_ids"]), self.params.max_tokens
            params = msgspec.structs.replace(self.params, output_kind=RequestOutputKind.DELTA)
            if limit is not None and limit > room > 0:
                params = msgspec.structs.replace(params, max_tokens=room)
            self.engine.add_request(request_id, prompt, params, lora_request=self.lora)
        except InvalidRequestError as e:
            self.report(f"{e} (/clear forgets the conversation)")
            return False
        if dropped:
            turns = "1 turn at the beginning of the conversation was dropped"
            if dropped > 1:
                turns = f"{dropped} turns at the beginning of the conversation were dropped"
            notice(f"octavo: the context of {context} tokens is full: {turns}")
        answer, reason, error, times = self._stream(request_id)
        if error is not None:
            self.report(error)
            return False
        times.num_prompt_tokens = len(prompt["prompt_token_ids"])
        self.times.append(times)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        if reason == "length" and (limit is None or limit > room):
            notice(f"octavo: the answer is cut: the context of {context} tokens is full")
        elif reason == "length" and isinstance(limit, DefaultMaxTokens):
            notice(f"octavo: the answer is cut at {limit} tokens (/set max_tokens none lifts this limit)")
        if self.show_times:
            notice(f"[{times}]")
        return True

    def _fitted(self, kept: list[Message], context: int) -> tuple[list[Message], TokensPrompt, int]:
        """(the messages, their prompt, turns that had to be dropped so that an answer fits)."""
        from octavo.engine.chat_images import chat_prompt

        limit = self.params.max_tokens
        is_named = limit is not None and not isinstance(limit, DefaultMaxTokens)
        room = min(limit or 0, context // 2) if is_named else min(ANSWER_ROOM, context // 4)
        first = self._first
        prompt = chat_prompt(self.engine.inputs, kept)
        dropped = 0
        while len(prompt["prompt_token_ids"]) + room > context and len(kept) > first + 1:
            del kept[first : first + 2]  # a question and its answer
            dropped += 1
            prompt = chat_prompt(self.engine.inputs, kept)
        return kept, prompt, dropped

    def _stream(self, request_id: str) -> tuple[str, str | None, str | None, AnswerTimes]:
        """Shows text until the request ends or Ctrl-C is pressed; (text, finish reason, error, times)."""
        shown: list[str] = []
        reason: str | None = None
        error: str | None = None
        times = AnswerTimes(time.monotonic())
        try:
            with interrupts_recorded() as interrupts, self.display.answer() as show:
                while self.engine.has_unfinished_requests():
                    outputs = self.engine.step()
                    if interrupts:
                        last = self.engine.abort_request(request_id)
                        outputs += [] if last is None else [last]
                    for output in outputs:
                        added = output.outputs[0]
                        reason, error = added.finish_reason, added.error
                        times.add(len(added.token_ids), output.num_cached_tokens)
                        shown.append(added.text)
                        show(added.text)
        finally:
            self.engine.abort_request(request_id)
        return "".join(shown), reason, error, times


def question_text(message: Message) -> str:
    """The text of a question that may have images."""
    content = message["content"]
    return content if isinstance(content, str) else content[-1]["text"]


@contextmanager
def interrupts_recorded() -> Iterator[list[int]]:
    """Records Ctrl-C instead of interrupting a step; a second one raises KeyboardInterrupt."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    before: Callable[[int, FrameType | None], Any] | int | None = signal.signal(signal.SIGINT, handle)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)
