"""Options of the HTTP server in one validated model, from which flags, variables, files and documentation follow."""

from __future__ import annotations

import ipaddress
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, model_validator

from octavo.config.options import AdapterOptions
from octavo.core.errors import ConfigError

#: Environment variable with API keys, separated by commas.
API_KEYS_VARIABLE = "OCTAVO_API_KEYS"

#: Longer prompts, in characters for each token of the context, are refused without being tokenized.
CHARS_PER_TOKEN = 32
#: Bytes of a multipart form beside the recording in it.
FORM_BYTES = 1 << 20
_HOST = re.compile(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|[0-9a-f:.]+(%[a-z0-9]+)?")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as e:
        raise ValueError(f"it is no JSON: {e}") from None


def _words(value: Any) -> Any:
    return tuple(names(value)) if isinstance(value, str) else value


def _networks(value: tuple[str, ...]) -> tuple[str, ...]:
    for text in value:
        ipaddress.ip_network(text)  # its error names the text
    return value


def host_name(text: str) -> str:
    """A host name in canonical form: lower case, no trailing dot, no brackets; IPv4-mapped addresses as IPv4."""
    bare = text.removeprefix("[").removesuffix("]").removesuffix(".").lower()
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        return bare
    return str(getattr(address, "ipv4_mapped", None) or address)


def _hosts(value: tuple[str, ...]) -> tuple[str, ...]:
    hosts = tuple(map(host_name, value))
    for text, host in zip(value, hosts, strict=True):
        if not _HOST.fullmatch(host):
            raise ValueError(f"{text!r} is no host: write it without scheme, port and path; *.NAME allows what ends so")
    return hosts


def _modules(value: Any) -> Any:
    """Adapters as a dictionary; given as ``NAME=PATH`` texts, or as objects with "name" and "path"."""
    if isinstance(value, str):  # of a variable
        value = _json(value) if value.lstrip()[:1] in ("[", "{") else value.split()
    if isinstance(value, dict):
        value = [value] if {"name", "path"} <= value.keys() else [{"name": n, "path": p} for n, p in value.items()]
    if not isinstance(value, list):
        return value
    paths: dict[str, str] = {}
    for entry in value:
        if isinstance(entry, str) and entry.startswith("{"):
            entry = _json(entry)
        if isinstance(entry, str):
            name, _, path = entry.partition("=")
            entry = {"name": name, "path": path}
        if not isinstance(entry, dict) or not all(isinstance(entry.get(k), str) and entry[k] for k in ("name", "path")):
            raise ValueError("an adapter is NAME=PATH, or an object with name and path")
        if entry["name"] in paths:
            raise ValueError(f"the adapter {entry['name']!r} is given twice")
        paths[entry["name"]] = entry["path"]
    return paths


#: Paths of adapters by name; in flags and variables ``NAME=PATH`` words.
AdapterPaths = Annotated[dict[str, str] | None, BeforeValidator(_modules)]
#: A path; text in files and variables.
FilePath = Annotated[Path | None, BeforeValidator(lambda value: Path(value) if isinstance(value, str) else value)]


#: Environment variable with the address of Ollama's server, for it and its clients.
OLLAMA_HOST_VARIABLE = "OLLAMA_HOST"
_OLLAMA_PORT = 11434


def ollama_address(text: str | None) -> tuple[str, int]:
    """Host and port of a value of OLLAMA_HOST, as Ollama's clients read it; without one, 127.0.0.1 and 11434."""
    scheme, separator, rest = (text or "").strip().strip("\"'").partition("://")
    default = {"http": 80, "https": 443}.get(scheme, _OLLAMA_PORT) if separator else _OLLAMA_PORT
    try:
        parts = urlsplit(f"//{rest if separator else scheme}")
        return parts.hostname or "127.0.0.1", default if parts.port is None else parts.port
    except ValueError as e:
        raise ConfigError(f"{OLLAMA_HOST_VARIABLE} must be a host, with or without a port, not {text!r}: {e}") from None


def names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


class ServerOptions(BaseModel):
    """Options of the HTTP server. Every description has its unit; the defaults suit one machine and one user."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 or :: for all networks.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0: a free one.")
    served_model_name: str | None = Field(
        None, description="Names of the model for clients, separated by commas. Default: the name in the option model."
    )
    api_key: str | None = Field(
        None, description="API keys, separated by commas; the list of processes shows them, a file does not."
    )
    api_key_file: FilePath = Field(
        None, description=f"File with API keys, one a line; the variable {API_KEYS_VARIABLE} may hold more."
    )
    ui: bool = Field(
        True,
        description="Serve a page at / to chat with the model and to watch the engine. If other machines reach the "
        "server, the page is only served with API keys, one of which it asks for.",
    )
    tls_cert: FilePath = Field(None, description="Certificate chain (PEM), to serve HTTPS.")
    tls_key: FilePath = Field(None, description="Private key of the certificate (PEM).")
    ollama: bool = Field(
        False,
        description="Listen where Ollama does, too: at the address of the variable OLLAMA_HOST, by default "
        "127.0.0.1:11434, with Ollama's routes only.",
    )
    allow_pull: bool = Field(
        False, description="Let clients download and remove models, and give them names (/api/pull, /api/delete, "
        "/api/copy).",
    )  # fmt: skip
    models: FilePath = Field(
        None,
        description="YAML file with several models to serve: a list of source, name, aliases, keep_alive, pinned and "
        "the engine's options of each.",
    )
    models_dir: FilePath = Field(
        None, description="Folder with several models to serve: folders with a config.json, and GGUF files."
    )
    memory: ByteSize | None = Field(
        None, ge=1,
        description="With several models: memory of all that are loaded, in bytes or as 20GiB; the least recently used "
        "idle one makes room. Default: nine tenths of what is free at the start. With --fit: memory of the model.",
    )  # fmt: skip
    max_loaded: int | None = Field(
        None, ge=1, description="With several models: maximum number that are loaded at a time. Default: by memory."
    )
    model_keep_alive: float | None = Field(
        None, ge=0,
        description="With several models: seconds without a request after which a model is unloaded. Default: it stays "
        "until its memory is needed.",
    )  # fmt: skip
    allowed_origins: str | None = Field(
        None, description="Web origins whose pages may call the server (CORS), separated by commas; * for all."
    )
    allowed_hosts: Annotated[tuple[str, ...], BeforeValidator(_words), AfterValidator(_hosts)] = Field(
        (),
        description="Allowed hosts of the header Host beside localhost and loopback addresses, separated by commas; "
        "*.example.com for all below it, * for any. Default: none on a loopback address without API keys, against "
        "pages that reach it through a browser (DNS rebinding), else any.",
    )
    max_queued_requests: int = Field(
        1024, ge=1, description="Maximum prompts that wait for their first token; 429 beyond."
    )
    max_queued_tokens: int = Field(
        4 << 20, ge=1, description="Maximum tokens of the prompts that wait for their first token; 429 beyond."
    )
    sandbox_seconds_per_client: float = Field(
        60.0, gt=0,
        description="Maximum processor seconds within a minute for one client's new schemas, grammars, chat "
        "templates, images and recordings; 429 beyond. A client is an API key, or an address if no key is needed.",
    )  # fmt: skip
    max_sequences_per_request: int = Field(
        256, ge=1, description="Maximum sequences of a request: prompts times n (or best_of)."
    )
    max_inputs_per_request: int = Field(
        2048, ge=1, description="Maximum inputs of a request for vectors or scores: texts, documents, pairs."
    )
    max_body_bytes: int = Field(8 << 20, ge=1024, description="Maximum bytes of a request body; 413 beyond.")
    max_body_bytes_total: ByteSize | None = Field(
        None, ge=1024,
        description="Maximum bytes of the bodies of all open requests, including uploads and unpacked compressed "
        "bodies, in bytes or with a unit (1GiB); 503 beyond. Default: 512 MiB, or four times the largest body if that "
        "is more.",
    )  # fmt: skip
    max_body_bytes_per_client: ByteSize | None = Field(
        None, ge=1024,
        description="Maximum of these bytes for one client, which is an API key, or an address if no key is needed; "
        "429 beyond. Default: half of max_body_bytes_total. A proxy is one address: set this to max_body_bytes_total "
        "behind it.",
    )  # fmt: skip
    max_audio_bytes: int = Field(
        64 << 20, ge=1024, description="Maximum bytes of a recording sent to /v1/audio/...; 413 beyond."
    )
    max_audio_seconds: float = Field(14_400.0, gt=0, description="Maximum seconds of a recording; 400 beyond.")
    max_image_bytes: ByteSize = Field(
        ByteSize(20 << 20), ge=1024,
        description="Maximum size of an image file in a conversation, in bytes or with a unit (20MiB); 400 beyond. In "
        "base64 it takes a third more of max_body_bytes.",
    )  # fmt: skip
    max_image_pixels: int = Field(
        1 << 26, ge=1, description="Maximum pixels of an image (width x height), checked before decoding; 400 beyond."
    )
    allow_image_urls: bool = Field(
        False, description="Fetch images from URLs in requests, at public addresses only. Off: URLs are refused."
    )
    allowed_media_domains: Annotated[tuple[str, ...], BeforeValidator(_words)] = Field(
        (), description="Hosts that images may be fetched from, separated by commas. Default: all."
    )
    image_url_networks: Annotated[tuple[str, ...], BeforeValidator(_words), AfterValidator(_networks)] = Field(
        (), description="Networks to fetch images from although not public, as 10.1.0.0/16, separated by commas."
    )
    image_url_seconds: float = Field(10.0, gt=0, description="Maximum seconds to fetch an image, redirects included.")
    max_prompt_chars: int | None = Field(
        None, ge=1,
        description=f"Maximum characters of a prompt. Default: {CHARS_PER_TOKEN} for each token of the context.",
    )  # fmt: skip
    max_stored_responses: int = Field(
        1000, ge=0, description="Maximum responses of /v1/responses kept for previous_response_id; 0: none."
    )
    max_stored_response_bytes: int = Field(
        64 << 20, ge=0, description="Maximum bytes of these responses and their conversations; older ones are dropped."
    )
    request_timeout: float = Field(
        600.0, gt=0, description="Maximum seconds from the arrival of a request to the end of its answer."
    )
    max_connections: int = Field(
        8192, ge=1, description="Maximum open connections, within the limit on open files; others wait."
    )
    max_connections_per_address: int | None = Field(
        None, ge=1,
        description="Maximum connections from one address (IPv6: from one /64); others are closed. Default: half of "
        "max_connections. A proxy is one address: set this to max_connections behind it.",
    )  # fmt: skip
    header_timeout: float = Field(
        10.0, gt=0,
        description="Maximum seconds to receive the head of a request, from the start of the connection or, on a "
        "kept-alive one, from the first byte.",
    )  # fmt: skip
    body_timeout: float = Field(30.0, gt=0, description="Maximum seconds to receive a request's body.")
    stall_timeout: float = Field(
        60.0, ge=1, description="Seconds after which the connection of a client that reads nothing is closed."
    )
    keep_alive_timeout: int = Field(75, ge=1, description="Seconds that an idle connection stays open.")
    shutdown_timeout: float = Field(
        30.0, ge=0, description="Seconds for open requests to finish after SIGTERM or Ctrl-C."
    )
    log_format: Literal["plain", "json"] = Field("plain", description="Format of log lines.")
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value),
    ] = Field("info", description="Lowest level to log.")
    log_file: FilePath = Field(None, description="File to append log lines to. Default: standard error.")
    log_requests: bool = Field(True, description="Log a line for each HTTP request.")
    log_prompts: bool = Field(False, description="Log the first characters of prompts, too.")
    unknown_fields: Literal["refuse", "ignore"] = Field(
        "refuse", description="Requests with unknown fields: refuse with 400, or ignore the fields and log them once."
    )
    unsupported_tools: Literal["ignore", "refuse"] = Field(
        "ignore", description="Tools that only another service can run (web search): ignore and log, or refuse."
    )
    trust_request_chat_template: bool = Field(
        False, description="Let requests bring a chat_template, which runs with limits of time and memory."
    )
    tool_call_parser: str = Field(
        "auto",
        description="Format of the model's tool calls: auto (by its chat template), none, hermes, llama3_json, "
        "mistral, pythonic, deepseek, gemma, functiongemma, qwen3_coder, granite, phi4_mini_json, or module:Class.",
    )
    reasoning_parser: str = Field(
        "auto",
        description="Format of the model's reasoning: auto (by its chat template), none (reasoning stays in the "
        "content), qwen3, deepseek_r1, mistral, gemma, seed_oss, granite, or module:Class.",
    )
    enable_admin_routes: bool = Field(
        False,
        description="Serve /sleep, /wake_up and /is_sleeping, which free the engine's memory for a while, and "
        "/admin/replicas, /admin/drain, /admin/undrain and /admin/restart, which move requests between replicas.",
    )
    lora_modules: AdapterPaths = Field(
        None, description="Adapters to load at start (NAME=PATH ...), for requests by name. Needs enable_lora."
    )
    lora_folder: FilePath = Field(
        None, description="Only folder from which enable_lora_routes and lora_resolver may load adapters."
    )
    enable_lora_routes: bool = Field(
        False, description="Serve /v1/load_lora_adapter and /v1/unload_lora_adapter, for adapters in lora_folder."
    )
    lora_resolver: str | None = Field(
        None, description="Loads an adapter when a request names it: folder (NAME in lora_folder), or module:Class."
    )
    otlp_traces_endpoint: str | None = Field(
        None, description="URL of an OpenTelemetry collector (OTLP over HTTP) that gets a span for each prompt."
    )

    @model_validator(mode="after")
    def _no_contradictions(self) -> ServerOptions:
        if (self.tls_cert is None) != (self.tls_key is None):
            present, missing = ("tls_cert", "tls_key") if self.tls_key is None else ("tls_key", "tls_cert")
            raise ValueError(f"{present} needs {missing} too")
        needs_folder = {"enable_lora_routes": self.enable_lora_routes, "lora_resolver": self.lora_resolver == "folder"}
        for name, given_one in needs_folder.items():
            if given_one and self.lora_folder is None:
                raise ValueError(f"{name} needs lora_folder, the folder that adapters are read from")
        return self

    @property
    def is_local(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def origins(self) -> list[str]:
        return names(self.allowed_origins)

    def check_engine(self, config: AdapterOptions) -> None:
        """Raises ConfigError if options need adapters and the engine serves none."""
        names = ("lora_modules", "enable_lora_routes", "lora_resolver")
        if not (config.enable_lora or config.enable_prompt_adapter) and (
            options := [n for n in names if getattr(self, n)]
        ):
            raise ConfigError(f"{', '.join(options)} need the engine's option enable_lora, or enable_prompt_adapter")

    def model_names(self, model: str) -> list[str]:
        """Names of the model in requests; responses have the first one by default."""
        return names(self.served_model_name) or [short_name(model)]


def short_name(model: str) -> str:
    """The name of a model for clients, who must not see the full path of a folder."""
    for program in ("ollama:", "lmstudio:"):
        model = model.removeprefix(program)
    return Path(model).name or model if Path(model).exists() else model
