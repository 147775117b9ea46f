"""Answers with very many logprobs: the same as small ones, and made beside the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from octavo.core.outputs import Logprob, TokenLogprobs
from octavo.server.fields import ResponseModel
from octavo.server.generation import make_prompt_logprobs
from octavo.server.http import streaming as large_answers
from octavo.server.http.streaming import LARGE, LazyList, encode_in_slices, run_if_large
from octavo.server.openai.protocol import Completion, CompletionChoice, CompletionLogprobs
from tests.server.running_server import Running


class Leaf(ResponseModel):
    value: float
    name: str | None = None


class Tree(ResponseModel):
    leaves: list[Leaf] | None = None
    numbers: list[float | None] | None = None
    words: list[dict[str, float] | None] | None = None
    inner: Leaf | None = None
    by_name: dict[str, Any] | None = None


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 200])
def test_a_response_is_encoded_as_it_is_whole(count: int) -> None:
    tree = Tree(
        leaves=[Leaf(value=i / 3, name='"é\n' if i % 2 else None) for i in range(count)],
        numbers=[None, *(1e-7 * i for i in range(count))],
        words=[None if i % 5 == 0 else {"a": -9999.0, '"\\': float(i)} for i in range(count)],
        inner=Leaf(value=1),
        by_name={"x": [1, "two", {}], "": None},
    )
    assert encode_in_slices(tree) == tree.encode()
    partly = Tree(numbers=[0.5] * count)
    assert encode_in_slices(partly) == partly.encode()
    assert encode_in_slices(Tree()) == b"{}"


@pytest.mark.parametrize("count", [0, 1, 64, 129])
def test_entries_are_made_a_few_at_a_time(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_answers, "_SLICE", 10)
    items: list[TokenLogprobs | None] = [None]
    items += [{7: Logprob(-float("inf"), i, "é")} for i in range(1, count)]
    items = items[:count]
    choice = CompletionChoice(finish_reason="stop", index=0, logprobs=None, text="x")
    choice.prompt_logprobs = make_prompt_logprobs(items)
    sent = json.loads(encode_in_slices(choice))["prompt_logprobs"]
    known = [{"7": {"logprob": -9999.0, "rank": i, "decoded_token": "é"}} for i in range(1, count)]
    assert sent == [None, *known][:count]
    made: list[int] = []

    def make(item: int) -> int:
        made.append(item)
        return item

    entries = LazyList(range(count), make).slices()
    for first in entries:
        assert len(first) <= 10 and made[-1] == first[-1]


def test_only_large_answers_are_made_in_another_thread() -> None:
    async def names() -> list[str]:
        return [await run_if_large(size, lambda: threading.current_thread().name) for size in (LARGE - 1, LARGE)]

    small, large = asyncio.run(names())
    assert small == threading.current_thread().name and large.startswith("octavo-answers")


PROMPTS: list[dict[str, Any]] = [
    {"prompt": [[11] * 200, [12] * 200], "prompt_logprobs": 20},
    {"prompt": [[11] * 200, [12] * 200], "echo": True, "logprobs": 20, "prompt_logprobs": 3},
    {"prompt": [[11, 12]] * 2, "n": 2, "logprobs": 20, "max_tokens": 200, "ignore_eos": True, "seed": 1},
]


@pytest.mark.parametrize("body", PROMPTS)
@pytest.mark.parametrize("streams", [False, True])
def test_large_answers_of_completions_are_those_of_small_requests(
    tiny_server: Running, body: dict[str, Any], streams: bool
) -> None:
    """Each prompt alone has fewer logprobs than a large answer has."""
    body = {"max_tokens": 2, "temperature": 0, "stream": streams, **body}
    with tiny_server.http() as http:

        def choices(prompt: Any) -> list[dict[str, Any]]:
            answer = http.post("/v1/completions", json={**body, "prompt": prompt})
            assert answer.status_code == 200, answer.text
            if not streams:
                found: list[dict[str, Any]] = answer.json()["choices"]
                return found
            lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
            assert lines[-1] == "[DONE]"
            chunks = [chunk for line in lines[:-1] for chunk in json.loads(line)["choices"]]
            return [chunk for chunk in chunks if chunk.get("prompt_logprobs") or chunk["logprobs"]]

        together, alone = choices(body["prompt"]), [choices(prompt) for prompt in body["prompt"]]
    n = body.get("n", 1)
    for number, of_prompt in enumerate(alone):
        for index in range(n):
            mine = [c for c in together if c["index"] == number * n + index]
            theirs = [{**c, "index": number * n + index} for c in of_prompt if c["index"] == index]
            for name in ("prompt_logprobs", "logprobs"):
                assert joined(mine, name) == joined(theirs, name)
            assert "".join(c["text"] for c in mine) == "".join(c["text"] for c in theirs)


def joined(chunks: list[dict[str, Any]], name: str) -> Any:
    """A field of a choice over its chunks, whose lists go on; rounded, as batches of other sizes round otherwise."""
    values = [value for chunk in chunks if (value := chunk.get(name)) is not None]
    if values and isinstance(values[0], dict):
        return [[token for value in values for token in value[part]] for part in ("tokens", "text_offset")]
    return [
        [entry and {token: known["decoded_token"] for token, known in entry.items()} for entry in v] for v in values
    ]


def test_logprobs_of_a_completion_are_encoded_as_they_are_given() -> None:
    logprobs = CompletionLogprobs.model_construct(
        text_offset=[0], token_logprobs=[None], tokens=["a"], top_logprobs=[{"a": -1.5}]
    )
    choice = CompletionChoice(finish_reason=None, index=0, logprobs=logprobs, text="a")
    answer = Completion(
        id="1", choices=[choice], created=1, model="m", object="text_completion", system_fingerprint="f"
    )
    assert encode_in_slices(answer) == answer.encode()
    assert json.loads(answer.encode())["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -1.5}]
