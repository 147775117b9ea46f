"""``octavo serve``: serves a model over the OpenAI API."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Mapping
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from octavo.cli.parsing import Arguments, Parser, asks_for_help

if TYPE_CHECKING:
    from octavo.config.engine_config import EngineConfig
    from octavo.config.model_list import ListedModel
    from octavo.config.server_options import ServerOptions
    from octavo.engine.core_start import CoreProcess

PREFIX = "server"
PROFILE_FLAG = "--profile-startup"
#: Options in ``--help``; ``--help all`` shows the others too.
COMMON_OPTIONS = frozenset(
    {
        *("host", "port", "served_model_name", "api_key", "api_key_file", "ui", "tls_cert", "tls_key"),
        *("allowed_origins", "max_queued_requests", "request_timeout", "log_level", "log_requests"),
        *("tool_call_parser", "reasoning_parser", "lora_modules", "allow_image_urls", "ollama", "allow_pull"),
        *("models", "models_dir", "memory", "max_loaded", "model_keep_alive"),
    }
)

EXAMPLE = """\
examples:
  octavo serve smollm2-135m
  octavo serve unsloth/Qwen3-0.6B-GGUF:Q4_K_M
  octavo serve smollm2-135m --ollama
  octavo serve smollm2-135m all-minilm-l6-v2 --memory 8GiB
  octavo serve --models-dir ~/models --max-loaded 2
  octavo serve ./my-model --fit --users 8 --context 8192
  octavo serve smollm2-135m --port 9000 --max-num-seqs 64 --api-key-file keys.txt
  OCTAVO_PORT=9000 octavo serve --config octavo.yaml
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Name three rivers."}]}'

With several models, or none, which means all on this machine (octavo list), each is loaded when a request names it.

API keys may also be given in the variable OCTAVO_API_KEYS, separated by commas. Without keys any client that can reach
the server may use it; by default it listens on this machine only (--host).

SIGTERM or Ctrl-C: new requests are refused, open ones finish (--shutdown-timeout), exit code 0; a second Ctrl-C ends
the server at once with 130.
If the engine dies, open requests fail at once, /health answers 503, and the exit code is 70.
"""


def main(argv: list[str]) -> int:
    """Starts the engine's process, reads the flags and serves, so that both processes import at the same time."""
    before = signal.signal(signal.SIGTERM, _end_start)
    gc.disable()  # imports make many lasting objects; the ready server collects by its own rules
    # Otherwise pydantic's first model reads the entry points of all installed packages.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    if PROFILE_FLAG in argv:
        from octavo.process.startup import measure_imports

        measure_imports()
    process = None
    if not asks_for_help(argv):
        from octavo.engine.core_start import CoreProcess

        process = CoreProcess()
    from octavo.process.startup import phase

    try:
        with phase("flags"):
            arguments = make_parser().read(argv)
        return run(arguments, process)
    finally:
        if process is not None:
            process.kill()
        signal.signal(signal.SIGTERM, before)


def _end_start(number: int, frame: FrameType | None) -> None:
    """SIGTERM before the server is ready: exits at once, as the default action would, which PID 1 of a container lacks.

    The next start removes an incomplete download.
    """
    os._exit(0)


def make_parser() -> Parser:
    from octavo.cli.fit import LOAD, add_load_flags
    from octavo.cli.flags import add_engine_flags, add_option_flags
    from octavo.config.server_options import ServerOptions

    parser = Parser(
        prog="octavo serve",
        usage="octavo serve [options] [MODEL] [MODEL ...]",
        description="Serves a model, or several, over HTTP under the routes of the OpenAI API.",
        epilog=EXAMPLE,
    )
    parser.add_argument(
        PROFILE_FLAG, action="store_true", help="log the phases of the start and their times, by process"
    )
    parser.rare.add("profile_startup")
    parser.add_argument(
        "--fit", action="store_true", help="take the options that octavo fit recommends for what follows"
    )
    add_option_flags(parser, PREFIX, ServerOptions.model_fields, common=COMMON_OPTIONS)
    add_load_flags(parser)
    parser.rare |= set(LOAD)
    add_engine_flags(parser)
    return parser


def run(arguments: Arguments, process: CoreProcess | None = None) -> int:
    """Serves until a signal or the death of the engine; ``process``: the engine core's, if it was started ahead."""
    from octavo.cli.fit import nearest_in_errors, recommended, refuse_load_without_fit
    from octavo.cli.flags import read_engine_config, take_model
    from octavo.config.sources import configured_model, resolve_server_options
    from octavo.process.startup import phase

    with phase("options"):
        options = resolve_server_options(arguments.group(PREFIX), config_file=arguments.config)
        served: EngineConfig | list[ListedModel]
        is_one = arguments.model is not None or (configured_model(arguments.config) is not None)
        if (is_one or len(arguments.words) == 1) and options.models is None and options.models_dir is None:
            served = read_engine_config(arguments, take_model(arguments))
        else:
            served = read_models(arguments, options)
    if isinstance(served, list):
        from octavo.core.errors import ConfigError

        if arguments.fit:
            raise ConfigError("--fit chooses for one model: give one, or run octavo fit for each")
    elif arguments.fit:
        with phase("fit"):
            served = recommended(served, arguments, options.memory)
    else:
        refuse_load_without_fit(arguments)
    with phase("imports of the server's start"):
        from octavo.server.serve import serve

    configure = partial(_configure, arguments)
    if isinstance(served, list):
        return serve(served, options, process, profiles=arguments.profile_startup, configure=configure)
    with nearest_in_errors(served):
        return serve(served, options, process, profiles=arguments.profile_startup, configure=configure)


def _configure(arguments: Arguments, own: Mapping[str, Any]) -> EngineConfig:
    """The options of one of several engines: its ``own`` come before the common ones."""
    from octavo.cli.flags import PREFIX as ENGINE
    from octavo.config.sources import resolve_config

    return resolve_config({**arguments.group(ENGINE), **own}, config_file=arguments.config)


def read_models(arguments: Arguments, options: ServerOptions) -> list[ListedModel]:
    """The models of the words, of ``models`` and ``models_dir``; without any of them, those on this machine.

    Raises:
        ConfigError: there is none, two have one name, or an option is wrong.
    """
    from octavo.config.model_list import ModelEntry, entries_of_folder, list_models, read_entries
    from octavo.config.sources import configured_model
    from octavo.core.errors import ConfigError

    sources = [arguments.model, *arguments.words] if arguments.model else [*arguments.words]
    if (configured := configured_model(arguments.config)) is not None and configured not in sources:
        sources.insert(0, configured)
    entries = [ModelEntry(source=source) for source in dict.fromkeys(sources)]
    if options.models is not None:
        entries += read_entries(options.models)
    if options.models_dir is not None:
        entries += entries_of_folder(options.models_dir)
    if not entries:
        from octavo.engine import model_catalog

        entries = [ModelEntry(source=model.name) for model in model_catalog.list_models()]
    if not entries:
        raise ConfigError("no model given, and none is on this machine: name one, as in: octavo serve smollm2-135m")
    server = options.model_dump(exclude_unset=True)
    return list_models(entries, partial(_configure, arguments), options.model_keep_alive, server)
