"""The server's options come from the same sources as the engine's."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.config.server_options import ServerOptions
from octavo.config.sources import resolve_config, resolve_server_options
from octavo.core.errors import ConfigError
from tests.config.option_sources import write_file

#: A text for each option, other than its default.
TEXTS = {
    "host": "::1",
    "port": "9000",
    "served_model_name": "a,b",
    "api_key": "a,b",
    "api_key_file": "/keys",
    "tls_cert": "/cert",
    "tls_key": "/key",
    "allowed_origins": "https://a.example",
    "allowed_hosts": "a.example,*.b.example",
    "max_body_bytes": "2048",
    "max_body_bytes_total": "1GiB",
    "max_body_bytes_per_client": "2048",
    "max_audio_bytes": "2048",
    "max_image_bytes": "2048",
    "allow_image_urls": "true",
    "allowed_media_domains": "a.example,b.example",
    "image_url_networks": "10.0.0.0/8",
    "ui": "false",
    "ollama": "true",
    "allow_pull": "true",
    "models": "/models.yaml",
    "models_dir": "/models",
    "log_format": "json",
    "log_level": "WARNING",
    "log_file": "/log",
    "log_requests": "false",
    "log_prompts": "true",
    "unknown_fields": "ignore",
    "unsupported_tools": "refuse",
    "trust_request_chat_template": "1",
    "tool_call_parser": "hermes",
    "reasoning_parser": "qwen3",
    "enable_admin_routes": "true",
    "lora_modules": "a=/a b=/b",
    "lora_folder": "/adapters",
    "enable_lora_routes": "true",
    "lora_resolver": "folder",
    "otlp_traces_endpoint": "http://127.0.0.1:4318/v1/traces",
}
TEXTS = {name: "64" for name in ServerOptions.model_fields} | TEXTS


def test_every_option_is_read_from_variables_and_from_the_file(tmp_path: Path) -> None:
    by_variable = resolve_server_options({}, environ={f"OCTAVO_{name.upper()}": text for name, text in TEXTS.items()})
    lines = [f"{name.replace('_', '-')}: {'true' if text == '1' else text}" for name, text in TEXTS.items()]
    file = write_file(tmp_path, "\n".join(line.replace("::1", "'::1'") for line in lines))
    by_file = resolve_server_options({}, config_file=file, environ={})
    assert by_file == by_variable
    defaults = resolve_server_options({}, environ={})
    assert [name for name in TEXTS if getattr(by_file, name) == getattr(defaults, name)] == []
    assert by_file.allowed_media_domains == ("a.example", "b.example")
    assert by_file.log_file == Path("/log") and by_file.log_level == "warning"


def test_a_models_name_is_without_the_program_that_keeps_it() -> None:
    options = resolve_server_options({}, environ={})
    names = [options.model_names(name) for name in ("ollama:llama3.2:1b", "lmstudio:owner/name", "smollm2-135m")]
    assert names == [["llama3.2:1b"], ["owner/name"], ["smollm2-135m"]]


def test_each_source_wins_over_the_one_before_it(tmp_path: Path) -> None:
    file = write_file(tmp_path, "model: m\nport: 1\nkeep_alive_timeout: 2\nbody_timeout: 3\nseed: 4\n")
    environ = {"OCTAVO_CONFIG": str(file), "OCTAVO_KEEP_ALIVE_TIMEOUT": "5", "OCTAVO_BODY_TIMEOUT": "6"}
    options = resolve_server_options({"body_timeout": 7.0}, environ=environ)
    assert (options.port, options.keep_alive_timeout, options.body_timeout) == (1, 5, 7.0)
    # The same file and the same variables serve the engine, and every other command.
    assert resolve_config({}, environ=environ).seed == 4


@pytest.mark.parametrize(
    ("text", "environ", "words"),
    [
        ("allowed_hosts: http://a.example\n", {}, ["allowed_hosts", "'http://a.example'"]),
        ("allowed_hosts: a.example:80\n", {}, ["allowed_hosts", "'a.example:80'"]),
        ("allowed_hosts: a.*\n", {}, ["allowed_hosts", "'a.*'"]),
        ("port: x\n", {}, ["port", "'x'", "octavo.yaml"]),
        ("prot: 1\n", {}, ["'prot'", "'port'"]),
        ("", {"OCTAVO_PROT": "1"}, ["OCTAVO_PROT", "OCTAVO_PORT"]),
        ("", {"OCTAVO_PORT": "70000"}, ["OCTAVO_PORT", "65535"]),
        ("enable_lora_routes: true\n", {}, ["enable_lora_routes needs lora_folder", "octavo.yaml"]),
        ("lora_modules: [a=b, a=c]\n", {}, ["lora_modules", "'a' is given twice", "octavo.yaml"]),
        ("lora_modules: [a]\n", {}, ["lora_modules", "NAME=PATH"]),
        ("", {"OCTAVO_LORA_MODULES": "{"}, ["OCTAVO_LORA_MODULES", "JSON"]),
        ("image_url_networks: 10.1.0.1/16\n", {}, ["image_url_networks", "10.1.0.1/16", "octavo.yaml"]),
        ("tls_cert: a\n", {}, ["tls_cert needs tls_key too", "tls_cert from", "octavo.yaml"]),
    ],
)
def test_what_is_wrong_is_named_with_its_source(
    tmp_path: Path, text: str, environ: dict[str, str], words: list[str]
) -> None:
    file = write_file(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        resolve_server_options({}, config_file=file, environ=environ)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    "given",
    [
        ["a=/x", "b=/y=z"],
        ['{"name": "a", "path": "/x", "base_model_name": "m"}', "b=/y=z"],
        [{"name": "a", "path": "/x"}, {"name": "b", "path": "/y=z"}],
        {"a": "/x", "b": "/y=z"},
        "a=/x b=/y=z",
        '[{"name": "a", "path": "/x"}, {"name": "b", "path": "/y=z"}]',
    ],
)
def test_adapters_are_words_or_objects(given: object) -> None:
    assert resolve_server_options({"lora_modules": given}, environ={}).lora_modules == {"a": "/x", "b": "/y=z"}


def test_options_for_adapters_need_an_engine_that_serves_them() -> None:
    options = resolve_server_options({"lora_modules": ["a=/x"]}, environ={})
    with pytest.raises(ConfigError, match=r"lora_modules need the engine's option enable_lora"):
        options.check_engine(resolve_config({"model": "m"}, environ={}))
    options.check_engine(resolve_config({"model": "m", "enable_lora": True}, environ={}))
