"""Regexes of ECMA-262 as regexes of Rust's crate ``regex`` that match whole texts.

Anchors at the ends of a regex are left out; others, and look-around, are expanded by ``regex_automaton``.
"""

from __future__ import annotations

from octavo.grammar.ecma_regex import (
    ANY,
    ANYTHING,
    EMPTY,
    Assertion,
    Chars,
    Choice,
    Look,
    Node,
    Repeat,
    Sequence,
    children,
    parse,
    quantifier,
    write_chars,
)
from octavo.grammar.regex_automaton import expanded

#: Most characters between look-around and the end of a text that are counted.
_LONGEST_COUNT = 200


def whole_match(text: str) -> list[str]:
    """Regexes of Rust that each match a whole text if and only if the whole text matches the given one.

    Several stand for a conjunction: of look-around whose place in the text is known, and of the rest.

    Raises:
        RegexError: see ``parse``; look-around that is too large is an ``UnsupportedRegexError``.
    """
    return [_written(part) for part in _conjuncts(parse(text), begins=True, ends=True)]


def search(text: str) -> list[str]:
    """As ``whole_match``, of the texts in which the regex matches somewhere, as JSON Schema's ``pattern`` means it."""
    node = parse(text)
    parts = _flat(node)
    begins, ends = parts[:1] == (Assertion("^"),), parts[-1:] == (Assertion("$"),)
    found = []
    for part in _conjuncts(node, begins=begins, ends=ends):
        before = () if begins else (ANYTHING,)
        found.append(_written(Sequence((*before, part, ANYTHING))))
    return found


def single_search(text: str) -> str:
    """As ``search``, in one regex."""
    return _written(Sequence((ANYTHING, parse(text), ANYTHING)))


def single_whole_match(text: str) -> str:
    """As ``whole_match``, in one regex."""
    return _written(parse(text))


def has_look(node: Node) -> bool:
    """Whether an automaton is needed to write it: it has look-around, or an anchor that is not at an end."""
    if isinstance(node, Assertion | Look):
        return True
    return any(map(has_look, children(node)))


def _flat(node: Node) -> tuple[Node, ...]:
    """The parts of a sequence, also of those within it."""
    if not isinstance(node, Sequence):
        return (node,)
    return tuple(inner for part in node.parts for inner in _flat(part))


def _conjuncts(node: Node, *, begins: bool, ends: bool) -> list[Node]:
    """Regexes of which a text must match all.

    Look-around before which, or after which, a known number of characters stands, is a condition of its own: so each
    is expanded alone, and what is left needs no expansion.

    Args:
        begins: the regex matches from the beginning of the text; ends: to its end.
    """
    parts = _flat(node)
    found: list[Node] = []
    rest: list[Node] = []
    for i, part in enumerate(parts):
        before, after = _length(parts[:i]), _length(parts[i + 1 :])
        if isinstance(part, Look) and begins and before is not None:
            inner = part if part.negated or part.behind else part.part
            found.append(Sequence((Assertion("^"), Repeat(ANY, before, before), inner, ANYTHING)))
        elif isinstance(part, Look) and ends and after is not None:
            found.append(Sequence((ANYTHING, part, Repeat(ANY, after, after), Assertion("$"))))
        else:
            rest.append(part)
    return [*found, Sequence(tuple(rest))] if found else [node]


def _length(parts: tuple[Node, ...]) -> int | None:
    """How many characters any text has that these match; None: not all have the same number."""
    total = 0
    for part in parts:
        if isinstance(part, Chars):
            length: int | None = 1
        elif isinstance(part, Choice):
            lengths = {_length((option,)) for option in part.options}
            length = lengths.pop() if len(lengths) == 1 else None
        elif isinstance(part, Repeat):
            inner = _length((part.part,))
            length = None if inner is None or part.least != part.most else inner * part.least
        else:
            length = _length(part.parts) if isinstance(part, Sequence) else 0
        if length is None or length > _LONGEST_COUNT:
            return None
        total += length
    return total


def _written(node: Node) -> str:
    """A regex of Rust that matches the whole texts that the node matches."""
    plain = _without_anchors(node)
    if plain is not None and not has_look(plain):
        return _plain(plain)
    return expanded(node)


def _without_anchors(node: Node) -> Node | None:
    """The same without anchors at its ends; None: it has such between other parts."""
    if not has_look(node):
        return node
    parts = [part for part in _flat(node) if part != EMPTY]
    # Alternatives at the ends decide for themselves whether they are anchored.
    for i, part in enumerate(parts):
        if isinstance(part, Choice) and has_look(part) and len(part.options) <= 100:
            before, after = parts[:i], parts[i + 1 :]
            if all(p == ANYTHING or p == Assertion("^") for p in before) and all(
                p == ANYTHING or p == Assertion("$") for p in after
            ):
                options = [_without_anchors(Sequence((*before, option, *after))) for option in part.options]
                if all(option is not None for option in options):
                    return Choice(tuple(option for option in options if option is not None))
            return None
    anchors = [i for i, part in enumerate(parts) if part == Assertion("^")]
    if anchors:
        # Before a beginning nothing but the empty text can stand.
        if any(part not in (ANYTHING, Assertion("^")) for part in parts[: anchors[-1]]):
            return None
        parts = parts[anchors[-1] + 1 :]
    anchors = [i for i, part in enumerate(parts) if part == Assertion("$")]
    if anchors:
        if any(part not in (ANYTHING, Assertion("$")) for part in parts[anchors[0] + 1 :]):
            return None
        parts = parts[: anchors[0]]
    return Sequence(tuple(parts))


def _plain(node: Node) -> str:
    """A node without assertions as a regex of Rust."""
    if isinstance(node, Chars):
        return write_chars(node)
    if isinstance(node, Sequence):
        return "".join(f"(?:{_plain(p)})" if isinstance(p, Choice) else _plain(p) for p in node.parts)
    if isinstance(node, Choice):
        return "|".join(map(_plain, node.options))
    assert isinstance(node, Repeat)
    inner = _plain(node.part)
    if not isinstance(node.part, Chars):
        inner = f"(?:{inner})"
    return inner + quantifier(node.least, node.most)
