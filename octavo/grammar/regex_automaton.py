"""Writes regexes with look-around, word boundaries and inner anchors as plain regexes that match the same texts.

An alternating automaton (Chandra, Kozen, Stockmeyer, "Alternation", JACM 1981) runs over the regex: a look-ahead is a
second condition on the rest of the text, a negated one a condition that must fail. Its configurations, boolean formulas
over positions in the regex, are the states of a deterministic automaton. That is minimised, and written as a regex by
eliminating its states (Brzozowski and McCluskey, 1963). ``whole_match`` and ``search`` are the entry points.
"""

from __future__ import annotations

import functools
import sys
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from octavo.grammar.ecma_regex import (
    ANY,
    ANYTHING,
    EMPTY,
    MAX_CODE,
    WORD,
    Assertion,
    Chars,
    Choice,
    Look,
    Node,
    Ranges,
    Repeat,
    Sequence,
    UnsupportedRegexError,
    children,
    complement,
    merge_ranges,
    parse,
    quantifier,
    write_chars,
)

#: Limits of an expansion: instructions, states, terms of a formula, characters of the result, and character groups.
_MAX_PROGRAM = 3_000
_MAX_STATES = 400
_MAX_TERMS = 200
_MAX_LENGTH = 50_000
_MAX_SYMBOLS = 100

#: A position in the program, and whether the rest of the text must match from there, or must not.
_Literal = tuple[int, bool]
#: A disjunction of conjunctions: without terms false, with an empty term true.
_Formula = frozenset[frozenset[_Literal]]
_FALSE: _Formula = frozenset()
_TRUE: _Formula = frozenset({frozenset()})


def expand_look_around(node: Node) -> str:
    """A regex of Rust without assertions for the same whole texts; raises UnsupportedRegexError beyond the limits."""
    symbols = _Symbols(node)
    start, moves, accepting = _minimise(*_determinise(_Program(node, symbols), symbols))
    return _regex_of(start, moves, accepting, symbols)


def _too_large() -> UnsupportedRegexError:
    return UnsupportedRegexError("the regex is too large for its look-around to be expanded")


class _Symbols:
    """The alphabet: groups of characters that no set of the regex tells apart."""

    def __init__(self, node: Node) -> None:
        charsets: set[Chars] = {ANY}  # of look-behinds
        bounded = False
        waiting = [node]
        while waiting:
            part = waiting.pop()
            if isinstance(part, Chars):
                charsets.add(part)
            bounded = bounded or (isinstance(part, Assertion) and part.kind in "bB")
            waiting += children(part)
        sets = {chars: _ranges_of(chars) for chars in charsets}
        tests = [*sets.values(), WORD] if bounded else [*sets.values()]
        cuts = sorted({0, *(cut for ranges in tests for low, high in ranges for cut in (low, high + 1))})
        pieces = [(low, high - 1) for low, high in zip(cuts, [*cuts[1:], MAX_CODE + 1], strict=True) if low < high]
        groups: dict[tuple[bool, ...], list[tuple[int, int]]] = {}
        members = [_membership(ranges, pieces) for ranges in tests]
        for i, piece in enumerate(pieces):
            groups.setdefault(tuple(member[i] for member in members), []).append(piece)
        if len(groups) > _MAX_SYMBOLS:
            raise _too_large()
        #: The ranges of each symbol.
        self.ranges = [merge_ranges(group) for group in groups.values()]
        #: The symbols of each set, and of word characters.
        self.of = {chars: frozenset(k for k, key in enumerate(groups) if key[i]) for i, chars in enumerate(sets)}
        self.word = frozenset(k for k, key in enumerate(groups) if bounded and key[-1])

    def __len__(self) -> int:
        return len(self.ranges)


def _membership(ranges: Ranges, pieces: list[tuple[int, int]]) -> list[bool]:
    """Whether each piece is within the ranges; both are sorted."""
    is_member, i = [], 0
    for low, _ in pieces:
        while i < len(ranges) and ranges[i][1] < low:
            i += 1
        is_member.append(i < len(ranges) and ranges[i][0] <= low)
    return is_member


def _ranges_of(chars: Chars) -> Ranges:
    ranges = [*chars.ranges]
    for name, negated in chars.properties:
        category = _property(name)
        ranges += complement(category) if negated else category
    if chars.folded:
        ranges += _other_cases(ranges)
    return complement(ranges) if chars.negated else merge_ranges(ranges)


def _other_cases(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    cases = []
    for low, high in merge_ranges(ranges):
        for code in range(low, min(high, 0x1FFFF) + 1):
            for other in {chr(code).lower(), chr(code).upper()}:
                if len(other) == 1 and ord(other) != code:
                    cases.append((ord(other), ord(other)))
    return cases


@functools.cache
def _property(name: str) -> Ranges:
    short = name.partition("=")[2] or name
    short = {"Letter": "L", "Number": "N", "Punctuation": "P", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll",
             "Decimal_Number": "Nd", "Symbol": "S", "Mark": "M", "Separator": "Z"}.get(short, short)  # fmt: skip
    if not (1 <= len(short) <= 2 and short[0] in "LMNPSZC"):
        raise UnsupportedRegexError(f"the property {name} is not supported beside look-around")
    codes = [c for c in range(sys.maxunicode + 1) if unicodedata.category(chr(c)).startswith(short)]
    return merge_ranges((code, code) for code in codes)


@dataclass(frozen=True)
class _Step:
    """An instruction; only ``chars`` consumes a symbol."""

    kind: str
    then: tuple[int, ...] = ()
    symbols: frozenset[int] = frozenset()
    look: int = 0
    negated: bool = False


class _Program:
    def __init__(self, node: Node, symbols: _Symbols) -> None:
        self.steps: list[_Step] = []
        self._symbols = symbols
        #: First instructions of look-behinds, which run from the beginning of the text.
        self.behind: list[int] = []
        self.start = self._compile(node, self._add(_Step("end")))

    def _add(self, step: _Step) -> int:
        if len(self.steps) >= _MAX_PROGRAM:
            raise _too_large()
        self.steps.append(step)
        return len(self.steps) - 1

    def _compile(self, node: Node, then: int) -> int:
        """The first instruction of a node whose successor is ``then``."""
        if isinstance(node, Chars):
            return self._add(_Step("chars", (then,), self._symbols.of[node]))
        if isinstance(node, Sequence):
            for part in reversed(node.parts):
                then = self._compile(part, then)
            return then
        if isinstance(node, Choice):
            return self._add(_Step("split", tuple(self._compile(option, then) for option in node.options)))
        if isinstance(node, Assertion):
            return self._add(_Step(node.kind, (then,)))
        if isinstance(node, Repeat):
            return self._repeat(node, then)
        if node.behind:
            # A look-behind matches if the text before it ends with its part.
            self.behind.append(self._compile(Sequence((ANYTHING, node.part)), self._add(_Step("here"))))
            return self._add(_Step("behind", (then,), look=len(self.behind) - 1, negated=node.negated))
        look = self._compile(node.part, self._add(_Step("all")))
        return self._add(_Step("look", (then,), look=look, negated=node.negated))

    def _repeat(self, node: Repeat, then: int) -> int:
        if node.most is None:
            loop = self._add(_Step("split"))
            body = self._compile(node.part, loop)
            self.steps[loop] = _Step("split", (body, then))
            then = loop
        else:
            for _ in range(node.most - node.least):
                then = self._add(_Step("split", (self._compile(node.part, then), then)))
        for _ in range(node.least):
            then = self._compile(node.part, then)
        return then


@dataclass
class _Place:
    """The symbols around a position of the text; None: there is none."""

    before: int | None
    after: int | None
    #: For each look-behind, whether its part ends here.
    behind: list[bool] = field(default_factory=list)


class _Machine:
    def __init__(self, program: _Program, symbols: _Symbols) -> None:
        self._steps, self._word = program.steps, symbols.word

    def after(self, formula: _Formula, place: _Place) -> _Formula:
        """The condition on the text behind ``place.after``; at the end of the text, true or false."""
        memo: dict[int, _Formula] = {}
        terms = _FALSE
        for term in formula:
            product = _TRUE
            for position, positive in term:
                condition = self._expand(position, place, memo, set())
                product = _both(product, condition if positive else _not(condition))
                if not product:
                    break
            terms = _either(terms, product)
        return terms

    def _expand(self, position: int, place: _Place, memo: dict[int, _Formula], on_way: set[int]) -> _Formula:
        if position in memo:
            return memo[position]
        if position in on_way:  # an empty loop adds nothing
            return _FALSE
        step = self._steps[position]
        on_way.add(position)
        formula = self._formula(step, lambda other: self._expand(other, place, memo, on_way), place)
        on_way.discard(position)
        if not on_way:
            memo[position] = formula
        return formula

    def _formula(self, step: _Step, expand: Callable[[int], _Formula], place: _Place) -> _Formula:
        if step.kind == "chars":
            if place.after is None or place.after not in step.symbols:
                return _FALSE
            return frozenset({frozenset({(step.then[0], True)})})
        if step.kind == "end":
            return _TRUE if place.after is None else _FALSE
        if step.kind in ("all", "here"):  # "here" is evaluated by ``ends_here``
            return _TRUE if step.kind == "all" else _FALSE
        if step.kind == "split":
            return functools.reduce(_either, (expand(position) for position in step.then), _FALSE)
        if step.kind == "look":
            looked = expand(step.look)
            looked = _not(looked) if step.negated else looked
            return _both(looked, expand(step.then[0])) if looked else _FALSE
        return expand(step.then[0]) if self._holds(step, place) else _FALSE

    def _holds(self, step: _Step, place: _Place) -> bool:
        if step.kind == "^":
            return place.before is None
        if step.kind == "$":
            return place.after is None
        if step.kind == "behind":
            return place.behind[step.look] != step.negated
        return ((place.before in self._word) != (place.after in self._word)) == (step.kind == "b")

    def ends_here(self, formula: _Formula, place: _Place) -> bool:
        """Whether a look-behind's program has reached its end before this place."""
        waiting, seen = [position for term in formula for position, _ in term], set[int]()
        while waiting:
            position = waiting.pop()
            step = self._steps[position]
            if position in seen:
                continue
            seen.add(position)
            if step.kind == "here":
                return True
            if step.kind == "split" or (step.kind in "^$bB" and self._holds(step, place)):
                waiting += step.then
            elif step.kind in ("look", "behind"):
                raise UnsupportedRegexError("look-around within a look-behind is not supported")
        return False


def _simplify(terms: Iterable[frozenset[_Literal]]) -> _Formula:
    """The formula without contradictory and implied terms."""
    kept: list[frozenset[_Literal]] = []
    for term in sorted(set(terms), key=len):
        if any((position, not positive) in term for position, positive in term):
            continue
        if not any(other <= term for other in kept):
            kept.append(term)
    if len(kept) > _MAX_TERMS:
        raise _too_large()
    return frozenset(kept)


def _either(a: _Formula, b: _Formula) -> _Formula:
    return _simplify([*a, *b]) if a and b else a or b


def _both(a: _Formula, b: _Formula) -> _Formula:
    if a == _TRUE or b == _TRUE:
        return b if a == _TRUE else a
    if len(a) * len(b) > _MAX_TERMS * 10:
        raise _too_large()
    return _simplify(x | y for x in a for y in b)


def _not(formula: _Formula) -> _Formula:
    negation = _TRUE
    for term in formula:
        negation = _both(negation, frozenset(frozenset({(position, not positive)}) for position, positive in term))
    return negation


#: After a start of a text: the condition on the rest, those of look-behinds, and the last symbol.
_State = tuple[_Formula, tuple[_Formula, ...], int | None]


def _determinise(program: _Program, symbols: _Symbols) -> tuple[list[list[int]], list[bool]]:
    """Moves [state][symbol], from state 0 on, and which states accept."""
    machine = _Machine(program, symbols)
    before_matters = bool(program.behind) or any(step.kind in ("b", "B", "^") for step in program.steps)

    def representative(symbol: int) -> int:
        """One symbol for all that are equivalent as the last symbol."""
        if not before_matters:
            return 0
        return min(symbols.word) if symbol in symbols.word else min({*range(len(symbols))} - symbols.word)

    first: _State = (
        frozenset({frozenset({(program.start, True)})}),
        tuple(frozenset({frozenset({(start, True)})}) for start in program.behind),
        None,
    )
    numbers: dict[_State, int] = {first: 0}
    order, moves, accepting = [first], list[list[int]](), list[bool]()
    for formula, behind, before in order:
        flags = [machine.ends_here(one, _Place(before, None)) for one in behind]
        accepting.append(bool(machine.after(formula, _Place(before, None, flags))))
        row = []
        for symbol in range(len(symbols)):
            flags = [machine.ends_here(one, _Place(before, symbol)) for one in behind]
            place = _Place(before, symbol, flags)
            state: _State = (
                machine.after(formula, place),
                tuple(machine.after(one, place) for one in behind),
                representative(symbol),
            )
            if not state[0]:
                state = (_FALSE, (), None)
            if state not in numbers:
                if len(numbers) >= _MAX_STATES:
                    raise _too_large()
                numbers[state] = len(numbers)
                order.append(state)
            row.append(numbers[state])
        moves.append(row)
    return moves, accepting


def _minimise(moves: list[list[int]], accepting: list[bool]) -> tuple[int, list[list[int]], list[bool]]:
    """The smallest automaton of the same language (Moore's partition refinement): first state, moves, accepting."""
    block = [int(end) for end in accepting]
    count = 0
    while len(set(block)) != count:
        count = len(set(block))
        keys: dict[tuple[int, ...], int] = {}
        block = [keys.setdefault((block[i], *(block[j] for j in row)), len(keys)) for i, row in enumerate(moves)]
    one_of = {number: i for i, number in enumerate(block)}
    rows = [[block[j] for j in moves[one_of[number]]] for number in range(len(one_of))]
    return block[0], rows, [accepting[one_of[number]] for number in range(len(one_of))]


def _regex_of(start: int, moves: list[list[int]], accepting: list[bool], symbols: _Symbols) -> str:
    """A regex of the automaton's language, by eliminating states; an edge "" matches the empty text."""
    first, last = -1, -2
    edges: dict[int, dict[int, str]] = {first: {start: ""}, last: {}}
    for i, row in enumerate(moves):
        groups: dict[int, list[tuple[int, int]]] = {}
        for symbol, target in enumerate(row):
            groups.setdefault(target, []).extend(symbols.ranges[symbol])
        edges[i] = {target: write_chars(_as_chars(ranges)) for target, ranges in groups.items()}
        if accepting[i]:
            edges[i][last] = ""
    useful = {last}
    while more := {i for i, out in edges.items() if i not in useful and not useful.isdisjoint(out)}:
        useful |= more
    if start not in useful:
        return r"[^\x{0}-\x{10FFFF}]"
    edges = {i: {j: text for j, text in out.items() if j in useful} for i, out in edges.items() if i in useful}
    while len(edges) > 2:
        into = {i: [j for j, out in edges.items() if i in out and j != i] for i in edges}
        inner = [i for i in edges if i not in (first, last)]
        _eliminate(min(inner, key=lambda i: len(into[i]) * (len(edges[i]) - (i in edges[i]))), edges, into)
        if sum(len(text) for out in edges.values() for text in out.values()) > _MAX_LENGTH:
            raise _too_large()
    return edges[first][last]


def _eliminate(state: int, edges: dict[int, dict[int, str]], into: dict[int, list[int]]) -> None:
    out = edges.pop(state)
    loop = out.pop(state, None)
    again = "" if loop in (None, "") else f"(?:{loop})*"
    for source in into[state]:
        head = edges[source].pop(state)
        for target, tail in out.items():
            text = head + again + tail
            if (old := edges[source].get(target)) is None or old == text:
                edges[source][target] = text
            else:
                edges[source][target] = f"(?:{old}|{text})" if old and text else f"(?:{old or text})?"


def _as_chars(ranges: list[tuple[int, int]]) -> Chars:
    """The set, or its complement negated if that is shorter."""
    inside, outside = merge_ranges(ranges), complement(ranges)
    return Chars(outside, negated=True) if len(outside) < len(inside) else Chars(inside)


# From regexes of ECMA-262 to regexes of Rust's crate ``regex``.

#: Maximum characters between look-around and the end of a text that are counted.
_LONGEST_COUNT = 200


def whole_match(text: str) -> list[str]:
    """Regexes of Rust, all of which a whole text matches if and only if it matches this one; raises RegexError.

    Several are a conjunction of look-around whose place in the text is known, and of the rest.
    """
    return [_write_regex(part) for part in _conjuncts(parse(text), begins=True, ends=True)]


def search(text: str) -> list[str]:
    """As ``whole_match``, for texts with a match anywhere, as JSON Schema's ``pattern`` means it."""
    node = parse(text)
    parts = _flat(node)
    begins, ends = parts[:1] == (Assertion("^"),), parts[-1:] == (Assertion("$"),)
    regexes = []
    for part in _conjuncts(node, begins=begins, ends=ends):
        before = () if begins else (ANYTHING,)
        regexes.append(_write_regex(Sequence((*before, part, ANYTHING))))
    return regexes


def single_search(text: str) -> str:
    return _write_regex(Sequence((ANYTHING, parse(text), ANYTHING)))


def single_whole_match(text: str) -> str:
    return _write_regex(parse(text))


def has_look(node: Node) -> bool:
    """Whether the node has look-around or anchors, so that it may need an automaton."""
    return isinstance(node, Assertion | Look) or any(map(has_look, children(node)))


def _flat(node: Node) -> tuple[Node, ...]:
    if not isinstance(node, Sequence):
        return (node,)
    return tuple(inner for part in node.parts for inner in _flat(part))


def _conjuncts(node: Node, *, begins: bool, ends: bool) -> list[Node]:
    """Regexes of which a text must match all; ``begins``, ``ends``: the regex is anchored to the start, to the end.

    Look-around with a known number of characters before or after it becomes a condition, expanded alone.
    """
    parts = _flat(node)
    conditions: list[Node] = []
    rest: list[Node] = []
    for i, part in enumerate(parts):
        before, after = _length(parts[:i]), _length(parts[i + 1 :])
        if isinstance(part, Look) and begins and before is not None:
            inner = part if part.negated or part.behind else part.part
            conditions.append(Sequence((Assertion("^"), Repeat(ANY, before, before), inner, ANYTHING)))
        elif isinstance(part, Look) and ends and after is not None:
            conditions.append(Sequence((ANYTHING, part, Repeat(ANY, after, after), Assertion("$"))))
        else:
            rest.append(part)
    return [*conditions, Sequence(tuple(rest))] if conditions else [node]


def _length(parts: tuple[Node, ...]) -> int | None:
    """The length of all texts that the parts match; None if it varies."""
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


def _write_regex(node: Node) -> str:
    if (plain := _strip_anchors(node)) is not None and not has_look(plain):
        return _plain(plain)
    return expand_look_around(node)


def _strip_anchors(node: Node) -> Node | None:
    """The node without anchors at its ends; None if it has anchors elsewhere."""
    if not has_look(node):
        return node
    parts = [part for part in _flat(node) if part != EMPTY]
    # Alternatives at the ends are anchored one by one.
    for i, part in enumerate(parts):
        if isinstance(part, Choice) and has_look(part) and len(part.options) <= 100:
            before, after = parts[:i], parts[i + 1 :]
            if all(p == ANYTHING or p == Assertion("^") for p in before) and all(
                p == ANYTHING or p == Assertion("$") for p in after
            ):
                options = [_strip_anchors(Sequence((*before, option, *after))) for option in part.options]
                if all(option is not None for option in options):
                    return Choice(tuple(option for option in options if option is not None))
            return None
    if anchors := [i for i, part in enumerate(parts) if part == Assertion("^")]:
        # Only the empty text can stand before the beginning.
        if any(part not in (ANYTHING, Assertion("^")) for part in parts[: anchors[-1]]):
            return None
        parts = parts[anchors[-1] + 1 :]
    if anchors := [i for i, part in enumerate(parts) if part == Assertion("$")]:
        if any(part not in (ANYTHING, Assertion("$")) for part in parts[anchors[0] + 1 :]):
            return None
        parts = parts[: anchors[0]]
    return Sequence(tuple(parts))


def _plain(node: Node) -> str:
    if isinstance(node, Chars):
        return write_chars(node)
    if isinstance(node, Sequence):
        return "".join(f"(?:{_plain(p)})" if isinstance(p, Choice) else _plain(p) for p in node.parts)
    if isinstance(node, Choice):
        return "|".join(map(_plain, node.options))
    assert isinstance(node, Repeat)
    inner = _plain(node.part) if isinstance(node.part, Chars) else f"(?:{_plain(node.part)})"
    return inner + quantifier(node.least, node.most)
