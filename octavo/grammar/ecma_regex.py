"""Parses regexes of ECMA-262, the dialect of JSON Schema; ``regex_automaton`` writes them for llguidance.

The same text means something else to llguidance, whose regexes are those of Rust's crate ``regex``: there ``\\d`` and
``\\w`` cover all of Unicode, ``\\s`` lacks the byte order mark, ``.`` matches a carriage return, and ``[a&&b]`` is an
intersection. So a regex is parsed here and written anew with explicit character sets. Grouping, laziness and group
names do not change which texts match, and are dropped. Non-regular constructs, such as back-references, are errors.

Schemas in use also have, beyond ECMA-262 with the flag ``u``, and the parser accepts: literal braces and brackets,
escaped punctuation, and ``(?P<name>``, ``(?i)``, ``(?s)`` of other dialects.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

MAX_CODE = 0x10FFFF
Ranges = tuple[tuple[int, int], ...]

_DEEPEST = 150
_MOST = 1_000_000_000
_DIGITS: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
#: WhiteSpace and LineTerminator of ECMA-262.
_SPACE: Ranges = (
    (0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
    (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
_LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_ASSERTIONS = ("^", "$", "\\b", "\\B", "(?=", "(?!", "(?<=", "(?<!")
_HEX = frozenset("0123456789abcdefABCDEF")


class RegexError(ValueError):
    """The regex is not valid ECMA-262; the message has the error and its character."""


class UnsupportedRegexError(RegexError):
    """The regex is valid, but describes no regular language, or its expansion is too large."""


@dataclass(frozen=True)
class Chars:
    """One character: of these ranges or Unicode properties, or, if ``negated``, of none of them."""

    ranges: Ranges = ()
    #: (text between the braces of ``\\p{...}``, whether it was ``\\P``).
    properties: tuple[tuple[str, bool], ...] = ()
    negated: bool = False
    folded: bool = False


@dataclass(frozen=True)
class Sequence:
    """A concatenation; without parts, the empty text."""

    parts: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Choice:
    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """A quantified part; ``most`` None: unbounded."""

    part: Node
    least: int
    most: int | None


@dataclass(frozen=True)
class Assertion:
    """``^``, ``$``, ``b`` (word boundary) or ``B`` (no word boundary)."""

    kind: str


@dataclass(frozen=True)
class Look:
    """A look-ahead, or with ``behind`` a look-behind."""

    part: Node
    behind: bool
    negated: bool


Node = Chars | Sequence | Choice | Repeat | Assertion | Look

ANY = Chars(negated=True)
ANYTHING = Repeat(ANY, 0, None)
EMPTY = Sequence()


def parse(text: str) -> Node:
    """Raises RegexError for an invalid regex, and UnsupportedRegexError for a back-reference."""
    return _Parser(text).parse()


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    result, low = [], 0
    for first, last in merge_ranges(ranges):
        if first > low:
            result.append((low, first - 1))
        low = last + 1
    if low <= MAX_CODE:
        result.append((low, MAX_CODE))
    return tuple(result)


def write_chars(chars: Chars) -> str:
    """A character set as a class of Rust's regex."""
    # Texts have no lone surrogates: cut them out.
    halves = [half for a, b in merge_ranges(chars.ranges) for half in ((a, min(b, 0xD7FF)), (max(a, 0xE000), b))]
    if not (ranges := [(low, high) for low, high in halves if low <= high]) and not chars.properties:
        return "(?s:.)" if chars.negated else r"[^\x{0}-\x{10FFFF}]"
    inner = "".join(_literal(a) if a == b else f"{_literal(a)}-{_literal(b)}" for a, b in ranges)
    inner += "".join(rf"\{'P' if negated else 'p'}{{{name}}}" for name, negated in chars.properties)
    single = not chars.properties and not chars.negated and len(ranges) == 1 and ranges[0][0] == ranges[0][1]
    written = inner if single else f"[{'^' if chars.negated else ''}{inner}]"
    return f"(?i:{written})" if chars.folded else written


def children(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Sequence):
        return node.parts
    if isinstance(node, Choice):
        return node.options
    return (node.part,) if isinstance(node, Repeat | Look) else ()


def _literal(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else rf"\x{{{code:X}}}"


def quantifier(least: int, most: int | None) -> str:
    usual = {(0, None): "*", (1, None): "+", (0, 1): "?", (1, 1): ""}
    counts = f"{{{least}}}" if least == most else f"{{{least},{'' if most is None else most}}}"
    return usual.get((least, most), counts)


@dataclass
class TextReader:
    text: str
    at: int = 0
    depth: int = 0

    def _peek(self, count: int = 1) -> str:
        return self.text[self.at : self.at + count]

    def _take(self, expected: str) -> bool:
        if self.text.startswith(expected, self.at):
            self.at += len(expected)
            return True
        return False


@dataclass
class _Parser(TextReader):
    #: ``.`` matches line terminators.
    dot_all: bool = False
    folds: bool = False

    def parse(self) -> Node:
        flags = next((flags for flags in ("(?i)", "(?s)", "(?is)", "(?si)") if self._take(flags)), "")
        self.folds, self.dot_all = "i" in flags, "s" in flags
        node = self._choice()
        if self.at < len(self.text):
            raise self._error("unopened group" if self.text[self.at] == ")" else "unexpected character")
        return node

    def _error(self, message: str, at: int | None = None) -> RegexError:
        return RegexError(f"{message}, at character {(self.at if at is None else at) + 1} of the regex")

    def _choice(self) -> Node:
        if self.depth > _DEEPEST:
            raise self._error("the regex is nested too deeply")
        self.depth += 1
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        self.depth -= 1
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            start = self.at
            parts.append(self._repeated(self._atom(), start))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _repeated(self, node: Node, begin: int) -> Node:
        start = self.at
        bounds = self._bounds()
        if bounds is None:
            return node
        if isinstance(node, Assertion | Look) and self.text.startswith(_ASSERTIONS, begin):
            raise self._error("an assertion cannot be repeated", start)
        least, most = bounds
        if most is not None and most < least:
            raise self._error("invalid repetition count range", start)
        if max(least, most or 0) > _MOST:
            raise self._error(f"repetitions of more than {_MOST} are not supported", start)
        is_lazy = self._take("?")  # the same texts match
        if not is_lazy and self._peek() == "+":
            raise self._error("possessive quantifiers are not of ECMA-262")
        if not is_lazy and ((self._peek() and self._peek() in "*?") or self._bounds() is not None):
            raise self._error("nothing to repeat")
        return Repeat(node, least, most)

    def _bounds(self) -> tuple[int, int | None] | None:
        """The quantifier at this position; None if there is none, and a brace is literal."""
        if (char := self._peek()) and char in "*+?":
            self.at += 1
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        if char != "{":
            return None
        end = self.text.find("}", self.at)
        inner = self.text[self.at + 1 : end] if end > 0 else ""
        least, comma, most = inner.partition(",")
        if not _is_number(least) or not (most == "" or _is_number(most)):
            return None
        self.at = end + 1
        # Longer ones than Python converts are beyond any bound.
        low, high = (int(n) if len(n) < 20 else _MOST + 1 for n in (least, most or "0"))
        return low, (low if not comma else None if most == "" else high)

    def _atom(self) -> Node:
        start, char = self.at, self.text[self.at]
        if char in "*+?":
            raise self._error("nothing to repeat")
        if char == "{" and self._bounds() is not None:
            raise self._error("nothing to repeat", start)
        self.at += 1
        if char in "^$":
            return Assertion(char)
        if char == ".":
            return ANY if self.dot_all else Chars(_LINE_ENDS, negated=True)
        if char == "[":
            return self._with_case(self._class())
        if char == "(":
            return self._group(start)
        if char == "\\":
            if (next_char := self._peek()) and next_char in "bB":
                self.at += 1
                return Assertion(next_char)
            return self._with_case(self._escape(in_class=False))
        return self._with_case(_one(ord(char)))

    def _with_case(self, chars: Chars) -> Chars:
        return replace(chars, folded=True) if self.folds else chars

    def _group(self, start: int) -> Node:
        look = next((mark for mark in ("?=", "?!", "?<=", "?<!") if self._take(mark)), None)
        folds, dot_all = self.folds, self.dot_all
        if look is None and self._peek() == "?":
            if flags := next((flags for flags in ("?:", "?i:", "?s:") if self._take(flags)), ""):
                self.folds, self.dot_all = folds or "i" in flags, dot_all or "s" in flags
            elif self._take("?<") or self._take("?P<"):
                end = self.text.find(">", self.at)
                name = self.text[self.at : end] if end > 0 else ""
                if not name.replace("$", "_").isidentifier():
                    raise self._error("the name of a group must be an identifier", start)
                self.at = end + 1
            elif self._peek(2) == "?>":
                raise self._error("atomic groups are not of ECMA-262", start)
            elif self._peek(3) == "?P=":
                raise UnsupportedRegexError(f"back-references are not supported, at character {start + 1} of the regex")
            else:
                raise self._error("unknown kind of group", start)
        node = self._choice()
        if not self._take(")"):
            raise self._error("unclosed group", start)
        self.folds, self.dot_all = folds, dot_all
        return node if look is None else Look(node, behind="<" in look, negated="!" in look)

    def _escape(self, *, in_class: bool) -> Chars:
        start = self.at - 1
        if not (char := self._peek()):
            raise self._error("a backslash at the end", start)
        self.at += 1
        if char in "dDwWsS":
            ranges = {"d": _DIGITS, "w": WORD, "s": _SPACE}[char.lower()]
            return Chars(ranges if char.islower() else complement(ranges))
        if char in "pP":
            return self._property(start, negated=char == "P")
        if char in _CONTROLS:
            return _one(_CONTROLS[char])
        if char == "b" and in_class:
            return _one(8)
        if char == "c":
            letter = self._peek()
            if not (letter.isascii() and letter.isalpha()):
                raise self._error(r"\c needs a letter", start)
            self.at += 1
            return _one(ord(letter) % 32)
        if char == "x":
            return _one(self._hex(2, start))
        if char == "u":
            return _one(self._unicode(start))
        if char == "0" and not self._peek().isdigit():
            return _one(0)
        if char in "123456789" or (char == "k" and not in_class):
            raise UnsupportedRegexError(f"back-references are not supported, at character {start + 1} of the regex")
        if char.isascii() and char.isalnum():
            raise self._error(f"unrecognized escape sequence \\{char}", start)
        return _one(ord(char))

    def _property(self, start: int, *, negated: bool) -> Chars:
        end = self.text.find("}", self.at)
        if self._peek() != "{" or end < 0:
            raise self._error(r"\p needs a property in braces", start)
        name = self.text[self.at + 1 : end]
        self.at = end + 1
        if not name or not all(c.isascii() and (c.isalnum() or c in "_=") for c in name):
            raise self._error("invalid property name", start)
        if last := {"ASCII": 0x7F, "Any": MAX_CODE}.get(name):
            return Chars(complement(((0, last),)) if negated else ((0, last),))
        return Chars(properties=((name, negated),))

    def _hex(self, count: int, start: int) -> int:
        digits = self._peek(count)
        if len(digits) < count or not _HEX.issuperset(digits):
            raise self._error("invalid hexadecimal digits", start)
        self.at += count
        return int(digits, 16)

    def _unicode(self, start: int) -> int:
        if self._take("{"):
            end = self.text.find("}", self.at)
            digits = self.text[self.at : end] if end > 0 else ""
            if not digits or not _HEX.issuperset(digits) or int(digits[-9:], 16) > MAX_CODE or len(digits) > 9:
                raise self._error("invalid code point", start)
            self.at = end + 1
            return int(digits, 16)
        code = self._hex(4, start)
        if 0xD800 <= code < 0xDC00 and self._peek(2) == r"\u":
            at = self.at
            self.at += 2
            low = self._hex(4, at) if self._peek() != "{" else 0
            if 0xDC00 <= low < 0xE000:
                return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
            self.at = at
        return code

    def _class(self) -> Chars:
        start = self.at - 1
        negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        properties: list[tuple[str, bool]] = []
        while True:
            if self.at >= len(self.text):
                raise self._error("unclosed character class", start)
            if self._take("]"):
                break
            at = self.at
            first = self._class_atom()
            if self._peek() == "-" and self._peek(2)[1:] not in ("]", "") and _is_one(first):
                self.at += 1
                last = self._class_atom()
                if _is_one(last):
                    low, high = first.ranges[0][0], last.ranges[0][0]
                    if high < low:
                        raise self._error("invalid character class range", at)
                    ranges.append((low, high))
                    continue
                # A hyphen before a set such as \d is literal.
                first = Chars((*first.ranges, (0x2D, 0x2D), *last.ranges), last.properties)
            ranges += first.ranges
            properties += first.properties
        return Chars(merge_ranges(ranges), tuple(properties), negated)

    def _class_atom(self) -> Chars:
        char = self.text[self.at]
        self.at += 1
        return self._escape(in_class=True) if char == "\\" else _one(ord(char))


def _one(code: int) -> Chars:
    return Chars(((code, code),))


def _is_one(chars: Chars) -> bool:
    return len(chars.ranges) == 1 and chars.ranges[0][0] == chars.ranges[0][1] and not chars.properties


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
