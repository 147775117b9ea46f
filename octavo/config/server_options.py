"""Options of the HTTP server as one validated model; flags, variables, files and documentation follow from it."""

from __future__ import annotations

import ipaddress
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, model_validator

from octavo.config.options import AdapterOptions
from octavo.core.errors import ConfigError

#: Environment variable of API keys, separated by commas.
API_KEYS_VARIABLE = "OCTAVO_API_KEYS"

#: Prompts of more characters for each token of the context than this are refused without being tokenized.
CHARS_PER_TOKEN = 32
#: Bytes of a form beside the recording in it.
FORM_BYTES = 1 << 20
_HOST = re.compile(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|[0-9a-f:.]+(%[a-z0-9]+)?")


def _path(value: Any) -> Any:
    return Path(value) if isinstance(value, str) else value


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


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
    """A host as it is compared with others: in lower case, without a trailing dot, an address as it is written most.

    The brackets of an IPv6 address are left out, and an IPv4 address within one stands for itself.
    """
    bare = text.removeprefix("[").removesuffix("]").removesuffix(".").lower()
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        return bare
    return str(getattr(address, "ipv4_mapped", None) or address)


def _hosts(value: tuple[str, ...]) -> tuple[str, ...]:
    hosts = tuple(map(host_name, value))
    for given, host in zip(value, hosts, strict=True):
        if not _HOST.fullmatch(host):
            raise ValueError(
                f"{given!r} is no host: write it without scheme, port and path; *.NAME allows what ends so"
            )
    return hosts


def _modules(value: Any) -> Any:
    """Names and paths of adapters as a dictionary: of ``NAME=PATH`` texts, or objects with "name" and "path"."""
    if isinstance(value, str):  # a variable: JSON, or words
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


#: Adapters by name; in flags and variables ``NAME=PATH`` words.
AdapterPaths = Annotated[dict[str, str] | None, BeforeValidator(_modules)]
#: A path, which files and variables write as text.
FilePath = Annotated[Path | None, BeforeValidator(_path)]


def names(text: str | None) -> list[str]:
    """The names in a text with commas between them."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


class ServerOptions(BaseModel):
    """Options of the HTTP server. Every description states its unit; the defaults suit one machine and one user."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 or :: for every network.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    served_model_name: str | None = Field(
        None, description="Names that clients use for the model, with commas between; default: as it was given."
    )
    api_key: str | None = Field(
        None,
        description="API keys, with commas between. Every user of the machine sees them in the list of processes: a "
        "file, or the variable, keeps them.",
    )
    api_key_file: FilePath = Field(
        None, description=f"File of API keys, one a line; the variable {API_KEYS_VARIABLE} holds keys too."
    )
    ui: bool = Field(
        True,
        description="Serve a page at / to chat with the model and to watch the engine; where others than this machine "
        "reach the server, only if it has API keys, one of which the page asks for.",
    )
    tls_cert: FilePath = Field(None, description="Certificate chain (PEM); makes the server speak HTTPS.")
    tls_key: FilePath = Field(None, description="Private key of the certificate (PEM).")
    allowed_origins: str | None = Field(
        None, description="Web origins whose pages may call the server (CORS), with commas between; * for all."
    )
    allowed_hosts: Annotated[tuple[str, ...], BeforeValidator(_words), AfterValidator(_hosts)] = Field(
        (),
        description="Hosts that requests may name (in their header Host) beside localhost and loopback addresses, with "
        "commas between; *.example.com for all below it, * for any. Default: none on a loopback address without API "
        "keys, as pages of other hosts reach it through a browser (DNS rebinding); else any.",
    )
    max_queued_requests: int = Field(
        1024, ge=1, description="Most prompts that wait for their first token; further ones are answered 429."
    )
    max_queued_tokens: int = Field(
        4 << 20,
        ge=1,
        description="Most tokens in the prompts that wait for their first token; further ones are answered 429.",
    )
    sandbox_seconds_per_client: float = Field(
        60.0,
        gt=0,
        description="Seconds of processor time within a minute that one client's new schemas, grammars, chat "
        "templates, images and recordings may take (a client is an API key, or an address where no key is needed); 429 "
        "beyond.",
    )
    max_sequences_per_request: int = Field(
        256, ge=1, description="Most sequences that one request may ask for: prompts times n (or best_of)."
    )
    max_inputs_per_request: int = Field(
        2048, ge=1, description="Most inputs of one request for vectors or scores: texts, documents, pairs."
    )
    max_body_bytes: int = Field(8 << 20, ge=1024, description="Largest request body, in bytes; 413 beyond.")
    max_body_bytes_total: ByteSize | None = Field(
        None,
        ge=1024,
        description="Most bytes that the bodies of all requests take until they are answered, uploads among them and "
        "compressed ones as they are unpacked, in bytes or with a unit (1GiB); 503 beyond. Default: 512 MiB, or four "
        "times the largest body if that is more.",
    )
    max_body_bytes_per_client: ByteSize | None = Field(
        None,
        ge=1024,
        description="Most of these bytes that one client's bodies take (a client is an API key, or an address where no "
        "key is needed); 429 beyond. Default: half of max_body_bytes_total; behind a proxy, which is one address, give "
        "it as many.",
    )
    max_audio_bytes: int = Field(
        64 << 20, ge=1024, description="Largest recording that is sent to /v1/audio/..., in bytes; 413 beyond."
    )
    max_audio_seconds: float = Field(
        14_400.0, gt=0, description="Longest recording, in seconds of audio; refused with 400 beyond."
    )
    max_image_bytes: ByteSize = Field(
        ByteSize(20 << 20),
        ge=1024,
        description="Largest file of an image in a conversation, in bytes or with a unit (20MiB); refused with 400 "
        "beyond. One in base64 takes a third more of max_body_bytes.",
    )
    max_image_pixels: int = Field(
        1 << 26,
        ge=1,
        description="Most pixels of an image, width times height; refused with 400 beyond, before they are decoded.",
    )
    allow_image_urls: bool = Field(
        False,
        description="Fetch images from URLs (http, https) that requests name; else only files within requests are "
        "taken. Nothing is fetched from addresses that are not public.",
    )
    allowed_media_domains: Annotated[tuple[str, ...], BeforeValidator(_words)] = Field(
        (), description="Hosts that images may be fetched from, with commas between; default: all."
    )
    image_url_networks: Annotated[tuple[str, ...], BeforeValidator(_words), AfterValidator(_networks)] = Field(
        (),
        description="Networks that images may be fetched from although their addresses are not public, such as "
        "10.1.0.0/16, with commas between.",
    )
    image_url_seconds: float = Field(
        10.0, gt=0, description="Seconds that fetching an image may take, redirects included."
    )
    max_prompt_chars: int | None = Field(
        None,
        ge=1,
        description=f"Longest prompt, in characters; default: {CHARS_PER_TOKEN} for each token of the context.",
    )
    max_stored_responses: int = Field(
        1000, ge=0, description="Most responses of /v1/responses that are kept for previous_response_id; 0: none."
    )
    max_stored_response_bytes: int = Field(
        64 << 20, ge=0, description="Most bytes of these responses and their conversations; older ones are forgotten."
    )
    request_timeout: float = Field(
        600.0, gt=0, description="Seconds from the arrival of a request to the end of its answer."
    )
    max_connections: int = Field(
        8192,
        ge=1,
        description="Most connections that are open at once; further ones wait until one closes. Fewer where the limit "
        "on open files (ulimit -n) is lower.",
    )
    max_connections_per_address: int | None = Field(
        None,
        ge=1,
        description="Most connections from one address (of IPv6: from one /64); further ones are closed. Default: half "
        "of max_connections; behind a proxy, which is one address, give it as many.",
    )
    header_timeout: float = Field(
        10.0,
        gt=0,
        description="Seconds that a client may take to send the head of a request, from the beginning of its "
        "connection or, on one that is kept open, from the first byte.",
    )
    body_timeout: float = Field(30.0, gt=0, description="Seconds that a client may take to send a request's body.")
    stall_timeout: float = Field(
        60.0, ge=1, description="Seconds after which the connection of a client that reads nothing is closed."
    )
    keep_alive_timeout: int = Field(75, ge=1, description="Seconds that an idle connection is kept open.")
    shutdown_timeout: float = Field(
        30.0, ge=0, description="Seconds that open requests have to finish after SIGTERM or Ctrl-C."
    )
    log_format: Literal["plain", "json"] = Field("plain", description="Form of the log lines.")
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)] = Field(
        "info", description="Least level that is logged."
    )
    log_file: FilePath = Field(None, description="File that log lines are appended to; default: standard error.")
    log_requests: bool = Field(True, description="Log a line for each HTTP request.")
    log_prompts: bool = Field(False, description="Log prompts too (their first characters).")
    unknown_fields: Literal["refuse", "ignore"] = Field(
        "refuse",
        description="What becomes of a request with a field that is unknown here, or known and not supported: refused "
        "with 400, as OpenAI's API does, or served without it, and the name is logged once.",
    )
    unsupported_tools: Literal["ignore", "refuse"] = Field(
        "ignore",
        description="What becomes of a tool in a request that only another service could run, such as a search of the "
        "web: left out, and its type is logged once, or the request is refused with 400.",
    )
    trust_request_chat_template: bool = Field(
        False,
        description="Let requests bring a chat template of their own (chat_template); it runs in a process with limits "
        "of time and memory.",
    )
    tool_call_parser: str = Field(
        "auto",
        description="How the model writes calls of tools: auto (as its chat template says), none, hermes, llama3_json, "
        "mistral, pythonic, deepseek, gemma, functiongemma, qwen3_coder, granite, phi4_mini_json, or module:Class.",
    )
    reasoning_parser: str = Field(
        "auto",
        description="How the model marks its reasoning: auto (as its chat template says), none (it stays in the "
        "content), qwen3, deepseek_r1, mistral, gemma, seed_oss, granite, or module:Class.",
    )
    enable_admin_routes: bool = Field(
        False,
        description="Offer /sleep, /wake_up and /is_sleeping, which free the engine's memory for a while, and "
        "/admin/replicas, /admin/drain, /admin/undrain and /admin/restart, which move requests between replicas.",
    )
    lora_modules: AdapterPaths = Field(
        None,
        description="Adapters to load at the start (NAME=PATH ...), whose names requests give as model; needs "
        "enable_lora.",
    )
    lora_folder: FilePath = Field(
        None,
        description="Folder of the adapters that enable_lora_routes and lora_resolver may load; they read nothing "
        "outside of it.",
    )
    enable_lora_routes: bool = Field(
        False,
        description="Offer /v1/load_lora_adapter and /v1/unload_lora_adapter, which load adapters from lora_folder.",
    )
    lora_resolver: str | None = Field(
        None,
        description="Finds an adapter on the first request that names it: folder (NAME in lora_folder), or "
        "module:Class.",
    )
    otlp_traces_endpoint: str | None = Field(
        None, description="URL of an OpenTelemetry collector (OTLP over HTTP) that takes a span for each prompt."
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
        """Whether only this machine reaches the address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def origins(self) -> list[str]:
        """``allowed_origins`` as a list."""
        return names(self.allowed_origins)

    def check_engine(self, config: AdapterOptions) -> None:
        """Refuses options for adapters where the engine serves none.

        Raises:
            ConfigError: naming the options of both.
        """
        names = ("lora_modules", "enable_lora_routes", "lora_resolver")
        if not (config.enable_lora or config.enable_prompt_adapter) and (
            options := [n for n in names if getattr(self, n)]
        ):
            raise ConfigError(f"{', '.join(options)} need the engine's option enable_lora, or enable_prompt_adapter")

    def model_names(self, model: str) -> list[str]:
        """Names of the model in requests; the first is the default in responses."""
        if aliases := names(self.served_model_name):
            return aliases
        # The full path of a folder must not be revealed to clients.
        return [Path(model).name or model] if Path(model).exists() else [model]
