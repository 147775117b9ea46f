"""``octavo pull``: downloads a model."""

from __future__ import annotations

from octavo.cli.parsing import Arguments, Parser
from octavo.core.errors import ConfigError

EXAMPLE = """\
example:
  octavo pull smollm2-135m
"""


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
    from octavo.loader.resolve import pull

    print(pull(arguments.words[0], progress=True))
    return 0
