"""``octavo serve``: serves a model over the OpenAI API."""

from __future__ import annotations

from octavo.cli.engine_flags import add_engine_flags, add_option_flags, read_engine_config, take_model
from octavo.cli.parsing import Arguments, Parser
from octavo.core.config_sources import resolve_server_options
from octavo.core.server_options import ServerOptions

PREFIX = "server"

EXAMPLE = """\
examples:
  octavo serve smollm2-135m
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


def make_parser() -> Parser:
    """The command's parser."""
    parser = Parser(
        prog="octavo serve",
        usage="octavo serve [options] [MODEL]",
        description="Serves a model over HTTP under the routes of the OpenAI API.",
        epilog=EXAMPLE,
    )
    add_option_flags(parser, PREFIX, ServerOptions.model_fields)
    add_engine_flags(parser)
    return parser


def run(arguments: Arguments) -> int:
    """Serves until a signal or the death of the engine; returns the exit code."""
    options = resolve_server_options(arguments.group(PREFIX), config_file=arguments.config)
    config = read_engine_config(arguments, take_model(arguments))
    from octavo.server.serve_app import serve

    return serve(config, options)
