"""``octavo fit``: which types, cache and context of a model fit this machine, and how fast they are."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from octavo.cli.flags import COMMON_OPTIONS, add_engine_flags, read_engine_config, take_model
from octavo.cli.parsing import Arguments, Parser, add_json_flag, check_positive, check_range, write_json
from octavo.config.engine_config import EngineConfig
from octavo.core.errors import ConfigError, InsufficientMemoryError, OctavoError
from octavo.loader.files import readable_size

if TYPE_CHECKING:
    from octavo.engine.fit import Choice, Fit, Load

logger = logging.getLogger("octavo.startup")

EXAMPLE = """\
examples:
  octavo fit smollm2-135m
  octavo fit unsloth/Qwen3-0.6B-GGUF:Q4_K_M --memory 4GiB
  octavo fit ./my-model --users 8 --context 8192 --tpot 0.1
  octavo fit ./my-model --users 8 --json -
  octavo serve ./my-model --fit --users 8

Nothing is loaded: of the weights, the headers are read. Rates of this machine are measured at first use, in some
seconds, and kept in the cache folder. Exit code 1: no choice gives what is asked.
"""


def make_parser() -> Parser:
    parser = Parser(
        prog="octavo fit",
        usage="octavo fit [options] [MODEL]",
        description="Shows which types of weights and cache, batch and context of a model fit this machine, what they\n"
        "take and how fast they are, and the command that serves the best of them.",
        epilog=EXAMPLE,
    )
    add_load_flags(parser)
    parser.add_argument(
        "--no-speed", action="store_true", help="measure nothing: tell memory alone, unless --ttft or --tpot is given"
    )
    add_json_flag(parser)
    add_engine_flags(parser)
    parser.rare |= {f"engine:{name}" for name in COMMON_OPTIONS}
    return parser


def add_load_flags(parser: Parser) -> None:
    """Adds the flags of what is asked of an engine; ``--memory`` unless the command has it already."""
    if "--memory" not in parser._option_string_actions:
        parser.add_argument(
            "--memory",
            type=_bytes,
            metavar="BYTES",
            help="memory of all processes together, as in 4GiB (default: what is free)",
        )
    parser.add_argument("--users", type=int, metavar="N", help="sequences at once (default: as many as fit)")
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens of prompt and answer (default: the longest that fits)"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="tokens of a prompt, for the speed (default: 512)"
    )
    parser.add_argument("--ttft", type=float, metavar="SECONDS", help="most seconds to a prompt's first token, alone")
    parser.add_argument(
        "--tpot", type=float, metavar="SECONDS", help="most seconds per token of each user, with all users"
    )


def _bytes(text: str) -> int:
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        size = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"must be a number of bytes, as in 4GiB, not {text!r}")
    return size


#: Flags of a load that mean nothing else in ``octavo serve``.
LOAD = ("users", "context", "prompt_tokens", "ttft", "tpot")


def refuse_load_without_fit(arguments: Arguments) -> None:
    for name in LOAD:
        if getattr(arguments, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is of --fit, which is not given")


def read_load(arguments: Arguments, options: EngineConfig) -> Load:
    """``--max-model-len`` and ``--max-num-seqs`` mean a context and users too."""
    from octavo.engine.fit import Load

    check_range(arguments, "users", "context", "prompt_tokens")
    check_positive(arguments, "ttft", "tpot")
    users = options.max_num_seqs if "max_num_seqs" in options.model_fields_set else None
    return Load(
        users=arguments.users or users,
        context=arguments.context or options.max_model_len,
        prompt=arguments.prompt_tokens,
        ttft=arguments.ttft,
        tpot=arguments.tpot,
    )


@contextmanager
def open_fit(options: EngineConfig, memory: int | None = None, *, speed: bool = True) -> Iterator[Fit]:
    """The choices of a model; of one of the hub that is not cached, headers of weights are fetched.

    Raises:
        OctavoError: there is no such model, or it cannot be served.
    """
    from octavo.cli.info import cpu_name, describe_model
    from octavo.engine.fit import Fit, MemoryBounds
    from octavo.engine.machine_rates import MachineRates
    from octavo.kernels import load_kernels, resolve_device
    from octavo.loader.weights import read_config

    device = resolve_device(options.device)
    kernels = load_kernels(options.kernels, device, deterministic=options.deterministic)
    kernels.set_threads(options.num_threads, options.pin_threads)
    rates = None
    if speed and kernels.name == "cpu":
        rates = MachineRates(cpu_name(), kernels)
    with describe_model(options) as described:
        if described.problem is not None or described.folder is None:
            assert described.problem is not None
            raise described.rename(described.problem)
        config = read_config(described.folder, options)
        bounds = MemoryBounds.of_machine(device, memory)
        yield Fit(options, config, kernels, bounds, described.gguf, rates, described.folder)


def run(arguments: Arguments) -> int:
    options = read_engine_config(arguments, take_model(arguments))
    load = read_load(arguments, options)
    needs_speed = not arguments.no_speed or load.ttft is not None or load.tpot is not None
    with open_fit(options, arguments.memory, speed=needs_speed) as fit:
        choices = fit.choices(load)
        fitting = [choice for choice in choices if choice.fits]
        problem = None if fitting else misfit(fit, load, choices)
        if arguments.json is not None:
            best = fitting[0] if fitting else None
            write_json(
                arguments.json,
                {
                    "model": options.model,
                    "available_bytes": fit.bounds.available,
                    "load": load,
                    "choices": [as_facts(fit, choice) for choice in choices],
                    "recommended": None if best is None else as_facts(fit, best),
                    "reason": problem if best is None else reason(choices, load),
                    "command": None if best is None else command(fit, best),
                },
            )
        else:
            print("\n".join(table(choices)))
            if fitting:
                print(f"\n{reason(choices, load)}\n{command(fit, fitting[0])}")
        if problem is not None:
            raise InsufficientMemoryError(problem)
    return 0


def as_facts(fit: Fit, choice: Choice) -> dict[str, Any]:
    """A choice as JSON; times in seconds."""
    speed = None
    if choice.speed is not None:
        speed = dataclasses.asdict(choice.speed) | {"tokens_per_second": choice.speed.tokens_per_second}
    facts = dataclasses.asdict(choice)
    return facts | {"needed_bytes": choice.needed_bytes, "speed": speed, "options": fit.engine_options(choice)}


_HEADS = ("weights", "kv cache", "users", "context", "memory", "first token", "per token", "tokens/s", "")


def table(choices: Sequence[Choice]) -> list[str]:
    """Lines with a row for each choice."""
    rows = [_HEADS]
    for choice in choices:
        speed = choice.speed
        figures = ("not measured", "-", "-")
        if speed is not None:
            figures = (f"{speed.ttft:.3g} s", f"{speed.tpot * 1e3:.3g} ms", f"{speed.tokens_per_second:.3g}")
        form = choice.dtype if choice.quantization == "none" else choice.quantization
        form = "as stored" if form == "auto" else form
        kv = "as weights" if choice.kv_cache_dtype == "auto" else choice.kv_cache_dtype
        sizes = (str(choice.max_num_seqs), str(choice.max_model_len), readable_size(choice.needed_bytes))
        rows.append((form, kv, *sizes, *figures, "; ".join(choice.misses)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def reason(choices: Sequence[Choice], load: Load) -> str:
    """Why the first choice is recommended, as a sentence."""
    best = choices[0]
    wider = [choice for choice in choices[1:] if not choice.fits and choice.quantization == "none"]
    asked = "what is asked" if load != type(load)() else "this machine"
    what = f"recommended: {best.describe()}: the nearest to the checkpoint that fits {asked}"
    if best.quantization not in ("none", "auto") and wider:
        what += f" ({wider[0].dtype}: {wider[0].misses[0]})"
    return what


def command(fit: Fit, choice: Choice) -> str:
    """The command line that serves a choice."""
    options = fit.options
    words = ["octavo", "serve", options.model]
    given = {name: getattr(options, name) for name in options.model_fields_set - {"model"}}
    for name, value in (given | fit.engine_options(choice)).items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif value is not None and isinstance(value, str | int | float):
            words += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


def misfit(fit: Fit, load: Load, choices: Sequence[Choice]) -> str:
    """Says in a line that none of the choices gives what is asked, and the nearest that does fit."""
    fast = [choice for choice in choices if choice.speed is not None]
    if fast:
        closest = min(fast, key=lambda choice: choice.speed.tpot if choice.speed else 0.0)
        last = "no choice is faster, not even for one user"
    else:
        closest = min(choices, key=lambda choice: choice.needed_bytes)
        last = f"the least is {readable_size(fit.least_bytes())}, for one sequence of one block"
    nearest = fit.nearest(load)
    if nearest is not None:
        last = f"the nearest that fits: {command(fit, nearest)} ({nearest.describe()})"
    return f"{fit.options.model} does not fit: {closest.describe()}: {closest.misses[0]}; {last}"


def recommended(options: EngineConfig, arguments: Arguments, memory: int | None) -> EngineConfig:
    """The options with those of the best choice, which is logged (``octavo serve --fit``).

    ``memory``: bytes of all processes together; None: what is free.

    Raises:
        InsufficientMemoryError: no choice gives what is asked.
    """
    load = read_load(arguments, options)
    with open_fit(options, memory) as fit:
        choices = fit.choices(load)
        if not choices[0].fits:
            raise InsufficientMemoryError(misfit(fit, load, choices))
        chosen = fit.engine_options(choices[0])
        logger.info("--fit: %s", reason(choices, load))
        logger.info("--fit: %s", command(fit, choices[0]))
    return EngineConfig(**{name: getattr(options, name) for name in options.model_fields_set} | chosen)


@contextmanager
def nearest_in_errors(options: EngineConfig) -> Iterator[None]:
    """Adds the nearest choice that fits to the error of a model that does not."""
    try:
        yield
    except InsufficientMemoryError as e:
        from octavo.engine.fit import Load

        try:
            with open_fit(options, speed=False) as fit:
                load = Load(users=1, context=options.max_model_len)
                nearest = next((choice for choice in fit.choices(load) if choice.fits), None) or fit.nearest(load)
        except OctavoError:
            raise e from None
        if nearest is None:
            raise
        hint = f"the nearest that fits: {command(fit, nearest)}; 'octavo fit {options.model}' shows all"
        raise InsufficientMemoryError(f"{e}; {hint}") from None
