"""Servers that several tests share."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.server.running_server import TINY, Running, running


@pytest.fixture(scope="session")
def demo_server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of the demo model."""
    log = tmp_path_factory.mktemp("demo-server") / "log"
    flags = ("--num-gpu-blocks-override", "600", "--max-model-len", "2048", "--served-model-name", "demo")
    with running(demo_model, log, *flags) as server:
        yield server


#: Tokens of the model of ``special_server``, in place of bytes that no text of its tests has.
SPECIAL_TOKENS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|endoftext|>", "<think>", "</think>")
#: Begins its answers with reasoning, unless ``enable_thinking`` is false, and leaves that of earlier turns out.
THINKING_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if enable_thinking is not defined or enable_thinking %}<think>"
    "{% else %}<think></think>{% endif %}{% endif %}"
)


@pytest.fixture(scope="session")
def special_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of the tiny model that has tokens to fill gaps, and to mark reasoning."""
    folder = tmp_path_factory.mktemp("special") / "model"
    shutil.copytree(tiny_model, folder)
    parts = json.loads((folder / "tokenizer.json").read_text())
    vocab = parts["model"]["vocab"]
    for token, byte in zip(SPECIAL_TOKENS, "ĀāĂăĄą", strict=True):
        vocab[token] = vocab.pop(byte)
        entry = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        parts["added_tokens"].append({"id": vocab[token], "content": token, "special": True, **entry})
    parts["added_tokens"].sort(key=lambda token: token["id"])
    (folder / "tokenizer.json").write_text(json.dumps(parts))
    (folder / "chat_template.jinja").write_text(THINKING_TEMPLATE)
    with running(folder, folder.parent / "log", *TINY, "--served-model-name", "tiny") as server:
        yield server


@pytest.fixture
def serve(tiny_model: Path, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts servers of the tiny model with flags of a test's own: ``serve("--max-queued-requests", "1")``."""
    with contextlib.ExitStack() as stack:
        count = 0

        def make(*flags: str, env: dict[str, str] | None = None) -> Running:
            nonlocal count
            count += 1
            return stack.enter_context(running(tiny_model, tmp_path / f"log{count}", *TINY, *flags, env=env))

        yield make
