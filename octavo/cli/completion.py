"""``octavo completion``: scripts that complete commands, flags and values in a shell, made from the parsers."""

from __future__ import annotations

import argparse
import re
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

from octavo.cli.main import COMMANDS, load_command
from octavo.cli.parsing import Arguments, Parser
from octavo.core.errors import ConfigError
from octavo.loader.builtin import BUILTIN

EXAMPLE = """\
examples:
  octavo completion bash > ~/.local/share/bash-completion/completions/octavo
  octavo completion zsh > ~/.zfunc/_octavo         # a folder of fpath, before compinit
  octavo completion fish > ~/.config/fish/completions/octavo.fish
"""


@dataclass
class Flag:
    name: str
    help: str
    has_value: bool
    #: The allowed values; empty: any, and files are offered.
    values: list[str] = field(default_factory=list)


@dataclass
class Node:
    """Words and flags that may follow a command or subcommand."""

    words: list[str]
    flags: list[Flag]


def make_parser() -> Parser:
    parser = Parser(
        prog="octavo completion",
        usage="octavo completion bash|zsh|fish",
        description="Prints a script that completes commands, flags and their values, for a shell.",
        epilog=EXAMPLE,
    )
    parser.kinds = dict.fromkeys(SHELLS)
    return parser


def run(arguments: Arguments) -> int:
    if len(arguments.words) != 1 or arguments.words[0] not in SHELLS:
        words = " ".join(arguments.words) or "none"
        raise ConfigError(f"octavo completion takes one of {', '.join(SHELLS)}, not {words}")
    print(SHELLS[arguments.words[0]](tree()), end="")
    return 0


def tree() -> dict[str, Node]:
    """The node of each command and subcommand (``bench serve``); "" is the program itself."""
    nodes = {"": Node([*COMMANDS], [Flag("--help", "show this help message and exit", False)])}
    for name in COMMANDS:
        parser = load_command(name).make_parser()
        nodes[name] = _node(parser)
        nodes[name].words = [*parser.kinds]
        for word, make in parser.kinds.items():
            nodes[f"{name} {word}"] = _node(make() if make is not None else parser)
    return nodes


def _node(parser: Parser) -> Node:
    flags = []
    for action in parser._actions:
        if action.help is not argparse.SUPPRESS:
            text = " ".join((action.help or "").replace("%%", "%").split()).split(". ")[0]
            values = [str(choice) for choice in action.choices or ()] or _values(action.metavar)
            has_value = action.nargs not in (0, "?")
            flags += [Flag(name, text, has_value, values) for name in action.option_strings]
    return Node([], flags)


def _values(metavar: object) -> list[str]:
    """The values that a metavar lists, as ``auto|float32``; ``PATH|-`` lists none."""
    if isinstance(metavar, str) and re.fullmatch(r"[a-z0-9][\w.-]*(\|[a-z0-9][\w.-]*)+", metavar):
        return metavar.split("|")
    return []


# ---- scripts


def bash(nodes: dict[str, Node]) -> str:
    return _fill("bash", nodes, "words='{words}' flags='{flags}'", "values='{}'")


def zsh(nodes: dict[str, Node]) -> str:
    """A script for zsh: a file in a folder of ``fpath``, or sourced after compinit."""
    return _fill("zsh", nodes, "offered=({words}) flags=({flags})", "values=({})")


def fish(nodes: dict[str, Node]) -> str:
    lines = [_template("fish").rstrip("\n").replace("@KINDS@", " ".join(_kinds(nodes)))]
    for name, text in COMMANDS.items():
        lines.append(f"complete -c octavo -n __octavo_at -a {name} -d {_quoted(text)}")
    for path, node in nodes.items():
        at = f"complete -c octavo -n {_quoted(f'__octavo_at {path}'.strip())}"
        if path:
            words = _words(path, node)
            lines.append(f"{at} -F" + (f" -a '{words}'" if words else ""))
        for flag in node.flags:
            value = "" if not flag.has_value else f" -x -a '{' '.join(flag.values)}'" if flag.values else " -r -F"
            name = f"-l {flag.name[2:]}" if flag.name.startswith("--") else f"-s {flag.name[1:]}"
            lines.append(f"{at} {name}{value} -d {_quoted(textwrap.shorten(flag.help, 120, placeholder='...'))}")
    return "\n".join(lines) + "\n"


def _template(shell: str) -> str:
    return (Path(__file__).parent / "completions" / f"octavo.{shell}").read_text(encoding="utf-8")


def _fill(shell: str, nodes: dict[str, Node], words: str, values: str) -> str:
    """Inserts each command's code: templates of its ``words`` and flags, and of the ``values`` of the flag before."""
    cases = []
    for path, node in nodes.items():
        flags = " ".join(flag.name for flag in node.flags)
        code = words.format(words=_words(path, node), flags=flags)
        cases.append(f"    ('{path}') {code}\n      case $before in")
        flags_by_values: dict[str, list[str]] = {}
        for flag in node.flags:
            if flag.has_value:  # @: files
                flags_by_values.setdefault(" ".join(flag.values) or "@", []).append(flag.name)
        cases += [f"        ({'|'.join(names)}) {values.format(of)} ;;" for of, names in flags_by_values.items()]
        cases.append("      esac ;;")
    return _template(shell).replace("@KINDS@", "|".join(_kinds(nodes))).replace("@CASES@", "\n".join(cases))


def _kinds(nodes: dict[str, Node]) -> list[str]:
    return [f"'{path}'" for path in nodes if " " in path]


def _words(path: str, node: Node) -> str:
    takes_model = any(flag.name == "--model" for flag in node.flags) or path in ("pull", "rm")
    return " ".join([*node.words, *(BUILTIN if takes_model else ())])


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}
