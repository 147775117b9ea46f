"""Fields of requests that say the form of the answer, in the spellings of several APIs; at most one form is given."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from octavo.server.protocol_base import Name, RequestModel


class JsonSchemaFormat(RequestModel):
    """``response_format.json_schema``."""

    name: Name | None = Field(None, description="Accepted, without effect.")
    description: str | None = Field(None, description="Accepted, without effect.")
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema", description="The JSON schema.")
    strict: bool | None = Field(
        None,
        description="Objects have no properties but those that the schema names, where it is silent about others; "
        "without, as --structured-outputs-config says. Keywords that an answer cannot be held to are refused; without, "
        "they are left out, and the header X-Octavo-Relaxed-Schema names them. An answer has the form either way.",
    )


class ResponseFormat(RequestModel):
    """``response_format``."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"] = Field(
        description="Free text, any JSON object, JSON of a schema, or text with tags."
    )
    json_schema: JsonSchemaFormat | None = Field(None, description="Of json_schema.")
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="Of json_object: a JSON schema.")
    structures: list[dict[str, Any]] | None = Field(None, description="Of structural_tag: begin, schema, end of each.")
    triggers: list[str] | None = Field(None, description="Of structural_tag: texts by which tags begin.")


class FormFields(RequestModel):
    """The form of the answer."""

    response_format: ResponseFormat | None = Field(None, description="The form of the answer, as of the OpenAI API.")
    structured_outputs: dict[str, Any] | None = Field(
        None,
        description="The form of the answer: json, json_object, regex, choice, grammar or structural_tag, and options.",
    )
    guided_json: str | dict[str, Any] | bool | None = Field(
        None, description="Another name of structured_outputs.json."
    )
    guided_regex: str | None = Field(None, description="Another name of structured_outputs.regex.")
    guided_choice: list[str] | None = Field(None, description="Another name of structured_outputs.choice.")
    guided_grammar: str | None = Field(None, description="Another name of structured_outputs.grammar.")
    guided_whitespace_pattern: str | None = Field(
        None, description="With guided_json: what may stand between the tokens of JSON."
    )
    json_schema: str | dict[str, Any] | None = Field(None, description="Another name of structured_outputs.json.")
    regex: str | None = Field(None, description="Another name of structured_outputs.regex.")
    grammar: str | None = Field(None, description="Another name of structured_outputs.grammar.")
    ebnf: str | None = Field(None, description="Another name of structured_outputs.grammar.")
    structural_tag: str | dict[str, Any] | None = Field(
        None, description="Another name of structured_outputs.structural_tag."
    )
