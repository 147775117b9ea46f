"""Responses that are made in the background: polled, cancelled, forgotten, and streams of theirs that are resumed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import psutil
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from octavo.server.openai.responses import BackgroundResponse
from octavo.server.state import ResponseStore, StoredResponse
from tests.busy_machine import eventually
from tests.server.answers import answer_of, error_of
from tests.server.running_server import TINY, Running, running
from tests.server.test_growing_responses import USAGE
from tests.server.test_growing_responses import begun as growing_response

Serve = Callable[..., Running]
ROUTE = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ONE_AT_A_TIME = ("--max-num-seqs", "1")
#: A second or so of the tiny model's work.
LONG: dict[str, Any] = {"input": "hi", "max_output_tokens": 150, "temperature": 0, "ignore_eos": True}
SHORT: dict[str, Any] = {"input": "hi", "max_output_tokens": 8, "temperature": 0}
BACKGROUND: dict[str, Any] = {"background": True}
STREAM: dict[str, Any] = {"background": True, "stream": True}


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    log = tmp_path_factory.mktemp("background") / "log"
    with running(tiny_model, log, *TINY, "--served-model-name", "tiny", *ONE_AT_A_TIME) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http() as http:
        yield http


def create(http: httpx.Client, **body: Any) -> dict[str, Any]:
    return checked(answer_of(http, ROUTE, **body))


def get(http: httpx.Client, made: dict[str, Any]) -> dict[str, Any]:
    return checked(http.get(f"{ROUTE}/{made['id']}").json())


def cancel(http: httpx.Client, made: dict[str, Any]) -> dict[str, Any]:
    return checked(http.post(f"{ROUTE}/{made['id']}/cancel").json())


def checked(raw: dict[str, Any]) -> dict[str, Any]:
    """A response, if it is one by the types of the openai package."""
    Response.model_validate(raw, strict=True)
    return raw


def wait_for_end(http: httpx.Client, made: dict[str, Any]) -> dict[str, Any]:
    eventually(lambda: get(http, made)["status"] not in ("queued", "in_progress"))
    return get(http, made)


def refused(http: httpx.Client, status: int = 400, **body: Any) -> dict[str, Any]:
    return error_of(http, ROUTE, status=status, **{**SHORT, **body})


def events_of(data: bytes) -> list[dict[str, Any]]:
    """The events of a stream, each checked by the types of the openai package."""
    blocks = data.decode().removesuffix("\n\n").split("\n\n") if data else []
    events = [json.loads(block.partition("data: ")[2]) for block in blocks]
    for event in events:
        EVENT.validate_python(event, strict=True)
    return events


def resumed(http: httpx.Client, response_id: str, after: int | None = None) -> bytes:
    """What is sent of a stream after an event, to its end."""
    params = {"stream": "true", **({} if after is None else {"starting_after": str(after)})}
    answer = http.get(f"{ROUTE}/{response_id}", params=params)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"), answer.text
    return answer.content


@contextlib.contextmanager
def standstill(server: Running) -> Iterator[None]:
    """The engine does nothing for the time of a block."""
    core = psutil.Process(server.core_pid())
    core.suspend()
    try:
        yield
    finally:
        core.resume()


@contextlib.contextmanager
def begun(server: Running, http: httpx.Client) -> Iterator[tuple[dict[str, Any], Iterator[bytes]]]:
    """A long stream of the background, and what comes of it, while the engine stands still after some tokens."""
    core = psutil.Process(server.core_pid())
    before = server.metric("octavo_generation_tokens_total")
    with standstill(server), http.stream("POST", ROUTE, json={**LONG, **STREAM}) as answer:
        data = answer.iter_bytes()
        first = next(data)
        made = events_of(first)[0]["response"]
        while server.metric("octavo_generation_tokens_total") - before < 8:
            core.resume()
            time.sleep(0.0005)
            core.suspend()
        assert get(http, made)["status"] == "in_progress"
        yield made, itertools.chain([first], data)


@contextlib.contextmanager
def blocked(server: Running) -> Iterator[None]:
    """The engine has other work for the time of a block."""
    body = {"prompt": ["x"] * 200, "max_tokens": 240, "ignore_eos": True, "stream": True}
    with server.http() as http, http.stream("POST", "/v1/completions", json=body) as answer:
        texts = answer.iter_text()
        next(texts)
        yield


def plain(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what is its own."""
    own = ("id", "created_at", "completed_at", "usage", "background")
    output = [{**item, "id": ""} for item in response["output"]]
    return {**{name: value for name, value in response.items() if name not in own}, "output": output}


# Polled -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [{}, {"logit_bias": {"1": 100}}, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}],
    ids=["incomplete", "completed", "logprobs"],
)
def test_it_is_answered_at_once_and_becomes_what_it_would_have_been(http: httpx.Client, fields: dict[str, Any]) -> None:
    whole = create(http, **SHORT, **fields)
    made = create(http, **SHORT, **fields, **BACKGROUND)
    assert made["status"] == "queued" and made["output"] == [] and made["background"] is True
    ended = wait_for_end(http, made)
    assert plain(ended) == plain(whole) and whole["background"] is False
    assert ended["usage"]["output_tokens"] == whole["usage"]["output_tokens"] and ended["id"] == made["id"]


def test_the_openai_package_polls_it(server: Running) -> None:
    with server.client() as client:
        made = client.responses.create(model="tiny", input="hi", max_output_tokens=6, background=True)
        assert made.status == "queued" and made.background

        def poll() -> Response:
            return client.responses.retrieve(made.id)

        eventually(lambda: poll().status == "incomplete")
        assert poll().output_text and client.responses.cancel(made.id) == poll()
        [item] = client.responses.input_items.list(made.id)
        assert item.type == "message"
        more = client.responses.create(model="tiny", input="more", previous_response_id=made.id, max_output_tokens=6)
        assert [item.id for item in client.responses.input_items.list(more.id, order="asc")][:2] == [
            item.id,
            poll().output[0].id,
        ]


def test_it_does_not_depend_on_a_connection(server: Running, http: httpx.Client) -> None:
    with standstill(server), server.http() as gone:
        polled = create(gone, **LONG, **BACKGROUND)
        with gone.stream("POST", ROUTE, json={**LONG, **STREAM}) as answer:
            [event, *_] = events_of(next(answer.iter_bytes()))
        gone.close()
    for made in (polled, event["response"]):
        assert wait_for_end(http, made)["usage"]["output_tokens"] == 150


def test_it_waits_for_its_turn_and_cannot_be_continued_before_its_end(server: Running, http: httpx.Client) -> None:
    with blocked(server):
        made = create(http, **SHORT, **BACKGROUND)
        assert get(http, made)["status"] == "queued"
        error = refused(http, previous_response_id=made["id"])
        assert error["param"] == "previous_response_id" and "in progress" in error["message"]
    assert wait_for_end(http, made)["status"] == "incomplete"
    create(http, **SHORT, previous_response_id=made["id"])


def test_what_is_not_to_be_stored_cannot_be_made_in_the_background(http: httpx.Client) -> None:
    for stream in (False, True):
        error = refused(http, store=False, background=True, stream=stream)
        assert error["param"] == "background" and "store=false" in error["message"]


def test_what_is_wrong_is_said_at_once(http: httpx.Client) -> None:
    for stream in (False, True):
        fields = {"background": True, "stream": stream}
        assert refused(http, **fields, input="x" * 300)["code"] == "context_length_exceeded"
        assert refused(http, **fields, temperature=-1)["param"] == "temperature"
        assert refused(http, 404, **fields, model="other")["code"] == "model_not_found"
    assert refused(http, background=True, stream_options={"include_obfuscation": True})["param"] == "stream_options"


# Ends ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_one_that_waits_is_cancelled(server: Running, http: httpx.Client, stream: bool) -> None:
    with blocked(server):
        with http.stream("POST", ROUTE, json={**SHORT, "background": True, "stream": stream}) as answer:
            chunk = next(answer.iter_bytes())
        made = events_of(chunk)[0]["response"] if stream else json.loads(chunk)
        ended = cancel(http, made)
        assert ended["status"] == "cancelled" and ended["output"] == [] and ended["completed_at"] is None
        assert cancel(http, made) == ended == get(http, made)
        eventually(lambda: server.metric("octavo_http_open_requests") == 2)
    server.wait_until_idle()


def test_one_that_runs_is_cancelled_with_what_it_has(server: Running, http: httpx.Client) -> None:
    before = server.metric("octavo_generation_tokens_total")
    with server.http() as other, begun(server, other) as (made, data):
        ended = cancel(http, made)
        received = b"".join(data)
    assert ended["status"] == "cancelled" and cancel(http, made) == ended == get(http, made)
    events = events_of(received)
    said = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    [item] = ended["output"]
    assert item["status"] == "incomplete" and item["content"][0]["text"] == said != ""
    assert events[-1]["type"] == "response.incomplete" and events[-1]["response"] == ended
    assert resumed(http, made["id"]) == received
    server.wait_until_idle()
    assert server.metric("octavo_generation_tokens_total") - before < 150


def test_only_one_of_the_background_is_cancelled(http: httpx.Client) -> None:
    made = create(http, **SHORT)
    answer = http.post(f"{ROUTE}/{made['id']}/cancel")
    assert answer.status_code == 400 and "background=true" in answer.json()["error"]["message"]
    assert http.post(f"{ROUTE}/resp_0/cancel").status_code == 404


def test_one_that_is_deleted_ends(server: Running, http: httpx.Client) -> None:
    with blocked(server):
        made = create(http, **SHORT, **BACKGROUND)
        assert http.delete(f"{ROUTE}/{made['id']}").json()["deleted"] is True
        server.wait_for_log(f"background response {made['id']}: cancelled")
        for answer in (http.get(f"{ROUTE}/{made['id']}"), http.post(f"{ROUTE}/{made['id']}/cancel")):
            assert answer.status_code == 404
    server.wait_until_idle()


def test_one_that_is_forgotten_ends(serve: Serve) -> None:
    server = serve(*ONE_AT_A_TIME, "--max-stored-responses", "2")
    with blocked(server), server.http() as http:
        first, second, third = (create(http, **SHORT, **BACKGROUND) for _ in range(3))
        server.wait_for_log(f"background response {first['id']}: cancelled")
        assert http.get(f"{ROUTE}/{first['id']}").status_code == 404
        assert [get(http, made)["status"] for made in (second, third)] == ["queued", "queued"]


def test_the_bytes_of_those_that_are_made_are_bounded(serve: Serve) -> None:
    server = serve("--max-stored-response-bytes", "6000")
    with server.http() as http:
        error = refused(http, background=True, metadata={str(i): "x" * 500 for i in range(16)})
        assert error["param"] == "background" and "max_stored_response_bytes" in error["message"]
        # Its events outgrow the store.
        with http.stream("POST", ROUTE, json={**LONG, **STREAM}) as answer:
            events = events_of(answer.read())
        assert events[-1]["response"]["status"] == "cancelled" and events[-1]["response"]["output"]
        assert http.get(f"{ROUTE}/{events[0]['response']['id']}").status_code == 404
        made = create(http, **SHORT, **BACKGROUND)
        assert wait_for_end(http, made)["status"] == "incomplete"
    server.wait_until_idle()


@pytest.mark.parametrize("broken", [False, True])
def test_what_comes_after_the_end_changes_nothing(broken: bool) -> None:
    """A response that has ended is ended for good, also while its request is still taken leave of."""
    growing, store = growing_response(), ResponseStore(2, 10_000)

    class LastOutput:
        async def outputs(self) -> AsyncGenerator[list[None], None]:
            yield [None]
            await asyncio.sleep(0 if broken else 60)
            raise RuntimeError

    class Pending:
        chat, names = LastOutput(), dict[str, str]()

        def __init__(self) -> None:
            self.growing = growing

        def grow(self, choice: None) -> list[Any]:
            return [*growing.begin(), *growing.end(USAGE, is_whole=True)]

        def encode(self) -> bytes:
            return growing.response.model_dump_json().encode()

        def stored(self, run: BackgroundResponse) -> StoredResponse:
            return StoredResponse(self.encode(), [], 0, "", run=run, run_size=run.num_bytes)

    async def run() -> tuple[bytes, bytes]:
        made = BackgroundResponse(cast(Any, Pending()), store, math.inf, keeps_events=True)
        await made.start()
        await asyncio.sleep(0.01)
        assert made.has_ended
        first = store.get(made.id, "").body
        await made.stop()
        return first, store.get(made.id, "").body

    first, last = asyncio.run(run())
    assert first == last and json.loads(first)["status"] == "completed"


def test_one_that_takes_too_long_fails(serve: Serve) -> None:
    server = serve(*ONE_AT_A_TIME, "--request-timeout", "0.3")
    with server.http() as http, standstill(server):
        made = create(http, **SHORT, **BACKGROUND)
        ended = wait_for_end(http, made)
        assert ended["status"] == "failed" and ended["error"]["code"] == "server_error"
        assert "request_timeout" in ended["error"]["message"] and cancel(http, made) == ended
        with http.stream("POST", ROUTE, json={**SHORT, **STREAM}) as answer:
            last = events_of(answer.read())[-1]
        assert last["type"] == "response.failed" and "request_timeout" in last["response"]["error"]["message"]


def test_one_that_the_queue_has_no_room_for_is_refused(serve: Serve) -> None:
    server = serve(*ONE_AT_A_TIME, "--max-queued-requests", "1", "--max-num-batched-tokens", "64")
    with server.http() as http, standstill(server):
        first = create(http, **SHORT, **BACKGROUND)
        for stream in (False, True):
            assert refused(http, 429, background=True, stream=stream)["code"] == "queue_full"
        assert get(http, first)["status"] == "queued"


def test_one_that_is_open_after_the_shutdown_timeout_fails(serve: Serve) -> None:
    server = serve(*ONE_AT_A_TIME, "--shutdown-timeout", "0.5")
    with blocked(server), server.http() as http:
        create(http, **LONG, **BACKGROUND)
        with http.stream("POST", ROUTE, json={**LONG, **STREAM}) as answer:
            data = answer.iter_bytes()
            received = next(data)
            assert server.stop() == 0
            received += b"".join(data)
    last = events_of(received)[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    log = server.log.read_text()
    assert "Traceback" not in log and "was destroyed" not in log, log


def test_one_ends_within_the_shutdown_timeout(serve: Serve) -> None:
    server = serve()
    with server.http() as http:
        made = create(http, **LONG, **BACKGROUND)
        assert server.stop() == 0
    assert f"background response {made['id']}: incomplete" in server.log.read_text()


def test_others_have_nothing_of_it(serve: Serve) -> None:
    server = serve(env={"OCTAVO_API_KEYS": "mine,yours"})
    with server.http(headers={"x-api-key": "mine"}) as mine, server.http(headers={"x-api-key": "yours"}) as yours:
        with mine.stream("POST", ROUTE, json={**SHORT, **STREAM}) as answer:
            made = events_of(answer.read())[-1]["response"]
        address = f"{ROUTE}/{made['id']}"
        for other in (
            yours.post(f"{address}/cancel"),
            yours.get(address, params={"stream": "true"}),
            yours.get(f"{address}/input_items"),
        ):
            assert other.status_code == 404
        assert mine.get(f"{address}/input_items").status_code == 200 and cancel(mine, made) == made


# Streams ------------------------------------------------------------------------------------------------------------


def test_a_stream_of_the_background_is_the_stream_that_waits_before_it_begins(http: httpx.Client) -> None:
    with http.stream("POST", ROUTE, json={**SHORT, "stream": True}) as answer:
        usual = events_of(answer.read())
    with http.stream("POST", ROUTE, json={**SHORT, **STREAM}) as answer:
        events = events_of(answer.read())
    kinds = [event["type"] for event in usual]
    assert [event["type"] for event in events] == [kinds[0], "response.queued", *kinds[1:]]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    statuses = [event["response"]["status"] for event in events if "response" in event]
    assert statuses == ["queued", "queued", "in_progress", "incomplete"]
    assert plain(events[-1]["response"]) == plain(usual[-1]["response"])
    assert get(http, events[0]["response"]) == events[-1]["response"]


def test_a_stream_is_resumed_after_any_of_its_events(http: httpx.Client) -> None:
    with http.stream("POST", ROUTE, json={**SHORT, **STREAM}) as answer:
        first = answer.read()
    blocks = [block + b"\n\n" for block in first.split(b"\n\n") if block]
    response_id = events_of(first)[0]["response"]["id"]
    assert len(blocks) > 8 and resumed(http, response_id) == first
    for number in range(len(blocks)):
        assert resumed(http, response_id, number) == b"".join(blocks[number + 1 :])
    assert resumed(http, response_id, len(blocks) + 7) == b""


def test_a_stream_is_resumed_while_it_runs(server: Running, http: httpx.Client) -> None:
    gone = server.http()
    with begun(server, gone) as (made, data):
        # What has been received ends within an event, perhaps.
        blocks = next(data).split(b"\n\n")[:-1]
        gone.close()
        params = {"stream": "true", "starting_after": str(len(blocks) - 1)}
        request = http.build_request("GET", f"{ROUTE}/{made['id']}", params=params)
        follower = http.send(request, stream=True)
        assert follower.status_code == 200 and get(http, made)["status"] == "in_progress"
    rest = follower.read()
    everything = b"".join(block + b"\n\n" for block in blocks) + rest
    numbers = [event["sequence_number"] for event in events_of(everything)]
    assert numbers == list(range(len(numbers))) and len(numbers) > len(blocks) > 0
    assert resumed(http, made["id"]) == everything
    assert events_of(everything)[-1]["response"]["usage"]["output_tokens"] == 150


def test_the_openai_package_resumes_a_stream(server: Running) -> None:
    with server.client() as client:
        stream = client.responses.create(
            model="tiny", input="hi", max_output_tokens=8, temperature=0, background=True, stream=True
        )
        first = list(stream)
        assert first[0].type == "response.created" and first[-1].type == "response.incomplete"
        response_id = first[0].response.id
        assert list(client.responses.retrieve(response_id, stream=True)) == first
        assert list(client.responses.retrieve(response_id, stream=True, starting_after=4)) == first[5:]
        whole = client.responses.retrieve(response_id)
        with client.responses.stream(response_id=response_id, starting_after=4) as later:
            assert [event.sequence_number for event in later] == [event.sequence_number for event in first[5:]]
        assert whole == first[-1].response
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve("resp_0", stream=True)


def test_only_a_stream_is_resumed(http: httpx.Client) -> None:
    for fields in ({}, {"stream": True}, BACKGROUND):
        answer = http.post(ROUTE, json={**SHORT, **fields})
        made = events_of(answer.content)[0]["response"] if "stream" in fields else answer.json()
        address = f"{ROUTE}/{made['id']}"
        for params, param in (
            ({"stream": "true"}, "stream"),
            ({"starting_after": "1"}, "starting_after"),
            ({"stream": "true", "starting_after": "-1"}, "starting_after"),
        ):
            error = http.get(address, params=params)
            assert error.status_code == 400 and error.json()["error"]["param"] == param
