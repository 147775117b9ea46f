"""``octavo batch run``: answers a file of requests in the OpenAI API's batch format."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from octavo.cli.flags import add_engine_flags, add_option_flags, read_engine_config, take_model
from octavo.cli.parsing import EXIT_FAILED, Arguments, Parser, add_json_flag, json_output, write_line
from octavo.config.server_options import ServerOptions
from octavo.config.sources import resolve_server_options
from octavo.core.errors import ConfigError

PREFIX = "server"
#: Options of the server that decide which requests are accepted.
SERVER_FLAGS = (
    *("served_model_name", "max_sequences_per_request", "max_inputs_per_request", "max_prompt_chars"),
    *("unknown_fields", "trust_request_chat_template", "tool_call_parser", "reasoning_parser"),
    *("lora_modules", "lora_folder", "lora_resolver"),
)
_NO_LIMIT = 1 << 31
#: A batch has no limits for clients: nobody waits for an answer, and the requests in flight are bounded.
SERVER_OPTIONS: dict[str, Any] = {
    "max_queued_requests": _NO_LIMIT,
    "max_queued_tokens": _NO_LIMIT,
    "request_timeout": float(_NO_LIMIT),
    "sandbox_seconds_per_client": float(_NO_LIMIT),
    "log_requests": False,
}

EXAMPLE = """\
examples:
  octavo batch run -i in.jsonl -o out.jsonl smollm2-135m
  octavo batch run -i in.jsonl -o out.jsonl smollm2-135m --max-num-seqs 64 --json -
  octavo batch run -i in.jsonl -o out.jsonl smollm2-135m --retry-failed

a line of in.jsonl, and the line of out.jsonl that answers it:
  {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Two and two make"}}
  {"id": "batch_req_...", "custom_id": "a", "response": {"status_code": 200, "body": {...}, ...}, ...}

Each body is checked and answered as octavo serve would; url is /v1/completions, /v1/chat/completions, /v1/embeddings,
/v1/rerank or /v1/score. If a request cannot be served, the others are answered, and the exit code is 1.
Answers come in any order. If a run is stopped, even by kill -9, the same command continues it: requests that out.jsonl
answers are not answered again.
"""


def make_parser() -> Parser:
    parser = Parser(
        prog="octavo batch",
        usage="octavo batch run -i FILE -o FILE [options] [MODEL]",
        description="Answers a file of requests in the OpenAI API's batch format.",
        epilog=EXAMPLE,
    )
    parser.kinds = {"run": None}
    parser.add_argument("-i", "--input", type=Path, required=True, metavar="FILE", help="requests, one a line")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="answers are appended to this file"
    )
    parser.add_argument(
        "--max-in-flight",
        type=int,
        metavar="N",
        help="most requests in the engine at once (default: twice max_num_seqs, for each replica)",
    )
    parser.add_argument("--retry-failed", action="store_true", help="repeat the requests whose answer is an error")
    add_json_flag(parser)
    add_option_flags(parser, PREFIX, {name: ServerOptions.model_fields[name] for name in SERVER_FLAGS})
    add_engine_flags(parser)
    return parser


def run(arguments: Arguments) -> int:
    if arguments.words[:1] != ["run"]:
        raise ConfigError("octavo batch needs a word that says what to do: run")
    arguments.words.pop(0)
    config = read_engine_config(arguments, take_model(arguments))
    in_flight = arguments.max_in_flight
    if in_flight is None:
        in_flight = 2 * config.max_num_seqs * config.data_parallel_size
    if in_flight < 1:
        raise ConfigError(f"--max-in-flight must be at least 1, not {in_flight}")
    options = resolve_server_options({**arguments.group(PREFIX), **SERVER_OPTIONS}, config_file=arguments.config)
    with json_output(arguments) as json_out:
        from octavo.batch.runner import run_batch

        summary = run_batch(
            config,
            options,
            arguments.input,
            arguments.output,
            max_in_flight=in_flight,
            retry_failed=arguments.retry_failed,
        )
        print(summary.as_text(), file=sys.stderr)
        if json_out is not None:
            figures = {**asdict(summary), "output_tokens_per_second": summary.output_tokens_per_second}
            write_line(json_out, figures)
    return EXIT_FAILED if summary.failed else 0
