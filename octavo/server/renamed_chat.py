"""The chat of a route whose fields have other names: its errors are told under the route's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.requests import Request

from octavo.core.errors import InvalidRequestError, TokenizerError
from octavo.server.chat_request import Chat, start_chat
from octavo.server.errors import ApiError, as_api_error
from octavo.server.protocol import ChatCompletionRequest
from octavo.server.service import Service


async def start_renamed(
    service: Service, request: Request, body: Mapping[str, Any], prefix: str, names: Mapping[str, str]
) -> Chat:
    """Checks a chat and prepares its generation.

    Args:
        service: the service.
        request: the HTTP request.
        body: fields of a chat.
        prefix: of the response's id.
        names: fields of a chat to those of the route.

    Raises:
        ApiError: it cannot be served; the message and ``param`` name fields of the route.
    """
    try:
        chat = ChatCompletionRequest.model_validate(dict(body))
        return await start_chat(service, request, chat, prefix=prefix)
    except (ApiError, InvalidRequestError, TokenizerError) as e:
        raise renamed(as_api_error(e), names) from None
    except ValidationError as e:
        raise renamed(as_api_error(RequestValidationError(e.errors())), names) from None


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """The error with the route's names of fields: in ``param``, and in the message where it cannot be another word."""
    message = re.sub(r"[a-z]+(_[a-z]+)+", lambda found: names.get(found[0], found[0]), error.message)
    param = None if error.param is None else names.get(error.param, error.param)
    return ApiError(error.status, message, kind=error.kind, param=param, code=error.code, headers=error.headers)
