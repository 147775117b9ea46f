"""Options of engine requests from the fields of HTTP bodies."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from octavo.server.engine_call import request_options
from octavo.server.fields import QueuedFields


@pytest.mark.parametrize(
    ("user", "key", "expected"), [("bob", "digest", "bob"), (None, "digest", "digest"), (None, None, "")]
)
def test_the_user_is_that_of_the_body_or_else_of_the_api_key(user: str | None, key: str | None, expected: str) -> None:
    scope = {"type": "http", "client": ("127.0.0.1", 1), "state": {} if key is None else {"api_key": key}}
    body = QueuedFields(user=user)
    assert request_options(Request(scope), body).user == expected
