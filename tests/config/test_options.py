"""Options with values of their own kinds, from every source: mappings, sizes and lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.config.engine_config import EngineConfig, make_config
from octavo.config.options import SpeculativeConfig
from octavo.config.sources import resolve_config
from octavo.core.errors import ConfigError
from tests.config.option_sources import config_from_flags, write_file


def test_every_source_means_the_same(tmp_path: Path) -> None:
    given = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}
    wanted = SpeculativeConfig(
        method="ngram", num_speculative_tokens=5, prompt_lookup_min=2, prompt_lookup_max=3, adaptive=True
    )
    text = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}'
    file = write_file(
        tmp_path, "speculative-config:\n  method: ngram\n  num_speculative_tokens: 5\n  prompt_lookup_max: 3\n"
    )
    for config in (
        make_config(model="m", speculative_config=given),
        make_config(model="m", speculative_config=text),
        resolve_config({"model": "m", "speculative_config": given}, environ={}),
        resolve_config({"model": "m"}, environ={"OCTAVO_SPECULATIVE_CONFIG": text}),
        resolve_config({"model": "m"}, config_file=file, environ={}),
        config_from_flags("--speculative-config", text),
    ):
        assert config.speculative_config == wanted
        again = make_config(**config.model_dump(exclude_unset=True))
        assert again.speculative_config == wanted
    assert config_from_flags("--speculative-config", "none").speculative_config is None
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


# The option ``structured_outputs_config``, from every source.


CONFIG = {"backend": "xgrammar", "disable_any_whitespace": True, "disable_additional_properties": False}


@pytest.mark.parametrize("given", [CONFIG, str(CONFIG).replace("'", '"').replace("T", "t").replace("F", "f")])
def test_fields_are_read_from_a_mapping_and_from_text(given: Any) -> None:
    for config in (
        make_config(model="m", structured_outputs_config=given),
        resolve_config({"model": "m", "structured_outputs_config": given}, environ={}),
    ):
        assert config.structured_outputs_config.model_dump() == {**CONFIG, "disable_fallback": False}


@pytest.mark.parametrize("given", [None, {}, {"disable_any_whitespace": None}])
def test_objects_are_closed_by_default(given: Any) -> None:
    config = make_config(model="m", structured_outputs_config=given).structured_outputs_config
    assert config.disable_additional_properties and not config.disable_any_whitespace


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"disable_any_whitspace": True}, "unknown field .*did you mean 'disable_any_whitespace'"),
        ({"disable_any_whitespace": 1}, "disable_any_whitespace: .*not 1"),
        ("xgrammar", "it must be a mapping such as"),
    ],
)
def test_what_is_wrong_is_named(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(model="m", structured_outputs_config=given)


# Options that are sizes: bytes with a unit, and lists of batch sizes.


@pytest.mark.parametrize(
    ("text", "size"), [("4GiB", 4 << 30), ("900MB", 900_000_000), ("1.5 GiB", 3 << 29), ("1048576", 1 << 20)]
)
def test_bytes_have_a_unit_or_not_in_every_source(text: str, size: int, tmp_path: Path) -> None:
    file = write_file(tmp_path, f"model: m\nkv_cache_memory_bytes: {text}\n")
    assert resolve_config({}, config_file=file, environ={}).kv_cache_memory_bytes == size
    environ = {"OCTAVO_KV_CACHE_MEMORY_BYTES": text, "OCTAVO_MODEL": "m"}
    assert resolve_config({}, environ=environ).kv_cache_memory_bytes == size
    assert make_config(model="m", kv_cache_memory_bytes=text).kv_cache_memory_bytes == size


def test_capture_sizes_are_a_list_in_every_source(tmp_path: Path) -> None:
    file = write_file(tmp_path, "model: m\ngraph_capture: [1, 2, 16]\n")
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


def test_max_num_seqs_auto_is_the_default_number_with_adaption() -> None:
    options = EngineConfig.model_validate({"model": "m", "max_num_seqs": "auto"}, strict=True)
    assert (options.max_num_seqs, options.adapt_num_seqs) == (256, True)
    again = EngineConfig.model_validate(options.model_dump(exclude_unset=True) | {"max_num_batched_tokens": 64})
    assert (again.max_num_seqs, again.adapt_num_seqs) == (64, True)
    assert not EngineConfig.model_validate({"model": "m"}).adapt_num_seqs
