"""What docs/serving.md shows with curl works as it stands there."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.busy_machine import PATIENCE
from tests.server.running_server import Running, running

PAGE = Path(__file__).resolve().parents[2] / "docs" / "serving.md"


def examples() -> list[list[str]]:
    """The curl commands of the blocks that begin with one, as words."""
    blocks = re.findall(r"```bash\n(curl .*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [shlex.split(command) for block in blocks for command in re.split(r"\n(?=curl )", block.strip())]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    log = tmp_path_factory.mktemp("readme") / "log"
    with running("smollm2-135m", log, "--num-gpu-blocks-override", "200", "--num-threads", "1") as server:
        yield server


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("words", examples(), ids=lambda words: next(w for w in words if w.startswith("http")))
def test_an_example_with_curl(server: Running, words: list[str]) -> None:
    ours = [word.replace("http://127.0.0.1:8000", server.url) for word in words]
    answer = subprocess.run([*ours, "--fail"], capture_output=True, text=True, timeout=PATIENCE, check=True).stdout
    if "/metrics" in ours[-1]:
        assert "octavo_requests" in answer
    elif '"stream": true' in ours[-1]:
        lines = [line for line in answer.splitlines() if line]
        assert lines[-1] == "data: [DONE]"
        deltas = [choice["delta"] for line in lines[:-1] for choice in json.loads(line[6:])["choices"]]
        assert "cat" in "".join(delta.get("content") or "" for delta in deltas)
    elif "chat" in " ".join(ours):
        assert "Paris" in json.loads(answer)["choices"][0]["message"]["content"]
    else:
        assert json.loads(answer)["data"][0]["id"] == "smollm2-135m"


def test_the_page_has_examples() -> None:
    assert len(examples()) == 4
