"""Options as vLLM's scripts give them: dataclasses, flags, files."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.compat.vllm.config_parts import CacheConfig
from octavo.compat.vllm.engine_args import (
    DEFAULTS,
    AsyncEngineArgs,
    EngineArgs,
    FlexibleArgumentParser,
    non_default_options,
)
from octavo.config.engine_config import EngineConfig
from octavo.core.errors import ConfigError


def parser() -> FlexibleArgumentParser:
    made = FlexibleArgumentParser(description="a script")
    assert EngineArgs.add_cli_args(made) is made
    made.add_argument_group("of its own").add_argument("--max-tokens", type=int)
    return made


def test_every_option_is_a_field_a_flag_and_none_by_default() -> None:
    args = EngineArgs(model="m")
    assert {field.name for field in dataclasses.fields(args)} == {*DEFAULTS} >= {*EngineConfig.model_fields}
    assert args.non_default() == {"model": "m"}
    assert non_default_options(dataclasses.asdict(args)) == {"model": "m"}
    parsed = parser().parse_args(["--model", "m"])
    assert EngineArgs.from_cli_args(parsed) == args
    assert {name: value for name, value in vars(parsed).items() if name != "max_tokens"} == dataclasses.asdict(args)


def test_options_of_an_engine_that_are_as_by_default_leave_variables_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_MAX_NUM_SEQS", "7")
    args = AsyncEngineArgs(model="m", tensor_parallel_size=1, block_size=None, seed=None, quantization=None)
    assert args.create_engine_config().max_num_seqs == 7
    assert args.create_engine_config().block_size == EngineConfig(model="m").block_size
    with pytest.raises(ConfigError, match="no model given"):
        EngineArgs().create_engine_config()
    with pytest.raises(TypeError, match="no_such_option"):
        EngineArgs(no_such_option=1)
    with pytest.raises(ConfigError, match="write create_engine_config"):
        EngineArgs("m").create_engine_configs()
    with pytest.raises(TypeError, match=r"EngineArgs: unknown option 'max_num_seq'; did you mean 'max_num_seqs'"):
        EngineArgs("m", max_num_seq=1)


def test_a_configuration_has_vllms_parts(tiny_model: Path) -> None:
    args = EngineArgs(
        str(tiny_model), block_size=4, max_num_seqs=3, kv_cache_dtype="int8", scheduling_policy="priority",
        tensor_parallel_size=2, distributed_executor_backend="ray", device="cpu", swap_space=1.0, dtype="float32",
    )  # fmt: skip
    config = args.create_engine_config()
    cache, scheduler, parallel = config.cache_config, config.scheduler_config, config.parallel_config
    assert (cache.block_size, cache.cache_dtype, cache.swap_space, cache.num_gpu_blocks) == (4, "int8", 1.0, None)
    assert (scheduler.max_num_seqs, scheduler.policy, scheduler.delay_factor) == (3, "static", 0.0)
    assert scheduler.max_num_batched_tokens >= scheduler.max_num_seqs and scheduler.max_model_len == 256
    assert (parallel.world_size, parallel.worker_use_ray) == (2, True)
    model = config.model_config
    assert (model.model, model.tokenizer, model.dtype, model.max_model_len) == (*[str(tiny_model)] * 2, "float32", 256)
    assert model.get_vocab_size() == model.hf_config.vocab_size and model.architecture == "LlamaForCausalLM"
    assert model.get_hidden_size() == model.hidden_size == model.hf_text_config.hidden_size
    assert model.get_head_size() == model.head_dim
    assert (config.device_config.device_type, config.load_config.load_format) == ("cpu", "auto")
    assert config.decoding_config.guided_decoding_backend == config.structured_outputs_config.backend == "auto"
    assert config.lora_config is None is config.prompt_adapter_config is config.speculative_config
    assert config.compilation_config is None and isinstance(cache, CacheConfig)
    enabled = EngineArgs("m", enable_lora=True, max_lora_rank=8, speculative_config={"method": "ngram"})
    other = enabled.create_engine_config()
    assert other.lora_config.max_lora_rank == 8 and other.speculative_config.method == "ngram"
    assert "max_lora_rank=8" in repr(other.lora_config) and "block_size" in dir(cache)
    assert {"cache_config", "max_num_seqs"} <= {*dir(config)}


def test_parts_are_read_only_and_name_what_was_meant() -> None:
    config = EngineArgs("m").create_engine_config()
    for change, said in (
        (lambda: setattr(config.cache_config, "block_size", 8), r"read-only: .* EngineArgs or LLM \(block_size=8\)"),
        (lambda: setattr(config, "cache_config", None), "VllmConfig is read-only"),
        (lambda: config.cache_config.blocksize, "CacheConfig has no 'blocksize'; did you mean 'block_size'"),
        (lambda: config.cache_config.max_num_seqs, "it is scheduler_config.max_num_seqs"),
        (lambda: config.cache_configs, "did you mean 'cache_config'"),
    ):
        with pytest.raises(AttributeError, match=said):
            change()
    with pytest.raises(ConfigError, match=r"made by EngineArgs\(block_size=16\).create_engine_config\(\)"):
        CacheConfig(block_size=16)


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        (
            ["--max_model_len", "64", "--no-enable_prefix_caching"],
            {"max_model_len": 64, "enable_prefix_caching": False},
        ),
        (["-tp", "2", "--dtype=half", "--enforce-eager"], {"tensor_parallel_size": 2, "dtype": "float16"}),
        (["--trust-remote-code", "--max-num-seqs", "3"], {"max_num_seqs": 3}),
        (["--speculative_config", '{"method": "ngram"}'], {"speculative_config": {"method": "ngram"}}),
        (
            ["--speculative-config.method", "ngram", "--speculative-config.num_speculative_tokens=3"],
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        ),
    ],
)
def test_flags_are_options(flags: list[str], options: dict[str, Any]) -> None:
    config = EngineArgs.from_cli_args(parser().parse_args(["--model", "m", *flags])).create_engine_config()
    for name, value in options.items():
        found = getattr(config, name)
        assert found == value or {key: getattr(found, key) for key in value} == value


def test_a_wrong_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, message in (
        (["--load-format", "sharded_state"], "sharded_state"),
        (["--max-num-sets", "3"], "unrecogn"),
    ):
        with pytest.raises(SystemExit):
            parser().parse_args(["--model", "m", *flags])
        assert message in capsys.readouterr().err
    with pytest.raises(ConfigError, match="worker_cls must be 'auto'"):
        EngineArgs.from_cli_args(parser().parse_args(["--model", "m", "--worker-cls", "x"])).create_engine_config()


def test_a_file_has_flags_and_the_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("model: m\nmax_num_seqs: 5\nenforce_eager: true\nswap_space: null\nmax-tokens: 3\n")
    args = parser().parse_args(["--config", str(path), "--max-num-seqs", "6"])
    assert (args.model, args.max_num_seqs, args.enforce_eager, args.max_tokens) == ("m", 6, True, 3)
    own = FlexibleArgumentParser()
    own.add_argument("--config")
    assert own.parse_args(["--config", "x"]).config == "x"
    with pytest.raises(SystemExit):
        parser().parse_args(["--config", str(tmp_path / "none.yaml")])


def test_mappings_are_written_key_by_key() -> None:
    made = FlexibleArgumentParser()
    made.add_argument("--some-config", type=json.loads)
    made.add_argument("--number", type=float)
    args = made.parse_args(
        ["--some_config.a.b", "1", "--some-config.a.c=[x, y]", "--some-config.d_e", "true", "--number=.5"]
    )
    assert args == argparse.Namespace(some_config={"a": {"b": 1, "c": ["x", "y"]}, "d_e": True}, number=0.5)
