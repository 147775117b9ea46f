"""``octavo cache``: shows what a KV store on disk or of several machines holds, and clears it."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.cli.parsing import Arguments, Parser, add_json_flag, json_output, write_line
from octavo.core.errors import ConfigError, did_you_mean
from octavo.kvstore.contents import StoreContents, StoredNamespace, open_contents
from octavo.loader.files import readable_size

KINDS = ("ls", "stat", "clear")

EXAMPLE = """\
examples:
  octavo cache ls /var/cache/octavo/kv
  octavo cache stat /var/cache/octavo/kv --json -
  octavo cache clear /var/cache/octavo/kv --namespace 77e408d9bfd0e547

STORE is the folder of --kv-disk, or the URL of --kv-store. ls shows a line for each namespace: blocks that one model
with one dtype and layout wrote, and can read; stat shows sums; clear removes blocks, which are then computed again.
Engines may use the store meanwhile.
"""


def make_parser() -> Parser:
    parser = Parser(
        prog="octavo cache",
        usage="octavo cache ls|stat|clear [options] STORE",
        description="Shows what a KV store holds, or clears it. It has no text of prompts.",
        epilog=EXAMPLE,
    )
    parser.kinds = dict.fromkeys(KINDS)
    parser.add_argument("--namespace", metavar="NAME", help="only this namespace, by its name in octavo cache ls")
    add_json_flag(parser)
    return parser


def run(arguments: Arguments) -> int:
    if len(arguments.words) != 2 or arguments.words[0] not in KINDS:
        raise ConfigError(f"octavo cache takes one of {', '.join(KINDS)}, and a folder or URL")
    kind, place = arguments.words
    contents = open_contents(place)
    namespaces = _chosen(contents, arguments.namespace)
    with json_output(arguments) as stream:
        if kind == "ls":
            if stream is None:
                print(_table(namespaces))
            else:
                write_line(stream, {"namespaces": namespaces})
        elif kind == "stat":
            sums = _sums(namespaces)
            if stream is None:
                print(
                    f"{_count(sums.values)} in {len(namespaces)} namespaces, {readable_size(sums.bytes)}{_ages(sums)}"
                )
            else:
                figures = {"namespaces": len(namespaces), "values": sums.values, "bytes": sums.bytes}
                write_line(stream, {**figures, "oldest": sums.oldest, "newest": sums.newest})
        else:
            values, num_bytes = contents.clear(arguments.namespace)
            if stream is None:
                print(f"{_count(values)} removed, {readable_size(num_bytes)} freed")
            else:
                write_line(stream, {"removed": values, "freed_bytes": num_bytes})
    return 0


def _chosen(contents: StoreContents, name: str | None) -> list[StoredNamespace]:
    namespaces = contents.namespaces()
    if name is None:
        return namespaces
    if chosen := [each for each in namespaces if each.name == name]:
        return chosen
    names = [each.name for each in namespaces]
    hint = did_you_mean(name, names, f"there is {', '.join(names) or 'none'}", cutoff=0.5)
    raise ConfigError(f"the store has no namespace {name!r}; {hint}")


def _sums(namespaces: Sequence[StoredNamespace]) -> StoredNamespace:
    return StoredNamespace(
        "",
        {},
        sum(each.values for each in namespaces),
        sum(each.bytes for each in namespaces),
        max((each.oldest for each in namespaces if each.oldest is not None), default=None),
        min((each.newest for each in namespaces if each.newest is not None), default=None),
    )


def _table(namespaces: Sequence[StoredNamespace]) -> str:
    rows = [
        (each.name, str(each.values), readable_size(each.bytes), _ages(each).lstrip(", "), _label(each))
        for each in namespaces
    ]
    rows.insert(0, ("namespace", "blocks", "size", "", ""))
    name, values, size, ages, _ = (max(len(row[column]) for row in rows) for column in range(5))
    return "\n".join(
        f"{row[0]:<{name}}  {row[1]:>{values}}  {row[2]:>{size}}  {row[3]:<{ages}}  {row[4]}".rstrip() for row in rows
    )


def _label(namespace: StoredNamespace) -> str:
    """The label on one line, whoever wrote it."""
    text = ", ".join(f"{name} {value}" for name, value in namespace.about.items())
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _count(values: int) -> str:
    return f"{values} block{'' if values == 1 else 's'}"


def _ages(namespace: StoredNamespace) -> str:
    if namespace.oldest is None or namespace.newest is None:
        return ""
    return f", used {_time(namespace.newest)} to {_time(namespace.oldest)} ago"


def _time(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
