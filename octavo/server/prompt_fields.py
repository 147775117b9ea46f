"""Tokenizes the prompts of requests; long ones in a thread."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from starlette.requests import Request

from octavo.core.errors import InvalidRequestError
from octavo.core.prompts import TokensPrompt
from octavo.engine.encoder_prompts import EncoderPrompts
from octavo.engine.fill_in_middle import no_fill_in_middle
from octavo.engine.message_forms import names_role
from octavo.server.api_errors import ApiError, invalid, unsupported
from octavo.server.message_fields import (
    THINKING_VARIABLES,
    check_variables,
    effort_variables,
    further_fields,
    refuse_unread,
)
from octavo.server.protocol import (
    ChatMessage,
    CompletionRequest,
    EncoderDecoderParts,
    Prediction,
    TemplateOptions,
    TextPart,
)
from octavo.server.request_template import RequestTemplate, choose
from octavo.server.service import Service
from octavo.server.tools import read_tools

if TYPE_CHECKING:
    from octavo.engine.tokenizer import Tokenizer

#: Up to this many characters are tokenized in well under a millisecond, and not in a thread.
_SHORT = 2000


async def read_prompts(service: Service, body: CompletionRequest) -> list[TokensPrompt]:
    """The prompts of a completion request; one that fills a gap ends with the model's tokens for this, too.

    Raises:
        ApiError: there is no prompt, there are too many, or one is too long.
    """
    prompts: Any = body.prompt
    if isinstance(prompts, str | EncoderDecoderParts) or (prompts and isinstance(prompts[0], int)):
        prompts = [prompts]
    if not prompts:
        raise invalid("prompt", "prompt must not be an empty list")
    limit = service.options.max_sequences_per_request
    if len(prompts) > limit:
        message = f"prompt holds {len(prompts)} prompts; at most {limit} can be served at once"
        raise ApiError(400, message, param="prompt")
    special = body.add_special_tokens is not False
    if (reader := service.llm.inputs.encoder_prompts) is not None:
        return await _encoder_prompts(service, reader, body, prompts)
    if any(isinstance(prompt, EncoderDecoderParts) for prompt in prompts):
        raise unsupported("prompt", "prompts with encoder_prompt are not supported: the model has a decoder alone")
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if body.suffix:
        return await _around_a_gap(service, body, texts)
    if not texts:
        return [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    ids = await encode(service, texts, special)
    return [TokensPrompt(prompt=text, prompt_token_ids=tokens) for text, tokens in zip(texts, ids, strict=True)]


async def _encoder_prompts(
    service: Service, reader: EncoderPrompts, body: CompletionRequest, given: Sequence[Any]
) -> list[TokensPrompt]:
    """Prompts of an encoder-decoder model.

    Raises:
        ApiError: a text is too long, or the body has what does not go with such a model.
        InvalidRequestError: the model cannot read a prompt.
    """
    for name in ("suffix", "truncate_prompt_tokens"):
        if getattr(body, name):
            raise unsupported(name, f"{name} is not supported with encoder-decoder models")
    parts = [(p.encoder_prompt, p.decoder_prompt) if isinstance(p, EncoderDecoderParts) else (p, None) for p in given]
    texts = [encoder for encoder, _ in parts if isinstance(encoder, str)]
    tokenizer = service.llm.tokenizer.source
    ids = iter(await encode(service, texts, body.add_special_tokens is not False, tokenizer=tokenizer))
    split = []
    for encoder, decoder in parts:
        _check_length(service, len(decoder or ()))
        if isinstance(encoder, str):
            encoder = TokensPrompt(prompt=encoder, prompt_token_ids=next(ids))
        split.append(cast(TokensPrompt, reader.split({"encoder_prompt": encoder, "decoder_prompt": decoder})))
    return split


async def _around_a_gap(service: Service, body: CompletionRequest, texts: list[str]) -> list[TokensPrompt]:
    """Prompts whose completions stand between each text and the suffix.

    Raises:
        ApiError: the model does not fill gaps, a text is too long, or the body has what does not go with a suffix.
    """
    for name in ("echo", "use_beam_search", "truncate_prompt_tokens"):
        if getattr(body, name):
            raise unsupported(name, f"{name} is not supported with suffix")
    if service.llm.tokenizer.fill_in_middle is None:
        raise unsupported("suffix", str(no_fill_in_middle()))
    if not texts:
        raise unsupported("suffix", "suffix is not supported with a prompt of token ids: give it as text")
    suffix, special = body.suffix or "", body.add_special_tokens is not False
    gap, ends = service.llm.tokenizer.encode_gap, service.llm.tokenizer.fill_in_middle.ends
    if not body.ignore_eos:
        body.stop_token_ids = [*(body.stop_token_ids or []), *ends]
    for text in texts:
        _check_length(service, len(text) + len(suffix))

    def make() -> list[TokensPrompt]:
        return [TokensPrompt(prompt_token_ids=gap(text, suffix, special)) for text in texts]

    return make() if sum(map(len, texts)) + len(texts) * len(suffix) < _SHORT else await asyncio.to_thread(make)


async def read_prediction(service: Service, prediction: Prediction | None) -> list[int] | None:
    """Token ids of what an answer is likely to be.

    Raises:
        ApiError: it is too long to be served.
    """
    if prediction is None:
        return None
    content = prediction.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    [token_ids] = await encode(service, [text], add_special_tokens=False, param="prediction")
    return token_ids


async def encode(
    service: Service,
    texts: list[str],
    add_special_tokens: bool,
    param: str = "prompt",
    tokenizer: Tokenizer | None = None,
) -> list[list[int]]:
    """Token ids of texts, by default of the model's tokenizer; ``param`` is the field that they are of.

    Raises:
        ApiError: a text is too long to be served.
    """
    for text in texts:
        _check_length(service, len(text), param)
    tokenizer = tokenizer or service.llm.tokenizer
    if sum(map(len, texts)) < _SHORT:
        return [tokenizer.encode(text, add_special_tokens) for text in texts]
    return await asyncio.to_thread(tokenizer.encode_batch, texts, add_special_tokens)


def _check_length(service: Service, length: int, param: str = "prompt") -> None:
    if length > service.max_prompt_chars:
        has = "have" if param == "messages" else "has"
        message = f"the {param} {has} {length} characters; at most {service.max_prompt_chars} can be served"
        raise invalid(param, message, "context_length_exceeded")


def truncated(prompt: TokensPrompt, limit: int, side: str) -> TokensPrompt:
    """A prompt of ``limit`` tokens at most, cut on its "left" or "right"."""
    ids = prompt["prompt_token_ids"]
    if len(ids) <= limit:
        return prompt
    return TokensPrompt(prompt_token_ids=ids[:limit] if side == "right" else ids[-limit:])


async def write_conversation(
    service: Service, request: Request, messages: Sequence[ChatMessage], body: TemplateOptions
) -> str:
    """The text of a conversation, with the tools and the template that the body names.

    Raises:
        ApiError, InvalidRequestError, TokenizerError: as ``read_tools``, ``choose`` and ``render_chat``.
    """
    tools = read_tools(body.tools, leave_out=service.leave_out_tool).shown
    template = await choose(service, request, body, has_tools=tools is not None)
    return await render_chat(service, template, messages, body, tools)


async def render_chat(
    service: Service,
    template: RequestTemplate,
    messages: Sequence[ChatMessage],
    body: TemplateOptions,
    tools: list[dict[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """The text of a conversation, as its template writes it and the body asks for.

    ``tools``: those that the model sees. ``variables`` of the template come beside those of the body.

    Raises:
        ApiError: the body asks for what contradicts itself, or as ``RequestTemplate.render``.
        InvalidRequestError: the template refuses the messages.
    """
    options = {**_template_options(service, template, body, tools), **variables}
    if not messages:
        raise InvalidRequestError("messages must not be empty")
    plain = [_as_dict(message, template.text) for message in messages]
    length = sum(len(str(message.get("content"))) + len(str(message.get("tool_calls", ""))) for message in plain)
    length += 0 if tools is None else len(str(tools))
    _check_length(service, length, "messages")
    fields = further_fields(messages)
    text, read = await template.render(plain, fields, options, short=length + 100 * len(plain) < _SHORT)
    for (index, name), is_read in zip(fields, read, strict=True):
        if not is_read:
            refuse_unread(service, index, name)
    return text


def _template_options(
    service: Service, template: RequestTemplate, body: TemplateOptions, tools: list[dict[str, Any]] | None
) -> dict[str, Any]:
    """Keywords of ``octavo.engine.chat_template.render_chat``."""
    continues = body.continue_final_message is True
    opens = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    if continues and opens:
        raise invalid("continue_final_message", "continue_final_message and add_generation_prompt exclude each other")
    variables = dict(body.chat_template_kwargs or {})
    for name in (
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "call_format",
        "image_placeholder",
    ):
        if name in variables:
            message = f"chat_template_kwargs must not hold {name}, which is a field of the request"
            raise invalid("chat_template_kwargs", message)
    if body.documents is not None:
        variables["documents"] = body.documents
    if variables:
        check_variables(service, template.variables, variables)
    if body.thinks is not None:
        for name in THINKING_VARIABLES:
            if isinstance(variables.get(name), bool) and variables[name] != body.thinks:
                message = f"chat_template_kwargs.{name} contradicts enable_thinking, thinking or reasoning"
                raise invalid("chat_template_kwargs", message)
        variables |= {name: body.thinks for name in THINKING_VARIABLES if name in template.variables}
    if body.reasoning_effort is not None:
        variables = {**effort_variables(body.reasoning_effort, template.variables), **variables}
    return {
        "add_generation_prompt": opens,
        "continue_final_message": continues,
        "tools": tools,
        "call_format": service.formats.call_format(template.text, template.variables),
        **variables,
    }


def _as_dict(message: ChatMessage, template: str) -> dict[str, Any]:
    """A message as the template gets it: with each field that was sent, null included."""
    # model_dump fails on deeply nested values.
    sent = message.model_fields_set
    fields = {**message.__dict__, **(message.model_extra or {})}
    plain = {name: value for name, value in fields.items() if name in sent}
    if isinstance(message.content, list):
        plain["content"] = [
            {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
            for part in message.content
        ]
    thought = message.reasoning_content or message.reasoning or _detailed(message.reasoning_details)
    if isinstance(thought, str) and message.role == "assistant":  # templates read it by either name
        plain["reasoning_content"] = plain["reasoning"] = thought
    if message.tool_calls:
        plain["tool_calls"] = [_function_call(call) for call in message.tool_calls]
    if message.role == "developer" and not names_role(template, "developer"):
        plain["role"] = "system"  # of which it is OpenAI's newer name
    return plain


def _function_call(call: dict[str, Any]) -> dict[str, Any]:
    """A call of a tool that takes a text as one of the function that stands for it; others as they are."""
    custom = call.get("custom")
    if call.get("type") != "custom" or not isinstance(custom, dict):
        return call
    arguments = json.dumps({"input": custom.get("input", "")}, ensure_ascii=False)
    rest = {name: value for name, value in call.items() if name != "custom"}
    return {**rest, "type": "function", "function": {"name": custom.get("name"), "arguments": arguments}}


def _detailed(details: object) -> str:
    """The texts of ``reasoning_details``; other parts are encrypted, or summaries of these."""
    texts = [part.get("text") for part in details if isinstance(part, dict)] if isinstance(details, list) else []
    return "".join(text for text in texts if isinstance(text, str))
