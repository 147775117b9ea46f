"""Grammars mean what they mean to llama.cpp (GBNF) and Lark."""

from __future__ import annotations

import pytest

from octavo import InvalidRequestError, StructuredOutputsParams
from octavo.grammar.notations import is_lark
from octavo.grammar.sources import make_grammar
from tests.grammar.byte_matcher import accepts

JSON_GBNF = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws   # members

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""

#: Grammars, texts of them, and texts that are not.
GBNF: list[tuple[str, list[str], list[str]]] = [
    (r'root ::= "\x41\u0042\U0001F642\t\r\n\\\"\[\]"', ['AB🙂\t\r\n\\"[]'], ["AB"]),
    (r"root ::= [\u0041-\u0043\U0001F600-\U0001F64F]+", ["ABC🙂"], ["D"]),
    (r"root ::= [^\x00-\x1F\u00e9]", ["é😀"[1:], "a"], ["é", "\n"]),
    ("root ::= [a-]", ["a", "-"], ["b"]),
    ("root ::= [&&~^[-]+", ["&~^[-"], ["a"]),
    ("root ::= .", ["\n", "é"], ["", "ab"]),
    ('root ::= "a"* b\nb ::= "a"', ["a", "aaa"], [""]),
    ('root ::= ("a" | "ab") ("c" | "bcd")', ["ac", "abc", "abcd", "abbcd"], ["a"]),
    ('root ::= [a-z]* "ab"', ["ab", "abab", "xab"], ["a"]),
    ('root ::= "a"{2} "b"{1,2} "c"{0,} "d"?', ["aab", "aabbccd"], ["ab"]),
    ('root ::= "a" | b\n\n  # a comment\nb ::= (\n  "x"\n  | "y"\n)\n', ["a", "x", "y"], ["b"]),
    ('root ::=\n  "a" b\nb ::= "b" |\n  "c"', ["ab", "ac"], ["a"]),
    (
        'root ::= fooBar foo-bar foo_bar start\nfooBar ::= "1"\nfoo-bar ::= "2"\nfoo_bar ::= "3"\nstart ::= "4"',
        ["1234"],
        [],
    ),
    ('root ::= "(" root ")" | ""', ["", "(())"], ["(()"]),
    ('root ::= "a"\nroot ::= "b"', ["b"], ["a"]),
    (JSON_GBNF, ['{"a": [1, -2.5e1, "x\\u00e9", {}], "b":null}'], ["{a}", "[1]"]),
]


@pytest.mark.parametrize(("grammar", "right", "wrong"), GBNF, ids=[text[:50] for text, _, _ in GBNF])
def test_a_grammar_of_llama_cpp_means_the_same(grammar: str, right: list[str], wrong: list[str]) -> None:
    made = make_grammar(StructuredOutputsParams(grammar=grammar))
    assert [text for text in right if not accepts(made, text)] == []
    assert [text for text in wrong if accepts(made, text)] == []


@pytest.mark.parametrize(
    ("grammar", "place"),
    [
        (r'root ::= "\q"', "line 1, column 11"),
        (r'root ::= "\u12"', "line 1, column 11"),
        (r'root ::= "\uD800"', "line 1, column 11"),
        ('root ::= "a', "line 1, column 12"),
        ('root ::= "a"\nb ::= (', "line 2, column 8"),
        ('root ::= "a"{3,2}', "line 1, column 13"),
        ('root ::= "a"{x}', "line 1, column 13"),
        ('root ::= "a" = "b"', "line 1, column 14"),
        ("root ::= a", "the rule 'a'"),
        ('a ::= "x"', "'root ::='"),
        ("root ::= " + "(" * 10_000, "line 1"),
    ],
)
def test_what_is_no_gbnf_is_refused_with_its_place(grammar: str, place: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make_grammar(StructuredOutputsParams(grammar=grammar))
    assert str(caught.value).startswith("structured_outputs.grammar: ") and place in str(caught.value)


LARK: list[tuple[str, list[str], list[str]]] = [
    ('?start: "a" b\n?b: "c" | "d"', ["ac", "ad"], ["a"]),
    ('!start: "a"', ["a"], []),
    ('start.1: "a"', ["a"], []),
    ('?start.-2: A b\nA.5: "x"\n!b.3: "y"', ["xy"], []),
    (r'start: "\x41\u0042\U0001F642" "\u00e9"', ["AB🙂é"], []),
    (r'start: "\n\t\\\""', ['\n\t\\"'], []),
    ('start: "a" // "x".1: \n  | "?b.2:" # %json {', ["a", "?b.2:"], []),
    ("start: /[a-z.1:]+/", ["b.1:"], []),
    (r'start: %json {"type": "string", "pattern": "^\\d$"}', ['"1"'], ['"٣"']),
    ('start: "a" -> x\n     | "b" -> y', ["a", "b"], ["c"]),
    ('start: "a"i "b"~2 "c".."e"', ["Abbd"], ["abd"]),
]


@pytest.mark.parametrize(("grammar", "right", "wrong"), LARK, ids=[text for text, _, _ in LARK])
def test_a_grammar_of_lark_means_the_same(grammar: str, right: list[str], wrong: list[str]) -> None:
    made = make_grammar(StructuredOutputsParams(grammar=grammar))
    assert [text for text in right if not accepts(made, text)] == []
    assert [text for text in wrong if accepts(made, text)] == []


def test_the_two_notations_are_told_apart() -> None:
    for text in ('start: "a"', '  ?start : "a"', "%import common.INT\nstart.2: INT", "%llguidance {}\nstart: /a/"):
        assert is_lark(text)
    for text in ('root ::= "a"', 'root ::= start\nstart ::= "a"', 'root ::= "start: x"'):
        assert not is_lark(text)


@pytest.mark.parametrize("grammar", [r'start: "\U00110000"', "start: %json {", 'start: %json {"type": 3}', "a: b"])
def test_what_is_no_lark_is_refused(grammar: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^structured_outputs\.grammar"):
        make_grammar(StructuredOutputsParams(grammar=grammar))
