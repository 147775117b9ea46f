"""Fields that say the form of the answer: several spellings, one meaning; errors name the field that was sent."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from octavo.core.errors import InvalidRequestError
from octavo.core.failures import GRAMMAR, NO_TOKEN_LEFT, SequenceFailure
from octavo.core.sampling_params import SamplingParams, StructuredOutputsParams, failure_of_fields
from octavo.server.answer_format import read_answer_format
from octavo.server.http.errors import ApiError, as_api_error
from octavo.server.openai.protocol import ChatCompletionRequest, CompletionRequest
from tests.server.running_server import Running

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {"structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f="]}


def body(**given: Any) -> CompletionRequest:
    return CompletionRequest(prompt="x", **given)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json": SCHEMA}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            {"json": SCHEMA},
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}},
            {"json": SCHEMA, "disable_additional_properties": True, "strict": True},
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": False}}},
            {"json": SCHEMA},
        ),
        ({"response_format": {"type": "structural_tag", **TAG}}, {"structural_tag": TAG}),
        ({"response_format": {"type": "text"}, "regex": "a"}, {"regex": "a"}),
        ({"structured_outputs": {"choice": ["a"]}}, {"choice": ["a"]}),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " "}, {"json": SCHEMA, "whitespace_pattern": " "}),
        ({"guided_json": "{}", "guided_regex": ""}, {"json": "{}"}),
        ({"guided_regex": "a"}, {"regex": "a"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        ({"json_schema": SCHEMA}, {"json": SCHEMA}),
        ({"ebnf": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"structural_tag": TAG}, {"structural_tag": TAG}),
    ],
    ids=str,
)
def test_a_form_is_the_same_in_every_spelling(given: dict[str, Any], meant: dict[str, Any]) -> None:
    form = read_answer_format(body(**given))
    assert form is not None and form.params == StructuredOutputsParams(**meant)


@pytest.mark.parametrize("given", [{}, {"response_format": {"type": "text"}}, {"regex": "", "grammar": ""}])
def test_free_text_has_no_form(given: dict[str, Any]) -> None:
    assert read_answer_format(body(**given)) is None


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex and guided_choice each"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex", "response_format and regex each"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "not regex and choice"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "did you mean regex"),
        ({"structured_outputs": {"regex": "a", "begin_after": [1]}}, "structured_outputs", "begin_after"),
        ({"guided_choice": []}, "guided_choice", "list of texts"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "only with guided_json"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format", "schema is not of type 'text'"),
    ],
    ids=str,
)
def test_a_wrong_form_is_refused_by_the_name_of_its_field(given: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises((ApiError, InvalidRequestError)) as caught:
        read_answer_format(body(**given))
    error = as_api_error(caught.value)
    assert error.status == 400 and error.param == param and words in error.message


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, "response_format"),
        ({"guided_json": {"type": "x"}}, "guided_json"),
        ({"structured_outputs": {"json": {"type": "x"}}}, "structured_outputs"),
    ],
)
def test_an_error_of_a_form_names_the_field(given: dict[str, Any], place: str) -> None:
    answer_format = read_answer_format(body(**given))
    assert answer_format is not None
    error = InvalidRequestError("no such type", path="structured_outputs.json").renamed(answer_format.names)
    assert error.field == place and as_api_error(error).param == place


def test_errors_of_workers_about_a_form_are_the_requests() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    costly = SequenceFailure("lexer error: too many expressions constructed\n<non-verbose/>", GRAMMAR)
    error = failure_of_fields(costly, params, 3)
    assert error is not None
    assert (error.path, error.problem) == ("structured_outputs.regex", costly.text.splitlines()[0])
    masked = failure_of_fields(SequenceFailure("nothing left", NO_TOKEN_LEFT), params, 3)
    assert masked is not None and masked.path == "structured_outputs.regex" and "3 tokens" in masked.problem
    for failure, given in ((SequenceFailure("the worker has failed"), params), (costly, SamplingParams())):
        assert failure_of_fields(failure, given, 3) is None


ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"guided_regex": "a("}, "guided_regex"),
        ({"regex": "a("}, "regex"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"regex": "a", "use_beam_search": True}, "regex"),
    ],
    ids=str,
)
def test_a_bad_form_is_refused_over_http(
    tiny_server: Running, route: str, stream: bool, given: dict[str, Any], param: str
) -> None:
    with tiny_server.http() as http:
        response = http.post(route, json={**ROUTES[route], "max_tokens": 2, "stream": stream, **given})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param, response.text
    assert response.json()["error"]["message"].startswith(param)


def test_every_route_for_text_has_the_fields() -> None:
    assert set(CompletionRequest.model_fields) & set(ChatCompletionRequest.model_fields) >= {
        "response_format",
        "structured_outputs",
        "guided_json",
    }


RELAXING = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "uniqueItems": True},
        "é/b": {"type": "string", "maxLength": 2, "format": "path"},
    },
    "required": ["a"],
}
PLACES = "/properties/a/uniqueItems, /properties/%C3%A9~1b/format"


def schema_fields(schema: dict[str, Any], strict: bool | None) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}}
    }


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_names_the_keywords_that_its_text_is_not_held_to(
    http: httpx.Client, route: str, stream: bool
) -> None:
    body = {**ROUTES[route], "max_tokens": 5, "stream": stream}
    for _ in range(2):  # compiled, and kept
        response = http.post(route, json={**body, **schema_fields(RELAXING, None)})
        assert response.status_code == 200 and response.headers["x-octavo-relaxed-schema"] == PLACES
    obeyed = {"type": "object", "properties": {"a": {"type": "null"}}}
    assert "x-octavo-relaxed-schema" not in http.post(route, json={**body, **schema_fields(obeyed, None)}).headers


@pytest.mark.parametrize("stream", [False, True])
def test_strict_refuses_keywords_that_an_answer_is_not_held_to(http: httpx.Client, stream: bool) -> None:
    route = "/v1/chat/completions"
    body = {**ROUTES[route], "max_tokens": 5, "stream": stream}
    response = http.post(route, json={**body, **schema_fields(RELAXING, True)})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "response_format" and error["type"] == "invalid_request_error"
    assert "schema at /properties/a/uniqueItems" in error["message"]


def test_the_header_of_relaxed_keywords_is_bounded(http: httpx.Client) -> None:
    names = [f"property{i}" for i in range(90)]
    schema = {"type": "object", "properties": {name: {"type": "string", "format": "x"} for name in names}}
    response = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "guided_json": schema})
    told = response.headers["x-octavo-relaxed-schema"]
    assert told.startswith("/properties/property0/format, ") and len(told) < 1100 and told.endswith(" more")
