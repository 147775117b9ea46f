"""Prompt caching as clients ask for it: marks of blocks, keys of conversations, and where a marked block ends.

A mark says that later requests begin with the same prompt up to the end of its block. Where that is, only the chat
template knows: a copy of the conversation with a text behind each marked block is rendered, and compared.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Literal

from octavo.core.cache_hints import (
    ANTHROPIC_SECONDS,
    MAX_BREAKPOINTS,
    OPTIONS_SECONDS,
    RETENTION_SECONDS,
    Breakpoint,
    CacheHints,
)
from octavo.core.errors import InvalidRequestError, TokenizerError
from octavo.server.fields import RequestModel
from octavo.server.http.errors import invalid_at

if TYPE_CHECKING:
    from octavo.server.chat_call import ChatCall, RequestTools


class CacheControl(RequestModel):
    """Marks the end of a prefix that later requests share."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def seconds(self) -> float:
        return ANTHROPIC_SECONDS[self.ttl or "5m"]


def seconds_of(cache_control: Any, prompt_cache_breakpoint: Any = None, ttl: str = "30m") -> float | None:
    """The seconds of a mark in an OpenAI body: Anthropic's, as gateways pass it on, or OpenAI's; None: it is none."""
    if isinstance(cache_control, dict) and cache_control.get("type") == "ephemeral":
        return ANTHROPIC_SECONDS.get(str(cache_control.get("ttl")), ANTHROPIC_SECONDS["5m"])
    return OPTIONS_SECONDS[ttl] if prompt_cache_breakpoint else None


def check_marks(marks: Sequence[tuple[str, float]]) -> None:
    """Refuses too many marks, and a longer time behind a shorter one; each is a path and seconds, in prompt order."""
    if len(marks) > MAX_BREAKPOINTS:
        problem = f"is the mark number {MAX_BREAKPOINTS + 1}; a request has at most {MAX_BREAKPOINTS}"
        raise invalid_at(marks[MAX_BREAKPOINTS][0], problem)
    for (before, shorter), (path, longer) in pairwise(marks):
        if longer > shorter:
            raise invalid_at(path, f"must not have a longer ttl than {before}, which stands before it: 1h before 5m")


class Marks:
    """The texts behind marked blocks, which no client can know."""

    def __init__(self) -> None:
        self._name = f"mark{token_hex(8)}n"
        #: Seconds of each mark.
        self.seconds: list[float] = []

    def add(self, text: str, seconds: float | None) -> str:
        """The text of a block with a mark at its end, before white space there, which templates may trim."""
        bare = text.rstrip()
        if seconds is None or not bare:
            return text
        return f"{bare}{self._new(seconds)}{text[len(bare) :]}"

    def add_to_parts(self, parts: list[dict[str, Any]], seconds: float | None) -> list[dict[str, Any]]:
        """Content parts with a mark behind the last one."""
        if seconds is None or not parts:
            return parts
        *before, last = parts
        if last["type"] == "text":
            return [*before, {**last, "text": self.add(last["text"], seconds)}]
        return [*parts, {"type": "text", "text": self._new(seconds)}]

    def add_to_json(self, value: Mapping[str, Any], seconds: float | None) -> dict[str, Any]:
        """An object with a mark as its last key."""
        return dict(value) if seconds is None else {**value, self._new(seconds): 0}

    def add_to_function(self, shown: Mapping[str, Any], seconds: float | None) -> Mapping[str, Any]:
        """A function as the template gets it, with a mark as its last key, and one in its description.

        The second one is for templates that write known keys only.
        """
        if seconds is None:
            return shown
        function = self.add_to_json(shown["function"], seconds)
        described = self._text(len(self.seconds) - 1, is_second=True)
        return {**shown, "function": {**function, "description": f"{function.get('description') or ''}{described}"}}

    def _new(self, seconds: float) -> str:
        self.seconds.append(seconds)
        return self._text(len(self.seconds) - 1)

    def _text(self, number: int, *, is_second: bool = False) -> str:
        return f"{self._name}{number}{'b' if is_second else 'a'}x"

    def ends(self, text: str, marked: str) -> list[int]:
        """Characters of ``text`` up to the end of each marked block; ``marked``: the same with the marks.

        Never more; 0 if the template does not write the block as it is.
        """
        mark = rf"{self._name}(\d+[ab])x"
        places: dict[str, int] = {}
        plain, last = "", 0
        for found in re.finditer(rf',\s*"{mark}"\s*:\s*0|{mark}', marked):
            plain += marked[last : found.start()]
            last = found.end()
            places.setdefault(found[1] or found[2], len(plain))
        common = common_prefix(text, plain + marked[last:])
        ends = (places.get(f"{i}a", places.get(f"{i}b", 0)) for i in range(len(self.seconds)))
        return [min(end, common) for end in ends]


def common_prefix(one: Any, other: Any) -> int:
    """The length of the common beginning of two texts or lists."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True, slots=True)
class MarkedConversation:
    """A conversation with a mark behind each marked block, of its tools or of its messages.

    Not of both: what a template makes of a tool with a mark may hide where the messages begin.
    """

    marks: Marks
    messages: list[dict[str, Any]]
    tools: RequestTools

    @classmethod
    def with_tools(
        cls, messages: list[dict[str, Any]], tools: RequestTools, seconds: Sequence[float | None], room: int
    ) -> list[MarkedConversation]:
        """One with marks behind the last ``room`` tools that have any; ``seconds``: of each tool that is shown."""
        places = [k for k, each in enumerate(seconds) if each is not None][-room:] if room else []
        if tools.shown is None or not places:
            return []
        marks, shown = Marks(), list(tools.shown)
        for k in places:
            shown[k] = marks.add_to_function(shown[k], seconds[k])
        return [cls(marks, messages, replace(tools, shown=shown))]

    def of(self, call: ChatCall) -> ChatCall:
        """The call with this conversation."""
        return replace(call, messages=self.messages, tools=self.tools, marked=(), extra_fields=())


async def ends_of_marks(
    call: ChatCall, text: str, render: Callable[[ChatCall], Awaitable[str]]
) -> list[tuple[int, float]]:
    """Where the marked blocks of a call end in its prompt ``text``, in characters, with the seconds of each mark.

    A template that refuses the marks has no such places: a hint never fails a request.
    """
    ends: list[tuple[int, float]] = []
    for marked in call.marked:
        try:
            copy = await render(marked.of(call))
        except (InvalidRequestError, TokenizerError):
            continue
        ends += zip(marked.marks.ends(text, copy), marked.marks.seconds, strict=True)
    return ends


def breakpoints_of(ends: Sequence[tuple[int, float]], token_ends: Sequence[int]) -> list[Breakpoint]:
    """``ends_of_marks`` as positions in tokens, in order; ``token_ends`` as ``Tokenizer.encode_with_ends`` says."""
    counts = [(bisect_right(token_ends, end), seconds) for end, seconds in ends if end]
    return [Breakpoint(count, seconds) for count, seconds in sorted(counts) if count]


def cache_hints(body: Any, breakpoints: Sequence[Breakpoint] = ()) -> CacheHints | None:
    """What a body with OpenAI's fields and these marks says of later requests; None: nothing.

    A key, a retention or a time to live holds the whole prompt, unless only its marks shall count (mode explicit).
    """
    key, options = body.prompt_cache_key or "", body.prompt_cache_options
    retention, ttl = body.prompt_cache_retention, None if options is None else options.ttl
    seconds = max(RETENTION_SECONDS[retention] if retention else 0.0, OPTIONS_SECONDS[ttl] if ttl else 0.0)
    if key and not seconds:
        seconds = RETENTION_SECONDS["in_memory"]
    if options is not None and options.mode == "explicit":
        seconds = 0.0
    return CacheHints(tuple(breakpoints), seconds, key) if breakpoints or seconds or key else None
