"""What docs/names.md and ARCHITECTURE.md name is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs.snippets import ROOT

PACKAGE = ROOT / "octavo"
NAMED = re.compile(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)")


def names_in(path: Path) -> set[str]:
    """Classes and functions of a module, methods as ``Class.method``."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (child for child in node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))
            names |= {f"{node.name}.{method.name}" for method in methods}
    return names


@pytest.mark.parametrize("page", [ROOT / "docs" / "names.md", ROOT / "ARCHITECTURE.md"], ids=lambda page: page.name)
def test_every_name_of_the_page_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for file, names in NAMED.findall(text):
        known = names_in(PACKAGE / file)
        for name in re.findall(r"`([\w.]+)`", names):
            assert name in known, f"{page.name}: {file} has no {name}"
    assert len(NAMED.findall(text)) > 5


def test_each_row_of_names_tells_its_tests() -> None:
    rows = re.findall(
        r"^\| [^|]+ \| [^|]+ \| `[^|]+ \| `(\w+)` \|$", (ROOT / "docs" / "names.md").read_text(), re.MULTILINE
    )
    assert len(rows) > 40
    for folder in rows:
        assert list((ROOT / "tests" / folder).glob("test_*.py")), folder
