"""An engine without a model, for tests of conversations: what it answers is written down before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.core.errors import InvalidRequestError
from octavo.core.outputs import CompletionOutput, RequestMetrics, RequestOutput
from octavo.core.request import TokensPrompt
from octavo.core.sampling_params import SamplingParams


class ScriptedEngine:
    """Answers every request with the same texts, a piece a step; a prompt that is too long is refused."""

    def __init__(self, texts: list[str], on_step: Callable[[int], None] = lambda n: None) -> None:
        self.tokenizer = self.inputs = self
        self.max_model_len = 100
        self.finish_reason = "stop"
        self.params: list[SamplingParams] = []
        self.texts = texts
        self.on_step = on_step
        self.conversations: list[list[dict[str, Any]]] = []
        self.aborted: list[str] = []
        self.error: str | None = None
        self.open: str | None = None
        self.steps = 0

    image_prompts = None

    def apply_chat_template(self, messages: list[dict[str, Any]]) -> str:
        self.conversations.append(list(messages))
        return "".join(m["content"] for m in messages)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [1 for _ in text]

    def add_request(self, request_id: str, prompt: TokensPrompt, params: SamplingParams, lora_request: None) -> None:
        if sum(prompt["prompt_token_ids"]) > self.max_model_len:
            raise InvalidRequestError("the prompt is too long")
        self.params.append(params)
        self.open, self.steps = request_id, 0

    def has_unfinished_requests(self) -> bool:
        return self.open is not None

    def _output(self, text: str, reason: str | None) -> RequestOutput:
        assert self.open is not None
        error = self.error if reason == "error" else None
        output = CompletionOutput(0, text, [1] * bool(text), finish_reason=reason, error=error)
        return RequestOutput(self.open, None, [], [output], reason is not None, RequestMetrics(0.0))

    def step(self) -> list[RequestOutput]:
        self.steps += 1
        self.on_step(self.steps)
        piece = self.texts[self.steps - 1]
        if self.steps < len(self.texts):
            return [self._output(piece, None)]
        last = self._output(piece, self.finish_reason if self.error is None else "error")
        self.open = None
        return [last]

    def abort_request(self, request_id: str) -> RequestOutput | None:
        if self.open != request_id:
            return None
        last = self._output("", "abort")
        self.aborted.append(request_id)
        self.open = None
        return last
