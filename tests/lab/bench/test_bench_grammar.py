"""``octavo bench grammar``: its schemas, and what it prints."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from octavo.cli.main import main
from octavo.lab.bench import grammar_cost


@pytest.mark.parametrize("size", grammar_cost.SIZES)
def test_documents_are_of_their_schema(size: int) -> None:
    schema = grammar_cost.make_schema(size)
    Draft202012Validator.check_schema(schema)
    for seed in range(3):
        Draft202012Validator(schema).validate(grammar_cost.make_document(schema, random.Random(seed)))
    assert json.dumps(schema).count('"type": "boolean"') == (size + 2) // 7


def test_every_part_is_measured(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(grammar_cost, "SIZES", (1, 9))
    monkeypatch.setattr(grammar_cost, "ROWS", 3)
    monkeypatch.setattr(grammar_cost, "_DELAYS", 2)
    words = ["bench", "grammar", str(tiny_model), "--batches", "2", "--rounds", "1", "--output-len", "40"]
    assert main([*words, "--num-threads", "1", "--json", "-"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    vocabulary, *masks, throughput, delay = records
    assert vocabulary["vocab_size"] == 258 and [m["properties"] for m in masks] == [1, 9]
    assert all(0 < m["mask_us_p50"] <= m["mask_us_p99"] and 0.2 < m["forced_share"] < 1 for m in masks)
    assert throughput["batch"] == 2 and throughput["ratio"] > 0 and throughput["processor_ratio"] > 0
    assert delay["free_ms"] > 0 and {"bound_ms", "added_ms", "added_processor_ms"} <= delay.keys()
    assert main([*words, "--num-threads", "1"]) == 0
    assert "properties   bytes  compile ms" in capsys.readouterr().out
    assert main([*words[:-1], "uniform:1,2"]) == 2
