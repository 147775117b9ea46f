"""The option ``speculative_config``, from every source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.cli.flags import add_engine_flags, read_engine_config
from octavo.cli.parsing import Parser
from octavo.config.engine_config import EngineConfig, make_config
from octavo.config.options import SpeculativeConfig
from octavo.config.sources import resolve_config
from octavo.core.errors import ConfigError


def from_flag(text: str) -> EngineConfig:
    parser = Parser(prog="octavo")
    add_engine_flags(parser)
    return read_engine_config(parser.read(["--speculative-config", text]), "m")


def test_every_source_means_the_same(tmp_path: Path) -> None:
    given = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}
    wanted = SpeculativeConfig(
        method="ngram", num_speculative_tokens=5, prompt_lookup_min=2, prompt_lookup_max=3, adaptive=True
    )
    text = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}'
    file = tmp_path / "octavo.yaml"
    file.write_text("speculative-config:\n  method: ngram\n  num_speculative_tokens: 5\n  prompt_lookup_max: 3\n")
    for config in (
        make_config(model="m", speculative_config=given),
        make_config(model="m", speculative_config=text),
        resolve_config({"model": "m", "speculative_config": given}, environ={}),
        resolve_config({"model": "m"}, environ={"OCTAVO_SPECULATIVE_CONFIG": text}),
        resolve_config({"model": "m"}, config_file=file, environ={}),
        from_flag(text),
    ):
        assert config.speculative_config == wanted
        again = make_config(**config.model_dump(exclude_unset=True))
        assert again.speculative_config == wanted
    assert from_flag("none").speculative_config is None
    assert make_config(model="m", speculative_config=None).speculative_config is None


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"model": "ngram"}, (2, 4)),
        ({"model": "[ngram]"}, (2, 4)),
        ({"method": "ngram", "prompt_lookup_min": 6}, (6, 6)),
        ({"method": "ngram", "prompt_lookup_max": 1}, (1, 1)),
        ({"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 5, "model": None}, (3, 5)),
    ],
)
def test_bounds_that_are_left_out(given: dict[str, Any], wanted: tuple[int, int]) -> None:
    config = make_config(model="m", speculative_config=given).speculative_config
    assert config is not None and (config.prompt_lookup_min, config.prompt_lookup_max) == wanted


def test_a_model_alone_means_draft_model() -> None:
    given = {"model": "smollm2-135m", "quantization": "int4", "num_speculative_tokens": 3}
    config = make_config(model="m", speculative_config=given)
    found = config.speculative_config
    assert found is not None and found.drafts_on_workers
    assert (found.method, found.model, found.quantization) == ("draft_model", "smollm2-135m", "int4")
    assert make_config(**config.model_dump()).speculative_config == found
    with pytest.raises(ConfigError, match=r"'draft_model' is not supported with pipeline_parallel_size \(2\) above 1"):
        make_config(model="m", speculative_config=given, pipeline_parallel_size=2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "method is missing: name one of ngram, suffix"),
        ({"num_speculative_tokens": 3}, "method is missing"),
        ({"method": "medusa"}, "method 'medusa' is not supported; the methods are ngram, suffix, draft_model"),
        ({"model": "medusa"}, "method 'medusa' is not supported"),
        ({"method": "layer_skip"}, "'layer_skip' is not supported: the first layers .* seldom say what the whole"),
        ({"method": "draft_model"}, "method 'draft_model' needs a model"),
        ({"method": "draft_model", "model": ""}, "method 'draft_model' needs a model"),
        ({"method": "draft_model", "model": "x", "quantization": "int3"}, "quantization: .*'int4'.*, not 'int3'"),
        ({"method": "draft_model", "model": 3}, "model: .*string, not 3"),
        ({"method": "ngram", "model": "x"}, "model 'x': method 'ngram' takes no model"),
        ({"method": "suffix", "quantization": "int4"}, "quantization 'int4': method 'suffix' takes no model"),
        (
            {"method": "ngram", "num_speculative_tokens": 0},
            "num_speculative_tokens: .*greater than or equal to 1, not 0",
        ),
        ({"method": "ngram", "num_speculative_tokens": 65}, "less than or equal to 64, not 65"),
        ({"method": "ngram", "num_speculative_tokens": "3"}, "num_speculative_tokens: .*integer, not '3'"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens: .*integer, not True"),
        (
            {"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3},
            r"prompt_lookup_min \(4\) must be at most",
        ),
        ({"method": "ngram", "num_speculative_token": 3}, "did you mean 'num_speculative_tokens'"),
        ({"method": "ngram", "zzz": 3}, "unknown field 'zzz'; known: method"),
        ({"method": ["ngram"]}, "method"),
        ("ngram", "it must be a mapping such as"),
        ("{", "it must be a mapping such as"),
        (3, "it must be a mapping such as"),
        ({"method": "suffix", "suffix_decoding_max_cached_tokens": 1 << 40}, "suffix_decoding_max_cached_tokens"),
    ],
)
def test_what_is_wrong_is_said_with_what_would_be_right(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"speculative_config: .*{message}"):
        make_config(model="m", speculative_config=given)
    with pytest.raises(ConfigError, match=f"speculative_config: .*{message}"):
        resolve_config({"model": "m", "speculative_config": given}, environ={})
