"""``octavo bench serve``: load on an OpenAI-compatible server, and latencies as seen by its clients."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import os
from pathlib import Path
from typing import IO, TYPE_CHECKING

from octavo.cli.parsing import (
    EXIT_FAILED,
    Arguments,
    Parser,
    add_json_flag,
    add_report_flag,
    check_folder,
    check_positive,
    check_range,
    json_output,
    refuse_words,
    write_line,
)
from octavo.config.server_options import names
from octavo.core.errors import ConfigError
from octavo.lab.commands.waiting import Waiting, add_thorough_flag, duration
from octavo.lab.plots.style import check_image
from octavo.lab.workloads.flags import DEFAULT_REQUESTS, FORMS, add_seed_flag, add_workload_flags, make_workload

if TYPE_CHECKING:
    from octavo.lab.bench.serve_client import Client, RequestOutcome
    from octavo.lab.bench.serve_report import ServeReport
    from octavo.lab.bench.serve_workload import Request

#: Requests of a first look: half a minute of the demo model on two cores.
FEW_REQUESTS = 40

EXAMPLE = f"""\
It needs a server that runs: start one in another terminal, and wait until it says "serving":
  octavo serve smollm2-135m

examples:
  octavo bench serve --model smollm2-135m --concurrency 16 --num-requests 200
  octavo bench serve --model smollm2-135m --request-rate 4 --goodput ttft:500,tpot:60 --json -
  octavo bench serve --base-url http://127.0.0.1:9000 --model m --endpoint chat --request-rate inf
  octavo bench serve --model m --input-len lognormal:200,0.8,1500 --output-len uniform:16,256 --request-rate 2
  octavo bench serve --model m --lora-names sql,law,chat --lora-skew 1 --concurrency 16
  octavo bench serve --model m --trace requests.jsonl --plot run.png
  octavo bench serve --model m --request-rate 1 --input-len chat --output-len chat --turns geometric:4 --think-time 20

{FORMS}
Exit code 1 if no request was completed.
"""


def make_parser() -> Parser:
    """The command's parser."""
    parser = Parser(
        prog="octavo bench serve",
        usage="octavo bench serve --model NAME [options]",
        description="Sends requests to a running server over HTTP, streaming, and reports latencies, rates and errors.",
        epilog=EXAMPLE,
    )
    target = parser.add_argument_group("server")
    target.add_argument(
        "--base-url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="address of the server (http://127.0.0.1:8000)",
    )
    target.add_argument("--model", metavar="NAME", help="the model's name in requests")
    target.add_argument(
        "--endpoint", choices=("completions", "chat"), default="completions", help="route (completions)"
    )
    target.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the API key")
    target.add_argument("--extra-body", metavar="JSON", help="fields added to each request; null leaves a field out")
    target.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds a request may take (600)")
    add_workload_flags(parser, FEW_REQUESTS)
    add_thorough_flag(parser, f"{DEFAULT_REQUESTS} requests")
    add_seed_flag(parser)
    load = parser.add_argument_group("clients and prompts")
    load.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help="closed loop: N clients, each one request at a time (8 without arrivals)",
    )
    load.add_argument(
        "--lora-names", type=_names, metavar="A,B,...", help="adapters (or models): each request takes one"
    )
    load.add_argument(
        "--lora-skew", type=float, default=0.0, metavar="S", help="Zipf's law: A the most popular; 0: all alike (0)"
    )
    load.add_argument("--warmup", type=int, default=0, metavar="N", help="uncounted requests before the run (0)")
    load.add_argument(
        "--prompt-form", choices=("ids", "text"), help="token ids, or words of about a token each (ids; chat: text)"
    )
    load.add_argument(
        "--send-targets", action="store_true", help="tell the server each request's targets (policy: deadline)"
    )
    load.add_argument("--token-range", type=_range, default=(1000, 8000), metavar="LOW,HIGH", help="ids (1000,8000)")
    shown = parser.add_argument_group("report")
    shown.add_argument("--goodput", metavar="LIMITS", help="ttft:MS,tpot:MS,e2e:MS, some or all of them")
    add_json_flag(parser)
    shown.add_argument("--plot", type=Path, metavar="IMAGE", help="draw the run: .png or .svg (needs octavo[plot])")
    add_report_flag(parser)
    return parser


def run(arguments: Arguments) -> int:
    """Runs the benchmark and prints a report, or JSON; returns the exit code."""
    from octavo.lab.bench.serve_plot import draw, make_page
    from octavo.lab.plots.style import load_matplotlib, save

    refuse_words(arguments)
    _check(arguments)
    if arguments.plot is not None or arguments.report is not None:
        load_matplotlib()
    with json_output(arguments) as stream:
        report, outcomes = _measure(arguments, stream)
    if arguments.plot is not None:
        save(draw(report, outcomes), arguments.plot)
    if arguments.report is not None:
        options = arguments.plain("json", "plot", "report")
        make_page(report, draw(report, outcomes), arguments.command, options).write(arguments.report)
    return 0 if report.completed else EXIT_FAILED


def _measure(arguments: Arguments, stream: IO[str] | None) -> tuple[ServeReport, list[RequestOutcome]]:
    import asyncio

    from octavo.lab.bench.serve_load import measure
    from octavo.lab.bench.serve_report import Goodput, RunSettings, as_text, make_report

    goodput = Goodput.parse(arguments.goodput) if arguments.goodput else None
    requests, warmup, arrivals = _workload(arguments)
    clients = None if arrivals is not None else arguments.concurrency or 8
    client = _client(arguments)
    what = f"{len(requests)} requests of {clients} clients" if clients is not None else _open_loop(requests)
    with Waiting(f"{what} to {arguments.base_url}", len(requests), first=clients or 1) as waiting:
        running = measure(client, requests, clients=clients, warmup=warmup, ended=waiting.add, begins=waiting.phase)
        outcomes, cpu = asyncio.run(running)
    asked = RunSettings(
        base_url=arguments.base_url,
        model=arguments.model,
        endpoint=arguments.endpoint,
        arrivals=arrivals or f"closed loop, {clients} clients",
        seed=arguments.seed,
    )
    report = make_report(asked, outcomes, cpu, goodput)
    if stream is None:
        print(as_text(report))
    else:
        write_line(stream, report)
    return report, outcomes


def _open_loop(requests: list[Request]) -> str:
    """So many requests, and how long it takes until the last one is sent."""
    return f"{len(requests)} requests, sent within {duration(max((request.at for request in requests), default=0.0))},"


def _check(arguments: Arguments) -> None:
    if not arguments.model:
        raise ConfigError("octavo bench serve needs --model: the name of the model on the server")
    if not arguments.base_url.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url must begin with http:// or https://, not {arguments.base_url!r}")
    if (arguments.request_rate or arguments.arrivals) is not None and arguments.concurrency is not None:
        raise ConfigError("give --request-rate or --arrivals (open loop) or --concurrency (closed loop), not both")
    check_range(arguments, "concurrency")
    check_range(arguments, "warmup", least=0)
    check_range(arguments, "lora_skew", least=0, most=10)
    check_positive(arguments, "timeout")
    if arguments.plot is not None:
        check_image(arguments.plot)
    check_folder(arguments.plot, "--plot")
    check_folder(arguments.report, "--report")
    if arguments.endpoint == "chat" and arguments.prompt_form == "ids":
        raise ConfigError("--endpoint chat takes text; token ids need --endpoint completions")


def _workload(arguments: Arguments) -> tuple[list[Request], list[Request], str | None]:
    """(requests, warm-up requests, description of open-loop arrivals or None)."""
    from octavo.lab.bench.serve_workload import requests, with_models, with_targets
    from octavo.lab.workloads.tokens import text, token_ids

    load = make_workload(arguments, arguments.seed, DEFAULT_REQUESTS if arguments.thorough else FEW_REQUESTS)
    form = arguments.prompt_form or ("text" if arguments.endpoint == "chat" else "ids")
    prompt = text if form == "text" else functools.partial(token_ids, id_range=arguments.token_range)
    counted = requests(load, prompt)
    if arguments.send_targets:
        counted = [with_targets(request) for request in counted]
    if arguments.endpoint == "chat" and not all(isinstance(request.prompt, str) for request in counted):
        raise ConfigError("--endpoint chat takes text, and the trace holds token ids")
    # Other prompts of the same lengths, after the same shared prefixes: what a server caches of these is cached then.
    spare = dataclasses.replace(
        load, requests=arguments.warmup or 1, arrivals=None, conversations=None, trace=None, name="warm-up"
    )
    warmup = requests(itertools.islice(spare, arguments.warmup), prompt)
    if arguments.lora_names:
        counted = with_models(counted, arguments.lora_names, arguments.lora_skew, arguments.seed)
        warmup = with_models(warmup, arguments.lora_names, arguments.lora_skew, arguments.seed + 1)
    if load.arrivals is not None:
        return counted, warmup, str(load.arrivals)
    if load.trace is not None and arguments.concurrency is None:
        return counted, warmup, f"times of {load.trace.name}"
    return counted, warmup, None


def _client(arguments: Arguments) -> Client:
    from octavo.lab.bench.serve_client import Client
    from octavo.lab.bench.serve_workload import extra_fields

    key = None
    if arguments.api_key_env:
        key = os.environ.get(arguments.api_key_env)
        if not key:
            raise ConfigError(f"--api-key-env: there is no environment variable {arguments.api_key_env}")
    # A field of all requests wins over that of one.
    body = {} if arguments.lora_names else {"model": arguments.model}
    body |= extra_fields(arguments.extra_body) if arguments.extra_body else {}
    return Client(arguments.base_url, arguments.endpoint, body, key, arguments.timeout)


def _names(text: str) -> list[str]:
    if not (found := names(text)):
        raise argparse.ArgumentTypeError("it needs a name")
    return found


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(",")
    if not (low.isdigit() and high.isdigit() and int(low) <= int(high)):
        raise argparse.ArgumentTypeError(f"a range is LOW,HIGH, two integers from 0, not {text!r}")
    return int(low), int(high)
