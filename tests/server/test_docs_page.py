"""The page ``/docs``."""

from __future__ import annotations

import re

from tests.server.running_server import Running


def test_the_docs_name_every_route_and_field_and_load_nothing(tiny_server: Running) -> None:
    with tiny_server.http() as http:
        answer = http.get("/docs")
        description = http.get("/openapi.json").json()
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    page = answer.text
    assert not re.search(r"<(script|link|img|iframe)|\bsrc=|url\(|@import|https?://", page)
    for path, methods in description["paths"].items():
        for method in methods:
            assert f"<h2>{method.upper()} {path}</h2>" in page
    for name in description["components"]["schemas"]["ChatCompletionRequest"]["properties"]:
        assert f"<td>{name}<td>" in page
    assert (
        "<td>prompt<td>string or list of string or list of integer or list of list of integer or EncoderDecoderParts "
        "or list of EncoderDecoderParts<td>Required." in page
    )
