"""``octavo pull``: downloads a model."""

from __future__ import annotations

import sys

from octavo.cli.parsing import Arguments, Parser
from octavo.core.errors import ConfigError
from octavo.loader.builtin import BUILTIN

EXAMPLE = """\
examples:
  octavo pull smollm2-135m
  octavo pull HuggingFaceTB/SmolLM2-360M-Instruct

built-in models:
""" + "".join(f"  {model.name:<17} {model.description}\n" for model in BUILTIN.values())


def make_parser() -> Parser:
    """The command's parser."""
    return Parser(
        prog="octavo pull",
        usage="octavo pull [options] NAME",
        description="Downloads a model, unless it is cached, and prints its folder.",
        epilog=EXAMPLE,
    )


def run(arguments: Arguments) -> int:
    """Downloads the model and prints its folder."""
    if len(arguments.words) != 1:
        raise ConfigError("octavo pull takes one NAME, as in: octavo pull smollm2-135m")
    from octavo.loader.resolve import resolve_model

    name = arguments.words[0]
    print(resolve_model(name))
    if name in BUILTIN and BUILTIN[name].is_base:
        print(f"octavo: {name} is a base model: it continues texts and answers no questions", file=sys.stderr)
    return 0
