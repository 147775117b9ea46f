"""Sources of options: which one wins, and what is refused with its source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from octavo.config.engine_config import PARTS, EngineConfig, make_config
from octavo.config.options import SchedulerOptions
from octavo.config.sources import RESERVED_VARIABLES, parse_option, resolve_config
from octavo.core.errors import ConfigError, OctavoError
from tests.config.option_sources import config_from_flags, write_file


def refused(overrides: dict[str, Any], **sources: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_config(overrides, **{"environ": {}, **sources})
    assert isinstance(caught.value, OctavoError)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_model_alone_gives_the_defaults() -> None:
    assert resolve_config({"model": "m"}, environ={}) == EngineConfig(model="m")


def test_each_source_wins_over_the_one_before_it(tmp_path: Path) -> None:
    file = write_file(tmp_path, "model: file\nmax-num-seqs: 1\nblock_size: 2\nseed: 3\n")
    environ = {"OCTAVO_BLOCK_SIZE": "4", "OCTAVO_SEED": "5"}
    config = resolve_config({"seed": 6}, config_file=file, environ=environ)
    assert (config.model, config.max_num_seqs, config.block_size, config.seed) == ("file", 1, 4, 6)
    assert config.watermark == EngineConfig.model_fields["watermark"].default


def test_a_none_argument_resets_what_the_file_set(tmp_path: Path) -> None:
    file = write_file(tmp_path, "model: m\nmax_model_len: 64\n")
    assert resolve_config({}, config_file=file, environ={}).max_model_len == 64
    assert resolve_config({"max_model_len": None}, config_file=file, environ={}).max_model_len is None


def test_the_config_variable_names_a_file_and_an_explicit_file_replaces_it(tmp_path: Path) -> None:
    named = write_file(tmp_path, "model: by-variable\nseed: 1\n")
    environ = {"OCTAVO_CONFIG": str(named)}
    assert resolve_config({}, environ=environ).model == "by-variable"
    explicit = tmp_path / "other.yaml"
    explicit.write_text("model: explicit\n")
    config = resolve_config({}, config_file=explicit, environ=environ)
    assert (config.model, config.seed) == ("explicit", 0)


@pytest.mark.parametrize(
    ("variable", "text", "option", "value"),
    [
        ("OCTAVO_ENABLE_CHUNKED_PREFILL", "false", "enable_chunked_prefill", False),
        ("OCTAVO_ENABLE_CHUNKED_PREFILL", "1", "enable_chunked_prefill", True),
        ("OCTAVO_MAX_NUM_SEQS", "16", "max_num_seqs", 16),
        ("OCTAVO_WATERMARK", "0.25", "watermark", 0.25),
        ("OCTAVO_MAX_MODEL_LEN", "none", "max_model_len", None),
        ("OCTAVO_DTYPE", "bfloat16", "dtype", "bfloat16"),
        ("OCTAVO_MODEL", "/models/a b", "model", "/models/a b"),
    ],
)
def test_variables_are_parsed_to_the_type_of_the_option(variable: str, text: str, option: str, value: object) -> None:
    config = resolve_config({"model": "m"} if option != "model" else {}, environ={variable: text})
    assert getattr(config, option) == value
    assert type(getattr(config, option)) is type(value)


def test_an_empty_variable_counts_as_unset() -> None:
    assert resolve_config({"model": "m"}, environ={"OCTAVO_SEED": ""}).seed == 0


def test_reserved_and_foreign_variables_are_ignored(tmp_path: Path) -> None:
    environ = dict.fromkeys(RESERVED_VARIABLES, "x") | {"OCTAVO_CONFIG": "", "OCTAVOX": "1", "HOME": "/"}
    assert resolve_config({"model": "m"}, environ=environ) == EngineConfig(model="m")


def test_the_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_BLOCK_SIZE", "32")
    assert resolve_config({"model": "m"}).block_size == 32


def test_a_path_is_taken_as_the_model(tmp_path: Path) -> None:
    assert resolve_config({"model": tmp_path}, environ={}).model == str(tmp_path)


def test_without_a_model_the_message_says_where_to_name_one() -> None:
    message = refused({})
    assert "OCTAVO_MODEL" in message
    assert "model:" in message


@pytest.mark.parametrize("sources", [{"overrides": {"max_num_seq": 4}}, {"environ": {"OCTAVO_MAX_NUM_SEQ": "4"}}])
def test_an_unknown_option_is_refused_with_the_nearest_name(sources: dict[str, Any]) -> None:
    message = refused({"model": "m", **sources.get("overrides", {})}, environ=sources.get("environ", {}))
    assert "max_num_seqs" in message.lower().replace("octavo_", "")


def test_an_unknown_key_of_a_file_is_refused_naming_the_file_and_the_nearest_name(tmp_path: Path) -> None:
    file = write_file(tmp_path, "model: m\nblock-sise: 8\n")
    message = refused({}, config_file=file)
    assert str(file) in message
    assert "'block_size'" in message


def test_a_misspelt_reserved_variable_is_refused_too() -> None:
    assert "OCTAVO_LOG_LEVEL" in refused({"model": "m"}, environ={"OCTAVO_LOG_LEVL": "debug"})


@pytest.mark.parametrize(
    ("text", "right"), [("sixteen", "integer"), ("0", "greater than or equal to 1"), ("1.5", "integer")]
)
def test_a_bad_variable_is_refused_with_its_name_its_value_and_what_is_right(text: str, right: str) -> None:
    message = refused({"model": "m"}, environ={"OCTAVO_MAX_NUM_SEQS": text})
    assert "OCTAVO_MAX_NUM_SEQS" in message
    assert repr(text) in message
    assert right in message


@pytest.mark.parametrize("line", ["max_num_seqs: yes", "max_num_seqs: many", 'max_num_seqs: "8"', "max_num_seqs: 0"])
def test_a_bad_value_in_a_file_names_the_file(tmp_path: Path, line: str) -> None:
    file = write_file(tmp_path, f"model: m\n{line}\n")
    message = refused({}, config_file=file)
    assert message.startswith("max_num_seqs: ")
    assert str(file) in message


@pytest.mark.parametrize("options", [{"max_num_seqs": 0}, {"dtype": "float64"}, {"max_num_seqs": "8"}, {"model": 3}])
def test_a_bad_argument_is_refused(options: dict[str, Any]) -> None:
    assert "(from argument)" in refused({"model": "m", **options})


def test_whole_numbers_serve_as_shares(tmp_path: Path) -> None:
    assert resolve_config({"model": "m", "gpu_memory_utilization": 1}, environ={}).gpu_memory_utilization == 1.0


def test_a_contradiction_names_the_source_of_both_sides(tmp_path: Path) -> None:
    file = write_file(tmp_path, "model: m\nmax_num_seqs: 8\n")
    message = refused({}, config_file=file, environ={"OCTAVO_MAX_NUM_BATCHED_TOKENS": "4"})
    assert f"max_num_seqs from {file}" in message
    assert "max_num_batched_tokens from OCTAVO_MAX_NUM_BATCHED_TOKENS" in message


def test_an_option_given_twice_in_a_file_is_refused(tmp_path: Path) -> None:
    assert "twice" in refused({}, config_file=write_file(tmp_path, "model: m\nblock-size: 8\nblock_size: 16\n"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- model\n- m\n", "list"),
        ("model: [unclosed\n", "not valid YAML"),
        ("model: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_plain_mapping_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    assert reason in refused({}, config_file=write_file(tmp_path, text))


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refused({}, config_file=tmp_path / "absent.yaml")
    assert str(tmp_path) in refused({}, config_file=tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in refused({}, config_file=binary)


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert resolve_config({"model": "m"}, config_file=write_file(tmp_path, "# nothing\n"), environ={}).model == "m"


def test_parse_option_keeps_none_as_a_text_where_the_option_cannot_be_unset() -> None:
    assert parse_option("model", "none") == "none"
    with pytest.raises(ValueError, match="not 'none'"):
        parse_option("max_num_seqs", "none")


def test_make_config_refuses_like_the_sources_do() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        make_config(model="m", max_num_seq=1)
    with pytest.raises(ConfigError, match="at least max_num_seqs"):
        make_config(model="m", max_num_seqs=8, max_num_batched_tokens=4)


def test_a_config_cannot_be_changed_after_it_was_checked() -> None:
    with pytest.raises(ValueError, match="frozen"):
        EngineConfig(model="m").seed = 1  # type: ignore[misc]


def test_every_option_is_of_one_part_and_a_part_can_be_made_alone() -> None:
    names = [name for part in PARTS.values() for name in part.model_fields]
    assert names == list(EngineConfig.model_fields), "each once, and in the order of the parts"
    config = make_config(model="m", max_num_seqs=3)
    assert all(isinstance(config, part) for part in PARTS.values())
    assert SchedulerOptions(max_num_seqs=3).max_num_batched_tokens == config.max_num_batched_tokens
    with pytest.raises(ValidationError, match="at least max_num_seqs"):
        SchedulerOptions(max_num_seqs=3, max_num_batched_tokens=2)
    with pytest.raises(ValidationError, match="block_size"):
        SchedulerOptions(block_size=4)  # type: ignore[call-arg]


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"host_prefix_cache": True, "enable_prefix_caching": False}, "host_prefix_cache needs enable_prefix_caching"),
    ({"host_prefix_cache": True, "swap_space": 0}, "host_prefix_cache needs swap space.*swap_space"),
    ({"host_prefix_cache": True, "num_host_blocks_override": 0}, "host_prefix_cache needs swap space"),
    ({"preemption_mode": "swap", "swap_space": 0}, "preemption_mode 'swap' needs swap space"),
    ({"preemption_mode": "swap", "num_host_blocks_override": 0, "swap_space": 4}, "preemption_mode 'swap' needs"),
    ({"scheduler_delay_factor": 0.5}, "scheduler_delay_factor.*prefill_first"),
    ({"scheduler_delay_factor": 0.5, "batching": "mixed"}, "scheduler_delay_factor.*prefill_first"),
]


@pytest.mark.parametrize(("options", "message"), CONTRADICTIONS, ids=lambda v: str(v)[:40])
def test_options_without_effect_beside_others_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(model="m", **options)
    with pytest.raises(ConfigError, match=message):
        resolve_config({"model": "m", **options}, environ={})


@pytest.mark.parametrize(
    "options",
    [
        {"host_prefix_cache": True},
        {"host_prefix_cache": True, "swap_space": 0, "num_host_blocks_override": 8},
        {"preemption_mode": "swap", "swap_space": 0, "num_host_blocks_override": 8},
        {"preemption_mode": "auto", "swap_space": 0},
        {"max_long_partial_prefills": 1, "long_prefill_token_threshold": 100},
        {"scheduler_delay_factor": 0.5, "batching": "prefill_first"},
    ],
)
def test_options_that_go_together_are_accepted_and_survive_a_copy(options: dict[str, Any]) -> None:
    config = make_config(model="m", **options)
    assert make_config(**config.model_dump()).model_dump() == config.model_dump()


def test_a_small_token_budget_alone_lowers_the_default_of_max_num_seqs() -> None:
    for budget, expected in [(64, 64), (256, 256), (4096, 256)]:
        config = make_config(model="m", max_num_batched_tokens=budget)
        assert (config.max_num_seqs, config.max_num_batched_tokens) == (expected, budget)
        assert resolve_config({"max_num_batched_tokens": budget, "model": "m"}, environ={}).max_num_seqs == expected
    with pytest.raises(ConfigError, match="at least max_num_seqs"):
        make_config(model="m", max_num_batched_tokens=64, max_num_seqs=256)
    assert SchedulerOptions(max_num_batched_tokens=3).max_num_seqs == 3
    lowered = make_config(model="m", max_num_batched_tokens=64)
    assert make_config(**lowered.model_dump()).max_num_seqs == 64
    assert lowered.model_dump(exclude_unset=True) == {"model": "m", "max_num_batched_tokens": 64}


def test_shared_prefixes_are_a_list_from_every_source(tmp_path: Path) -> None:
    listed = write_file(tmp_path, "model: m\nshared-prefix: [a.txt, b.txt]\n")
    assert resolve_config({}, config_file=listed, environ={}).shared_prefix == ["a.txt", "b.txt"]
    one = write_file(tmp_path, "model: m\nshared_prefix: a.txt\n")
    assert resolve_config({}, config_file=one, environ={}).shared_prefix == ["a.txt"]
    assert resolve_config({"model": "m"}, environ={"OCTAVO_SHARED_PREFIX": "a.txt"}).shared_prefix == ["a.txt"]
    flags = config_from_flags("--shared-prefix", "a", "--shared-prefix=b")
    assert flags.shared_prefix == ["a", "b"]
    assert "enable_prefix_caching" in refused({"model": "m", "shared_prefix": ["a"], "enable_prefix_caching": False})
    assert "shared_prefix" in refused({"model": "m", "shared_prefix": [3]})
