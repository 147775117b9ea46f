"""The form of the answer that a request asks for, from any of the fields that can say it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.errors import InvalidRequestError
from octavo.core.sampling_params import SamplingParams
from octavo.core.structured_outputs import FORMS, TOO_COSTLY, UNUSABLE, StructuredOutputsParams, structured_outputs_of
from octavo.server.api_errors import invalid
from octavo.server.logging import log_fields
from octavo.server.protocol_formats import FormFields, ResponseFormat

#: Fields that mean the same as one of ``structured_outputs``.
_OTHER_NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "grammar": "grammar",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}


class Form(NamedTuple):
    """A form, and where the request says it."""

    #: Such as ``response_format.json_schema.schema``, in place of ``structured_outputs.json``.
    place: str
    params: StructuredOutputsParams

    @property
    def field(self) -> str:
        """The request's field."""
        return self.place.partition(".")[0]


def read_form(body: FormFields) -> Form | None:
    """The form that a request asks for; None: free text.

    Raises:
        ApiError, InvalidRequestError: several fields say different ones, or a field is wrong; the message begins with
            its name.
    """
    forms: dict[str, Form] = {}
    if body.response_format is not None and (form := _of_response_format(body.response_format)) is not None:
        forms["response_format"] = form
    if body.structured_outputs is not None:
        params = structured_outputs_of(body.structured_outputs)
        forms["structured_outputs"] = Form(f"structured_outputs.{params.form}", params)
    for field, name in _OTHER_NAMES.items():
        value = getattr(body, field)
        if value is not None and value != "":
            options: dict[str, Any] = {name: value}
            if field == "guided_json":
                options["whitespace_pattern"] = body.guided_whitespace_pattern or None
            forms[field] = Form(field, _made(field, options))
    if len({_meaning(form.params) for form in forms.values()}) > 1:
        raise invalid(list(forms)[-1], f"{' and '.join(forms)} each say the form of the answer; give one of them")
    if body.guided_whitespace_pattern and "guided_json" not in forms:
        raise invalid("guided_whitespace_pattern", "guided_whitespace_pattern is allowed only with guided_json")
    return next(iter(forms.values()), None)


def _meaning(params: StructuredOutputsParams) -> str:
    """A form as text that is the same for a schema and its JSON text, and for a left-out option and its null."""
    fields = {name: value for name, value in msgspec.to_builtins(params).items() if value not in (None, False, [])}
    for name in ("json", "structural_tag"):
        if isinstance(fields.get(name), str):
            with contextlib.suppress(ValueError, RecursionError):
                fields[name] = json.loads(fields[name])
    return json.dumps(fields, sort_keys=True)


def renamed(error: InvalidRequestError, body: FormFields) -> InvalidRequestError:
    """The error, with the place where the request says the form in place of ``structured_outputs``."""
    form = read_form(body)
    if form is None:
        return error
    message = str(error).replace(f"structured_outputs.{form.params.form}", form.place, 1)
    if form.field == "guided_json":
        message = message.replace("structured_outputs.whitespace_pattern", "guided_whitespace_pattern", 1)
    return InvalidRequestError(message)


def form_error(error: str | None, params: SamplingParams | BeamSearchParams) -> str | None:
    """What an engine's error says of the form that a request asks for; None: it is about something else."""
    form = params.structured_outputs if isinstance(params, SamplingParams) else None
    if form is None or error is None or not error.startswith((UNUSABLE, TOO_COSTLY)):
        return None
    return f"structured_outputs.{form.form}: {error.partition(chr(10))[0]}"


#: The response's header that names the keywords of a schema that the answer is not held to.
RELAXED_HEADER = "x-octavo-relaxed-schema"
#: Most characters of it: servers and proxies bound the size of all headers.
_LONGEST_HEADER = 1000


def tell_relaxed_keywords(scope: MutableMapping[str, Any], places: Sequence[str]) -> None:
    """Adds ``RELAXED_HEADER`` to the response of a request, if it has not begun, and to its line in the access log.

    Places are JSON pointers within the schema, percent-encoded where a header cannot hold them.
    """
    shown, length = list[str](), 0
    for place in places:
        written = quote(place, safe="/~$.-_[]: ")
        if length + len(written) > _LONGEST_HEADER:
            shown.append(f"and {len(places) - len(shown)} more")
            break
        shown.append(written)
        length += len(written) + 2
    told = ", ".join(shown)
    scope.setdefault("state", {}).setdefault("response_headers", {})[RELAXED_HEADER] = told
    log_fields(scope)["relaxed_schema"] = told


def _of_response_format(response_format: ResponseFormat) -> Form | None:
    fields = {"json_schema": ("json_schema",), "json_object": ("schema",), "structural_tag": ("structures", "triggers")}
    values = {
        "json_schema": response_format.json_schema,
        "schema": response_format.schema_,
        "structures": response_format.structures,
        "triggers": response_format.triggers,
    }
    for name, value in values.items():
        if value is not None and name not in fields.get(response_format.type, ()):
            raise invalid("response_format", f"response_format.{name} is not of type {response_format.type!r}")
    if response_format.type == "json_object":
        if response_format.schema_ is not None:
            return Form("response_format.schema", StructuredOutputsParams(json=response_format.schema_))
        return Form("response_format", StructuredOutputsParams(json_object=True))
    if response_format.type == "json_schema":
        if response_format.json_schema is None or response_format.json_schema.schema_ in (None, False):
            raise invalid("response_format", "response_format.json_schema.schema must be a JSON schema")
        params = StructuredOutputsParams(
            json=response_format.json_schema.schema_,
            disable_additional_properties=response_format.json_schema.strict or None,
            strict=response_format.json_schema.strict or None,
        )
        return Form("response_format.json_schema.schema", params)
    if response_format.type == "structural_tag":
        tag = {"structures": response_format.structures, "triggers": response_format.triggers}
        return Form("response_format", StructuredOutputsParams(structural_tag=tag))
    return None


def _made(field: str, options: dict[str, Any]) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(**options)
    except InvalidRequestError as e:
        for name in FORMS:
            if str(e).startswith(f"structured_outputs.{name}"):
                raise InvalidRequestError(str(e).replace(f"structured_outputs.{name}", field, 1)) from None
        raise
