"""``vllm_xargs``: arguments of logits processors that a server was started with."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.server.running_server import Running

PLUGIN = """
from octavo import LogitsProcessorPlugin


class OneToken(LogitsProcessorPlugin):
    arguments = ("token",)

    def make(self, params):
        token = params.extra_args["token"]
        if not isinstance(token, int):
            raise ValueError(f"token must be a number, not {token!r}")

        def only(output_ids, logits):
            logits[:token] = logits[token + 1:] = float("-inf")
            return logits

        return only
"""


def test_requests_ask_for_a_processor_by_its_arguments(serve: Callable[..., Running], tmp_path: Path) -> None:
    (tmp_path / "one_token.py").write_text(PLUGIN)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    server = serve("--logits-processors", "one_token:OneToken", env={"PYTHONPATH": path})
    body = {"prompt": "abc", "max_tokens": 4, "ignore_eos": True}

    def answer(**fields: object) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/completions", json={**body, **fields}, timeout=60)

    assert (
        answer(vllm_xargs={"token": 65}).json()["choices"][0]["text"]
        == answer(allowed_token_ids=[65]).json()["choices"][0]["text"]
    )
    refused = answer(vllm_xargs={"token": "a"})
    assert (refused.status_code, "token must be a number, not 'a'" in refused.text) == (400, True)
    refused = answer(vllm_xargs={"tokens": 1})
    assert (
        refused.status_code,
        "no logits processor takes it; taken: 'token'" in refused.json()["error"]["message"],
    ) == (
        400,
        True,
    )
