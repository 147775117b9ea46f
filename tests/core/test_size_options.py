"""Options that are sizes: bytes with a unit, and lists of batch sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.config.engine_config import make_config
from octavo.config.sources import resolve_config
from octavo.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"), [("4GiB", 4 << 30), ("900MB", 900_000_000), ("1.5 GiB", 3 << 29), ("1048576", 1 << 20)]
)
def test_bytes_have_a_unit_or_not_in_every_source(text: str, size: int, tmp_path: Path) -> None:
    file = tmp_path / "octavo.yaml"
    file.write_text(f"model: m\nkv_cache_memory_bytes: {text}\n")
    assert resolve_config({}, config_file=file, environ={}).kv_cache_memory_bytes == size
    environ = {"OCTAVO_KV_CACHE_MEMORY_BYTES": text, "OCTAVO_MODEL": "m"}
    assert resolve_config({}, environ=environ).kv_cache_memory_bytes == size
    assert make_config(model="m", kv_cache_memory_bytes=text).kv_cache_memory_bytes == size


def test_capture_sizes_are_a_list_in_every_source(tmp_path: Path) -> None:
    file = tmp_path / "octavo.yaml"
    file.write_text("model: m\ngraph_capture: [1, 2, 16]\n")
    assert resolve_config({}, config_file=file, environ={}).graph_sizes == [1, 2, 16]
    environ = {"OCTAVO_GRAPH_CAPTURE": "1,2, 16", "OCTAVO_MODEL": "m"}
    assert resolve_config({}, environ=environ).graph_sizes == [1, 2, 16]
    assert make_config(model="m", graph_capture=[4]).graph_sizes == [4]
    assert make_config(model="m").graph_sizes is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"graph_capture": []}, "at least 1 item"),
        ({"graph_capture": [0]}, "greater than or equal to 1"),
        ({"graph_capture": "1,two"}, "invalid literal"),
        ({"graph_capture": [8, 512]}, r"has 512, but no batch has more than max_num_seqs \(256\)"),
        ({"graph_capture": [8], "enforce_eager": True}, "enforce_eager turns CUDA graphs off"),
    ],
)
def test_capture_sizes_that_cannot_be_used_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_config(model="m", **options)
