"""``octavo bench``: measures throughput, kernels, memory use, the scheduler, executors, a server."""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any

from octavo.cli.flags import add_engine_flags, read_engine_config, refuse_idle_flags, take_model
from octavo.cli.parsing import Arguments, Parser, add_json_flag, check_positive, check_range, json_output, refuse_words
from octavo.core.errors import ConfigError
from octavo.lab.commands import (
    bench_allocators,
    bench_calibrate,
    bench_chaos,
    bench_failover,
    bench_grammar,
    bench_images,
    bench_kernels,
    bench_policies,
    bench_serve,
    bench_speculation,
)
from octavo.lab.commands.records import add_again_flag, show
from octavo.lab.commands.waiting import Waiting

if TYPE_CHECKING:
    from octavo.config.engine_config import EngineConfig
    from octavo.config.kv_spec import KVSpec
    from octavo.lab.bench.windows import WindowFigures

KINDS = (
    "offline",
    "kernels",
    "memory",
    "scheduler",
    "executor",
    "calibrate",
    "simulation",
    "failover",
    "grammar",
    "allocators",
    "policies",
    "images",
    "serve",
    "chaos",
)
#: Kinds with a parser of their own.
OWN_PARSERS = {
    "allocators": bench_allocators,
    "policies": bench_policies,
    "images": bench_images,
    "serve": bench_serve,
    "chaos": bench_chaos,
}

EXAMPLE = """\
examples:
  octavo bench offline smollm2-135m --batches 1,8,64
  octavo bench offline smollm2-135m --batches 16 --input-len 1024 --json -
  octavo bench offline llama-3.1-8b-shape --load-format dummy --input-len 1024
  octavo bench offline smollm2-135m --speculative ngram,suffix --batches 1,4,16,64
  octavo bench kernels smollm2-135m --rows 1,8,64
  octavo bench kernels llama-3.1-8b-shape --device cuda --rows 1,64,8192
  octavo bench memory smollm2-135m
  octavo bench scheduler --running 64,256,1024 --waiting 10000 --scheduling-policy sjf
  octavo bench executor --running 1,64,1024 --tensor-parallel-size 2
  octavo bench calibrate smollm2-135m --json profile.json
  octavo bench simulation smollm2-135m --profile profile.json --seconds 20
  octavo bench failover smollm2-135m --data-parallel-size 2 --num-threads 1 --failures kill,drain,restart
  octavo bench grammar smollm2-135m --batches 1,64
  octavo bench allocators smollm2-135m --cases short,long
  octavo bench policies smollm2-135m --places process,simulated
  octavo bench images
  octavo bench serve --model smollm2-135m --concurrency 16
  octavo bench chaos smollm2-135m --duration 60

offline    throughput of batches of random prompts, greedy decoding to a fixed length; one row for each batch size:
           medians of --rounds, which are interleaved, and the range of the seconds. A run beside which the machine
           changed is repeated up to --again times, and marked with * if that did not help.
           With --speculative: of drafters against no drafts, in turns, on texts to write out again with a change,
           chats, the same chats again, random tokens and code; further fields of --speculative-config count for each
kernels    each kernel alone at the shapes of the model, and its share of the machine's peak rates
memory     share of the KV cache that holds tokens, on a trace of mixed lengths; what attention windows save, of the
           model if it has any, else of shapes that do; and savings by sharing
scheduler  processor time of schedule and update in a step, in microseconds, without a model; the scheduler's options
           and those of the blocks count, others are refused; the slowest of 1,000 steps also by the clock, with the
           time of other processes; and how often the garbage collector ran in them, by generation
executor   microseconds from a step's plan to its result, without a model, for the workers of the parallelism options
calibrate  seconds of steps of a model, and the profile for 'octavo simulate' that fits them; wants a quiet machine.
           With --kv-disk DIR, what a KV store in this folder costs, too
simulation workloads on the engine, by the clock, and the same simulated with a profile: how far the figures differ;
           medians of --rounds, a disturbed run is repeated up to --again times and marked with * if that did not help
failover   a server's replica is killed under load, or drained for a while, or all are restarted one after the other
           (--failures): latencies, pauses and recovery, measured, and simulated with the profile of one replica;
           --seconds of arrivals at the share --load of what the replicas can serve
grammar    structured output: time of masks for ten schemas of growing size, throughput of batches whose requests all
           have a schema against none, and what a schema adds to the time to the first token; --batches, --output-len
           and --rounds count
allocators paged against contiguous KV caches: octavo bench allocators --help
policies   scheduling policies on scenarios, in process, on a server, simulated: octavo bench policies --help
images     gaps between tokens of text streams, alone and beside requests with images: octavo bench images --help
serve      latency and throughput of a server over HTTP; its options: octavo bench serve --help
chaos      whether answers stay the same while processes of a server are killed: octavo bench chaos --help
"""


class _BenchParser(Parser):
    """Passes arguments after a kind of ``OWN_PARSERS`` to the parser of that kind, which has other options."""

    def read(self, argv: Sequence[str]) -> Arguments:
        if not argv or argv[0] not in OWN_PARSERS:
            return super().read(argv)
        arguments = OWN_PARSERS[argv[0]].make_parser().read(argv[1:])
        arguments.words.insert(0, argv[0])
        arguments.has_own_parser = True
        return arguments


def make_parser() -> Parser:
    """The command's parser."""
    parser = _BenchParser(
        prog="octavo bench",
        usage=f"octavo bench {'|'.join(KINDS)} [options] [MODEL]",
        description="Runs a benchmark. On a shared machine only ratios within one run are meaningful.",
        epilog=EXAMPLE,
    )
    parser.kinds = {kind: OWN_PARSERS[kind].make_parser if kind in OWN_PARSERS else None for kind in KINDS}
    parser.add_argument("--batches", type=_sizes, default=[1, 8, 64], metavar="N,N", help="batch sizes (1,8,64)")
    parser.add_argument("--input-len", default="128", metavar="LEN", help="length of prompts in tokens (128)")
    parser.add_argument("--output-len", default="128", metavar="LEN", help="tokens to generate (128)")
    parser.add_argument(
        "--rows", type=_sizes, default=[1, 8, 64, 512], metavar="N,N", help="rows of products (1,8,64,512)"
    )
    parser.add_argument(
        "--running", type=_sizes, default=[64, 256, 1024], metavar="N,N", help="decoding sequences (64,256,1024)"
    )
    parser.add_argument("--waiting", type=int, default=0, metavar="N", help="waiting requests (0)")
    parser.add_argument("--context", type=int, default=256, metavar="N", help="tokens in context of each (256)")
    parser.add_argument(
        "--profile", default="smollm2-135m-2-cores", metavar="NAME|FILE", help="of a simulation (smollm2-135m-2-cores)"
    )
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="of each workload's arrivals (20)")
    parser.add_argument("--load", type=float, default=0.5, metavar="X", help="of failover: share of the capacity (0.5)")
    parser.add_argument(
        "--failures", default="kill", metavar="F,F", help="of failover: kill, drain, restart, one run each (kill)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        metavar="N",
        help="of offline, a calibration, simulation, comparison of drafters, or of grammar: times are medians (3)",
    )
    add_again_flag(parser)
    parser.add_argument(
        "--speculative",
        metavar="METHOD,...",
        help="of offline: compare drafters (ngram, suffix; prediction, where requests predict their answers rightly) "
        "with no drafts; each may have fields of its own, as in ngram,ngram:adaptive=false",
    )
    parser.add_argument(
        "--with-server", action="store_true", help="of a calibration: measure what a server adds to the steps, too"
    )
    add_json_flag(parser)
    add_engine_flags(parser)
    return parser


def run(arguments: Arguments) -> int:
    """Runs a benchmark and prints a table, or JSON lines."""
    if not arguments.words or arguments.words[0] not in KINDS:
        raise ConfigError(f"octavo bench needs a kind of benchmark: {', '.join(KINDS)}")
    kind = arguments.words.pop(0)
    if kind in OWN_PARSERS:
        if not hasattr(arguments, "has_own_parser"):
            raise ConfigError(f"{kind!r} must come right after 'octavo bench', before its options")
        return OWN_PARSERS[kind].run(arguments)
    model = None
    if kind in ("scheduler", "executor"):
        refuse_words(arguments)
    else:
        model = take_model(arguments)
    for name, least in (("context", 32), ("waiting", 0), ("rounds", 1), ("again", 0)):
        check_range(arguments, name, least=least)
    measure = {
        "offline": _offline,
        "kernels": bench_kernels.run,
        "memory": _memory,
        "scheduler": _scheduler,
        "executor": _executor,
        "calibrate": bench_calibrate.run,
        "grammar": bench_grammar.run,
        "simulation": _simulation,
        "failover": bench_failover.run,
    }[kind]
    with json_output(arguments) as stream:
        measure(arguments, model, stream)
    return 0


def _offline(arguments: Arguments, model: str | None, stream: IO[str] | None) -> None:
    from octavo.engine.llm import LLM
    from octavo.kernels import resolve_device
    from octavo.lab.bench.offline import RoundsFigures, make_batches, measure_rounds
    from octavo.lab.workloads.lengths import parse_inputs, parse_outputs

    options = read_engine_config(arguments, model)
    if arguments.speculative is not None:
        show(bench_speculation.measure(arguments, options), stream, bench_speculation.TITLE, bench_speculation.line)
        return
    device = resolve_device(options.device)
    limits = None
    if device != "cpu":
        from octavo.kernels.torch_backend import measure_device

        limits = measure_device(device)
    lengths = parse_inputs(arguments.input_len), parse_outputs(arguments.output_len)
    batches = make_batches(arguments.batches, *lengths, options.seed)
    longest = max(item.input_len + item.output_len for batch in batches for item in batch)
    defaults = {"max_model_len": longest, "max_num_seqs": max(arguments.batches), "time_kernels": limits is None}
    llm = LLM(**{**defaults, **options.model_dump(exclude_unset=True)})

    def last(f: RoundsFigures) -> str:
        if f.share_outside_kernels is not None:
            return f"{f.share_outside_kernels:14.1%}"
        return f"{f.decode_step_ms:7.2f}  {f.device_idle_share or 0:8.1%}  {f.share_of_bandwidth or 0:12.1%}"

    runs = len(batches) * arguments.rounds
    with Waiting(f"{runs} runs of batches", runs, first=len(batches)) as waiting:
        figures, notes = measure_rounds(
            llm,
            batches,
            limits.bandwidth_gb_s if limits is not None else None,
            rounds=arguments.rounds,
            again=arguments.again,
            ended=waiting.add,
            say=waiting.say,
        )
    show(
        figures,
        stream,
        "batch   seconds    least  largest  prefill tok/s  decode tok/s  output tok/s  "
        + ("outside kernels" if limits is None else "step ms  GPU idle  of bandwidth"),
        lambda f: (
            f"{f.batch:5}{'*' if f.disturbed else ' '}  {f.seconds:7.2f}  {f.fastest_seconds:7.2f}"
            f"  {f.slowest_seconds:7.2f}  {f.prefill_tokens_per_s:13.0f}  {f.decode_tokens_per_s:12.1f}"
            f"  {f.output_tokens_per_s:12.1f}  {last(f)}"
        ),
    )
    for note in notes:
        print(note, file=sys.stderr if stream is not None else sys.stdout)


def _memory(arguments: Arguments, model: str | None, stream: IO[str] | None) -> None:
    from octavo.engine.llm import LLM
    from octavo.engine.model_files import find_files
    from octavo.lab.bench.memory_use import measure_sharing, measure_use
    from octavo.loader.builtin import SHAPES

    options = read_engine_config(arguments, model)
    asked = options.model_dump(exclude_unset=True)
    show(
        (measure_use(size) for size in (8, 16, 32)),
        stream,
        "block size  running  blocks in use that hold tokens  of the whole cache  contiguous: running  of the cache",
        lambda f: (
            f"{f.block_size:10}  {f.running:7.0f}  {f.share_of_used_blocks:30.1%}  {f.share_of_cache:18.1%}"
            f"  {f.running_if_contiguous:19.0f}  {f.share_if_contiguous:12.1%}"
        ),
    )
    show(
        _windows(options),
        stream,
        "\nlayers with windows     load      cache  blocks         tokens  MiB a request  running  of the cache read",
        lambda f: (
            f"{f.model:22} {f.load:>6}  {f.cache_bytes / 2**30:5.1f} GiB  "
            f"{'of each kind' if f.groups else 'of all layers':13}  {f.tokens:6}  {f.sequence_bytes / 2**20:13.1f}"
            f"  {f.running:7.1f}  {f.share_of_cache:17.1%}"
        ),
    )
    if options.model in SHAPES:  # texts need a tokenizer
        return
    defaults: dict[str, Any] = {"max_model_len": 1024, "num_gpu_blocks_override": 2048}
    if find_files(options).model_config.encoder_facts is not None:  # whose outputs may all be shorter
        del defaults["max_model_len"]
    llm = LLM(**{**defaults, **asked})
    show(
        measure_sharing(llm),
        stream,
        "\nsharing            width or shots  without     with  saved",
        lambda f: f"{f.kind:17}  {f.width:14}  {f.without:7}  {f.with_sharing:7}  {f.saved:5.1%}",
    )


def _windows(options: EngineConfig) -> Iterator[WindowFigures]:
    """Of the model if it has windows, else of published ones."""
    from octavo.lab.bench.windows import SHAPES, measure_windows
    from octavo.loader.resolve import resolve_model
    from octavo.models.config_files import read_model_config
    from octavo.models.network import build_without_weights

    def specs(name: str) -> list[KVSpec]:
        config = read_model_config(resolve_model(name, revision=options.revision, weights=False))
        return build_without_weights(config, "bfloat16", kv_cache_dtype=options.kv_cache_dtype).kv_specs

    own = specs(options.model)
    models = {options.model: own} if any(spec.window for spec in own) else {name: specs(name) for name in SHAPES}
    for name, of_layers in models.items():
        yield from measure_windows(name, of_layers)


def _scheduler(arguments: Arguments, model: str | None, stream: IO[str] | None) -> None:
    from octavo.lab.bench.scheduler_cost import OPTIONS, measure

    why = "octavo bench scheduler, which has no model and sets the sequences by --running"
    refuse_idle_flags(arguments, OPTIONS, why)
    options = read_engine_config(arguments, "none")
    if options.host_prefix_cache and not options.num_host_blocks_override:
        raise ConfigError("host_prefix_cache needs num_host_blocks_override here: without a model there is no memory")
    drafts = options.speculative_config is not None
    outputs = ("repeated", "new") if drafts else ("repeated",)
    cases = itertools.product(arguments.running, outputs)
    show(
        (measure(n, arguments.waiting, arguments.context, options, output=output) for n, output in cases),
        stream,
        "policy  running  waiting  context  schedule us  update us  us a sequence  99.9 % us  slowest us  by the clock"
        "  collections  longest us" + "  output    draft tokens" * drafts,
        lambda f: (
            f"{f.policy:6}  {f.running:7}  {f.waiting:7}  {f.context:7}  {f.schedule_us:11.1f}  {f.update_us:9.1f}"
            f"  {f.us_per_sequence:13.2f}  {f.p999_us:9.0f}  {f.slowest_us:10.0f}  {f.slowest_wall_us:12.0f}"
            f"  {'+'.join(map(str, f.collections)):>11}  {f.longest_collection_us:10.0f}"
            + f"  {f.output:8}  {f.draft_tokens:12.1f}"
            * drafts
        ),
    )


def _executor(arguments: Arguments, model: str | None, stream: IO[str] | None) -> None:
    from octavo.lab.bench.executors import measure

    show(
        measure(read_engine_config(arguments, "none"), arguments.running),
        stream,
        "executor          workers  sequences  step us",
        lambda f: f"{f.executor:16}  {f.workers:7}  {f.sequences:9}  {f.step_us:7.1f}",
    )


def _simulation(arguments: Arguments, model: str | None, stream: IO[str] | None) -> None:
    from octavo.engine.llm import LLM
    from octavo.lab.bench.steady import Guard
    from octavo.lab.bench.validate import ValidatedWorkload, compare, summary
    from octavo.lab.simulate.step_profile import load_profile

    profile = load_profile(arguments.profile)
    check_positive(arguments, "seconds")
    llm = LLM(**read_engine_config(arguments, model).model_dump(exclude_unset=True))
    comparisons: list[ValidatedWorkload] = []
    guard = Guard(again=arguments.again, say=logging.getLogger("octavo").info)

    def collected() -> Iterator[ValidatedWorkload]:
        for comparison in compare(llm, profile, arguments.seconds, rounds=arguments.rounds, guard=guard):
            comparisons.append(comparison)
            yield comparison

    def line(c: ValidatedWorkload) -> str:
        each = zip(c.pairs, c.errors, c.paced_errors, c.followed_errors, strict=True)
        columns = (f"{m:8.3f} {error:+7.1%} {paced:+7.1%} {followed:+7.1%}" for (m, _), error, paced, followed in each)
        mark = "*" if c.disturbed else " "
        return f"{c.kind:13} {c.load:5.0%}{mark}{c.requests:8} {c.pace:6.3f}  " + "  ".join(columns)

    names = "".join(f"  {name:>32}" for name in ValidatedWorkload.FIGURES)
    explained = "(measured in s; simulated; simulated at this pace; at the pace of each 2 s)"
    title = f"kind           load requests   pace{names}\n{'':37}{explained}"
    show(collected(), stream, title, line)
    if stream is None:
        print("\n".join([summary(comparisons), *guard.report()]))


def _sizes(text: str) -> list[int]:
    sizes = [int(word) for word in text.split(",") if word.strip().isdigit()]
    if not sizes or len(sizes) != text.count(",") + 1 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"sizes are integers from 1 with commas between, not {text!r}")
    return sizes
