"""The openai package's own types as judge of answers."""

from __future__ import annotations

import copy
import json
from typing import Any

from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

__all__ = ["events", "judge_chat", "judge_chunk", "judge_completion", "judge_model"]


def judge_chat(raw: dict[str, Any]) -> ChatCompletion:
    return ChatCompletion.model_validate(raw, strict=True)


def judge_chunk(raw: dict[str, Any]) -> ChatCompletionChunk:
    return ChatCompletionChunk.model_validate(raw, strict=True)


def judge_model(raw: dict[str, Any]) -> Model:
    return Model.model_validate(raw, strict=True)


def judge_completion(raw: dict[str, Any], *, chunk: bool = False) -> Completion:
    """These types say less than OpenAI's servers send: null as finish_reason of a chunk that is not the last, and as
    logprob of the first token of an echoed prompt."""
    checked = copy.deepcopy(raw)
    for choice in checked["choices"]:
        if chunk and choice["finish_reason"] is None:
            choice["finish_reason"] = "stop"
        logprobs = choice["logprobs"]
        if logprobs and logprobs["tokens"] and logprobs["token_logprobs"][0] is None:
            assert logprobs["top_logprobs"][0] is None and logprobs["text_offset"][0] == 0
            logprobs["token_logprobs"][0], logprobs["top_logprobs"][0] = 0.0, {}
    return Completion.model_validate(checked, strict=True)


def events(text: str) -> list[dict[str, Any]]:
    """The JSON of a complete stream's events."""
    found = []
    blocks = text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""], text[-300:]
    for block in blocks[:-2]:
        assert block.startswith("data: ") and "\n" not in block
        found.append(json.loads(block.removeprefix("data: ")))
    return found
