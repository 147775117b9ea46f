"""Regexes of ECMA-262 as regexes of Rust's crate ``regex`` that match whole texts.

Anchors at the ends of a regex are left out; others, and look-around, are expanded by ``regex_automaton``.
"""

from __future__ import annotations

from octavo.grammar.ecma_regex import (
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


def whole_match(text: str) -> list[str]:
    """Regexes of Rust that each match a whole text if and only if the whole text matches the given one.

    Several stand for a conjunction: of the look-aheads that begin a regex, and what follows them.

    Raises:
        RegexError: see ``parse``; look-around that is too large is an ``UnsupportedRegexError``.
    """
    return [_written(part) for part in _conjuncts(parse(text))]


def search(text: str) -> list[str]:
    """As ``whole_match``, of the texts in which the regex matches somewhere, as JSON Schema's ``pattern`` means it."""
    node = parse(text)
    head = next(iter(_flat(node)), None)
    if head == Assertion("^"):
        return [_written(Sequence((part, ANYTHING))) for part in _conjuncts(node)]
    return [_written(Sequence((ANYTHING, node, ANYTHING)))]


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


def _conjuncts(node: Node) -> list[Node]:
    """Regexes of which a text must match all, from its beginning: leading look-aheads stand alone."""
    parts = _flat(node)
    count = next((i for i, part in enumerate(parts) if not _leads(part)), len(parts))
    looks = [part for part in parts[:count] if isinstance(part, Look)]
    if not looks:
        return [node]
    found: list[Node] = []
    for look in looks:
        start = Assertion("^")
        if look.negated:
            found.append(Sequence((start, look, ANYTHING)))
        else:
            found.append(Sequence((start, look.part, ANYTHING)))
    rest = parts[count:]
    return [*found, Sequence((Assertion("^"), *rest))]


def _leads(part: Node) -> bool:
    return part == Assertion("^") or (isinstance(part, Look) and not part.behind)


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
