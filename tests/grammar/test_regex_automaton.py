"""Regexes mean what ECMA-262 means, whatever llguidance reads them as."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from octavo import InvalidRequestError, StructuredOutputsParams
from octavo.core.sampling_params import Grammar
from octavo.grammar.ecma_regex import RegexError, UnsupportedRegexError
from octavo.grammar.regex_automaton import search, whole_match
from octavo.grammar.sources import byte_tokenizer, make_grammar
from tests.grammar.byte_matcher import accepts


def grammar_of(regex: str) -> Grammar | None:
    """Of the texts that match as a whole; None: there is none."""
    try:
        return make_grammar(StructuredOutputsParams(regex=regex))
    except InvalidRequestError as e:
        assert str(e) == "structured_outputs.regex: no text has this form"
        return None


def matches(regex: str, text: str) -> bool:
    grammar = grammar_of(regex)
    return grammar is not None and accepts(grammar, text)


#: Regexes, texts that match as a whole, and texts that do not: by ECMA-262 with the flag u.
WHOLE: list[tuple[str, list[str], list[str]]] = [
    (r"\d", ["7"], ["٣", "a"]),
    (r"\D", ["٣", "a"], ["7"]),
    (r"\w", ["a", "_", "0"], ["é", "-"]),
    (r"\W", ["é", "-"], ["a", "_"]),
    (r"\s", [" ", "\t", "\v", "\u00a0", "\ufeff", "\u2028", "\u3000"], ["\u0085", "\u180e", "a"]),
    (r"\S", ["\u0085", "a"], ["\ufeff", " "]),
    (r"[^\s\d]+", ["a\u0085٣"], ["a b", "a1"]),
    (".", ["a", "\u0085", "😀"], ["\n", "\r", "\u2028", "\u2029", ""]),
    ("[^]", ["\n", "a"], [""]),
    (r"a\/b\.\-", ["a/b.-"], ["a/b"]),
    (r"\cJ\cj\t\v\f\0", ["\n\n\t\v\f\0"], ["JJ"]),
    (r"\x41\u0042\u{43}\u{1F600}\uD83D\uDE00", ["ABC😀😀"], ["ABC"]),
    (r"\p{L}\p{Lu}\P{L}\p{Script=Greek}", ["éÉ1λ"], ["éé1λ", "aB2b"]),
    ("(?<year>[0-9]{4})-(?<m_1>[0-9]{2})", ["2026-11"], ["2026-1"]),
    ("a*?b+?c??d{2,3}?", ["aabdd", "bcddd"], ["add"]),
    ("a{,2}", ["a{,2}"], ["", "aa"]),
    ("{}x}]", ["{}x}]"], []),
    (r"[\b]", ["\b"], ["b"]),
    ("[a&&b]", ["a", "&", "b"], ["c"]),
    ("[a~~b]", ["a", "~", "b"], ["c"]),
    (r"[[\d-z]", ["[", "5", "-", "z"], ["y"]),
    ("^a|b$", ["a", "b"], ["ab"]),
    ("(?i)^yes|Nein$", ["YES", "yEs", "nEIN"], ["ye"]),
    ("(?s)a.b", ["a\nb", "axb"], ["ab"]),
    ("(?:(?i:x)y)+", ["XyxyXy"], ["xY"]),
    (r"(?=.*\d)(?=.*[a-z])[a-z0-9]{3,}", ["a1b", "111x"], ["abc", "123", "a1"]),
    (r"(?!.*\.\.)[a.]+", ["a.a", ".a."], ["a..a"]),
    ("((?!foo)[a-z])*", ["", "fo", "barfo"], ["foo", "barfoo"]),
    (r"a(?=b)[a-z]+", ["ab", "abc"], ["ac"]),
    (r".*\bfoo\b.*", ["foo", "a foo!"], ["afoo", "foo_"]),
    (r"[ab]*(?<!a)b[ab]*", ["b", "bb", "abb"], ["ab", "aab", "a"]),
    (r"[a-z$]*(?<=\$)\d+", ["$1", "ab$22"], ["ab22"]),
    ("(^|,)a($|,)", ["a", ",a", "a,", ",a,"], [""]),
    ("x(?:)", ["x"], [""]),
]


@pytest.mark.parametrize(("regex", "right", "wrong"), WHOLE, ids=[regex for regex, _, _ in WHOLE])
def test_a_regex_of_a_whole_text_means_what_ecma_means(regex: str, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not matches(regex, text)] == []
    assert [text for text in wrong if matches(regex, text)] == []


#: Patterns, texts in which they match somewhere, and others.
SEARCH: list[tuple[str, list[str], list[str]]] = [
    ("b", ["abc", "b", "a\nb"], ["ac"]),
    ("^b", ["bc"], ["ab", "a\nb"]),
    ("b$", ["ab"], ["ba", "b\n"]),
    ("^a|b$", ["ax", "xb"], ["xa", "bx"]),
    ("^(a|b)$", ["a", "b"], ["ab", ""]),
    ("(^|,)a(,|$)", ["a", "b,a", "a,b", "b,a,c"], ["ba", "ab"]),
    ("", ["", "a"], []),
    ("^$", [""], ["a"]),
    (r"\bcat\b", ["a cat!", "cat"], ["concat", "cats"]),
    (r"^(?!\s*$).+", ["a", " a"], ["", "  "]),
    (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", ["1.5", "+0", ".5"], ["-", ".", ""]),
    (r"^(?=.*[a-z])(?=.*[A-Z])(?=.*\d)[\w@$!%*?&]{8,64}$", ["aB3aB3aB3"], ["aaaaaaaa3", "aB3"]),
    ("(?<=a)b", ["ab", "xaby"], ["b", "xb"]),
]


@pytest.mark.parametrize(("pattern", "right", "wrong"), SEARCH, ids=[pattern for pattern, _, _ in SEARCH])
def test_a_pattern_of_a_schema_is_searched_for(pattern: str, right: list[str], wrong: list[str]) -> None:
    relaxed: list[str] = []
    grammar = make_grammar(StructuredOutputsParams(json={"type": "string", "pattern": pattern}), relaxed=relaxed)
    assert relaxed == []
    assert [text for text in right if not accepts(grammar, json.dumps(text, ensure_ascii=False))] == []
    assert [text for text in wrong if accepts(grammar, json.dumps(text, ensure_ascii=False))] == []


@pytest.mark.parametrize(
    ("regex", "kind", "place"),
    [
        ("a++", RegexError, 3),
        ("a*+", RegexError, 3),
        ("(?>a)", RegexError, 1),
        ("a**", RegexError, 3),
        ("*a", RegexError, 1),
        ("(a", RegexError, 1),
        ("a)", RegexError, 2),
        ("[a", RegexError, 1),
        ("[b-a]", RegexError, 2),
        ("a{3,2}", RegexError, 2),
        (r"\Aa", RegexError, 1),
        (r"\u{110000}", RegexError, 1),
        (r"\xZZ", RegexError, 1),
        ("a\\", RegexError, 2),
        ("^*", RegexError, 2),
        ("(?<1>a)", RegexError, 1),
        ("(?x)a", RegexError, 1),
        (r"(a)\1", UnsupportedRegexError, 4),
        (r"(?<n>a)\k<n>", UnsupportedRegexError, 8),
        (r"(?P=n)", UnsupportedRegexError, 1),
        ("(" * 100_000, RegexError, None),
        ("(" * 1_000 + ")" * 1_000, RegexError, None),
    ],
)
def test_what_is_no_regex_is_refused_with_its_place(regex: str, kind: type[Exception], place: int | None) -> None:
    with pytest.raises(kind, match=f"at character {'[0-9]+' if place is None else place} of the regex$") as caught:
        whole_match(regex)
    assert isinstance(caught.value, UnsupportedRegexError) == (kind is UnsupportedRegexError)
    with pytest.raises(InvalidRequestError, match=r"^structured_outputs\.regex: "):
        make_grammar(StructuredOutputsParams(regex=regex))


def test_look_around_that_is_too_large_is_not_expanded() -> None:
    for regex in ("(?!" + "(a|b)*a(a|b){12})[ab]*", "((?!a{1,90000})b)*", r"(?:\b|a){5000}"):
        with pytest.raises(UnsupportedRegexError, match="too large"):
            whole_match(regex)


ATOMS = ("a", "b", "c", "[ab]", "[^a]", "1", "-", r"\.", "(?:a|bc)", r"[^\n\r\u2028\u2029]", "[-.1]")
REGEXES = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "*?"])).map(lambda p: f"(?:{p[0]}){p[1]}"),
        st.tuples(st.sampled_from(["?=", "?!"]), inner).map(lambda pair: f"({pair[0]}{pair[1]})"),
        st.tuples(st.sampled_from(["?<=", "?<!"]), st.sampled_from("ab1.")).map(lambda pair: f"({pair[0]}[{pair[1]}])"),
        st.sampled_from(["^", "\\b"]),
    ),
    max_leaves=6,
)
TEXTS = st.lists(st.text("abc1-. ", max_size=6), min_size=5, max_size=15)


@settings(deadline=None, max_examples=150)
@given(REGEXES, TEXTS)
def test_random_regexes_match_what_the_module_re_matches(regex: str, texts: list[str]) -> None:
    """Python's dialect agrees with ECMA-262's in what is drawn here; ``\\Z`` is ECMA's ``$``."""
    ours: dict[str, list[Grammar]] = {}
    for name, written in (("whole", whole_match(regex)), ("search", search(regex + "$"))):
        ours[name] = [grammar_of_rust(part) for part in written]
    for text in [*texts, ""]:
        whole = all(accepts_text(matcher, text) for matcher in ours["whole"])
        assert whole == (re.fullmatch(regex, text, re.ASCII) is not None), text
        found = all(accepts_text(matcher, text) for matcher in ours["search"])
        assert found == (re.search(f"(?:{regex})\\Z" if "|" in regex else regex + r"\Z", text, re.ASCII) is not None)


def grammar_of_rust(regex: str) -> Grammar:
    return Grammar("", LLMatcher.grammar_from_regex(regex))


def accepts_text(grammar: Grammar, text: str) -> bool:
    matcher = LLMatcher(byte_tokenizer(), grammar.source, log_level=0)
    content = [*text.encode(), 256]
    return not matcher.is_error() and matcher.validate_tokens(content) == len(content)
