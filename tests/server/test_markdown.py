"""Markdown of answers, read by the page's own module in node: what is shown, and in a time linear in the text."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.server.page import FOLDER

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node is not there to run the module")

Read = Callable[..., list[dict[str, Any]]]
SCRIPT = Path(__file__).with_name("markdown_trees.mjs")


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """Reads texts: of each its ``tree`` and the ``ms`` of the processor."""
    folder = tmp_path_factory.mktemp("ui")
    shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
    (folder / "package.json").write_text('{"type": "module"}')

    def run(texts: list[str], *, trees: bool = True) -> list[dict[str, Any]]:
        given = json.dumps({"folder": folder.as_uri(), "texts": texts, "trees": trees})
        done = subprocess.run(["node", str(SCRIPT)], input=given, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found

    return run


def link(address: str, *content: Any) -> list[Any]:
    return ["a", {"href": address, "target": "_blank", "rel": "noopener noreferrer nofollow"}, *content]


def heading(level: int, text: str) -> list[Any]:
    return ["p", {"class": f"md-h md-h{min(level, 4)}", "role": "heading", "aria-level": min(level + 3, 6)}, text]


#: Of one paragraph: a text, and what is in its element.
INLINE: list[tuple[str, list[Any]]] = [
    ("plain < & > text", ["plain < & > text"]),
    ("<b onclick=x>no</b>", ["<b onclick=x>no</b>"]),
    ("an *em* and _em_", ["an ", ["em", {}, "em"], " and ", ["em", {}, "em"]]),
    ("**a** __b__ ~~c~~", [["strong", {}, "a"], " ", ["strong", {}, "b"], " ", ["s", {}, "c"]]),
    ("**a *b* `c`**", [["strong", {}, "a ", ["em", {}, "b"], " ", ["code", {}, "c"]]]),
    ("snake_case_name 2 * 3 * 4 2*3*4", ["snake_case_name 2 * 3 * 4 2*3*4"]),
    ("** a** **b", ["** a** **b"]),
    ("`*a*` `` b`c `` ``d`", [["code", {}, "*a*"], " ", ["code", {}, "b`c"], " ``d`"]),
    ("[a *b*](https://c.d/e_(f))", [link("https://c.d/e_(f)", "a ", ["em", {}, "b"])]),
    ('[a](mailto:b "t") ![c](http://d)', [link("mailto:b", "a"), " ", link("http://d", "c")]),
    ("[a](javascript:b) [c] [d](e f)", ["[a](javascript:b) [c] [d](e f)"]),
    ("see https://a.b/c?d=e. (http://f)", ["see ", link("https://a.b/c?d=e", "https://a.b/c?d=e"), ". (",
                                            link("http://f", "http://f"), ")"]),
    ("http://, https://...", ["http://, https://..."]),
    ("a\nb", ["a", ["br", {}], "b"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "content"), INLINE)
def test_text_within_a_paragraph(read: Read, text: str, content: list[Any]) -> None:
    [found] = read([text])
    assert found["tree"] == ["div", {"class": "markdown"}, ["p", {}, *content]]


BLOCKS: list[tuple[str, list[Any]]] = [
    ("# A\n## B ##\n###### C#", [heading(1, "A"), heading(2, "B"), heading(6, "C#")]),
    ("#a\n\n---\n* * *\n-- -x", [["p", {}, "#a"], ["hr", {}], ["hr", {}], ["p", {}, "-- -x"]]),
    ("```py\na\n\n  b\n```\nc", [["Code", {"language": "py", "text": "a\n\n  b"}], ["p", {}, "c"]]),
    ("~~~\n```\n~~~~\n```\nb", [["Code", {"language": "", "text": "```"}], ["Code", {"language": "", "text": "b"}]]),
    ("- a\n- b\n  - c\n\n    d\n", [["ul", {}, ["li", {}, "a"],
                                     ["li", {}, "b", ["ul", {}, ["li", {}, "c"]], ["p", {}, "d"]]]]),
    ("3) a\n4) b\n\nc", [["ol", {"start": 3}, ["li", {}, "a"], ["li", {}, "b"]], ["p", {}, "c"]]),
    ("> a\n> > b", [["blockquote", {}, ["p", {}, "a"], ["blockquote", {}, ["p", {}, "b"]]]]),
    ("a | b\n-|-", [["div", {"class": "scroll", "tabindex": "0", "role": "region", "aria-label": "Table of the answer"},
                     ["table", {}, ["thead", {}, ["tr", {}, ["th", {}, "a"], ["th", {}, "b"]]], ["tbody", {}]]]]),
    ("a | b\n- x", [["p", {}, "a | b"], ["ul", {}, ["li", {}, "x"]]]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "content"), BLOCKS)
def test_blocks(read: Read, text: str, content: list[Any]) -> None:
    [found] = read([text])
    assert found["tree"] == ["div", {"class": "markdown"}, *content]


def words(tree: Any) -> str:
    return tree if isinstance(tree, str) else "".join(map(words, [*tree[1].get("text", ""), *tree[2:]]))


def test_nothing_that_is_nested_too_deeply_is_lost(read: Read) -> None:
    lists = "\n".join(" " * 2 * i + f"- w{i}" for i in range(20))
    quotes = "\n".join(">" * (i + 1) + f" w{i}" for i in range(20))
    marks = "".join(f"**w{i} ~~v{i} " for i in range(9)) + "".join(f"v~~ w{i}** " for i in range(9))
    for found, source in zip(read([lists, quotes, marks]), [lists, quotes, marks], strict=True):
        for word in source.replace(">", " ").replace("*", " ").replace("~", " ").replace("-", " ").split():
            assert word in words(found["tree"]), word


def repeated(*pieces: str) -> Callable[[int], str]:
    """Texts of about ``n`` characters: each piece an equal part of them, again and again."""
    return lambda n: "".join(piece * (n // len(pieces) // len(piece)) for piece in pieces)


#: Parts of texts that begin an element, or look as if.
MARKS = [
    "`",
    "[",
    "![",
    "*",
    "**",
    "_",
    "__",
    "~~",
    "](",
    "[a]",
    ">",
    "#",
    "|",
    "1",
    "h",
    "<",
    "[a](a",
    "[a](b`c",
    "**~~__",
    "`a``b",
    "http://",
    "https://.,",
]
SPACED = [
    "\n",
    "\r",
    " ",
    "![a](b ",
    '[a](b "',
    " *a",
    "*a _b ",
    "**a ",
    "** a **b",
    "__a ",
    "~~a ~~",
    "` ",
    "http://. ",
]
LINES = ["- a\n", "- a\n\n", "1. ", "- ", "> a\n", "|\n", "a|b\n-|-\n\n", "a\n", "```\n```\n", "````\n```\n", "[\n"]
SEVERAL = [("[", "](a", "a"), ("[a](b", " ", "x"), ("http://", "."), ("x", "`", "y"), ("**~~__", "a", "__~~**")]
#: Ways to write ``n`` characters for which a parser that looks at the same text again needs a time of n * n or more.
HOSTILE: dict[str, Callable[[int], str]] = {
    **{repr(part): repeated(part) for part in (*MARKS, *SPACED, *LINES)},
    **{repr(parts): repeated(*parts) for parts in (*SEVERAL, ("- ", " ", "\u2028x"))},
    "runs of backticks": lambda n: "".join("`" * i + "a" for i in range(1, int((2 * n) ** 0.5))),
    "table of dashes": lambda n: "a|b\n" + "-" * n + "x",
    "table of bars": lambda n: "a|b\n" + "|-" * (n // 2) + "x",
    "table of spaces": lambda n: "a|b\n-" + " " * n + "x",
    "heading with spaces": lambda n: "# a" + " " * n + "x",
    "heading with marks": lambda n: "# a" + " #" * (n // 2) + "x",
    "rule": lambda n: "-" * n + "x",
    "rule with spaces": lambda n: "* * *" + " " * n + "x",
    "fence with spaces": lambda n: "```" + " " * n + "`",
    "fence with a word": lambda n: "```" + "a" * n + "`",
    "item far right": lambda n: " " * n + "- a\n  x",
    "items in items": lambda n: "\n".join(" " * 2 * i + "- a" for i in range(int(n**0.5))),
    "quotes in quotes": lambda n: "\n".join(">" * i + "a" for i in range(1, int((2 * n) ** 0.5))),
}  # fmt: skip


def test_hostile_texts_take_linear_time(read: Read) -> None:
    """Eight times the text: 64 times the time if it were quadratic. A parser with expressions needed seconds."""
    texts = [write(n) for write in HOSTILE.values() for n in (16_000, 16_000, 128_000)]
    times = [found["ms"] for found in read(texts, trees=False)]
    for i, name in enumerate(HOSTILE):
        first, second, large = times[3 * i : 3 * i + 3]
        small = min(first, second)
        assert small < 200, (name, small)
        assert large < 24 * max(small, 10), (name, small, large)


PIECES = [
    *"`*_~[]()!|>#-+\\\"'<&\n\t \u2028\u00a0\u00e9\U0001f600h1",
    *("**", "__", "~~", "``", "```", "](", "](http://a", "\n\n", "\n- ", "\n  - ", "\n1. ", "\n> ", "\n|-|", "\n# "),
    *("\n---\n", "http://", "https://a.b/c", "javascript:alert(1)", "<script>", "word ", "a_b"),
]
TAGS = set(
    [
        "div",
        "p",
        "a",
        "code",
        "em",
        "strong",
        "s",
        "br",
        "hr",
        "blockquote",
        "ul",
        "ol",
        "li",
        "pre",
        "Code",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
    ]
)
ATTRIBUTES = set(
    ["class", "href", "target", "rel", "role", "aria-level", "aria-label", "tabindex", "start", "language", "text"]
)


def elements(tree: Any) -> list[Any]:
    return [] if isinstance(tree, str) else [tree, *(one for child in tree[2:] for one in elements(child))]


def test_of_any_text_every_word_is_shown_and_nothing_else_is_made(read: Read) -> None:
    draw = random.Random(7)
    texts = ["".join(draw.choices(PIECES, k=draw.randint(1, 40))) for _ in range(1500)]
    for text, found in zip(texts, read(texts), strict=True):
        for tag, attributes, *_ in elements(found["tree"]):
            assert tag in TAGS, text
            assert set(attributes) <= ATTRIBUTES, text
            assert tag != "a" or attributes["href"].lower().startswith(("http://", "https://", "mailto:")), text
        if "```" not in text and "~~~" not in text:  # what follows the language of a block of code is not shown
            assert words(found["tree"]).count("word") >= text.count("word "), text


def test_long_mixes_take_linear_time(read: Read) -> None:
    draw = random.Random(8)
    mixes = [draw.choices(PIECES, k=5) for _ in range(60)]
    texts = [("".join(mix) * n)[:n] for mix in mixes for n in (16_000, 16_000, 128_000)]
    times = [found["ms"] for found in read(texts, trees=False)]
    for i, mix in enumerate(mixes):
        first, second, large = times[3 * i : 3 * i + 3]
        assert large < 24 * max(min(first, second), 10), (mix, first, second, large)
