"""vLLM's interface where torch is not installed."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest

from octavo.compat.vllm.engines import Profiler
from octavo.compat.vllm.helpers import AdapterLogitsProcessor, BatchProcessors
from octavo.core.errors import ConfigError


@pytest.fixture(autouse=True)
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither found nor imported."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "torch" else find_spec(name, *a))
    monkeypatch.setitem(sys.modules, "torch", None)


def test_an_engine_without_processors_needs_none() -> None:
    config: Any = None
    params: Any = object()
    assert BatchProcessors([], config, "cpu").add_to(params) is params


def test_processors_and_traces_say_what_to_install() -> None:
    config: Any = None
    kind: Any = AdapterLogitsProcessor
    with pytest.raises(ConfigError, match=r"octavo\[torch\]"):
        BatchProcessors([kind], config, "cpu")
    with pytest.raises(ConfigError, match=r"octavo\[torch\]"):
        Profiler({"torch_profiler_dir": "traces"}).start()
