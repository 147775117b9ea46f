"""``octavo bench``: measures this machine, this installation and a model."""

from __future__ import annotations

import argparse
import dataclasses
from typing import IO, Any

import msgspec

from octavo.cli.engine_flags import add_engine_flags, read_engine_config
from octavo.cli.parsing import Arguments, Parser, add_json_flag, json_stream, refuse_words, take_model
from octavo.core.errors import ConfigError

KINDS = ("offline", "kernels")

EXAMPLE = """\
examples:
  octavo bench offline smollm2-135m --batches 1,8,64
  octavo bench offline smollm2-135m --batches 16 --input-len 1024 --json -
  octavo bench kernels smollm2-135m --rows 1,8,64

offline   random prompts of a fixed length as one batch, greedy, to a fixed length; one row a batch size
kernels   each kernel alone at the shapes of the model, and its share of what this machine can do at best
"""


def make_parser() -> Parser:
    """The command's parser."""
    parser = Parser(
        prog="octavo bench",
        usage=f"octavo bench {'|'.join(KINDS)} [options] MODEL",
        description="Measures. Figures are those of this machine at this moment; only ratios of one run count.",
        epilog=EXAMPLE,
    )
    parser.add_argument("--batches", type=_sizes, default=[1, 8, 64], metavar="N,N", help="batch sizes (1,8,64)")
    parser.add_argument("--input-len", type=int, default=128, metavar="N", help="tokens a prompt has (128)")
    parser.add_argument("--output-len", type=int, default=128, metavar="N", help="tokens to generate (128)")
    parser.add_argument("--rows", type=_sizes, default=[1, 8, 64, 512], metavar="N,N", help="for kernels (1,8,64,512)")
    add_json_flag(parser)
    add_engine_flags(parser)
    return parser


def run(arguments: Arguments) -> int:
    """Measures and prints a table, or JSON lines."""
    if not arguments.words or arguments.words[0] not in KINDS:
        raise ConfigError(f"octavo bench needs what to measure: {', '.join(KINDS)}")
    measure = {"offline": _offline, "kernels": _kernels}[arguments.words.pop(0)]
    model = take_model(arguments)
    refuse_words(arguments)
    for name in ("input_len", "output_len"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(arguments, name)}")
    if arguments.json is None:
        measure(arguments, model, None)
    else:
        with json_stream(arguments.json) as stream:
            measure(arguments, model, stream)
    return 0


def _offline(arguments: Arguments, model: str | None, stream: IO[str] | None) -> None:
    from octavo.bench.offline import measure
    from octavo.engine.llm import LLM

    asked = read_engine_config(arguments, model).model_dump(exclude_unset=True)
    longest = arguments.input_len + arguments.output_len
    options = {"max_model_len": longest, "max_num_seqs": max(arguments.batches), **asked, "time_kernels": True}
    llm = LLM(**options)
    if stream is None:
        print("batch  seconds  prefill tok/s  decode tok/s  output tok/s  outside kernels")
    for figures in measure(llm, arguments.batches, arguments.input_len, arguments.output_len):
        if stream is not None:
            stream.write(msgspec.json.encode(_rounded(dataclasses.asdict(figures))).decode() + "\n")
            stream.flush()
            continue
        print(
            f"{figures.batch:5}  {figures.seconds:7.2f}  {figures.prefill_tokens_per_s:13.0f}"
            f"  {figures.decode_tokens_per_s:12.1f}  {figures.output_tokens_per_s:12.1f}"
            f"  {figures.share_outside_kernels:14.1%}",
            flush=True,
        )


def _kernels(arguments: Arguments, model: str | None, stream: IO[str] | None) -> None:
    import torch

    from octavo.bench.kernels import measure
    from octavo.bench.limits import measure_limits
    from octavo.kernels import load_kernels
    from octavo.loader.resolve import resolve_model
    from octavo.models.config import read_model_config

    options = read_engine_config(arguments, model)
    config = read_model_config(resolve_model(options.model, dtype=options.dtype, revision=options.revision))
    kernels = load_kernels(options.kernels, "cpu", head_dim=config.head_dim)
    kernels.set_threads(options.num_threads)
    limits = measure_limits()
    dtype = torch.float32 if options.dtype == "float32" else torch.bfloat16
    if stream is None:
        print(f"{kernels.describe()}, {dtype}: reads {limits.read_gb_s:.1f} GB/s, adds {limits.fma_gflops:.0f} GFLOP/s")
        print(f"{'kernel':22} {'shape':>14} {'rows':>5} {'us':>10} {'GB/s':>7} {'GFLOP/s':>8} {'of limit':>8}")
    with torch.inference_mode():
        for f in measure(kernels, config, dtype, limits, arguments.rows):
            if stream is not None:
                stream.write(msgspec.json.encode(_rounded(dataclasses.asdict(f))).decode() + "\n")
                stream.flush()
                continue
            print(
                f"{f.kernel:22} {f.shape:>14} {f.rows:5} {f.microseconds:10.1f} {f.gb_per_s:7.1f} {f.gflop_per_s:8.1f}"
                f" {f.share_of_limit:8.0%}",
                flush=True,
            )


def _rounded(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}


def _sizes(text: str) -> list[int]:
    sizes = [int(word) for word in text.split(",") if word.strip().isdigit()]
    if not sizes or len(sizes) != text.count(",") + 1 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"batch sizes are integers from 1 with commas between, not {text!r}")
    return sizes
