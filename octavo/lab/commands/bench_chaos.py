"""``octavo bench chaos``: whether answers are the same while a server's processes are killed, stopped and starved."""

from __future__ import annotations

import sys
from pathlib import Path

from octavo.cli.flags import add_engine_flags, read_engine_config, take_model
from octavo.cli.parsing import (
    EXIT_FAILED,
    Arguments,
    Parser,
    add_json_flag,
    check_folder,
    check_positive,
    check_range,
    json_output,
    write_line,
)
from octavo.core.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m"
EXAMPLE = """\
examples:
  octavo bench chaos
  octavo bench chaos smollm2-135m --clients 16 --duration 60 --interval 10 --json chaos.json
  octavo bench chaos --data-parallel-size 2 --standby-engines 1
  octavo bench chaos --tensor-parallel-size 2 --faults kill,stop --step-timeout 5
  octavo bench chaos --interval 0 --kinds chat,beams
  octavo bench chaos --stores disk,shared --num-gpu-blocks-override 600 --faults kill,damage,fill,store-kill,store-pause

It starts a server of its own, with the engine's options that are given (--engine-restarts without a limit and
--step-timeout 10, if they are not, of which the time does not count in which other processes had the processors;
n-gram drafts, except with pipeline stages). Each distinct request is first computed
alone. Then the clients ask for them at random, while engine cores and workers are killed (SIGKILL), stopped (SIGSTOP),
paused (SIGSTOP, then SIGCONT) and starved (lowest priority beside busy processes). Every answer must be the one that
the request got alone, bit for bit: texts, token ids, logprobs, finish reasons, usage. Processes, shared memory,
descriptors and files must be as before in the end. With --stores the server has KV stores on a small disk (a mounted
one, if the user may) and in a Redis server of 64 MiB; values are damaged, the disk is filled, and the Redis server is
killed and stopped, too. --seed decides what is asked and what is hit when. Exit code 1 if anything fails.
"""


def make_parser() -> Parser:
    """The command's parser."""
    from octavo.lab.bench.chaos_faults import FAULTS
    from octavo.lab.bench.chaos_stores import FAULTS as STORE_FAULTS
    from octavo.lab.bench.chaos_workload import KINDS

    parser = Parser(
        prog="octavo bench chaos",
        usage="octavo bench chaos [options] [MODEL]",
        description="Kills, stops and starves engine cores and workers of a server under load; compares all answers.",
        epilog=EXAMPLE,
    )
    chaos = parser.add_argument_group("chaos").add_argument
    chaos("--clients", type=int, default=64, metavar="N", help="streams that are open at once (64)")
    chaos("--duration", type=float, default=600.0, metavar="S", help="seconds in which requests begin (600)")
    chaos("--interval", type=float, default=15.0, metavar="S", help="mean seconds between faults; 0: none (15)")
    chaos("--kinds", default=",".join(KINDS), metavar="K,K", help=f"of requests ({','.join(KINDS)})")
    of_stores = ", ".join(f"{fault} ({store})" for fault, store in STORE_FAULTS.items())
    chaos(
        "--faults",
        metavar="F,F",
        help=f"kinds of faults ({','.join(FAULTS)}, and those of the stores: {of_stores})",
    )
    chaos("--stores", metavar="S,S", help="KV stores for the server: disk, shared (needs redis-server)")
    chaos(
        "--patience", type=float, default=300.0, metavar="S", help="seconds without a chunk that break a stream (300)"
    )
    chaos("--log", type=Path, metavar="FILE", help="write what the server logs to this file")
    add_json_flag(parser)
    add_engine_flags(parser)
    return parser


def run(arguments: Arguments) -> int:
    """Runs it and prints the report, or JSON; returns the exit code."""
    from octavo.lab.bench import chaos_run
    from octavo.lab.bench.chaos_faults import FAULTS
    from octavo.lab.bench.chaos_report import as_text
    from octavo.lab.bench.chaos_stores import FAULTS as STORE_FAULTS

    model = take_model(arguments)
    options = read_engine_config(arguments, model or DEFAULT_MODEL)
    check_range(arguments, "clients", most=1024)
    check_range(arguments, "interval", least=0)
    check_positive(arguments, "duration", "patience")
    check_folder(arguments.log, "--log")
    stores = tuple(arguments.stores.split(",")) if arguments.stores else ()
    known = (*FAULTS, *(fault for fault, store in STORE_FAULTS.items() if store in stores))
    settings = chaos_run.ChaosSettings(
        clients=arguments.clients,
        duration=arguments.duration,
        interval=arguments.interval,
        kinds=tuple(arguments.kinds.split(",")),
        faults=tuple(arguments.faults.split(",")) if arguments.faults else known,
        stores=stores,
        patience=arguments.patience,
        log=arguments.log,
    )
    if unknown := set(settings.faults) - set(known):
        raise ConfigError(f"there is no fault {sorted(unknown)[0]!r}; there are {', '.join(known)}")
    with json_output(arguments) as stream:
        report = chaos_run.run(options, settings, lambda words: print(words, file=sys.stderr, flush=True))
        if stream is not None:
            write_line(stream, report)
    if arguments.json != "-":
        print(as_text(report))
    return 0 if report.passed else EXIT_FAILED
