"""The reference of the Python API as one page, made of the docstrings of all public names: ``octavo.__all__``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import msgspec
from pydantic import BaseModel

import octavo

HEAD = """\
# Python

Every public name of `octavo`, from its docstring. Options of engines are in [options.md](options.md).
"""


def render() -> str:
    """The whole page in Markdown, classes and functions first, errors last."""
    names = sorted(octavo.__all__, key=lambda name: (_is_error(getattr(octavo, name)), name))
    return "\n".join([HEAD, *(line for name in names for line in _entry(name, getattr(octavo, name)))])


def _is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


def _entry(name: str, value: Any) -> Iterator[str]:
    yield f"\n## {name}\n"
    if not inspect.isclass(value) and not callable(value):
        yield f"`{value!r}`" if isinstance(value, str | int) else f"A type: `{value}`".replace("typing.", "")
        return
    if not _is_error(value) and (text := _signature(name, value)):
        yield f"```text\n{text}\n```\n"
    yield _text(inspect.getdoc(value) or "")
    if inspect.isclass(value) and not _is_error(value):
        for method, function in sorted(vars(value).items()):
            plain = function.__func__ if isinstance(function, classmethod | staticmethod) else function
            if method.startswith("_") or not (inspect.isfunction(plain) or isinstance(plain, property)):
                continue
            yield f"\n### {name}.{method}\n"
            if inspect.isfunction(plain) and (text := _signature(method, plain)):
                yield f"```text\n{text}\n```\n"
            yield _text(inspect.getdoc(plain) or "")


def _signature(name: str, value: Any) -> str:
    """How it is called; empty for classes whose fields are options, and for what has no signature."""
    if inspect.isclass(value) and issubclass(value, BaseModel):
        return ""
    if inspect.isclass(value) and issubclass(value, msgspec.Struct):
        fields = msgspec.structs.fields(value)
        shown = [field.name if field.required else f"{field.name}={_default(field)}" for field in fields]
    else:
        try:
            parameters = inspect.signature(value).parameters.values()
        except (TypeError, ValueError):
            return ""
        shown = [str(each).replace("'", "") for each in parameters if each.name != "self"]
    result = "" if inspect.isclass(value) else getattr(value, "__annotations__", {}).get("return", "")
    end = f") -> {result}" if result else ")"
    one = f"{name}({', '.join(shown)}{end}"
    return one if len(one) <= 100 else f"{name}(\n    " + ",\n    ".join(shown) + f",\n{end}"


def _default(field: msgspec.structs.FieldInfo) -> str:
    return "..." if field.default is msgspec.NODEFAULT else repr(field.default)


def _text(docstring: str) -> str:
    """A docstring as Markdown: code in single marks, and its sections as they stand."""
    paragraphs = []
    for paragraph in re.sub(r"``([^`]*)``", r"`\1`", docstring).split("\n\n"):
        if re.match(r"(Args|Raises|Returns|Yields|Attributes):\n", paragraph):
            title, _, rest = paragraph.partition("\n")
            items = re.sub(r"\n {8,}", " ", "\n" + rest)
            paragraph = f"*{title}*\n" + re.sub(r"\n {4}(\*{0,2}\w[^:\n]*):", r"\n\n- `\1`:", items)
        elif paragraph.startswith(">>>"):
            paragraph = f"```pycon\n{paragraph}\n```"
        paragraphs.append(paragraph)
    return "\n\n".join(paragraphs)
