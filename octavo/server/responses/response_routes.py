"""The routes under ``/v1/responses`` that make responses, and give and end those that are kept."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.api_errors import invalid, unsupported, wrong
from octavo.server.middleware import owner_of
from octavo.server.responses import response_request as chats
from octavo.server.responses.background import BackgroundResponse
from octavo.server.responses.pending_answer import PendingAnswer
from octavo.server.responses.response_input import read_input
from octavo.server.responses.response_protocol import DeletedResponse, ResponsesRequest
from octavo.server.responses.store import StoredResponse
from octavo.server.service import Service, service_of
from octavo.server.streaming import EventStream

#: Seconds that a client may follow a response for beyond the time that it may take, to see how it ended.
_GRACE = 10.0


async def create_response(request: Request, body: ResponsesRequest) -> Response:
    """Answers an input, as one response or as a stream of events, or at once with a response that is made later."""
    service = service_of(request)
    deadline = service.deadline()
    _check_storing(service, body)
    given = await read_input(service, request, body)
    chat = await chats.start(service, request, body, given.messages, given.tools)
    pending = PendingAnswer(service, request, body, chat, given)
    if not body.background:
        return await pending.respond(request, body.stream, deadline)
    run = BackgroundResponse(pending, service.responses, deadline, keeps_events=body.stream is True)
    first = await run.start()
    return EventStream(run.follow(), deadline + _GRACE) if body.stream else _as_json(first)


async def retrieve_response(
    request: Request,
    response_id: str,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=0)] = None,
) -> Response:
    """A response that is kept, as it is now; of one that is streamed in the background also its events."""
    service = service_of(request)
    stored = service.responses.get(response_id, owner_of(request))
    if not stream:
        if starting_after is not None:
            raise wrong("starting_after", "it is allowed only with stream=true")
        return _shown(stored)
    if stored.run is None or not stored.run.keeps_events:
        message = "events are kept of responses that were made with background=true and stream=true; get this one whole"
        raise unsupported("stream", f"stream is not supported: {message}")
    deadline = service.deadline() + _GRACE
    return EventStream(stored.run.follow(-1 if starting_after is None else starting_after), deadline)


async def cancel_response(request: Request, response_id: str) -> Response:
    """Ends a response that is made in the background; one that has ended stays as it is."""
    responses = service_of(request).responses
    run = responses.get(response_id, owner_of(request)).run
    if run is None:
        message = "only a response that was made with background=true can be cancelled; others end with the connection"
        raise invalid("response_id", message, "not_in_background")
    await run.stop()
    return _shown(responses.get(response_id, owner_of(request)))


async def delete_response(request: Request, response_id: str) -> DeletedResponse:
    """Forgets a response."""
    service_of(request).responses.delete(response_id, owner_of(request))
    return DeletedResponse(id=response_id, object="response", deleted=True)


def _check_storing(service: Service, body: ResponsesRequest) -> None:
    """Refuses what needs a memory of responses that there is not."""
    if service.responses.max_responses:
        if body.background and body.store is False:
            raise wrong("background", "a response of the background has to be stored; leave out store=false")
        return
    for name in ("store", "background"):
        if getattr(body, name):
            raise unsupported(name, f"{name} is not supported: this server keeps no responses (max_stored_responses)")


def _shown(stored: StoredResponse) -> Response:
    """A response that is kept, as it is now."""
    return _as_json(stored.body if stored.run is None or stored.run.has_ended else stored.run.encode())


def _as_json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
