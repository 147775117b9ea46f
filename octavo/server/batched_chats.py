"""The route ``/v1/chat/completions/batch`` of vLLM: several conversations, a choice of the response for each."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.errors import InvalidRequestError, TokenizerError
from octavo.server.api_errors import ApiError, as_api_error, invalid, unsupported
from octavo.server.cancellation import with_cancellation
from octavo.server.chat_completions import PendingCompletion
from octavo.server.chat_request import start_chat
from octavo.server.field_marks import refused
from octavo.server.protocol import ChatCompletionRequest, ChatMessage
from octavo.server.protocol_answers import ChatCompletion
from octavo.server.service import service_of


class BatchedChatsRequest(ChatCompletionRequest):
    """Body of ``/v1/chat/completions/batch``: that of ``/v1/chat/completions``, with several conversations."""

    messages: list[Annotated[list[ChatMessage], Field(fail_fast=True)]] = Field(  # type: ignore[assignment]
        description="The conversations."
    )
    stream: Any = refused("conversations are answered together; one alone is streamed by /v1/chat/completions", False)
    n: Any = refused("the choices are the answers to the conversations", 1)
    best_of: Any = refused("the choices are the answers to the conversations", 1)
    use_beam_search: Any = refused("the choices are the answers to the conversations", False)


async def create_batched_chats(request: Request, body: BatchedChatsRequest) -> Response:
    """Answers several conversations at once; choice i is the answer to conversation i."""
    service = service_of(request)
    deadline = service.deadline()
    if not body.messages:
        raise invalid("messages", "messages must not be an empty list")
    most = service.options.max_sequences_per_request
    if len(body.messages) > most:
        raise invalid(
            "messages", f"messages holds {len(body.messages)} conversations; at most {most} are served at once"
        )
    if body.stream_options is not None:
        raise unsupported("stream_options", "stream_options is allowed only with stream=true")
    fields = {name: getattr(body, name) for name in body.model_fields_set}
    chats = []
    for number, messages in enumerate(body.messages):
        one = ChatCompletionRequest.model_construct(body.model_fields_set, **{**fields, "messages": messages})
        try:
            chats.append(PendingCompletion(await start_chat(service, request, one, prefix="chatcmpl")))
        except (ApiError, InvalidRequestError, TokenizerError) as e:
            raise _of_conversation(as_api_error(e), number) from None
    answer = await with_cancellation(request.receive, _answer_all(chats), deadline)
    return Response(answer, media_type="application/json")


async def _answer_all(chats: list[PendingCompletion]) -> bytes:
    """One response of the answers to all chats, as JSON."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(_answer(chat, number)) for number, chat in enumerate(chats)]
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    whole, *others = [task.result() for task in running]
    usage = whole.usage
    for number, other in enumerate(others, 1):
        [choice] = other.choices
        choice.index = number
        whole.choices.append(choice)
        usage.prompt_tokens += other.usage.prompt_tokens
        usage.completion_tokens += other.usage.completion_tokens
        usage.total_tokens += other.usage.total_tokens
        usage.prompt_tokens_details.cached_tokens += other.usage.prompt_tokens_details.cached_tokens
    return whole.encode()


async def _answer(chat: PendingCompletion, number: int) -> ChatCompletion:
    try:
        return await chat.whole()
    except (ApiError, InvalidRequestError) as e:
        raise _of_conversation(as_api_error(e), number) from None


def _of_conversation(error: ApiError, number: int) -> ApiError:
    """The error, with the conversation that it is about."""
    message = f"conversation {number}: {error.message}"
    return ApiError(error.status, message, kind=error.kind, param=error.param, code=error.code, headers=error.headers)
