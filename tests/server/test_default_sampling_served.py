"""Default sampling parameters from a generation_config.json, for bodies that leave them out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.server.running_server import Running


def test_a_body_that_leaves_fields_out_has_the_models_defaults(serve: Callable[..., Running], tmp_path: Path) -> None:
    own = {"temperature": 0.0, "max_new_tokens": 5}
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    server = serve("--generation-config", str(tmp_path))
    with server.http() as http:

        def text(path: str, **fields: Any) -> tuple[str, int]:
            body = (
                {"prompt": "Hello"} if path == "completions" else {"messages": [{"role": "user", "content": "Hello"}]}
            )
            answer = http.post(f"/v1/{path}", json=body | {"ignore_eos": True} | fields).json()
            choice = answer["choices"][0]
            return choice["text"] if path == "completions" else choice["message"]["content"], answer["usage"][
                "completion_tokens"
            ]

        for path in ("completions", "chat/completions"):
            assert text(path) == text(path, temperature=0.0)
            assert text(path)[1] == 5
            assert text(path, max_tokens=3)[1] == 3
            warm = {"temperature": 1.0, "seed": 3, "max_tokens": 20}
            assert text(path, **warm) == text(path, **warm) != text(path, max_tokens=20)
