"""Chat templates as programs of strangers: they run in jinja2's sandbox, and their output is bounded."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from octavo.core.errors import InvalidRequestError, TokenizerError

#: Longest text that a template may write, in characters.
MAX_RENDERED = 16 << 20


class ExpressionError(InvalidRequestError):
    """An expression of the template failed."""


def written(template: str, values: Mapping[str, Any]) -> str:
    """What a template writes."""
    compiled = _compiled(template)
    pieces: list[str] = []
    length = 0
    try:
        for piece in compiled.generate(values):
            length += len(piece)
            if length > MAX_RENDERED:
                raise InvalidRequestError(f"the chat template writes more than {MAX_RENDERED} characters")
            pieces.append(piece)
    except InvalidRequestError:
        raise
    except jinja2.exceptions.SecurityError as e:
        raise TokenizerError(f"the chat template was stopped: {e}") from e
    except Exception as e:  # an expression of the template may raise anything
        raise ExpressionError(f"the chat template refuses this conversation: {str(e) or type(e).__name__}") from e
    return "".join(pieces)


@functools.lru_cache(maxsize=32)
def template_variables(template: str) -> frozenset[str]:
    """Names that a template reads and does not set itself.

    Raises:
        TokenizerError: the template is not valid.
    """
    _compiled(template)
    return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(template)))


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """jinja2's sandbox, with a bound also on what one expression can make."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) <= 2**32 and abs(right) <= 64):
            raise jinja2.exceptions.SecurityError("power out of bounds")
        for many, times in ((left, right), (right, left)):
            if isinstance(many, (str, list, tuple)) and isinstance(times, int) and len(many) * times > MAX_RENDERED:
                raise jinja2.exceptions.SecurityError("repetition out of bounds")
        return super().call_binop(context, operator, left, right)


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``, which marks the assistant's text for training: here its body, nothing more."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


@functools.lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    try:
        return _environment().from_string(template)
    except jinja2.exceptions.TemplateSyntaxError as e:
        raise TokenizerError(f"the chat template is not valid jinja: line {e.lineno}: {e.message}") from e
    except RecursionError:
        raise TokenizerError("the chat template is nested too deeply") from None


@functools.cache
def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter writes HTML escapes, which no model has seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
