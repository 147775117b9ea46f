"""The texts of the source: every string, with an ellipsis for what is put in when it is used."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from octavo.core.errors import InvalidRequestError

ROOT = Path(__file__).resolve().parents[2]


def texts(folder: Path = ROOT / "octavo") -> set[str]:
    """All strings of the package's modules, joined as Python joins them; ``{...}`` and ``%s`` are ``…``."""
    return {text for file in folder.rglob("*.py") for text in _texts(ast.parse(file.read_text(encoding="utf-8")))}


def _texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if (text := _text(node)) is not None:
            yield text
        elif isinstance(node, ast.Call) and node.args and (problem := _text(node.args[0])) is not None:
            path = next((_text(keyword.value) for keyword in node.keywords if keyword.arg == "path"), None)
            if path is not None:
                yield str(InvalidRequestError(problem, path=path))


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[.\d]*[sdgf]", "…", node.value)
    return None
