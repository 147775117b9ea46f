"""``octavo bench images``: prints what text streams lose while images are encoded."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.flags import add_engine_flags, read_engine_config, take_model
from octavo.cli.parsing import Arguments, Parser, add_json_flag, check_positive, check_range, json_output
from octavo.config.sources import configured_model
from octavo.core.errors import ConfigError
from octavo.lab.commands.records import show

if TYPE_CHECKING:
    from octavo.config.engine_config import EngineConfig
    from octavo.lab.bench.image_gaps import GapFigures

EXAMPLE = """\
examples:
  octavo bench images                                   # the shape of SmolVLM-256M with random weights
  octavo bench images --clients 4 --image-step-ms 20 --json -
  octavo bench images HuggingFaceTB/SmolVLM-256M-Instruct --side 512

Streams of text decode all the time, alone for --seconds; then as many requests come at once with an image each, all
different, of --side x --side pixels. Gaps are between tokens of the text streams. Wants a quiet machine.
"""


def make_parser() -> Parser:
    """The parser of ``octavo bench images``."""
    parser = Parser(
        prog="octavo bench images",
        usage="octavo bench images [MODEL] [options]",
        description="Measures gaps between tokens of text streams, alone and beside requests with images.",
        epilog=EXAMPLE,
    )
    parser.add_argument("--clients", type=int, default=16, metavar="N", help="text streams, and images (16)")
    parser.add_argument("--side", type=int, default=512, metavar="N", help="pixels of an image's sides (512)")
    parser.add_argument("--seconds", type=float, default=8.0, metavar="S", help="of text alone (8)")
    add_json_flag(parser)
    add_engine_flags(parser)
    return parser


def run(arguments: Arguments) -> int:
    """Measures and prints two lines, or JSON lines."""
    from octavo.lab.bench.image_gaps import write_shape

    check_range(arguments, "clients", least=1)
    check_range(arguments, "side", least=1)
    check_positive(arguments, "seconds")
    with tempfile.TemporaryDirectory() as folder, json_output(arguments) as stream:
        model = take_model(arguments)
        defaults: dict[str, Any] = {"max_model_len": 4096}
        if model is None and configured_model(arguments.config) is None:
            write_shape(Path(folder))
            model, defaults["load_format"] = folder, "dummy"
        options = read_engine_config(arguments, model)
        unset = {name: value for name, value in defaults.items() if name not in options.model_fields_set}
        figures = asyncio.run(_measure(options.model_copy(update=unset), arguments))
        show(
            figures,
            stream,
            "images  seconds  tokens/s  gap ms: median     99 %    worst  first token after s: first     last",
            lambda f: (
                f"{f.images:6}  {f.seconds:7.1f}  {f.tokens_per_s:8.0f}  {f.median_ms:14.0f}  {f.p99_ms:7.0f}"
                f"  {f.worst_ms:7.0f}" + ("" if f.first_s is None else f"  {f.first_s:26.1f}  {f.last_s:7.1f}")
            ),
        )
    return 0


async def _measure(options: EngineConfig, arguments: Arguments) -> tuple[GapFigures, GapFigures]:
    from octavo.engine.async_llm import AsyncLLM
    from octavo.lab.bench.image_gaps import measure

    async with AsyncLLM(options) as llm:
        if llm.model_config.image_facts is None:
            raise ConfigError(f"octavo bench images needs a model that sees images, and {options.model!r} does not")
        return await measure(llm, arguments.clients, arguments.side, arguments.seconds)
