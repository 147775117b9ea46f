"""Types and builders that the tests of commands share."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from octavo.cli.chat import Conversation
from octavo.core.sampling_params import SamplingParams
from tests.cli.scripted_engine import ScriptedEngine

#: The fixture ``octavo``.
Run = Callable[..., int]
Capture = pytest.CaptureFixture[str]


def json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def converse(engine: ScriptedEngine, system: str | None = None, **params: Any) -> Conversation:
    """A conversation with answers without a limit of tokens."""
    params = {"max_tokens": None, **params}
    return Conversation(engine, SamplingParams(**params), system, model="m")  # type: ignore[arg-type]
