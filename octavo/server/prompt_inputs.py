"""Prompts from request bodies: tokenized texts, rendered conversations, images. Long texts are handled in threads."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from starlette.requests import Request

from octavo.config.server_options import ServerOptions
from octavo.core.cache_hints import Breakpoint
from octavo.core.errors import CONTEXT_LENGTH, ConfigError, InvalidRequestError
from octavo.core.request import TokensPrompt
from octavo.engine.chat_messages import names_role, template_variables
from octavo.engine.chat_template import choose_template, render_and_read, render_in_sandbox, variables_in_sandbox
from octavo.engine.image_prompts import split_images
from octavo.engine.input_processor import EncoderPrompts
from octavo.engine.tokenizer import no_fill_in_middle
from octavo.server.chat_call import ChatCall, Conversation, Message, conversation_fields, read_tools
from octavo.server.http.errors import invalid_at, unsupported
from octavo.server.http.middleware import client_of
from octavo.server.http.streaming import with_cancellation
from octavo.server.openai.protocol import EncoderDecoderParts
from octavo.server.prompt_cache import breakpoints_of, common_prefix

if TYPE_CHECKING:
    from octavo.engine.async_llm import AsyncLLM
    from octavo.engine.image_prompts import ImagePrompts
    from octavo.engine.tokenizer import Tokenizer
    from octavo.images.image_reader import ImageReader
    from octavo.images.image_sources import ImageFetcher
    from octavo.images.processors import ProcessedImage
    from octavo.server.openai.protocol import (
        ChatMessage,
        CompletionRequest,
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
        raise invalid_at("prompt", "must not be an empty list")
    limit = service.options.max_sequences_per_request
    if len(prompts) > limit:
        raise invalid_at("prompt", f"holds {len(prompts)} prompts; at most {limit} can be served at once")
    special = body.add_special_tokens is not False
    if (reader := service.llm.inputs.encoder_prompts) is not None:
        return await _read_encoder_prompts(service, reader, body, prompts)
    if any(isinstance(prompt, EncoderDecoderParts) for prompt in prompts):
        raise unsupported("prompt", "encoder_prompt is not supported: the model has a decoder alone")
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
            raise unsupported(name, "is not supported with encoder-decoder models")
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
            raise unsupported(name, "is not supported with suffix")
    if service.llm.tokenizer.fill_in_middle is None:
        raise no_fill_in_middle()
    if not texts:
        raise unsupported("suffix", "is not supported with a prompt of token ids: give it as text")
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
        problem = f"has {length} characters; at most {service.max_prompt_chars} can be served"
        raise invalid_at(param, problem, CONTEXT_LENGTH)


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
    service: ServerState, request: Request, conversation: Conversation
) -> RequestTemplate:
    templates, chosen = service.llm.tokenizer.chat_templates, conversation.template
    text = choose_template(templates, chosen, has_tools=conversation.tools.shown is not None)
    if chosen is None or chosen in templates:
        return RequestTemplate(request, service, text, template_variables(text), is_from_client=False)
    if not service.options.trust_request_chat_template:
        problem = "must name a template of the model: the server has no --trust-request-chat-template"
        raise unsupported("chat_template", problem)
    sandbox, client = service.llm.inputs.sandbox, client_of(request)
    variables = await queued(service, request, lambda: variables_in_sandbox(sandbox, client, text))
    return RequestTemplate(request, service, text, variables, is_from_client=True)


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
    tools = read_tools(body.tools, leave_out=service.leave_out_tool)
    conversation = Conversation(**conversation_fields(body, messages, tools))
    return await render_chat(service, await choose_request_template(service, request, conversation), conversation)


async def render_chat(
    service: ServerState, template: RequestTemplate, conversation: Conversation, **variables: Any
) -> str:
    """Renders a conversation (``apply_chat_template`` of transformers); ``variables``: further ones."""
    messages, tools = conversation.messages, conversation.tools.shown
    options = {**_template_options(service, template, conversation), **variables}
    plain = [_for_template(message, template.text) for message in split_images(messages)[0]]
    length = sum(len(str(message.get("content"))) + len(str(message.get("tool_calls", ""))) for message in plain)
    length += 0 if tools is None else len(str(tools))
    _check_length(service, length, "messages")
    is_short = length + 100 * len(plain) < _SHORT
    text, read = await template.render(plain, conversation.extra_fields, options, is_short=is_short)
    # Fields that are no part of the API are for the template: it must read each that has a value.
    for (index, name), is_read in zip(conversation.extra_fields, read, strict=True):
        if is_read:
            continue
        if service.options.unknown_fields == "ignore":
            service.note_unknown(name)
            continue
        problem = "the field is unknown here and the model's chat template does not read it"
        raise invalid_at(f"messages[{index}].{name[:100]}", problem, "unknown_parameter")
    return text


def _for_template(message: Message, template: str) -> Message:
    """A message whose role the template knows, and whose reasoning has both of its names."""
    plain = dict(message)
    thought = message.get("reasoning_content") or message.get("reasoning") or ""
    if message["role"] == "assistant" and isinstance(thought, str):  # templates read it by either name
        plain["reasoning_content"] = plain["reasoning"] = thought
    if message["role"] == "developer" and not names_role(template, "developer"):
        plain["role"] = "system"  # of which it is OpenAI's newer name
    return plain


def _template_options(service: ServerState, template: RequestTemplate, conversation: Conversation) -> dict[str, Any]:
    thinks, effort = conversation.thinks, conversation.reasoning_effort
    opens = not conversation.continues if conversation.opens is None else conversation.opens
    variables = dict(conversation.variables)
    for name in _RESERVED_VARIABLES:
        if name in variables:
            raise invalid_at("chat_template_kwargs", f"must not hold {name}, which is a field of the request")
    if conversation.documents is not None:
        variables["documents"] = conversation.documents
    if variables:
        _check_variables(service, template.variables, variables)
    switches = [name for name in THINKING_VARIABLES if name in template.variables]
    if thinks is not None:
        for name in THINKING_VARIABLES:
            if isinstance(variables.get(name), bool) and variables[name] != thinks:
                raise invalid_at(
                    f"chat_template_kwargs.{name}", "enable_thinking, thinking or reasoning contradicts it"
                )
        variables |= dict.fromkeys(switches, thinks)
    if effort is not None:
        # Templates without levels can turn reasoning on and off, or ignore the effort.
        has_levels = effort != "none" and "reasoning_effort" in template.variables
        levels = {"reasoning_effort": effort} if has_levels else dict.fromkeys(switches, effort != "none")
        variables = {**levels, **variables}
    return {
        "add_generation_prompt": opens,
        "continue_final_message": conversation.continues,
        "tools": conversation.tools.shown,
        "call_format": service.formats.call_format(template.text, template.variables),
        "image_placeholder": service.images.placeholder,
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
            raise unsupported("documents", "is not supported: the model's chat template has no place for them")
        problem = f"the chat template has no variable {name!r:.100}"
        raise invalid_at("chat_template_kwargs", problem, "unknown_parameter")


async def chat_tokens(
    service: ServerState, request: Request, call: ChatCall, text: str, ends: Sequence[tuple[int, float]] = ()
) -> tuple[TokensPrompt, list[Breakpoint]]:
    """The prompt of a conversation that was rendered as ``text``, with its images; and its breakpoints.

    ``ends``: of marked blocks, in characters, with the seconds to hold what is before.
    """
    # The chat template adds the special tokens itself.
    breakpoints: list[Breakpoint] = []
    if ends:
        _check_length(service, len(text), "messages")
        tokenize, special = service.llm.tokenizer.encode_with_ends, call.add_special_tokens
        is_short = len(text) < _SHORT
        token_ids, token_ends = (
            tokenize(text, special) if is_short else await asyncio.to_thread(tokenize, text, special)
        )
        breakpoints = breakpoints_of(ends, token_ends)
    else:
        [token_ids] = await encode(service, [text], add_special_tokens=call.add_special_tokens, param="messages")
    prompts, urls = service.llm.inputs.image_prompts, service.images.urls(call.messages)
    if prompts is None:
        return TokensPrompt(prompt=text, prompt_token_ids=token_ids), breakpoints
    if urls and call.fields.truncate_prompt_tokens is not None:
        raise unsupported("truncate_prompt_tokens", "is not supported with images")
    images = []
    if urls:
        images = await queued(service, request, lambda: service.images.read(urls, client_of(request)))
    # Without images too: the text may contain a placeholder.
    whole, features = await asyncio.to_thread(prompts.expand, token_ids, images)
    if images and breakpoints:
        breakpoints = await asyncio.to_thread(_expanded, prompts, breakpoints, token_ids, images, whole)
    return TokensPrompt(prompt=text, prompt_token_ids=whole, multi_modal_data={"image": features}), breakpoints


def _expanded(
    prompts: ImagePrompts, breakpoints: list[Breakpoint], token_ids: list[int], images: list[Any], whole: list[int]
) -> list[Breakpoint]:
    """The breakpoints of a prompt after ``ImagePrompts.expand``, which made ``whole`` of ``token_ids``."""
    moved = []
    for mark in breakpoints:
        before = token_ids[: mark.num_tokens]
        expanded, _ = prompts.expand(before, images[: before.count(prompts.placeholder_id)])
        moved.append(Breakpoint(common_prefix(expanded, whole), mark.ttl))
    return moved


# Images of conversations.


class ImageInputs:
    """Reads the images of conversations in threads, within limits. Its imports come with the first image."""

    def __init__(self, llm: AsyncLLM, options: ServerOptions) -> None:
        self._llm, self._options = llm, options

    @property
    def placeholder(self) -> str | None:
        """The text that stands for an image where a template has none; None: the model reads no images."""
        prompts = self._llm.inputs.image_prompts
        return None if prompts is None else prompts.text_placeholder

    @property
    def are_seen(self) -> bool:
        return self._llm.inputs.image_prompts is not None

    def urls(self, messages: Sequence[Message]) -> dict[str, str]:
        """The URLs of a conversation's images by their paths; raises if there are too many, or the model sees none."""
        urls = {f"{path}.image_url": part["image_url"]["url"] for path, part in split_images(messages)[1].items()}
        prompts = self._llm.inputs.image_prompts
        if urls and prompts is None:
            raise unsupported(next(iter(urls)), "is not supported: the model reads text, not images")
        if prompts is not None:
            prompts.check_number(len(urls))
        return urls

    async def read(self, urls: Mapping[str, str], client: str) -> list[ProcessedImage]:
        """Fetches or decodes images, by path, and runs the model's image processor on them.

        A URL that repeats is read once.
        """
        paths = {url: path for path, url in reversed(list(urls.items()))}
        tasks = {url: asyncio.create_task(self._read(url, paths[url], client)) for url in dict.fromkeys(urls.values())}
        try:
            await asyncio.gather(*tasks.values())
            return [tasks[url].result() for url in urls.values()]
        except ConfigError as e:  # its message names folders of this machine
            logger.error("%s", e)
            message = "this server reads no images: the extra octavo[images] is not installed"
            # Not 501: clients retry statuses from 500 on.
            raise invalid_at("messages", message, "images_not_installed") from None
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _read(self, url: str, path: str, client: str) -> ProcessedImage:
        try:
            return await self._read_at(url, path, client)
        except InvalidRequestError as e:
            error = e.at(e.path or path)
            error.kind = "invalid_image"
            raise error from None

    async def _read_at(self, url: str, name: str, client: str) -> ProcessedImage:
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
