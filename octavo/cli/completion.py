"""``octavo completion``: scripts that complete commands, flags and values in a shell, made from the parsers."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from octavo.cli.main import COMMANDS, LAB_COMMANDS
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
    """A flag of a command."""

    name: str
    help: str
    #: Whether a value follows it, and which ones there are; empty: any, for which files are offered.
    has_value: bool
    values: list[str] = field(default_factory=list)


@dataclass
class Node:
    """What may follow a command, or a word of it (``bench serve``)."""

    words: list[str]
    flags: list[Flag]


def make_parser() -> Parser:
    """The command's parser."""
    parser = Parser(
        prog="octavo completion",
        usage="octavo completion bash|zsh|fish",
        description="Prints a script that completes commands, flags and their values, for a shell.",
        epilog=EXAMPLE,
    )
    parser.kinds = dict.fromkeys(SHELLS)
    return parser


def run(arguments: Arguments) -> int:
    """Prints the script.

    Raises:
        ConfigError: no shell is named, or one that there is no script for.
    """
    if len(arguments.words) != 1 or arguments.words[0] not in SHELLS:
        given = " ".join(arguments.words) or "none"
        raise ConfigError(f"octavo completion takes one of {', '.join(SHELLS)}, not {given}")
    print(SHELLS[arguments.words[0]](tree()), end="")
    return 0


def tree() -> dict[str, Node]:
    """What may follow each command, by its words with spaces between (``bench serve``); "" is the program itself."""
    nodes = {"": Node([*COMMANDS], [Flag("--help", "show this help message and exit", False)])}
    for name in COMMANDS:
        room = "octavo.lab.commands" if name in LAB_COMMANDS else "octavo.cli"
        parser = importlib.import_module(f"{room}.{name}").make_parser()
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
            flags += [Flag(name, text, action.nargs != 0, values) for name in action.option_strings]
    return Node([], flags)


def _values(metavar: object) -> list[str]:
    """The values that a metavar lists, as ``auto|float32``; ``PATH|-`` lists none."""
    found = isinstance(metavar, str) and re.fullmatch(r"[a-z0-9][\w.-]*(\|[a-z0-9][\w.-]*)+", metavar)
    return metavar.split("|") if found and isinstance(metavar, str) else []


# --- scripts ----------------------------------------------------------------------------------------------------------


def bash(nodes: dict[str, Node]) -> str:
    """A script for bash, which needs nothing of bash-completion."""
    kinds = "|".join(f"'{path}'" for path in nodes if " " in path)
    script = BASH.replace("@KINDS@", kinds).replace("@FLAGS@", "\n".join(_bash_flags(nodes)))
    return script.replace("@VALUES@", "\n".join(_bash_values(nodes)))


def _bash_flags(nodes: dict[str, Node]) -> Iterator[str]:
    for path, node in nodes.items():
        yield f"    '{path}') words='{_words(path, node)}'; flags='{' '.join(flag.name for flag in node.flags)}' ;;"


def _bash_values(nodes: dict[str, Node]) -> Iterator[str]:
    for path, node in nodes.items():
        for flag in node.flags:
            if flag.values:
                yield f"    '{path} {flag.name}') values='{' '.join(flag.values)}' ;;"
        if any_value := [flag.name for flag in node.flags if flag.has_value and not flag.values]:
            yield f"    {'|'.join(repr(f'{path} {name}') for name in any_value)}) values=@ ;;"


def _words(path: str, node: Node) -> str:
    """Words of a command: its own, and models where it takes one."""
    takes_model = any(flag.name == "--model" for flag in node.flags) or path in ("pull", "rm")
    return " ".join([*node.words, *(BUILTIN if takes_model else ())])


def zsh(nodes: dict[str, Node]) -> str:
    """A script for zsh, which runs bash's function."""
    return "#compdef octavo\nautoload -U +X bashcompinit && bashcompinit\n" + bash(nodes)


def fish(nodes: dict[str, Node]) -> str:
    """A script for fish, with the help of each flag."""
    lines = ["# Completions of octavo, made by: octavo completion fish", "complete -c octavo -f"]
    for name, text in COMMANDS.items():
        lines.append(f"complete -c octavo -n __fish_use_subcommand -a {name} -d {_fish(text)}")
    for path, node in nodes.items():
        name, _, word = path.partition(" ")
        if not name:
            continue
        seen = f"__fish_seen_subcommand_from {name}" + (f"; and __fish_seen_subcommand_from {word}" if word else "")
        words = _words(path, node)
        lines.append(f"complete -c octavo -n '{seen}' -F" + (f" -a '{words}'" if words else ""))
        for flag in node.flags:
            if flag.name.startswith("--"):
                value = "" if not flag.has_value else f" -x -a '{' '.join(flag.values)}'" if flag.values else " -r -F"
                lines.append(f"complete -c octavo -n '{seen}' -l {flag.name[2:]}{value} -d {_fish(flag.help)}")
    return "\n".join(lines) + "\n"


def _fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


BASH = """\
# Completions of octavo, made by: octavo completion bash
_octavo() {
  local current=${COMP_WORDS[COMP_CWORD]} before= path= words= flags= values= word
  COMPREPLY=()
  [ "$COMP_CWORD" -gt 1 ] && before=${COMP_WORDS[COMP_CWORD-1]}
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    if [ -z "$path" ]; then path=$word; else case "$path $word" in @KINDS@) path="$path $word" ;; esac; fi
  done
  case "$path" in
@FLAGS@
  esac
  case "$path $before" in
@VALUES@
  esac
  if [ "$values" = @ ]; then COMPREPLY=($(compgen -f -- "$current"))
  elif [ -n "$values" ]; then COMPREPLY=($(compgen -W "$values" -- "$current"))
  else
    case "$current" in
      -*) COMPREPLY=($(compgen -W "$flags" -- "$current")) ;;
      *) COMPREPLY=($(compgen -W "$words" -- "$current"))
         [ -n "$path" ] && COMPREPLY+=($(compgen -f -- "$current")) ;;
    esac
  fi
}
complete -F _octavo octavo
"""

SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}
