"""The tokens of a rendered conversation, with those of its images."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from octavo.core.prompts import TokensPrompt
from octavo.server.api_errors import unsupported
from octavo.server.middleware import client_of
from octavo.server.prompt_fields import encode
from octavo.server.protocol import ChatCompletionRequest
from octavo.server.request_template import queued
from octavo.server.service import Service


async def chat_tokens(service: Service, request: Request, body: ChatCompletionRequest, text: str) -> TokensPrompt:
    """The prompt of a conversation whose template has written ``text``.

    Raises:
        ApiError: an image cannot be read, the text is too long, the queue is full, or the client has left.
        InvalidRequestError: the template has not written each image once.
    """
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
    # Without images, too: the text may have a placeholder.
    token_ids, features = await asyncio.to_thread(prompts.expand, token_ids, images)
    return TokensPrompt(prompt=text, prompt_token_ids=token_ids, multi_modal_data={"image": features})
