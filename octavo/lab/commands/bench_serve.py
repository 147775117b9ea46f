"""``octavo bench serve``: load on an OpenAI-compatible server, and latencies as seen by its clients."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

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
from octavo.lab.commands.records import add_again_flag
from octavo.lab.commands.scenario_flag import add_scenario_flag, read_scenario
from octavo.lab.commands.waiting import Waiting, add_thorough_flag, duration
from octavo.lab.plots.style import check_image
from octavo.lab.workloads.flags import DEFAULT_REQUESTS, FORMS, add_seed_flag, add_workload_flags, make_workload

if TYPE_CHECKING:
    from octavo.lab.bench.serve_client import Client, RequestOutcome
    from octavo.lab.bench.serve_report import ServeReport
    from octavo.lab.bench.serve_workload import Request
    from octavo.lab.workloads.work_items import WorkItem

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
  octavo bench serve --model m --scenario mine.yaml
  octavo bench serve --model m --request-rate 1 --input-len chat --output-len chat --turns geometric:4 --think-time 20

{FORMS}
Of several --repeats the report is that of the median run, by output tokens a second, with the range of all. A run
beside which the machine changed (a slower reference load before or after it; time of other processes or of the
hypervisor during it) is marked; --again repeats it, with prompts of its own.
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
    add_scenario_flag(parser)
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
    load.add_argument("--repeats", type=int, default=1, metavar="N", help="runs, with seeds from --seed on (1)")
    load.add_argument("--warmup", type=int, default=0, metavar="N", help="uncounted requests before the run (0)")
    load.add_argument(
        "--prompt-form", choices=("ids", "text"), help="token ids, or words of about a token each (ids; chat: text)"
    )
    load.add_argument(
        "--send-targets", action="store_true", help="tell the server each request's targets (policy: deadline)"
    )
    load.add_argument("--token-range", type=_range, default=(1000, 8000), metavar="LOW,HIGH", help="ids (1000,8000)")
    # It is load on somebody's server: nothing is sent twice unasked.
    add_again_flag(parser, 0)
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
    from octavo.lab.bench.serve_report import Goodput, RunSettings, as_text, make_report, ranges, ranges_text
    from octavo.lab.bench.steady import Guard, Machine, listening_process

    goodput = Goodput.parse(arguments.goodput) if arguments.goodput else None
    loads = [_workload(arguments, arguments.seed + repeat) for repeat in range(arguments.repeats)]
    requests, _, arrivals = loads[0]
    clients = None if arrivals is not None else arguments.concurrency or 8
    what = f"{len(requests)} requests of {clients} clients" if clients is not None else _open_loop(requests)
    many = f"{arguments.repeats} times " if arguments.repeats > 1 else ""
    total = sum(len(load[0]) for load in loads)

    def run(repeat: int, attempts: Iterator[int], waiting: Waiting) -> tuple[ServeReport, list[RequestOutcome]]:
        attempt, seed = next(attempts), arguments.seed + repeat
        requests, warmup, _ = loads[repeat] if not attempt else _workload(arguments, seed, attempt)
        client = _client(arguments)
        running = measure(client, requests, clients=clients, warmup=warmup, ended=waiting.add, begins=waiting.phase)
        outcomes, cpu = asyncio.run(running)
        asked = RunSettings(
            base_url=arguments.base_url,
            model=arguments.model,
            endpoint=arguments.endpoint,
            arrivals=arrivals or f"closed loop, {clients} clients",
            seed=seed,
        )
        return make_report(asked, outcomes, cpu, goodput), outcomes

    url = urlsplit(arguments.base_url)
    local = url.hostname in ("127.0.0.1", "localhost", "::1")
    server = listening_process(url.port or (443 if url.scheme == "https" else 80)) if local else None
    with Waiting(f"{many}{what} to {arguments.base_url}", total, first=clients or 1) as waiting:
        guard = Guard(Machine(pids=[server] if server else []), again=arguments.again, say=waiting.say)
        jobs = {
            f"seed {arguments.seed + repeat}": functools.partial(run, repeat, itertools.count(), waiting)
            for repeat in range(arguments.repeats)
        }
        runs = guard.measure(jobs)
    results = sorted((each.result for each in runs), key=lambda of: of[0].output_tokens_per_s)
    report, outcomes = results[(len(runs) - 1) // 2]
    reports, notes = [of for of, _ in results], guard.report()
    if stream is None:
        print("\n".join([as_text(report), *ranges_text(reports), *notes]))
    else:
        more = {"repeats": len(runs), "ranges": ranges(reports), "conditions": [each.as_json() for each in runs]}
        write_line(stream, {**msgspec.structs.asdict(report), **more})
        for note in notes:
            print(note, file=sys.stderr)
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
    check_range(arguments, "repeats")
    check_range(arguments, "warmup", "again", least=0)
    check_range(arguments, "lora_skew", least=0, most=10)
    check_positive(arguments, "timeout")
    if arguments.plot is not None:
        check_image(arguments.plot)
    check_folder(arguments.plot, "--plot")
    check_folder(arguments.report, "--report")
    if arguments.endpoint == "chat" and arguments.prompt_form == "ids":
        raise ConfigError("--endpoint chat takes text; token ids need --endpoint completions")


def _workload(arguments: Arguments, seed: int, attempt: int = 0) -> tuple[list[Request], list[Request], str | None]:
    """(requests, warm-up requests, description of open-loop arrivals or None).

    Another ``attempt`` has the same requests with other prompts, as the server may have cached those before.
    """
    from octavo.lab.bench.serve_workload import requests, with_models, with_targets
    from octavo.lab.workloads.tokens import text, token_ids
    from octavo.lab.workloads.work_items import other_content

    items, spare, arrivals = _items(arguments, seed)
    form = arguments.prompt_form or ("text" if arguments.endpoint == "chat" else "ids")
    prompt = text if form == "text" else functools.partial(token_ids, id_range=arguments.token_range)
    counted = requests([other_content(item, f"attempt {attempt}") for item in items] if attempt else items, prompt)
    if arguments.send_targets:
        counted = [with_targets(request) for request in counted]
    if arguments.endpoint == "chat" and not all(isinstance(request.prompt, str) for request in counted):
        raise ConfigError("--endpoint chat takes text, and the trace holds token ids")
    warmup = requests(itertools.islice(spare, arguments.warmup), prompt)
    if arguments.lora_names:
        counted = with_models(counted, arguments.lora_names, arguments.lora_skew, seed)
        warmup = with_models(warmup, arguments.lora_names, arguments.lora_skew, seed + 1)
    return counted, warmup, arrivals


def _items(arguments: Arguments, seed: int) -> tuple[list[WorkItem], Iterable[WorkItem], str | None]:
    """(requests, others of such lengths after the same shared prefixes, description of open-loop arrivals or None)."""
    from octavo.lab.workloads.work_items import other_content

    if (scenario := read_scenario(arguments)) is not None:
        if scenario.inputs is not None:
            raise ConfigError(
                f"the rates of the scenario {scenario.name} are shares of a capacity, which bench serve does not know: "
                "give request-rate in a file, or measure with octavo bench policies --places server"
            )
        items = list(scenario.make(float("inf"), seed))
        is_open = arguments.concurrency is None and items[-1].at > 0
        spare = (other_content(item, "warm-up") for item in items)
        return items, spare, f"scenario {scenario.name}" if is_open else None
    load = make_workload(arguments, seed, DEFAULT_REQUESTS if arguments.thorough else FEW_REQUESTS)
    # What a server caches of these is cached then.
    others = dataclasses.replace(
        load, requests=arguments.warmup or 1, arrivals=None, conversations=None, trace=None, name="warm-up"
    )
    if load.arrivals is not None:
        return list(load), others, str(load.arrivals)
    if load.trace is not None and arguments.concurrency is None:
        return list(load), others, f"times of {load.trace.name}"
    return list(load), others, None


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
