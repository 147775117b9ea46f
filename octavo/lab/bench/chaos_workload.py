"""The requests of a chaos run: a few of each kind, each with one right answer, since every seed is fixed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from octavo.core.errors import ConfigError
from octavo.lab.bench.own_server import SERVED_NAME
from octavo.lab.workloads.tokens import WORDS

COMPLETIONS, CHAT = "completions", "chat/completions"
#: Names under which the server has its adapters.
ADAPTERS = ("chaos-adapter-0", "chaos-adapter-1")
#: Tokens of a long prompt, and most of an answer, where the context has room for them.
_LONG_PROMPT, _ANSWER = 3000, 64

_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["lake", "river", "sea"]},
        "depth": {"type": "integer", "minimum": 0, "maximum": 9999},
    },
    "required": ["name", "kind", "depth"],
}


@dataclass(frozen=True)
class ChaosRequest:
    """A request whose answer is determined."""

    #: Its kind and its number among them, such as ``beams/1``.
    name: str
    #: The route below ``/v1/``.
    route: str
    body: dict[str, Any]

    @property
    def kind(self) -> str:
        """What is special in it."""
        return self.name.partition("/")[0]

    def salted(self, salt: str) -> dict[str, Any]:
        """Its body with a salt: another client's request, that shares no cached prefix and has the same answer."""
        return {**self.body, "cache_salt": salt}


@dataclass(frozen=True)
class _Sizes:
    """Lengths that fit a context, and the ids of prompts given as such."""

    max_model_len: int
    id_range: tuple[int, int]

    @property
    def answer(self) -> int:
        return min(_ANSWER, self.max_model_len // 5)

    def text(self, name: str) -> str:
        """Words, few enough where a token is a byte."""
        return " ".join(random.Random(name).choices(WORDS, k=max(2, min(24, self.max_model_len // 32))))

    def ids(self, name: str, count: int) -> list[int]:
        most = self.max_model_len - self.answer - 1
        return random.Random(name).choices(range(self.id_range[0], self.id_range[1] + 1), k=min(count, most))

    def repeated(self, name: str) -> list[int]:
        """Ids that repeat themselves, of which drafts are made."""
        return (self.ids(name, 12) * 6)[: self.max_model_len // 2]


#: Yields the route and what is special in the body of each request of a kind.
_Make = Callable[[_Sizes], Iterator[tuple[str, dict[str, Any]]]]


def _messages(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def _chat(sizes: _Sizes) -> Iterator[tuple[str, dict[str, Any]]]:
    yield CHAT, {**_messages(sizes.text("chat/0")), "temperature": 0, "ignore_eos": True}
    yield CHAT, {**_messages(sizes.text("chat/1")), "temperature": 0.8, "top_p": 0.95, "ignore_eos": True}
    yield (
        CHAT,
        {**_messages(sizes.text("chat/2")), "temperature": 1, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    )


def _several(sizes: _Sizes) -> Iterator[tuple[str, dict[str, Any]]]:
    yield COMPLETIONS, {"prompt": sizes.text("n/0"), "n": 4, "temperature": 0.9, "logprobs": 1}
    yield CHAT, {**_messages(sizes.text("n/1")), "n": 4, "temperature": 1.2, "top_k": 50, "ignore_eos": True}


def _beams(sizes: _Sizes) -> Iterator[tuple[str, dict[str, Any]]]:
    beams = {"use_beam_search": True, "max_tokens": sizes.answer // 2}
    yield COMPLETIONS, {"prompt": sizes.text("beams/0"), **beams, "n": 2, "best_of": 4}
    yield COMPLETIONS, {"prompt": sizes.text("beams/1"), **beams, "n": 3, "length_penalty": 0.5}


def _schemas(sizes: _Sizes) -> Iterator[tuple[str, dict[str, Any]]]:
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "water", "schema": _SCHEMA}}}
    yield CHAT, {**_messages(sizes.text("schemas/0")), **form, "temperature": 0}
    yield CHAT, {**_messages(sizes.text("schemas/1")), **form, "temperature": 1}
    yield COMPLETIONS, {"prompt": sizes.text("schemas/2"), "guided_regex": r"([a-z]{3,9} ){8}end", "temperature": 0.7}


def _adapters(sizes: _Sizes) -> Iterator[tuple[str, dict[str, Any]]]:
    yield COMPLETIONS, {"prompt": sizes.text("adapters/0"), "model": ADAPTERS[0], "temperature": 0, "ignore_eos": True}
    yield CHAT, {**_messages(sizes.text("adapters/1")), "model": ADAPTERS[1], "temperature": 0.8, "ignore_eos": True}


def _drafts(sizes: _Sizes) -> Iterator[tuple[str, dict[str, Any]]]:
    yield COMPLETIONS, {"prompt": sizes.repeated("drafts/0"), "temperature": 0, "ignore_eos": True}
    yield COMPLETIONS, {"prompt": sizes.repeated("drafts/1"), "temperature": 0.6, "ignore_eos": True, "logprobs": 0}
    predicted = {"prediction": {"type": "content", "content": sizes.text("drafts/2")}}
    yield CHAT, {**_messages(sizes.text("drafts/2")), **predicted, "temperature": 0}


def _logprobs(sizes: _Sizes) -> Iterator[tuple[str, dict[str, Any]]]:
    several = {"logprobs": 5, "prompt_logprobs": 2}
    yield COMPLETIONS, {"prompt": sizes.text("logprobs/0"), **several, "temperature": 0, "ignore_eos": True}
    yield CHAT, {**_messages(sizes.text("logprobs/1")), "logprobs": True, "top_logprobs": 4, "temperature": 0.9}


def _stops(sizes: _Sizes) -> Iterator[tuple[str, dict[str, Any]]]:
    late = {"min_tokens": sizes.answer // 2, "ignore_eos": True}
    yield COMPLETIONS, {"prompt": sizes.text("stops/0"), **late, "temperature": 0, "stop": [" the", "a", "."]}
    kept = {"stop": ["e ", "in", "o"], "include_stop_str_in_output": True}
    yield COMPLETIONS, {"prompt": sizes.text("stops/1"), **late, "temperature": 1, "logprobs": 0, **kept}


def _long(sizes: _Sizes) -> Iterator[tuple[str, dict[str, Any]]]:
    yield COMPLETIONS, {"prompt": sizes.ids("long/0", _LONG_PROMPT), "temperature": 0, "ignore_eos": True}
    yield COMPLETIONS, {"prompt": sizes.ids("long/1", _LONG_PROMPT), "temperature": 0.7, "n": 2, "ignore_eos": True}


_KINDS: dict[str, _Make] = {
    "chat": _chat,
    "n": _several,
    "beams": _beams,
    "schemas": _schemas,
    "adapters": _adapters,
    "drafts": _drafts,
    "logprobs": _logprobs,
    "stops": _stops,
    "long": _long,
}
KINDS = tuple(_KINDS)


def make_requests(kinds: Collection[str], max_model_len: int, id_range: tuple[int, int]) -> list[ChaosRequest]:
    """The requests of these kinds for a context of so many tokens; ``id_range``: see ``token_id_range``.

    Raises:
        ConfigError: there is no such kind, or the context is too short.
    """
    if unknown := set(kinds) - set(KINDS):
        raise ConfigError(f"there is no kind of request {sorted(unknown)[0]!r}; there are {', '.join(KINDS)}")
    if max_model_len < 200:
        raise ConfigError(f"the requests need a context of at least 200 tokens, not {max_model_len}")
    sizes = _Sizes(max_model_len, id_range)
    seeds = itertools.count(1)
    requests = []
    for kind in (kind for kind in KINDS if kind in kinds):
        for number, (route, special) in enumerate(_KINDS[kind](sizes)):
            same = {
                "model": SERVED_NAME,
                "max_tokens": sizes.answer,
                "seed": next(seeds),
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
            }
            requests.append(ChaosRequest(f"{kind}/{number}", route, same | special))
    return requests
