"""The texts of the source: every string, with an ellipsis for what is put in when it is used."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def texts(folder: Path = ROOT / "octavo") -> set[str]:
    """All strings of the package's modules, joined as Python joins them; ``{...}`` and ``%s`` are ``…``."""
    return {text for file in folder.rglob("*.py") for text in _texts(ast.parse(file.read_text(encoding="utf-8")))}


def _texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[.\d]*[sdgf]", "…", node.value)
