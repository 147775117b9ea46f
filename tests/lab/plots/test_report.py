"""A report is one file that needs nothing else, shows what it was given, and is the same each time."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from octavo.core.errors import ConfigError
from octavo.lab.plots.report import Report
from tests.lab.plots.test_drawings import SERIES


class Page(HTMLParser):
    """What is in a page: tags with their attributes, cells of tables, text outside of figures."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        #: Of each table, the rows; numbers as the page has them in full.
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self._cell = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.tags.append((tag, given))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self._cell = True
            self.tables[-1][-1].append("")
        elif tag == "data":
            self._cell = False
            self.tables[-1][-1][-1] = given["value"]

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._cell = False

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._cell:
            self.tables[-1][-1][-1] += data

    def external(self) -> list[tuple[str, str, str]]:
        """What would be fetched or run: attributes that name something outside of the page, and scripts."""
        found = [(tag, "", "") for tag, _ in self.tags if tag in ("script", "link", "iframe", "object", "embed")]
        for tag, attributes in self.tags:
            for name, value in attributes.items():
                refers = name in ("src", "href", "xlink:href", "srcset", "action", "data") and not value.startswith("#")
                if refers or "://" in value or name.startswith("on"):
                    found.append((tag, name, value))
        return found


def test_a_report_needs_nothing_else_and_is_the_same_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from octavo.lab.plots import drawings

    files = [tmp_path / "a.html", tmp_path / "b.html"]
    for file in files:
        report = Report("Run", ["octavo", "simulate", "--users", "a b"], {"seed": 3})
        report.figure(drawings.timeline(SERIES, 100), "queues")
        report.figure(drawings.goodput([0.5, 1.0], {"fcfs": [1, 2]}))
        report.write(file)
    text = files[0].read_text(encoding="utf-8")
    assert files[0].read_bytes() == files[1].read_bytes()
    page = Page(text)
    assert page.external() == [] and "url(http" not in text and "@import" not in text
    assert [tag for tag, _ in page.tags].count("svg") == 2
    names = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(set(names)) == len(names)
    referred = [a.get("xlink:href", "").removeprefix("#") for _, a in page.tags if "xlink:href" in a]
    assert referred and set(referred) <= set(names)
    assert "currentColor" in text and "prefers-color-scheme: dark" in text
    assert "octavo simulate --users 'a b'" in page.text and ["seed", "3"] in page.tables[-1]


def test_tables_have_numbers_in_full_and_all_text_is_escaped() -> None:
    report = Report("<script>alert(1)</script>", ["<b>"], {"<i>": "<u>"})
    report.heading("<h>")
    report.text("a & <b>")
    report.table(["name", "<count>", "x"], [["<p>", 12345, 1 / 3], ["q", None, float("nan")]], "<caption>")
    page = Page(report.html())
    assert page.external() == []
    assert page.tables[0][1:] == [["<p>", "12345", repr(1 / 3)], ["q", "–", "–"]]  # noqa: RUF001  dashes
    for text in (
        "<script>alert(1)</script>",
        "a & <b>",
        "<h>",
        "<count>",
        "<caption>",
        "<b>",
        "<u>",
        "12,345",
        "0.3333",
    ):
        assert text in page.text
    assert not {"script", "b", "i", "u", "p", "h"} & {tag for tag, _ in page.tags} - {"p"}


def test_a_wrong_table_and_a_file_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    report = Report("Run")
    with pytest.raises(ValueError, match="a row of 1 cells in a table of 2"):
        report.table(["a", "b"], [["c"]])
    with pytest.raises(ConfigError, match="cannot write the report"):
        report.write(tmp_path / "none" / "x.html")
