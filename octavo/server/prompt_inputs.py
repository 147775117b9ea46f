"""Prompts from request bodies: tokenized texts, rendered conversations, images. Long texts are handled in threads."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from starlette.requests import Request

from octavo.config.server_options import ServerOptions
from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.request import TokensPrompt
from octavo.engine.chat_messages import names_role, template_variables
from octavo.engine.chat_template import choose_template, render_and_read, render_in_sandbox, variables_in_sandbox
from octavo.engine.input_processor import EncoderPrompts
from octavo.engine.tokenizer import no_fill_in_middle
from octavo.server.answer_format import read_tools
from octavo.server.http.errors import ApiError, invalid, unsupported
from octavo.server.http.middleware import client_of
from octavo.server.http.streaming import with_cancellation
from octavo.server.openai.protocol import EncoderDecoderParts, ImagePart, TextPart

if TYPE_CHECKING:
    from octavo.engine.async_llm import AsyncLLM
    from octavo.engine.tokenizer import Tokenizer
    from octavo.images.image_reader import ImageReader
    from octavo.images.image_sources import ImageFetcher
    from octavo.images.processors import ProcessedImage
    from octavo.server.openai.protocol import (
        ChatCompletionRequest,
        ChatMessage,
        CompletionRequest,
        Prediction,
        TemplateOptions,
    )
    from octavo.server.state import ServerState

logger = logging.getLogger("octavo.server")

T = TypeVar("T")

#: Variables by which templates turn reasoning on and off.
THINKING_VARIABLES = ("enable_thinking", "thinking")
#: Variables that a template may ignore: they have no effect on a model without reasoning.
_HINTS = frozenset({*THINKING_VARIABLES, "reasoning_effort"})
#: Variables that are fields of the request, or set by the server.
_RESERVED_VARIABLES = (
    "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "call_format",
    "image_placeholder",
)  # fmt: skip
#: Texts of fewer characters are tokenized on the event loop, in well under a millisecond.
_SHORT = 2000


async def read_prompts(service: ServerState, body: CompletionRequest) -> list[TokensPrompt]:
    """The prompts of a completion request. With ``suffix``, they are fill-in-the-middle prompts."""
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
        return await _read_encoder_prompts(service, reader, body, prompts)
    if any(isinstance(prompt, EncoderDecoderParts) for prompt in prompts):
        raise unsupported("prompt", "prompts with encoder_prompt are not supported: the model has a decoder alone")
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if body.suffix:
        return await _read_fill_in_middle(service, body, texts)
    if not texts:
        return [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    ids = await encode(service, texts, special)
    return [TokensPrompt(prompt=text, prompt_token_ids=tokens) for text, tokens in zip(texts, ids, strict=True)]


async def _read_encoder_prompts(
    service: ServerState, reader: EncoderPrompts, body: CompletionRequest, prompts: Sequence[Any]
) -> list[TokensPrompt]:
    for name in ("suffix", "truncate_prompt_tokens"):
        if getattr(body, name):
            raise unsupported(name, f"{name} is not supported with encoder-decoder models")
    parts = [(p.encoder_prompt, p.decoder_prompt) if isinstance(p, EncoderDecoderParts) else (p, None) for p in prompts]
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


async def _read_fill_in_middle(service: ServerState, body: CompletionRequest, texts: list[str]) -> list[TokensPrompt]:
    for name in ("echo", "use_beam_search", "truncate_prompt_tokens"):
        if getattr(body, name):
            raise unsupported(name, f"{name} is not supported with suffix")
    if service.llm.tokenizer.fill_in_middle is None:
        raise unsupported("suffix", str(no_fill_in_middle()))
    if not texts:
        raise unsupported("suffix", "suffix is not supported with a prompt of token ids: give it as text")
    suffix, special = body.suffix or "", body.add_special_tokens is not False
    if not body.ignore_eos:
        body.stop_token_ids = [*(body.stop_token_ids or []), *service.llm.tokenizer.fill_in_middle.ends]
    for text in texts:
        _check_length(service, len(text) + len(suffix))

    def encode_all() -> list[TokensPrompt]:
        encode_gap = service.llm.tokenizer.encode_gap
        return [TokensPrompt(prompt_token_ids=encode_gap(text, suffix, special)) for text in texts]

    is_short = sum(map(len, texts)) + len(texts) * len(suffix) < _SHORT
    return encode_all() if is_short else await asyncio.to_thread(encode_all)


async def read_prediction(service: ServerState, prediction: Prediction | None) -> list[int] | None:
    if prediction is None:
        return None
    content = prediction.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    [token_ids] = await encode(service, [text], add_special_tokens=False, param="prediction")
    return token_ids


async def encode(
    service: ServerState,
    texts: list[str],
    add_special_tokens: bool,
    param: str = "prompt",
    tokenizer: Tokenizer | None = None,
) -> list[list[int]]:
    """The token ids of texts; ``param`` names their field in errors, and the default tokenizer is the model's."""
    for text in texts:
        _check_length(service, len(text), param)
    tokenizer = tokenizer or service.llm.tokenizer
    if sum(map(len, texts)) < _SHORT:
        return [tokenizer.encode(text, add_special_tokens) for text in texts]
    return await asyncio.to_thread(tokenizer.encode_batch, texts, add_special_tokens)


def _check_length(service: ServerState, length: int, param: str = "prompt") -> None:
    if length > service.max_prompt_chars:
        has = "have" if param == "messages" else "has"
        message = f"the {param} {has} {length} characters; at most {service.max_prompt_chars} can be served"
        raise invalid(param, message, "context_length_exceeded")


def truncate_prompt(prompt: TokensPrompt, limit: int, side: str) -> TokensPrompt:
    """The last (side "left") or first (side "right") ``limit`` tokens of a prompt."""
    ids = prompt["prompt_token_ids"]
    if len(ids) <= limit:
        return prompt
    return TokensPrompt(prompt_token_ids=ids[:limit] if side == "right" else ids[-limit:])


# The chat template of a request.


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """The chat template of a request: one of the model's, or one that the client sent."""

    request: Request
    service: ServerState
    text: str
    #: The variables that the template reads.
    variables: frozenset[str]
    is_from_client: bool

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        fields: Sequence[tuple[int, str]],
        options: Mapping[str, Any],
        *,
        is_short: bool,
    ) -> tuple[str, list[bool]]:
        """As ``render_and_read``: in the sandbox if the client sent the template, else in a thread unless short."""
        options = {**self.service.llm.tokenizer.named_tokens, **options}
        if self.is_from_client:
            sandbox, client = self.service.llm.inputs.sandbox, client_of(self.request)
            work = partial(render_in_sandbox, sandbox, client, self.text, messages, fields, options)
            return await queued(self.service, self.request, work)
        if is_short:
            return render_and_read(self.text, messages, fields, options)
        return await asyncio.to_thread(render_and_read, self.text, messages, fields, options)


async def choose_request_template(
    service: ServerState, request: Request, body: TemplateOptions, *, has_tools: bool
) -> RequestTemplate:
    templates = service.llm.tokenizer.chat_templates
    text = choose_template(templates, body.chat_template, has_tools=has_tools)
    if body.chat_template is None or body.chat_template in templates:
        return RequestTemplate(request, service, text, template_variables(text), is_from_client=False)
    if not service.options.trust_request_chat_template:
        message = "chat_template must name a template of the model: the server has no --trust-request-chat-template"
        raise unsupported("chat_template", message)
    sandbox, client = service.llm.inputs.sandbox, client_of(request)
    variables = await queued(service, request, lambda: variables_in_sandbox(sandbox, client, text))
    return RequestTemplate(request, service, text, variables, is_from_client=True)


def thinking_variables(service: ServerState, *, enabled: bool, has_tools: bool) -> dict[str, bool]:
    """The template variables that turn reasoning on or off; none if the model's template reads none."""
    template = choose_template(service.llm.tokenizer.chat_templates, None, has_tools=has_tools)
    variables = template_variables(template)
    return {name: enabled for name in THINKING_VARIABLES if name in variables}


async def queued(service: ServerState, request: Request, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """The result of work that counts in the queue and is cancelled when its client disconnects."""
    name = object()
    service.queue.enter({name: 0})
    try:
        deadline = service.deadline()
        result: T = await with_cancellation(request.receive, work(), deadline)
        return result
    finally:
        service.queue.leave(name)


async def write_conversation(
    service: ServerState, request: Request, messages: Sequence[ChatMessage], body: TemplateOptions
) -> str:
    tools = read_tools(body.tools, leave_out=service.leave_out_tool).shown
    template = await choose_request_template(service, request, body, has_tools=tools is not None)
    return await render_chat(service, template, messages, body, tools)


async def render_chat(
    service: ServerState,
    template: RequestTemplate,
    messages: Sequence[ChatMessage],
    body: TemplateOptions,
    tools: list[dict[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """Renders a conversation (``apply_chat_template`` of transformers); ``tools`` replace those of the body."""
    options = {**_template_options(service, template, body, tools), **variables}
    if not messages:
        raise InvalidRequestError("messages must not be empty")
    plain = [_message_for_template(message, template.text) for message in messages]
    length = sum(len(str(message.get("content"))) + len(str(message.get("tool_calls", ""))) for message in plain)
    length += 0 if tools is None else len(str(tools))
    _check_length(service, length, "messages")
    # Fields that are no part of the API are for the template: it must read each that has a value.
    extra_fields = [
        (i, name)
        for i, message in enumerate(messages)
        for name, value in (message.model_extra or {}).items()
        if value not in (None, "", [], {}, False)
    ]
    is_short = length + 100 * len(plain) < _SHORT
    text, read = await template.render(plain, extra_fields, options, is_short=is_short)
    for (index, name), is_read in zip(extra_fields, read, strict=True):
        if is_read:
            continue
        if service.options.unknown_fields == "ignore":
            service.note_unknown(name)
            continue
        field = f"messages[{index}].{name[:100]}"
        message = f"{field}: the field is unknown here and the model's chat template does not read it"
        raise invalid("messages", message, "unknown_parameter")
    return text


def _template_options(
    service: ServerState, template: RequestTemplate, body: TemplateOptions, tools: list[dict[str, Any]] | None
) -> dict[str, Any]:
    continues = body.continue_final_message is True
    opens = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    if continues and opens:
        raise invalid("continue_final_message", "continue_final_message and add_generation_prompt exclude each other")
    variables = dict(body.chat_template_kwargs or {})
    for name in _RESERVED_VARIABLES:
        if name in variables:
            message = f"chat_template_kwargs must not hold {name}, which is a field of the request"
            raise invalid("chat_template_kwargs", message)
    if body.documents is not None:
        variables["documents"] = body.documents
    if variables:
        _check_variables(service, template.variables, variables)
    if body.thinks is not None:
        for name in THINKING_VARIABLES:
            if isinstance(variables.get(name), bool) and variables[name] != body.thinks:
                message = f"chat_template_kwargs.{name} contradicts enable_thinking, thinking or reasoning"
                raise invalid("chat_template_kwargs", message)
        variables |= {name: body.thinks for name in THINKING_VARIABLES if name in template.variables}
    if body.reasoning_effort is not None:
        # Templates without levels can turn reasoning on and off, or ignore the effort.
        if body.reasoning_effort != "none" and "reasoning_effort" in template.variables:
            effort: dict[str, Any] = {"reasoning_effort": body.reasoning_effort}
        else:
            switches = [name for name in THINKING_VARIABLES if name in template.variables]
            effort = dict.fromkeys(switches, body.reasoning_effort != "none")
        variables = {**effort, **variables}
    return {
        "add_generation_prompt": opens,
        "continue_final_message": continues,
        "tools": tools,
        "call_format": service.formats.call_format(template.text, template.variables),
        **variables,
    }


def _check_variables(service: ServerState, template_variables: Set[str], variables: Mapping[str, Any]) -> None:
    """Refuses a variable that the template does not read; with ``unknown_fields: ignore`` it is logged."""
    for name, value in variables.items():
        if value in (None, []) or name in template_variables or name in _HINTS:
            continue
        if service.options.unknown_fields == "ignore":
            service.note_unknown(name)
            continue
        if name == "documents":
            raise unsupported(name, "documents is not supported: the model's chat template has no place for them")
        message = f"chat_template_kwargs: the chat template has no variable {name!r:.100}"
        raise invalid("chat_template_kwargs", message, "unknown_parameter")


def _message_for_template(message: ChatMessage, template: str) -> dict[str, Any]:
    """A message as a dict with the fields that were sent, null included."""
    # Not model_dump, which fails on deeply nested values.
    sent = message.model_fields_set
    fields = {**message.__dict__, **(message.model_extra or {})}
    plain = {name: value for name, value in fields.items() if name in sent}
    if isinstance(message.content, list):
        plain["content"] = [
            {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
            for part in message.content
        ]
    thought = message.reasoning_content or message.reasoning
    if not thought:  # parts without a text are encrypted, or summaries of others
        details = message.reasoning_details if isinstance(message.reasoning_details, list) else []
        texts = [part.get("text") for part in details if isinstance(part, dict)]
        thought = "".join(text for text in texts if isinstance(text, str))
    if isinstance(thought, str) and message.role == "assistant":  # templates read it by either name
        plain["reasoning_content"] = plain["reasoning"] = thought
    if message.tool_calls:
        plain["tool_calls"] = [_function_call(call) for call in message.tool_calls]
    if message.role == "developer" and not names_role(template, "developer"):
        plain["role"] = "system"  # of which it is OpenAI's newer name
    return plain


def _function_call(call: dict[str, Any]) -> dict[str, Any]:
    """A custom tool call as a call of the function that stands for the tool; others as they are."""
    custom = call.get("custom")
    if call.get("type") != "custom" or not isinstance(custom, dict):
        return call
    arguments = json.dumps({"input": custom.get("input", "")}, ensure_ascii=False)
    rest = {name: value for name, value in call.items() if name != "custom"}
    return {**rest, "type": "function", "function": {"name": custom.get("name"), "arguments": arguments}}


async def chat_tokens(service: ServerState, request: Request, body: ChatCompletionRequest, text: str) -> TokensPrompt:
    """The prompt of a conversation that was rendered as ``text``, with its images."""
    # The chat template adds the special tokens itself.
    [token_ids] = await encode(service, [text], add_special_tokens=body.add_special_tokens is True)
    prompts, parts = service.llm.inputs.image_prompts, service.images.check(body.messages)
    if prompts is None:
        return TokensPrompt(prompt=text, prompt_token_ids=token_ids)
    if parts and body.truncate_prompt_tokens is not None:
        raise unsupported("truncate_prompt_tokens", "truncate_prompt_tokens is not supported with images")
    images = []
    if parts:
        images = await queued(service, request, lambda: service.images.read(parts, client_of(request)))
    # Without images too: the text may contain a placeholder.
    token_ids, features = await asyncio.to_thread(prompts.expand, token_ids, images)
    return TokensPrompt(prompt=text, prompt_token_ids=token_ids, multi_modal_data={"image": features})


# Images of conversations.


class ImageInputs:
    """Reads the images of conversations in threads, within limits. Its imports come with the first image."""

    def __init__(self, llm: AsyncLLM, options: ServerOptions) -> None:
        self._llm, self._options = llm, options

    @property
    def placeholder(self) -> str | None:
        """The text that stands for an image in a prompt; None: the model reads no images."""
        prompts = self._llm.inputs.image_prompts
        return None if prompts is None else prompts.processor.placeholder

    @property
    def are_seen(self) -> bool:
        return self._llm.inputs.image_prompts is not None

    def check(self, messages: Sequence[ChatMessage]) -> list[ImagePart]:
        """The images of a conversation; raises if there are too many."""
        contents = [message.content for message in messages if isinstance(message.content, list)]
        parts = [part for content in contents for part in content if isinstance(part, ImagePart)]
        most = (self._llm.config.limit_mm_per_prompt or {}).get("image")
        if most is not None and len(parts) > most:
            text = f"the conversation has {len(parts)} images; at most {most} are taken (limit_mm_per_prompt)"
            raise invalid("messages", text)
        return parts

    async def read(self, parts: Sequence[ImagePart], client: str) -> list[ProcessedImage]:
        """Fetches or decodes images and runs the model's image processor on them. A URL that repeats is read once."""
        tasks: dict[str, asyncio.Task[ProcessedImage]] = {}
        for number, part in enumerate(parts, start=1):
            name = "the image" if len(parts) == 1 else f"image {number}"
            if part.url not in tasks:
                tasks[part.url] = asyncio.create_task(self._read(part.url, name, client))
        try:
            await asyncio.gather(*tasks.values())
            return [tasks[part.url].result() for part in parts]
        except InvalidRequestError as e:
            raise invalid("messages", str(e), "invalid_image") from None
        except ConfigError as e:  # its message names folders of this machine
            logger.error("%s", e)
            message = "this server reads no images: the extra octavo[images] is not installed"
            # Not 501: clients retry statuses from 500 on.
            raise invalid("messages", message, "images_not_installed") from None
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _read(self, url: str, name: str, client: str) -> ProcessedImage:
        from octavo.images.image_sources import read_data_url

        if url[:5].lower() == "data:":
            content = await asyncio.to_thread(read_data_url, url, self._options.max_image_bytes, name)
        else:
            content = await self._fetcher.fetch(url, name)
        prompts = self._llm.inputs.image_prompts
        assert prompts is not None
        future = self._reader.process(content, prompts.processor, client=client, name=name)
        return await asyncio.wrap_future(future)

    @cached_property
    def _reader(self) -> ImageReader:
        from octavo.images.image_files import ImageLimits
        from octavo.images.image_reader import ImageReader

        limits = ImageLimits(int(self._options.max_image_bytes), self._options.max_image_pixels)
        return ImageReader(self._llm.inputs.sandbox, limits)

    @cached_property
    def _fetcher(self) -> ImageFetcher:
        from octavo.images.image_sources import ImageFetcher, UrlRules

        options = self._options
        networks = tuple(ipaddress.ip_network(text) for text in options.image_url_networks)
        rules = UrlRules(options.allow_image_urls, options.allowed_media_domains, networks, options.image_url_seconds)
        return ImageFetcher(rules, options.max_image_bytes)
