"""The inputs of requests for vectors and scores: checked, tokenized and cut, before any of them is computed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from octavo.core.prompts import Prompt
from octavo.server.api_errors import invalid, wrong
from octavo.server.pooling.pooled_fields import PooledTexts
from octavo.server.prompt_fields import write_conversation
from octavo.server.service import Service

#: Up to this many characters are tokenized in well under a millisecond, and not in a thread.
_SHORT = 2000


@dataclass(slots=True)
class PooledInput:
    """A prompt, which has its token ids once it is tokenized, and its place in the request, such as ``input[3]``."""

    place: str
    prompt: Mapping[str, Any]

    @property
    def token_ids(self) -> list[int]:
        """Its tokens."""
        ids: list[int] = self.prompt["prompt_token_ids"]
        return ids


@dataclass(slots=True)
class Pairs:
    """Pairs of texts: what is computed, each prompt once, and which of these prompts each pair is scored by."""

    inputs: list[PooledInput]
    of_pair: list[list[int]]


async def read_texts(
    service: Service,
    request: Request,
    body: PooledTexts,
    prompt_name: str | None = None,
    *,
    named: bool = False,
    field: str = "input",
) -> list[PooledInput]:
    """The inputs of a request, tokenized. If they are ``named``, the model's prompt of that name is before each.

    ``field``: what the route calls ``input``; errors name it.

    Raises:
        ApiError: there is none, there are too many, or one cannot be served; it names the first.
        InvalidRequestError: the model has no such prompt.
    """
    value: Any = body.input
    if (value is None) == (body.messages is None):
        raise invalid("input", "give input or messages, one of them")
    if body.messages is not None:
        if body.add_generation_prompt is None:
            body.add_generation_prompt = False
        text = await write_conversation(service, request, body.messages, body)
        single = PooledInput("messages", {"prompt": text})
        return await _tokenized(service, [single], body.truncate_prompt_tokens, body.add_special_tokens is True)
    several = isinstance(value, list) and not (value and isinstance(value[0], int))
    entries = value if several else [value]
    check_number(service, field, len(entries))
    inputs = []
    pooling = service.llm.front_end.pooling
    for i, entry in enumerate(entries):
        place = f"{field}[{i}]" if several else field
        if not entry:
            raise wrong(place, "it is empty; a vector or score of nothing means nothing")
        prompt = pooling.embedding_prompt(entry, prompt_name) if named else entry
        inputs.append(PooledInput(place, _fields(prompt)))
    return await _tokenized(service, inputs, body.truncate_prompt_tokens, body.add_special_tokens is not False)


async def read_pairs(
    service: Service,
    pairs: Sequence[tuple[str, str]],
    places: Sequence[str],
    truncate: int | None,
    max_tokens: int | None = None,
) -> Pairs:
    """What is computed to score pairs of texts; ``places`` are those of the pairs in the request.

    ``max_tokens``: second texts are cut to so many first.

    Raises:
        ApiError: a pair cannot be served; it names the first.
        InvalidRequestError: the model does not score, or there is no room for texts.
    """
    sizes = [len(first) + len(second) for first, second in pairs]
    if truncate is None and max_tokens is None:
        for place, size in zip(places, sizes, strict=True):
            _check_chars(service, place, size)
    found = await _beside_loop(sum(sizes), _find_pairs, service, pairs, places, truncate, max_tokens)
    found.inputs = await _tokenized(service, found.inputs, truncate, special=True)
    return found


def check_number(service: Service, field: str, count: int) -> None:
    """Refuses a request without inputs, or with too many.

    Raises:
        ApiError: 400.
    """
    limit = service.options.max_inputs_per_request
    if not count:
        raise invalid(field, f"{field} must not be an empty list")
    if count > limit:
        message = f"{field} holds {count} inputs; at most {limit} are served at once: send them in several requests"
        raise invalid(field, message, "too_many_inputs")


def _fields(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, Mapping):
        return dict(prompt)
    return {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}


def _find_pairs(
    service: Service,
    pairs: Sequence[tuple[str, str]],
    places: Sequence[str],
    truncate: int | None,
    max_tokens: int | None,
) -> Pairs:
    pooling = service.llm.front_end.pooling
    found, numbers = Pairs([], []), dict[Any, int]()
    for (first, second), place in zip(pairs, places, strict=True):
        if max_tokens is not None:
            second = _cut(service, second, max_tokens)
        numbers_of_pair = []
        for prompt in pooling.pair_prompts(first, second, truncate):
            fields = _fields(prompt)
            # A query whose vector is compared with many others is computed once.
            key = tuple(fields.items()) if "prompt_token_ids" not in fields else place
            number = numbers.setdefault(key, len(found.inputs))
            if number == len(found.inputs):
                found.inputs.append(PooledInput(place, fields))
            numbers_of_pair.append(number)
        found.of_pair.append(numbers_of_pair)
    return found


def _cut(service: Service, text: str, max_tokens: int) -> str:
    """The text up to the end of its token of this number."""
    offsets = service.llm.tokenizer.backend.encode(text, add_special_tokens=False).offsets
    return text if len(offsets) <= max_tokens else text[: offsets[max_tokens - 1][1]]


async def _tokenized(
    service: Service, inputs: list[PooledInput], truncate: int | None, special: bool
) -> list[PooledInput]:
    """The inputs with token ids, cut where that is asked for.

    Raises:
        ApiError: an input cannot be served.
        InvalidRequestError: it is cut to fewer tokens than are put around a text.
    """
    limit = service.llm.max_model_len
    if truncate == 0:
        raise invalid("truncate_prompt_tokens", "truncate_prompt_tokens must be -1 or at least 1, not 0")
    most = limit if truncate == -1 else truncate
    texts = [each for each in inputs if "prompt_token_ids" not in each.prompt]
    sizes = [len(each.prompt["prompt"]) for each in texts]
    if most is None:
        for each, size in zip(texts, sizes, strict=True):
            _check_chars(service, each.place, size)
    if texts:
        await _beside_loop(sum(sizes), _tokenize, service, texts, most, special)
    for each in inputs:
        if most is not None and len(each.token_ids) > most:
            each.prompt = {**each.prompt, "prompt_token_ids": each.token_ids[:most]}
        _check_tokens(service, each, limit)
    return inputs


def _tokenize(service: Service, inputs: list[PooledInput], most: int | None, special: bool) -> None:
    tokenizer = service.llm.tokenizer
    texts = [each.prompt["prompt"] for each in inputs]
    batch = tokenizer.encode_batch(texts, special)  # unlike ``encode``, it lets other threads run
    for each, text, ids in zip(inputs, texts, batch, strict=True):
        if special and most is not None and len(ids) > most:
            ids = tokenizer.encode_cut(text, most)  # with the special tokens at the end
        each.prompt = {**each.prompt, "prompt_token_ids": ids}


async def _beside_loop(size: int, call: Any, *args: Any) -> Any:
    """The result of a call that works on so many characters: made in a thread, if they are many."""
    return call(*args) if size < _SHORT else await asyncio.to_thread(call, *args)


def _check_chars(service: Service, place: str, size: int) -> None:
    if size > service.max_prompt_chars:
        message = f"it has {size} characters; at most {service.max_prompt_chars} can be served, {_HOW_TO_CUT}"
        raise wrong(place, message, "context_length_exceeded")


def _check_tokens(service: Service, each: PooledInput, limit: int) -> None:
    ids = each.token_ids
    if not ids:
        raise wrong(each.place, "there is no token in it")
    vocab_size = service.llm.model_config.vocab_size
    for token in (min(ids), max(ids)):
        if not 0 <= token < vocab_size:
            raise wrong(each.place, f"token ids are integers from 0 to {vocab_size - 1}, not {token}")
    if len(ids) > limit:
        message = f"it has {len(ids)} tokens; the model takes at most {limit}, {_HOW_TO_CUT}"
        raise wrong(each.place, message, "context_length_exceeded")


_HOW_TO_CUT = "and truncate_prompt_tokens=-1 cuts it there"
