"""``octavo serve``: serves a model over the OpenAI API."""

from __future__ import annotations

import gc
import os
import signal
from types import FrameType
from typing import TYPE_CHECKING

from octavo.cli.parsing import Arguments, Parser, asks_for_help

if TYPE_CHECKING:
    from octavo.engine.core_start import CoreProcess

PREFIX = "server"
PROFILE_FLAG = "--profile-startup"
#: Options in ``--help``; ``--help all`` shows the others too.
COMMON_OPTIONS = frozenset(
    {
        *("host", "port", "served_model_name", "api_key", "api_key_file", "ui", "tls_cert", "tls_key"),
        *("allowed_origins", "max_queued_requests", "request_timeout", "log_level", "log_requests"),
        *("tool_call_parser", "reasoning_parser", "lora_modules", "allow_image_urls"),
    }
)

EXAMPLE = """\
examples:
  octavo serve smollm2-135m
  octavo serve unsloth/Qwen3-0.6B-GGUF:Q4_K_M
  octavo serve smollm2-135m --port 9000 --max-num-seqs 64 --api-key-file keys.txt
  OCTAVO_PORT=9000 octavo serve --config octavo.yaml
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Name three rivers."}]}'

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
    from octavo.cli.flags import add_engine_flags, add_option_flags
    from octavo.config.server_options import ServerOptions

    parser = Parser(
        prog="octavo serve",
        usage="octavo serve [options] [MODEL]",
        description="Serves a model over HTTP under the routes of the OpenAI API.",
        epilog=EXAMPLE,
    )
    parser.add_argument(
        PROFILE_FLAG, action="store_true", help="log the phases of the start and their times, by process"
    )
    parser.rare.add("profile_startup")
    add_option_flags(parser, PREFIX, ServerOptions.model_fields, common=COMMON_OPTIONS)
    add_engine_flags(parser)
    return parser


def run(arguments: Arguments, process: CoreProcess | None = None) -> int:
    """Serves until a signal or the death of the engine; ``process``: the engine core's, if it was started ahead."""
    from octavo.cli.flags import read_engine_config, take_model
    from octavo.config.sources import resolve_server_options
    from octavo.process.startup import phase

    with phase("options"):
        options = resolve_server_options(arguments.group(PREFIX), config_file=arguments.config)
        config = read_engine_config(arguments, take_model(arguments))
    with phase("imports of the server's start"):
        from octavo.server.serve import serve

    return serve(config, options, process, profiles=arguments.profile_startup)
