"""The chat template of a request: the model's own, rendered in this process, or one that the request brings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request

from octavo.engine.chat_template import choose_template, render_and_read
from octavo.engine.request_templates import render_in_sandbox, variables_in_sandbox
from octavo.engine.template_program import template_variables
from octavo.server.api_errors import unsupported
from octavo.server.cancellation import with_cancellation
from octavo.server.middleware import client_of
from octavo.server.protocol import TemplateOptions
from octavo.server.service import Service

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """The chat template that a request uses."""

    request: Request
    service: Service
    text: str
    #: Names that it reads.
    variables: frozenset[str]
    #: Whether it is one of the model's.
    is_own: bool

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        fields: Sequence[tuple[int, str]],
        options: Mapping[str, Any],
        *,
        short: bool,
    ) -> tuple[str, list[bool]]:
        """``render_and_read``; what is ``short`` is rendered at once by the model's own template.

        Raises:
            ApiError: the queue is full, or the client has left.
            InvalidRequestError, TokenizerError: the template refuses the messages, or exceeds its limits.
        """
        options = {**self.service.llm.tokenizer.named_tokens, **options}
        if not self.is_own:
            sandbox, client = self.service.llm.inputs.sandbox, client_of(self.request)
            return await queued(
                self.service,
                self.request,
                lambda: render_in_sandbox(sandbox, client, self.text, messages, fields, options),
            )
        if short:
            return render_and_read(self.text, messages, fields, options)
        return await asyncio.to_thread(render_and_read, self.text, messages, fields, options)


async def choose(service: Service, request: Request, body: TemplateOptions, *, has_tools: bool) -> RequestTemplate:
    """The template that a request uses; ``has_tools``: whether the model sees any.

    Raises:
        ApiError: the request brings one, which is not allowed here; or as ``RequestTemplate.render``.
        InvalidRequestError, TokenizerError: the model has none, or it is not valid.
    """
    templates = service.llm.tokenizer.chat_templates
    text = choose_template(templates, body.chat_template, has_tools=has_tools)
    if body.chat_template is None or body.chat_template in templates:
        return RequestTemplate(request, service, text, template_variables(text), is_own=True)
    if not service.options.trust_request_chat_template:
        raise unsupported(
            "chat_template",
            "chat_template must be the name of one of the model's templates: this server was started without "
            "--trust-request-chat-template",
        )
    sandbox, client = service.llm.inputs.sandbox, client_of(request)
    variables = await queued(service, request, lambda: variables_in_sandbox(sandbox, client, text))
    return RequestTemplate(request, service, text, variables, is_own=False)


async def queued(service: Service, request: Request, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """The result of work that waits its turn: it counts in the queue, and ends when its client leaves."""
    name = object()
    service.queue.enter({name: 0})
    try:
        deadline = service.deadline()
        result: T = await with_cancellation(request.receive, work(), deadline)
        return result
    finally:
        service.queue.leave(name)
