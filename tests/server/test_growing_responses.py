"""Events of a chat in the formats of two other APIs: what a client adds up is what is sent whole."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any, cast

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from octavo.core.outputs import CompletionOutput, Logprob
from octavo.engine.tokenizer import TextStream, Tokenizer, load_tokenizer
from octavo.loader.sentencepiece import byte_alphabet
from octavo.server.anthropic import CacheCreation, GrowingMessage, MessageObject, MessageUsage
from octavo.server.anthropic import MessageTokensDetails as ThinkingDetails
from octavo.server.chat import ChatParser
from octavo.server.generation import TextLogprobs, TokenNames, make_chat_logprobs
from octavo.server.http.errors import ApiError
from octavo.server.openai.response_protocol import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseObject,
    ResponseUsage,
)
from octavo.server.openai.response_request import ITEMS, messages_of
from octavo.server.openai.responses import GrowingResponse
from octavo.server.reasoning_parsers import REASONING_PARSERS, Thinking
from octavo.server.tool_parsers.formats import Hermes
from octavo.server.tool_parsers.tool_parser import (
    ChatEvent,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    collect,
)

OPENAI: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ANTHROPIC: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
USAGE = ResponseUsage(
    input_tokens=1,
    input_tokens_details=InputTokensDetails(cached_tokens=0, cache_write_tokens=0),
    output_tokens=2,
    output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
    total_tokens=3,
)
MESSAGE_USAGE = MessageUsage(
    input_tokens=1,
    cache_read_input_tokens=0,
    cache_creation_input_tokens=0,
    cache_creation=CacheCreation(ephemeral_1h_input_tokens=0, ephemeral_5m_input_tokens=0),
    output_tokens=2,
    output_tokens_details=ThinkingDetails(thinking_tokens=0),
)


@st.composite
def increments(draw: st.DrawFn) -> list[list[ChatEvent]]:
    """Reasoning, texts and calls in any order, in pieces."""
    events: list[ChatEvent] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["reasoning", "text", "call"]), max_size=5)):
        text = json.dumps({"a": draw(st.text(max_size=5))}) if kind == "call" else draw(st.text(min_size=1, max_size=8))
        cuts = [
            0,
            *sorted(draw(st.sets(st.integers(1, len(text) - 1), max_size=3)) if len(text) > 1 else []),
            len(text),
        ]
        pieces = [text[a:b] for a, b in itertools.pairwise(cuts)]
        if kind == "call":
            events.append(ToolCallStart(calls, f"call_{calls}", f"tool{calls}"))
            events += [ToolCallArguments(calls, piece) for piece in pieces]
            calls += 1
        else:
            events += [ContentDelta(piece) if kind == "text" else ReasoningDelta(piece) for piece in pieces]
    ends = [0, *sorted(draw(st.sets(st.integers(0, len(events)), max_size=4))), len(events)]
    return [events[a:b] for a, b in itertools.pairwise(ends)]


def begun() -> GrowingResponse:
    return GrowingResponse(
        ResponseObject(
            id="resp_1", object="response", created_at=1, completed_at=None, status="in_progress", background=False,
            error=None, incomplete_details=None, instructions=None, max_output_tokens=None, metadata={}, model="m",
            output=[], parallel_tool_calls=True, previous_response_id=None, reasoning={}, store=True, temperature=1.0,
            text={"format": {"type": "text"}}, tool_choice="auto", tools=[], top_logprobs=0, top_p=1.0,
            truncation="disabled", usage=None, user=None,
        ),
        {},
    )  # fmt: skip


def added_up(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output that a client adds up from the events before the last one."""
    output: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(output)
            output.append(json.loads(json.dumps(event["item"])))
            continue
        if "output_index" not in event:
            continue
        assert event["output_index"] == len(output) - 1
        item = output[-1]
        if kind == "response.output_item.done":
            status = event["item"]["status"]
            assert event["item"] == {**item, "status": status} and status != "in_progress"
            item["status"] = status
            continue
        assert event["item_id"] == item["id"]
        if kind == "response.content_part.added":
            item["content"].append(dict(event["part"]))
        elif kind in ("response.output_text.delta", "response.reasoning_text.delta"):
            item["content"][event["content_index"]]["text"] += event["delta"]
            if "logprobs" in event:
                item["content"][0]["logprobs"] = item["content"][0]["logprobs"] + event["logprobs"]
        elif kind == "response.function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "response.function_call_arguments.done":
            assert (event["arguments"], event["name"]) == (item["arguments"], item["name"])
        elif kind == "response.content_part.done":
            assert event["part"] == item["content"][0]
        else:
            assert kind in ("response.output_text.done", "response.reasoning_text.done")
            assert event["text"] == item["content"][0]["text"]
    return output


@settings(max_examples=40)
@given(increments(), st.booleans())
def test_the_events_of_a_response_add_up_to_it(steps: list[list[ChatEvent]], is_whole: bool) -> None:
    growing = begun()
    events = growing.begin()
    for step in steps:
        events += growing.add(step)
    events += growing.end(USAGE, is_whole=is_whole)
    for number, event in enumerate(events):
        OPENAI.validate_python(event, strict=True)
        assert event["sequence_number"] == number
    response = growing.response.model_dump()
    Response.model_validate(response, strict=True)
    assert events[-1]["response"] == response and added_up(events) == response["output"]
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and events[0]["response"]["output"] == []
    assert kinds[-1] == ("response.completed" if is_whole else "response.incomplete") and kinds.count(kinds[-1]) == 1
    # Only the last item was cut off.
    ends = [item["status"] for item in response["output"]]
    assert ends == ["completed"] * (len(ends) - 1) + ["completed" if is_whole else "incomplete"]
    # And it says what the chat does, also to the next request.
    parts = collect(event for step in steps for event in step)
    assert growing_text(response, "message") == (parts.content or "")
    assert growing_text(response, "reasoning") == (parts.reasoning or "")
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    assert [(c["call_id"], c["name"], c["arguments"]) for c in calls] == [
        (c.id, c.name, c.arguments) for c in parts.tool_calls
    ]
    messages = messages_of(ITEMS.validate_json(json.dumps(response["output"])), [])
    assert all(message["role"] == "assistant" for message in messages)
    assert "".join(message["content"] or "" for message in messages) == (parts.content or "")
    assert [call["id"] for message in messages for call in message.get("tool_calls", [])] == [
        c["call_id"] for c in calls
    ]


def growing_text(response: dict[str, Any], kind: str) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == kind for part in item["content"])


def test_reasoning_a_text_and_calls_in_a_row_are_one_message() -> None:
    growing = begun()
    steps: list[ChatEvent] = [
        ReasoningDelta("hm"), ContentDelta("so"), ToolCallStart(0, "a", "f"), ToolCallArguments(0, "{}"),
        ToolCallStart(1, "b", "g"), ToolCallArguments(1, '{"x": 1}'),
    ]  # fmt: skip
    growing.add(steps)
    growing.end(USAGE, is_whole=True)
    outputs = [{"type": "function_call_output", "call_id": call, "output": "1"} for call in ("a", "b")]
    [message, *results] = messages_of(ITEMS.validate_python([*growing.response.model_dump()["output"], *outputs]), [])
    assert (message["role"], message["content"], message["reasoning_content"]) == ("assistant", "so", "hm")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "f", "arguments": "{}"},
        {"name": "g", "arguments": '{"x": 1}'},
    ]
    assert [(result["role"], result["tool_call_id"]) for result in results] == [("tool", "a"), ("tool", "b")]


def test_a_response_that_fails_closes_what_is_open() -> None:
    growing = begun()
    events = [*growing.begin(), *growing.add([ContentDelta("a")])]
    for status, code in ((500, "server_error"), (429, "rate_limit_exceeded"), (400, "invalid_prompt")):
        growing.response.status = "in_progress"
        events += growing.fail(ApiError(status, "no"))
        assert events[-1]["response"]["error"] == {"code": code, "message": "no"}
    for event in events:
        OPENAI.validate_python(event, strict=True)
    assert added_up(events)[0]["status"] == "incomplete"


@given(increments(), st.booleans())
def test_a_response_that_waits_may_be_cancelled(steps: list[list[ChatEvent]], begins: bool) -> None:
    growing = begun()
    events = [*growing.enqueue(), *(growing.begin() if begins else [])]
    for step in steps if begins else []:
        events += growing.add(step)
    events += growing.cancel()
    for number, event in enumerate(events):
        OPENAI.validate_python(event, strict=True)
        assert event["sequence_number"] == number
    statuses = [event["response"]["status"] for event in events if "response" in event]
    assert statuses == ["queued", "queued", *(["in_progress"] if begins else []), "cancelled"]
    output = events[-1]["response"]["output"]
    assert added_up(events) == output and all(item["status"] != "in_progress" for item in output)


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return load_tokenizer(demo_model)


PARTS = st.lists(st.sampled_from(["é", "word", " two words", "\n", "<", "</thin", "{", " 🙂"]), max_size=6).map("".join)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@settings(deadline=None, max_examples=60)
@given(PARTS, st.lists(st.one_of(PARTS, st.just(CALL)), max_size=4), st.booleans(), st.randoms(use_true_random=False))
def test_logprobs_are_those_of_the_texts_tokens(
    tokenizer: Tokenizer, thought: str, answer: list[str], by_byte: bool, cuts: random.Random
) -> None:
    """However the text comes, and whatever of it is held back, is reasoning, a mark or a call."""
    text = f"<think>{thought}</think>\n\n" + "\n".join(answer)
    alphabet = byte_alphabet()
    letters = {byte: letter for letter, byte in alphabet.items()}
    ids = (
        [tokenizer.convert_tokens_to_ids(letters[byte]) for byte in text.encode()]
        if by_byte
        else tokenizer.encode(text, add_special_tokens=False)
    )
    token_ids = [*(i for i in ids if i is not None), min(tokenizer.special_ids)]
    whole = grown(tokenizer, text, token_ids, [len(token_ids)], cuts)
    ends = [*sorted(cuts.sample(range(len(token_ids)), min(5, len(token_ids)))), len(token_ids)]
    events = grown(tokenizer, text, token_ids, ends, cuts)
    output = events[-1]["response"]["output"]
    assert [without_ids(item) for item in output] == [
        without_ids(item) for item in whole[-1]["response"]["output"]
    ] and added_up(events) == output
    texts = [item["content"][0] for item in output if item["type"] == "message"]
    for part in texts:
        spoken = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"])
        assert part["text"].encode() in spoken
        if by_byte:
            assert spoken == part["text"].encode()
    said = ""
    for event in events:  # no token leaves before the beginning of its text has left
        if event["type"] == "response.output_text.delta":
            said += event["delta"]
            for entry in event["logprobs"] if by_byte else ():
                assert bytes(entry["bytes"]) in said.encode()


def grown(
    tokenizer: Tokenizer, text: str, token_ids: list[int], ends: list[int], cuts: random.Random
) -> list[dict[str, Any]]:
    """The events of a choice whose tokens come in these increments, its text a little later."""
    parser = ChatParser(REASONING_PARSERS["qwen3"](Thinking.BEFORE), Hermes({"f": {}}))
    entry = {"logprob": -1.0, "rank": 1, "decoded_token": None}
    names = TokenNames(tokenizer)
    growing = GrowingResponse(begun().response, {}, lambda tokens: make_chat_logprobs(names, tokens, 0).content)
    growing.logprobs = logprobs = TextLogprobs(tokenizer, [], skip_special_tokens=True)
    stream, certain, given, begin, events = TextStream(tokenizer, []), 0, 0, 0, growing.begin()
    for end in ends:
        added, last = token_ids[begin:end], end == ends[-1]
        certain += sum(len(stream.push(i)) for i in added)
        shown = len(text) if last else max(given, certain - cuts.randrange(4))
        known = [{i: Logprob(**cast(dict[str, Any], entry))} for i in added]
        logprobs.add(CompletionOutput(0, token_ids=added, logprobs=known))
        events += growing.add(parser.feed(text[given:shown], added, last))
        begin, given = end, shown
    return [*events, *growing.end(USAGE, is_whole=True)]


def without_ids(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


@given(increments())
def test_the_events_of_a_message_add_up_to_it(steps: list[list[ChatEvent]]) -> None:
    message = MessageObject(
        id="msg_1", type="message", role="assistant", model="m", content=[], stop_reason=None, stop_sequence=None,
        usage=MESSAGE_USAGE,
    )  # fmt: skip
    growing = GrowingMessage(message)
    events = growing.begin()
    for step in steps:
        events += growing.add(step)
    events += growing.end("end_turn", None, MESSAGE_USAGE)
    events = json.loads(json.dumps(events))
    content: list[dict[str, Any]] = []
    texts: dict[int, str] = {}
    for event in events:
        if event["type"] == "ping":
            continue
        ANTHROPIC.validate_python(event, strict=True)
        if event["type"] == "content_block_start":
            assert event["index"] == len(content)
            content.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(content) - 1 and event["index"] not in texts
            kind = event["delta"].pop("type").removesuffix("_delta")
            [(field, text)] = event["delta"].items()
            block = content[-1]
            block[field] = block.get(field, "") + text
            assert kind == {"text": "text", "thinking": "thinking", "tool_use": "input_json"}[block["type"]]
        elif event["type"] == "content_block_stop":
            assert event["index"] == len(content) - 1
            if content[-1]["type"] == "tool_use":
                content[-1]["input"] = json.loads(content[-1].pop("partial_json"))
            texts[event["index"]] = ""
    whole = growing.message.model_dump()
    Message.model_validate(whole, strict=True)
    assert content == whole["content"] and len(texts) == len(content)
    parts = collect(event for step in steps for event in step)
    assert "".join(block["text"] for block in content if block["type"] == "text") == (parts.content or "")
    assert "".join(block["thinking"] for block in content if block["type"] == "thinking") == (parts.reasoning or "")
    calls = [(block["id"], block["input"]) for block in content if block["type"] == "tool_use"]
    assert calls == [(call.id, json.loads(call.arguments)) for call in parts.tool_calls]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ("", {}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": "b', {"a": "b"}),
        ("[1]", {"arguments": "[1]"}),
        ("no", {"arguments": "no"}),
    ],
)
def test_the_input_of_a_tool_is_an_object_whatever_the_model_wrote(written: str, wanted: dict[str, Any]) -> None:
    message = MessageObject(
        id="msg_1", type="message", role="assistant", model="m", content=[], stop_reason=None, stop_sequence=None,
        usage=MESSAGE_USAGE,
    )  # fmt: skip
    growing = GrowingMessage(message)
    growing.add([ToolCallStart(0, "a", "f"), ToolCallArguments(0, written)])
    growing.end("max_tokens", None, MESSAGE_USAGE)
    assert growing.message.model_dump()["content"][0]["input"] == wanted
