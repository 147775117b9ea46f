"""Options of vLLM that are no options here, from every source."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.flags import add_engine_flags
from octavo.cli.parsing import Parser
from octavo.config.engine_config import EngineConfig, make_config
from octavo.config.server_options import ServerOptions
from octavo.config.sources import parse_option, resolve_config
from octavo.core.errors import ConfigError
from octavo.core.foreign import ALIASES, FOREIGN_OPTIONS, OTHER_NAMES, own_options
from tests.config.option_sources import config_from_flags, write_file

PLAIN = EngineConfig(model="m")


def test_none_of_them_is_an_option_of_our_own() -> None:
    assert FOREIGN_OPTIONS.keys().isdisjoint(EngineConfig.model_fields), "remove it from FOREIGN_OPTIONS"
    assert FOREIGN_OPTIONS.keys().isdisjoint(ServerOptions.model_fields), "remove it from FOREIGN_OPTIONS"


@pytest.mark.parametrize("name", FOREIGN_OPTIONS)
def test_what_is_accepted_changes_nothing_and_all_else_gives_a_reason(name: str) -> None:
    option = FOREIGN_OPTIONS[name]
    for value in (*(option.accepted or ()), None):
        assert resolve_config({"model": "m", name: value}, environ={}) == PLAIN
        assert make_config(model="m", **{name: value}) == PLAIN
    if option.accepted is None:
        assert own_options({name: object()}) == {}
    elif set(map(repr, option.accepted)) != {"False", "True"}:
        with pytest.raises(ConfigError, match=rf"^{name} must be .*, not 'another': ...+ \(from argument\)$"):
            resolve_config({"model": "m", name: "another"}, environ={})


def test_a_number_is_no_switch_and_a_switch_no_number() -> None:
    with pytest.raises(ConfigError, match="decode_context_parallel_size must be 1, not True"):
        make_config(model="m", decode_context_parallel_size=True)
    with pytest.raises(ConfigError, match="disable_sliding_window must be False, not 0"):
        make_config(model="m", disable_sliding_window=0)


def test_a_file_may_hold_them(tmp_path: Path) -> None:
    text = "model: m\ndecode-context-parallel-size: 1\ntrust_remote_code: false\nhf-overrides: {}\ndtype: half\n"
    file = write_file(tmp_path, text)
    assert resolve_config({}, config_file=file, environ={}) == EngineConfig(model="m", dtype="float16")
    file.write_text("model: m\ndecode-context-parallel-size: 2\n")
    with pytest.raises(ConfigError, match=r"decode_context_parallel_size must be 1, not 2: .*octavo\.yaml"):
        resolve_config({}, config_file=file, environ={})
    assert resolve_config({"decode_context_parallel_size": 1}, config_file=file, environ={}) == PLAIN, (
        "the later source counts"
    )


def test_variables_may_hold_them() -> None:
    environ = {
        "OCTAVO_TENSOR_PARALLEL_SIZE": "1",
        "OCTAVO_TRUST_REMOTE_CODE": "true",
        "OCTAVO_TASK": "generate",
        "OCTAVO_SPECULATIVE_CONFIG": "none",
        "OCTAVO_HF_OVERRIDES": "{}",
        "OCTAVO_DTYPE": "float",
    }
    expected = EngineConfig(model="m", dtype="float32", task="generate", trust_remote_code=True)
    assert resolve_config({"model": "m"}, environ=environ) == expected
    with pytest.raises(ConfigError, match=r"enable_prompt_embeds must be False, not True.*OCTAVO_ENABLE_PROMPT_EMBEDS"):
        resolve_config({"model": "m"}, environ={"OCTAVO_ENABLE_PROMPT_EMBEDS": "true"})
    with pytest.raises(ConfigError, match="OCTAVO_Task"):
        resolve_config({"model": "m"}, environ={"OCTAVO_Task": "generate"})


def test_flags_take_them_and_help_leaves_them_out() -> None:
    argv = "--trust-remote-code --disable-log-stats --decode-context-parallel-size 1 --task generate --hf-overrides {}"
    assert config_from_flags(*argv.split(), "--max-seq-len-to-capture", "8192", "--dtype", "half").dtype == "float16"
    for flag, reason in (
        ("--enable-prompt-embeds", "enable_prompt_embeds must be False, not True: prompts are text or token ids"),
        ("--decode-context-parallel-size=2", "decode_context_parallel_size must be 1, not 2"),
        (
            "--speculative-model=m",
            "speculative_model must be None, not 'm': drafts are asked for with speculative_config",
        ),
    ):
        with pytest.raises(ConfigError, match=reason):
            config_from_flags(flag)
    parser = Parser(prog="octavo")
    add_engine_flags(parser)
    assert not [name for name in FOREIGN_OPTIONS if "--" + name.replace("_", "-") + " " in parser.format_help()]
    assert argparse.SUPPRESS not in parser.format_help()


@pytest.mark.parametrize(("name", "alias", "value"), [(n, a, v) for n, m in ALIASES.items() for a, v in m.items()])
def test_other_names_of_values(name: str, alias: str, value: str) -> None:
    assert getattr(resolve_config({"model": "m", name: alias}, environ={}), name) == value
    assert parse_option(name, alias) == value


@pytest.mark.parametrize(
    ("other", "text", "name", "value"),
    [
        ("cudagraph_capture_sizes", "1,2, 8", "graph_capture", [1, 2, 8]),
        ("status_interval", "2.5", "log_stats_interval", 2.5),
    ],
)
def test_other_names_of_options(other: str, text: str, name: str, value: Any, tmp_path: Path) -> None:
    assert OTHER_NAMES[other] == name and other not in EngineConfig.model_fields.keys() | ServerOptions.model_fields
    file = write_file(tmp_path, f"model: m\n{other}: {value}\n")
    configs = [
        make_config(model="m", **{other: value}),
        resolve_config({"model": "m", other: value}, environ={}),
        resolve_config({}, config_file=file, environ={}),
        resolve_config({"model": "m"}, environ={f"OCTAVO_{other.upper()}": text}),
        config_from_flags("--" + other.replace("_", "-"), text),
    ]
    assert [getattr(config, name) for config in configs] == [value] * 5
    resolved = resolve_config({name: value}, config_file=file, environ={f"OCTAVO_{other.upper()}": ""})
    assert getattr(resolved, name) == value
    with pytest.raises(ConfigError, match=f"option '{name}' is given twice, by different names"):
        make_config(model="m", **{other: value, name: value})


def test_no_sizes_of_captured_steps_are_the_default() -> None:
    assert make_config(model="m", cudagraph_capture_sizes=None).graph_capture == "lazy"


def test_none_gives_an_option_its_default() -> None:
    nothing: dict[str, Any] = dict.fromkeys(set(EngineConfig.model_fields) - {"model"})
    config = resolve_config({"model": "m", **nothing}, environ={"OCTAVO_MAX_NUM_SEQS": "3"})
    assert config.max_num_seqs == PLAIN.max_num_seqs
    assert config.aging_limit is None, "where None is a value of its own"


def test_none_is_the_default_of_every_option_whose_value_it_is_not() -> None:
    default = EngineConfig(model="m")
    for name in EngineConfig.model_fields.keys() - {"model"}:
        for config in (make_config(model="m", **{name: None}), resolve_config({"model": "m", name: None}, environ={})):
            assert getattr(config, name) == (None if name == "aging_limit" else getattr(default, name)), name
