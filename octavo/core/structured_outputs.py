"""Structured output: what a request asks for, and the grammar that the workers hold its tokens to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.core.errors import InvalidRequestError
from octavo.core.near_names import did_you_mean

#: The fields of ``StructuredOutputsParams`` that say a form.
FORMS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
#: How messages of workers begin that are about the form which a request asks for: it exceeds the limits of the parser
#: with the model's vocabulary, or in the course of an output.
UNUSABLE = "the grammar cannot be used: "
TOO_COSTLY = "the grammar became too costly: "


class StructuredOutputsParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The form that an output must have: exactly one of the first six fields. Names are those of vLLM.

    >>> StructuredOutputsParams(choice=["yes", "no"])

    Raises:
        InvalidRequestError: no form is given or several are, or a value is of the wrong type.
    """

    #: A JSON schema: a mapping, JSON text, or a class of pydantic. True: any JSON value.
    json: str | dict[str, Any] | bool | None = None
    #: True: any JSON object.
    json_object: bool | None = None
    #: A regular expression (of Rust's crate ``regex``, without look-around) that the whole output matches.
    regex: str | None = None
    #: The output is one of these texts.
    choice: list[str] | None = None
    #: A grammar in Lark's notation, as llguidance has it, or in llama.cpp's GBNF.
    grammar: str | None = None
    #: Free text in which certain tags begin a part of a certain schema: ``{"structures": [{"begin", "schema", "end"}],
    #: "triggers": [..]}``, or its JSON text.
    structural_tag: str | dict[str, Any] | None = None
    #: JSON without spaces and line breaks between its tokens. None: as the engine's ``structured_outputs_config`` says.
    disable_any_whitespace: bool | None = None
    #: A regular expression of what may stand between the tokens of JSON. None: a space, or a line break and an
    #: indentation of at most the schema's depth.
    whitespace_pattern: str | None = None
    #: Objects whose schema names properties and does not speak of further ones have none. None: as the engine's option.
    disable_additional_properties: bool | None = None
    #: Refuse a JSON schema with keywords that outputs cannot be held to, which are left out otherwise.
    strict: bool | None = None
    #: Of other engines, which may check by several libraries.
    disable_fallback: bool | None = None
    #: The form begins after the first occurrence of these tokens, such as the end of a model's reasoning.
    begin_after: list[int] = []

    def __post_init__(self) -> None:
        make_schema = getattr(self.json, "model_json_schema", None)
        if make_schema is not None:
            self.json = make_schema()
        self.validate()

    @property
    def form(self) -> str:
        """The name of the field that says the form."""
        return self._forms()[0]

    def validate(self) -> None:
        """Checks the types of the fields, and that they say one form.

        Raises:
            InvalidRequestError: naming the field, its value and what would be right.
        """
        forms = self._forms()
        if len(forms) != 1:
            what = " and ".join(forms) if forms else "none of them"
            raise InvalidRequestError(f"structured_outputs must have exactly one of {', '.join(FORMS)}, not {what}")
        _check("json", self.json, (str, dict, bool), "a JSON schema as a mapping or as text, or True")
        _check("json_object", self.json_object, bool, "True")
        _check("structural_tag", self.structural_tag, (str, dict), "a mapping or JSON text")
        for name in ("regex", "grammar", "whitespace_pattern"):
            _check(name, getattr(self, name), str, "text")
        if self.choice is not None and not _texts(self.choice):
            raise InvalidRequestError("structured_outputs.choice must be a list of texts, with at least one")
        for name in ("disable_any_whitespace", "disable_additional_properties", "disable_fallback", "strict"):
            if not isinstance(getattr(self, name), bool | None):
                raise InvalidRequestError(f"structured_outputs.{name} must be True or False")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise InvalidRequestError(
                "structured_outputs.whitespace_pattern and disable_any_whitespace exclude each other"
            )

    def _forms(self) -> list[str]:
        return [name for name in FORMS if getattr(self, name) not in (None, False)]


def structured_outputs_of(value: StructuredOutputsParams | Mapping[str, Any]) -> StructuredOutputsParams:
    """The parameters, also of a mapping with their fields.

    Raises:
        InvalidRequestError: a field is unknown or wrong.
    """
    if isinstance(value, StructuredOutputsParams):
        value.validate()  # a field may have been assigned since
        return value
    if not isinstance(value, Mapping):
        raise InvalidRequestError(
            f"structured_outputs must be StructuredOutputsParams or a mapping with its fields, not {value!r}"
        )
    fields = [name for name in StructuredOutputsParams.__struct_fields__ if name != "begin_after"]  # is not of users
    for name in value:
        if name not in fields:
            hint = did_you_mean(str(name), fields, written=str)
            raise InvalidRequestError(f"structured_outputs has the unknown field {name!r:.100}; {hint}")
    return StructuredOutputsParams(**value)


def _check(name: str, value: object, kinds: type | tuple[type, ...], right: str) -> None:
    if value is not None and not isinstance(value, kinds):
        raise InvalidRequestError(f"structured_outputs.{name} must be {right}, not {value!r:.200}")


def _texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """A checked grammar, as an engine core takes it."""

    #: Digest of the other fields.
    key: str
    #: In llguidance's own notation (Lark, or JSON).
    source: str
    #: The output is free up to the first occurrence of these tokens, which end a model's reasoning; empty: it is bound
    #: from its first token on.
    begin_after: list[int] = []
