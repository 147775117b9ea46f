"""Translates grammars in llama.cpp's GBNF and in Lark into llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from octavo.core.errors import InvalidRequestError
from octavo.grammar.ecma_regex import ANY, Chars, TextReader, merge_ranges, quantifier, write_chars

#: A rule ``start`` of Lark, perhaps with a mark or a priority; GBNF has ``::=``.
_LARK = re.compile(r"^\s*(?:%llguidance\b|[?!]{0,2}start(?:\.-?\d+)?\s*:(?!:=))", re.MULTILINE)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]"}
_LENGTHS = {"x": 2, "u": 4, "U": 8}
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_TOKEN = re.compile(r"<[^<>\s]+>")
_REPETITIONS = re.compile(r"\{\s*(\d{1,10})\s*(?:(,)\s*(\d{1,10})?\s*)?\}")
_DEEPEST = 150


def is_lark(text: str) -> bool:
    return _LARK.search(text) is not None


# GBNF: github.com/ggml-org/llama.cpp, grammars/README.md


@dataclass
class _Reference:
    name: str


#: An expression in Lark's notation: text and tokens (``<name>``), and references, whose names come last.
_Parts = list[str | _Reference]


def lark_of_gbnf(text: str) -> str:
    """The same grammar in Lark; raises InvalidRequestError, with the line, if it is not valid GBNF.

    A grammar without recursion becomes one terminal, so that all its texts can be produced. In other grammars each rule
    without recursion is a terminal, which matches greedily.
    """
    rules = _GbnfReader(text).read()
    if "root" not in rules:
        raise InvalidRequestError("there is no rule 'root ::='")
    for rule in rules.values():
        for name in _references(rule):
            if name not in rules:
                raise InvalidRequestError(f"the rule {name!r} is not defined")
    used = ["root"]
    for name in used:
        used += dict.fromkeys(other for other in _references(rules[name]) if other not in used)
    terminals = _terminals({name: rules[name] for name in used})
    names = {name: f"T{i}" if name in terminals else f"r{i}" for i, name in enumerate(used)}
    lines = ["start: " + names["root"]]
    for name in used:
        written = (names[part.name] if isinstance(part, _Reference) else part for part in rules[name])
        lines.append(f"{names[name]}: {''.join(written)}")
    return "\n".join(lines) + "\n"


def _references(parts: _Parts) -> list[str]:
    return [part.name for part in parts if isinstance(part, _Reference)]


def _terminals(rules: Mapping[str, _Parts]) -> set[str]:
    """The rules without tokens that refer to such rules only."""
    candidates = {
        name: {*_references(parts)}
        for name, parts in rules.items()
        if not any(isinstance(part, str) and part.startswith("<") for part in parts)
    }
    terminals: set[str] = set()
    while more := {name for name, used in candidates.items() if used <= terminals} - terminals:
        terminals |= more
    return terminals


@dataclass
class _GbnfReader(TextReader):
    def read(self) -> dict[str, _Parts]:
        rules: dict[str, _Parts] = {}
        self._space(lines=True)
        while self.at < len(self.text):
            name = self._name()
            self._space()
            if not self._take("::="):
                raise self._error("expected ::=")
            self._space(lines=True)
            rules[name] = self._options(nested=False)
            if self.at < len(self.text) and self.text[self.at] not in "\r\n":
                raise self._error("expected a new line")
            self._space(lines=True)
        return rules

    def _error(self, message: str) -> InvalidRequestError:
        line = self.text.count("\n", 0, self.at) + 1
        column = self.at - self.text.rfind("\n", 0, self.at)
        return InvalidRequestError(f"line {line}, column {column}: {message}")

    def _space(self, *, lines: bool = False) -> None:
        """Skips spaces and comments; ``lines``: line breaks, too."""
        while char := self._peek():
            if char == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif char in " \t" or (lines and char in "\r\n"):
                self.at += 1
            else:
                return

    def _name(self) -> str:
        match = _NAME.match(self.text, self.at)
        if match is None:
            raise self._error("expected the name of a rule")
        self.at = match.end()
        return match[0]

    def _options(self, *, nested: bool) -> _Parts:
        if self.depth > _DEEPEST:
            raise self._error("it is nested too deeply")
        self.depth += 1
        options = [self._sequence(nested=nested)]
        while self._goes_on(nested=nested):
            options.append(self._sequence(nested=nested))
        self.depth -= 1
        return options[0] if len(options) == 1 else ["(", *_joined(options, " | "), ")"]

    def _goes_on(self, *, nested: bool) -> bool:
        """Whether another alternative follows, perhaps on a line of its own; moves to it."""
        at = self.at
        self._space(lines=True)
        if self._take("|"):
            self._space(lines=True)
            return True
        if not nested:
            self.at = at
        return False

    def _sequence(self, *, nested: bool) -> _Parts:
        parts: list[_Parts] = []
        while (char := self._peek()) and char not in "|)" and (nested or char not in "\r\n"):
            parts.append(self._repeated(self._part()))
            self._space(lines=nested)
        return _joined(parts, " ") or ['""']

    def _part(self) -> _Parts:
        char = self._peek()
        if char == '"':
            return self._literal()
        if char == "[":
            return self._class()
        if self._take("("):
            self._space(lines=True)
            inner = self._options(nested=True)
            self._space(lines=True)
            if not self._take(")"):
                raise self._error("expected )")
            return inner
        if self._take("."):
            return [f"/{write_chars(ANY)}/"]
        if char == "<" and (token := _TOKEN.match(self.text, self.at)) is not None:
            self.at = token.end()
            return [token[0]]
        if char == "!" and self.text[self.at + 1 : self.at + 2] == "<":
            raise self._error("any token but one (!<...>) is not supported")
        return [_Reference(self._name())]

    def _repeated(self, parts: _Parts) -> _Parts:
        self._space()
        bounds: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if (char := self._peek()) in bounds:
            self.at += 1
            return ["(", *parts, ")", quantifier(*bounds[char])]
        if char != "{":
            return parts
        match = _REPETITIONS.match(self.text, self.at)
        if match is None:
            raise self._error("expected a number of repetitions, as {2}, {2,} or {2,4}")
        least = int(match[1])
        most = least if match[2] is None else None if match[3] is None else int(match[3])
        if most is not None and most < least:
            raise self._error("invalid repetition count range")
        self.at = match.end()
        return ["(", *parts, ")", quantifier(least, most)]

    def _literal(self) -> _Parts:
        self.at += 1
        chars = []
        while self._peek() != '"':
            chars.append(self._char())
        self.at += 1
        return [lark_literal("".join(chars))]

    def _class(self) -> _Parts:
        self.at += 1
        negated = self._take("^")
        ranges = []
        while self._peek() != "]":
            low = high = ord(self._char())
            if self._peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high = ord(self._char())
                if high < low:
                    raise self._error("a range of characters ends before it begins")
            ranges.append((low, high))
        self.at += 1
        return [f"/{write_chars(Chars(merge_ranges(ranges), negated=negated))}/"]

    def _char(self) -> str:
        if not (char := self._peek()):
            raise self._error("unexpected end of the grammar")
        self.at += 1
        if char != "\\":
            return char
        kind = self._peek()
        self.at += 1
        if kind in _ESCAPES and kind:
            return _ESCAPES[kind]
        if kind in _LENGTHS and kind:
            digits = self.text[self.at : self.at + _LENGTHS[kind]]
            code = int(digits, 16) if re.fullmatch("[0-9a-fA-F]+", digits) and len(digits) == _LENGTHS[kind] else -1
            if 0 <= code < 0xD800 or 0xE000 <= code < 0x110000:
                self.at += len(digits)
                return chr(code)
        self.at -= 2
        raise self._error(f"unknown escape \\{kind}")


def _joined(expressions: list[_Parts], between: str) -> _Parts:
    return [part for expression in expressions for part in (between, *expression)][1:]


def lark_literal(text: str) -> str:
    """A text as a literal of llguidance's Lark: JSON's, with C1 control characters escaped."""
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(f"\\u{ord(c):04x}" if 0x7F <= ord(c) < 0xA0 else c for c in quoted)


def lark_symbols(text: str, special: Mapping[str, int]) -> str:
    """A text as Lark literals and special tokens, whose ids ``special`` has."""
    tokens = sorted((token for token in special if token in text), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]
    symbols = []
    for part in filter(None, parts):
        if part not in special:
            symbols.append(json.dumps(part))
        else:  # llguidance names tokens by their text in angle brackets, or by id
            symbols.append(part if re.fullmatch(r'<[^<>\s"]+>', part) else f"<[{special[part]}]>")
    return " ".join(symbols)


# Lark: github.com/lark-parser/lark, docs/grammar.md

#: Tokens of Lark: strings, regexes and comments first, since they may contain text that looks like the others.
_LARK_PARTS = re.compile(
    r"""(?P<string>"(?:\\.|[^"\\\n])*")
    | (?P<token><[^<>\s]+>)
    | (?P<comment>//[^\n]*|\#[^\n]*)
    | (?P<regex>/(?!/)(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n])+/)
    | (?P<json>%json\b\s*)
    | (?P<head>^[ \t]*[?!]{0,2}[A-Za-z_][A-Za-z0-9_]*(?:\.-?\d+)(?=[ \t]*(?:\[[^\]\n]*\][ \t]*)?:))
    | (?P<mark>^[ \t]*[?!]{1,2}(?=[A-Za-z_]))
    """,
    re.VERBOSE | re.MULTILINE,
)
_LARK_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))|\\(.)")


def plain_lark(text: str, rewrite_schema: Callable[[str], str]) -> str:
    """A Lark grammar in llguidance's dialect, which lacks priorities, rule marks (``?``, ``!``) and some escapes.

    ``rewrite_schema`` gets the text of each schema behind ``%json``. Raises InvalidRequestError for an escape that is
    no character, and for invalid JSON.
    """
    written, at = [], 0
    while (match := _LARK_PARTS.search(text, at)) is not None:
        written.append(text[at : match.start()])
        at = match.end()
        part = match[0]
        if match["string"]:
            part = _LARK_ESCAPE.sub(_lark_char, part)
        elif match["json"] and text[at : at + 1] in ("{", "["):
            try:
                _, end = json.JSONDecoder().raw_decode(text, at)
            except (ValueError, RecursionError) as e:
                line = text.count("\n", 0, at) + 1
                raise InvalidRequestError(f"line {line}: what follows %json is not valid JSON: {e}") from None
            part += rewrite_schema(text[at:end])
            at = end
        elif match["head"]:
            part = part.lstrip(" \t?!").partition(".")[0]
        elif match["mark"]:
            part = ""
        written.append(part)
    return "".join(written) + text[at:]


def _lark_char(escape: re.Match[str]) -> str:
    if (digits := escape[1] or escape[2] or escape[3]) is None:
        return escape[0]
    code = int(digits, 16)
    if 0xD800 <= code < 0xE000 and escape[2]:  # half of a surrogate pair, which llguidance reads
        return escape[0]
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise InvalidRequestError(f"the escape {escape[0]} stands for no character")
    return lark_literal(chr(code))[1:-1]
