"""Chats of routes whose fields have other names: errors about them are told under these names."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager

from octavo.core.errors import InvalidRequestError, TokenizerError
from octavo.server.api_errors import ApiError, as_api_error
from octavo.server.chat_request import Chat, ChoiceEvents


@contextmanager
def renamed_errors(names: Mapping[str, str]) -> Iterator[None]:
    """Tells errors about a chat under a route's names of the fields.

    Args:
        names: fields of a chat to those of the route.

    Raises:
        ApiError: in place of the errors that requests are to blame for.
    """
    try:
        yield
    except (ApiError, InvalidRequestError, TokenizerError) as e:
        raise _renamed(as_api_error(e), names) from None


async def renamed_outputs(chat: Chat, names: Mapping[str, str]) -> AsyncGenerator[ChoiceEvents, None]:
    """The increments of a chat with one choice.

    Raises:
        ApiError: as ``Chat.outputs``, under the route's names.
    """
    with renamed_errors(names):
        async with aclosing(chat.outputs()) as outputs:
            async for [choice] in outputs:
                yield choice


def _renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """In ``param``, and in the message where the name cannot be another word."""
    message = re.sub(r"[a-z]+(_[a-z]+)+", lambda match: names.get(match[0], match[0]), error.message)
    param = None if error.param is None else names.get(error.param, error.param)
    return ApiError(error.status, message, kind=error.kind, param=param, code=error.code, headers=error.headers)
