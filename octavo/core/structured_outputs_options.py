"""Options of structured output."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

from octavo.core.option_part import OptionPart, make_part, read_mapping


class StructuredOutputsConfig(OptionPart):
    """Defaults of the fields of structured output of these names. Names are those of vLLM."""

    model_config = ConfigDict(strict=True)

    #: Whether JSON has no spaces and line breaks between its tokens.
    disable_any_whitespace: bool = False
    #: Whether objects have no properties but those that their schema names, where it is silent about others.
    disable_additional_properties: bool = True
    #: Without effect: all mean the same by a grammar, and there is no other that would be fallen back to.
    backend: str = "auto"
    disable_fallback: bool = False


def _structured_outputs(value: Any) -> Any:
    fields = read_mapping({} if value is None else value, '{"disable_any_whitespace": true}')
    return make_part(StructuredOutputsConfig, fields) if isinstance(fields, dict) else fields


class StructuredOutputOptions(OptionPart):
    """The grammars of structured output."""

    structured_outputs_config: Annotated[StructuredOutputsConfig, BeforeValidator(_structured_outputs)] = Field(
        StructuredOutputsConfig(),
        description="What forms of JSON are where a request does not say, as a mapping (JSON on the command line): "
        "disable_any_whitespace (no spaces and line breaks between tokens, false), disable_additional_properties "
        "(objects have no properties but those that their schema names, where it is silent about others, true). "
        "backend and disable_fallback have no effect.",
    )
    structured_outputs_compile_seconds: float = Field(
        5.0,
        gt=0,
        le=3600,
        description="Seconds of processor time that compiling the schema or grammar of a request may take; one that "
        "takes longer is refused. It is compiled in a process beside the engine.",
    )
