"""Command lines: argparse with suggestions for unknown flags and positional words between flags."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from octavo.core.errors import ConfigError, InvalidRequestError


def own_flags(argv: Sequence[str], flags: Collection[str]) -> list[str]:
    """Translates other engines' flags in a command line to the command's ``flags``; words after ``--`` stay.

    Only whole words are translated, so that a mistyped ``-max-tokens`` is not ``-m``.
    """
    if all(word.partition("=")[0] in flags or not word.startswith("-") for word in argv):
        return [*argv]
    from octavo.core.foreign import FLAG_VALUES, OTHER_FLAGS

    words: list[str] = []
    values: Mapping[str, str] = {}  # of the flag before
    for number, word in enumerate(argv):
        if word == "--":
            return [*words, *argv[number:]]
        name, equals, value = word.partition("=")
        ours = next((flag for flag in OTHER_FLAGS.get(name, ()) if flag.partition("=")[0] in flags), None)
        if name in flags or ours is None:
            words.append(values.get(word, word))
            values = {}
            continue
        values = FLAG_VALUES.get(ours, {})
        words.append(f"{ours}={values.get(value, value)}" if equals else ours)
        values = {} if equals else values
    return words


EXIT_FAILED = 1
EXIT_USAGE = 2


class Arguments(argparse.Namespace):
    """Parsed arguments; ``words``: the positional arguments in order, ``command``: all words of the call."""

    words: list[str]
    command: list[str]

    def plain(self, *without: str) -> dict[str, Any]:
        """The command's own flags with values and defaults; without ``without``, and without groups."""
        left_out = {"words", "command", *without}
        return {key: value for key, value in vars(self).items() if ":" not in key and key not in left_out}

    def group(self, prefix: str) -> dict[str, Any]:
        """The flags of a group that are set (stored as ``prefix:name``), by name."""
        return {
            key.removeprefix(f"{prefix}:"): value for key, value in vars(self).items() if key.startswith(f"{prefix}:")
        }


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations: suggests the nearest flag for an unknown one, and knows other engines' flags.

    ``read`` collects positional words, which argparse does not let stand between flags.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(
            allow_abbrev=False, add_help=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options
        )
        self.add_argument("-h", "--help", action=_Help, help="show this message and exit; 'all': every option")
        #: ``dest`` of each flag that only ``--help all`` shows.
        self.rare: set[str] = set()
        #: Subcommands, each with the function that makes its own parser, or None.
        self.kinds: dict[str, Callable[[], Parser] | None] = {}

    def read(self, argv: Sequence[str]) -> Arguments:
        """Parses; everything after ``--`` is a word. Exits with code 2 and one line if ``argv`` is wrong."""
        argv = own_flags(argv, self._option_string_actions)
        cut = argv.index("--") if "--" in argv else len(argv)
        arguments, rest = self.parse_known_args(argv[:cut], Arguments())
        for word in rest:
            # As argparse decides: a text with spaces, a lone hyphen and a negative number are words.
            if re.fullmatch(r"-[^\s=]+(=.*)?", word, re.DOTALL) and not re.fullmatch(r"-\d*\.?\d+", word):
                self.error(self._unknown(word.split("=")[0]))
        arguments.words = rest + argv[cut + 1 :]
        arguments.command = [*self.prog.split(), *argv]
        return arguments

    def format_help(self) -> str:
        """The help without the ``rare`` flags, and the command that shows them."""
        hidden = [action for action in self._actions if action.dest in self.rare and action.help != argparse.SUPPRESS]
        texts = [action.help for action in hidden]
        for action in hidden:
            action.help = argparse.SUPPRESS
        try:
            text = super().format_help()
        finally:
            for action, each in zip(hidden, texts, strict=True):
                action.help = each
        return text + (f"\n{len(hidden)} more options: {self.prog} --help all\n" if hidden else "")

    def error(self, message: str) -> NoReturn:
        """One line on standard error, exit code 2."""
        print(f"octavo: error: {message} (see '{self.prog} --help')", file=sys.stderr)
        sys.exit(EXIT_USAGE)

    def _unknown(self, flag: str) -> str:
        from octavo.core.foreign import ABSENT_FLAGS

        if flag in ABSENT_FLAGS:
            return f"unknown option {flag}: {ABSENT_FLAGS[flag]}"
        flags = [name for name in self._option_string_actions if name.startswith("--")]
        near = difflib.get_close_matches("--" + flag.lstrip("-").replace("_", "-"), flags, n=1, cutoff=0.5)
        return f"unknown option {flag}" + (f"; did you mean {near[0]}?" if near else "")


class _Help(argparse.Action):
    """Shows the help: the common flags, with the value ``all`` every flag."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs="?", default=argparse.SUPPRESS, help=help)
        self.metavar = "all"

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        if values == "all" and isinstance(parser, Parser):
            parser.rare = set()
        parser.print_help()
        parser.exit()


class Command(NamedTuple):
    """A command of a module that has several."""

    make_parser: Callable[[], Parser]
    run: Callable[[Arguments], int]


def asks_for_help(argv: Sequence[str]) -> bool:
    before = argv[: argv.index("--")] if "--" in argv else argv
    return any(word in ("-h", "--help") or word.startswith("--help=") for word in before)


def refuse_words(arguments: Arguments, why: str = "") -> None:
    if arguments.words:
        raise ConfigError(f"unexpected argument {arguments.words[0]!r}{why}")


def add_json_flag(parser: Parser) -> None:
    parser.add_argument("--json", metavar="PATH|-", help="write JSON to this file, or to standard output (-)")


def add_report_flag(parser: Parser) -> None:
    parser.add_argument(
        "--report", type=Path, metavar="HTML", help="tables and drawings as one file (needs the extra octavo[plot])"
    )


def check_folder(path: Path | None, flag: str) -> None:
    """Refuses a path whose folder does not exist, before a long run."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {path.absolute().parent}")


@contextmanager
def json_stream(target: str) -> Iterator[IO[str]]:
    """The stream of ``--json``, open for writing."""
    if target == "-":
        yield sys.stdout
        return
    try:
        stream = Path(target).open("w", encoding="utf-8")  # noqa: SIM115  closed below, outside of this try
    except OSError as e:
        raise ConfigError(f"cannot write --json {target}: {e.strerror}") from None
    with stream:
        yield stream


def json_output(arguments: Arguments) -> AbstractContextManager[IO[str] | None]:
    """The stream of ``--json``, None without it."""
    return nullcontext() if arguments.json is None else json_stream(arguments.json)


def write_json(target: str, value: Any) -> None:
    with json_stream(target) as stream:
        write_line(stream, value)


def write_line(stream: IO[str], value: Any) -> None:
    """Writes a value as a line of JSON: dataclasses as objects, infinity as null."""
    import msgspec

    stream.write(msgspec.json.encode(value).decode() + "\n")
    stream.flush()


@contextmanager
def errors_of_the_call() -> Iterator[None]:
    """Turns an ``InvalidRequestError`` into a ``ConfigError`` with the same text."""
    try:
        yield
    except InvalidRequestError as e:
        raise ConfigError(str(e)) from None


def check_range(arguments: Arguments, *names: str, least: int = 1, most: int | None = None) -> None:
    """Refuses flags whose numbers are out of range; unset flags pass."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and not (value >= least and (most is None or value <= most)):
            allowed = f"at least {least}" if most is None else f"from {least} to {most}"
            raise ConfigError(f"--{name.replace('_', '-')} must be {allowed}, not {value:g}")


def check_positive(arguments: Arguments, *names: str) -> None:
    """Refuses flags whose numbers are not between 0 and 1e9; unset flags pass."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and not 0 < value < 1e9:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0, not {value:g}")
