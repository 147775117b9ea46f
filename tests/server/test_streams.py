"""What a stream shows while it grows, and that served answers are those of the engine, bit for bit."""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from tests.busy_machine import PATIENCE
from tests.server.openai_judge import events
from tests.server.running_server import Running

PROMPTS = [
    f"{beginning} {topic}"
    for topic in ("the sea", "Paris", "a cat", "code")
    for beginning in ("A story about", "The truth about", "List facts on", "Écris sur")
]


def stream(server: Running, **fields: Any) -> list[dict[str, Any]]:
    with server.http() as http:
        answer = http.post("/v1/completions", json={"stream": True, **fields})
    assert answer.status_code == 200, answer.text
    return events(answer.text)


def texts(chunks: list[dict[str, Any]]) -> list[str]:
    return [choice["text"] for chunk in chunks for choice in chunk["choices"]]


def test_no_part_of_a_stop_text_is_ever_shown(demo_server: Running) -> None:
    fields: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 20, "temperature": 0}
    whole = "".join(texts(stream(demo_server, **fields)))
    for start, length in ((3, 2), (17, 9), (25, 14)):
        stop = whole[start : start + length]
        shown = whole[: whole.index(stop)]
        for extra in ({}, {"logprobs": 1}):
            chunks = stream(demo_server, **fields, **extra, stop=[stop, "never comes"])
            assert "".join(texts(chunks)) == shown
            assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
            assert chunks[-1]["choices"][0]["stop_reason"] == stop
            # Logprobs before the end are of tokens within the text that was sent.
            told = [
                t
                for chunk in chunks[:-2]
                for c in chunk["choices"]
                for t in (c["logprobs"] or {"tokens": []})["tokens"]
            ]
            assert whole.startswith("".join(told))
        kept = stream(demo_server, **fields, stop=stop, include_stop_str_in_output=True)
        assert "".join(texts(kept)) == shown + stop


def test_no_part_of_a_character_is_ever_shown(tiny_server: Running) -> None:
    # Only the bytes of these characters may be drawn; some draws are characters, most are not.
    with tiny_server.http() as http:
        ids = http.post("/tokenize", json={"prompt": "é€🥊"}).json()["tokens"]
    for seed in range(6):
        fields = {"prompt": "é", "max_tokens": 60, "seed": seed, "allowed_token_ids": ids, "stop": ["🥊🥊🥊"]}
        chunks = stream(tiny_server, **fields)
        with tiny_server.http() as http:
            whole = http.post("/v1/completions", json=fields).json()["choices"][0]["text"]
        assert "".join(texts(chunks)) == whole
        for part in texts(chunks):
            part.encode()  # no half of a surrogate pair
    # The four tokens of one character leave together.
    forced = stream(tiny_server, prompt=ids[5:8], max_tokens=1, allowed_token_ids=ids[8:9], echo=True)
    assert texts(forced)[0].endswith("\ufffd") and texts(forced)[-1] == ""


def ask(server: Running, prompt: str, **fields: Any) -> dict[str, Any]:
    return server.complete(prompt=prompt, **fields)


def ask_streamed(server: Running, prompt: str, **fields: Any) -> dict[str, Any]:
    joined: dict[str, Any] = {"text": "", "logprobs": {"token_logprobs": [], "top_logprobs": []}}
    for chunk in stream(server, prompt=prompt, **fields):
        for choice in chunk["choices"]:
            joined["text"] += choice["text"]
            for key, values in joined["logprobs"].items():
                values += (choice["logprobs"] or {}).get(key, [])
    return joined


def test_served_answers_are_the_offline_ones_bit_for_bit_alone_and_in_company(
    tiny_server: Running, tiny_model: Path
) -> None:
    compare_with_offline(tiny_server, tiny_model, PROMPTS, 0.9)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.9, 0.0])
def test_served_answers_of_the_demo_model_are_the_offline_ones_bit_for_bit_alone_and_in_company(
    demo_server: Running, demo_model: Path, temperature: float
) -> None:
    compare_with_offline(demo_server, demo_model, PROMPTS, temperature)


@pytest.mark.slow
def test_served_answers_are_the_offline_ones_bit_for_bit_among_64_clients(
    demo_server: Running, demo_model: Path
) -> None:
    compare_with_offline(demo_server, demo_model, [f"{i}. {p}" for i in range(4) for p in PROMPTS], 0.0)


def compare_with_offline(server: Running, model: Path, prompts: list[str], temperature: float) -> None:
    """One client alone, then one for each prompt at once, half of them streaming."""
    llm = LLM(model=str(model), num_gpu_blocks_override=600)
    params = [
        SamplingParams(temperature=temperature, max_tokens=12, logprobs=3, seed=i if temperature else None)
        for i in range(len(prompts))
    ]
    expected = llm.generate(prompts, params, use_tqdm=False)
    fields: list[dict[str, Any]] = [
        {"temperature": temperature, "max_tokens": 12, "logprobs": 3, **({"seed": i} if temperature else {})}
        for i in range(len(prompts))
    ]
    alone = ask(server, prompts[0], **fields[0])
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        asked = [
            pool.submit(ask_streamed if i % 2 else ask, server, prompt, **fields[i]) for i, prompt in enumerate(prompts)
        ]
        served = [future.result() for future in asked]
    for choice, output in zip([alone, *served], [expected[0], *expected], strict=True):
        own = output.outputs[0]
        assert choice["text"] == own.text
        assert own.logprobs is not None
        assert choice["logprobs"]["token_logprobs"] == [
            at[token].logprob for at, token in zip(own.logprobs, own.token_ids, strict=True)
        ]
        assert [sorted(top.values()) for top in choice["logprobs"]["top_logprobs"]] == [
            sorted(p.logprob for p in at.values()) for at in own.logprobs
        ]


def test_responses_to_generated_requests_conform_to_openapi(tiny_server: Running) -> None:
    page = tiny_server.http().get("/openapi.json").json()
    assert set(page["paths"]) == {
        "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{model}", "/tokenize", "/detokenize",
        "/v1/responses", "/v1/responses/{response_id}", "/v1/responses/{response_id}/input_items",
        "/v1/responses/{response_id}/cancel",
        "/v1/responses/input_tokens", "/v1/messages", "/v1/messages/count_tokens",
        "/v1/audio/transcriptions", "/v1/audio/translations",
        "/completion", "/completions", "/infill", "/apply-template", "/props", "/slots", "/tokenizer_info",
        "/", "/health", "/version", "/metrics", "/reset_prefix_cache",
        "/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/classify", "/pooling",
        "/embedding", "/embeddings", "/embed", "/v2/embed", "/v2/chat", "/v1/chat/completions/batch",
        *(f"/api/{name}" for name in ("chat", "copy", "create", "delete", "embed", "embeddings", "generate", "ps")),
        *(f"/api/{name}" for name in ("pull", "push", "show", "tags", "version", "blobs/{digest}")),
    }  # fmt: skip
    guide = Path(__file__).resolve().parents[2] / "docs" / "serving.md"
    for path, route in page["paths"].items():
        assert path.partition("/{")[0] in guide.read_text(encoding="utf-8")
        for method in route.values():
            assert method["description"] and "422" not in method["responses"]
    # It cannot make the forms of these: its filter refuses its own type for the bytes of a file.
    run_schemathesis(
        tiny_server, "--max-examples", "1", "--phases", "examples,fuzzing", "--exclude-path-regex", "/v1/audio/"
    )


@pytest.mark.slow  # by default these routes get such requests from a server that refuses them
@pytest.mark.parametrize(
    ("server", "paths"),
    [
        ("vector_server", "/v1/embeddings|/pooling|/embedding"),
        ("pair_server", "rerank|score"),
        ("class_server", "/classify|/v1/chat/completions"),
    ],
)
def test_responses_of_encoders_conform_to_openapi(server: str, paths: str, request: pytest.FixtureRequest) -> None:
    options = ("--max-examples", "12", "--phases", "examples,fuzzing", "--include-path-regex", paths)
    run_schemathesis(request.getfixturevalue(server), *options)


@pytest.mark.slow
def test_responses_to_many_more_generated_requests_conform_to_openapi(tiny_server: Running) -> None:
    run_schemathesis(tiny_server, "--max-examples", "60")


def run_schemathesis(server: Running, *options: str) -> None:
    """Runs schemathesis on the OpenAPI page: every response conforms to it, and none is a server error."""
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    program = Path(sys.executable).with_name("schemathesis")
    server.http().get("/openapi.json")  # is made when it is first asked for, and the program waits for 10 s
    result = subprocess.run(
        [str(program), "run", f"{server.url}/openapi.json", "--checks", checks, "--seed", "1", "--generation-database",
         "none", "--request-timeout", str(PATIENCE), "--suppress-health-check", "too_slow", *options],
        cwd=server.log.parent, capture_output=True, text=True, timeout=3 * PATIENCE,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    server.wait_until_idle()
