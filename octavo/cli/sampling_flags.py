"""Flags for sampling parameters, made from the fields of ``SamplingParams``."""

from __future__ import annotations

import argparse
import json
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from octavo.cli.engine_flags import help_text
from octavo.cli.parsing import Arguments, Parser
from octavo.core.errors import InvalidRequestError
from octavo.core.sampling_params import SamplingParams, defaults_beside

PREFIX = "sampling"
#: Parameters that help shows; the others are in ``--help all``.
COMMON_PARAMETERS = frozenset(
    (
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "max_tokens",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logprobs",
    )
)

#: One line of help for each field that can be given as text.
HELP = {
    "n": "completions of each prompt",
    "best_of": "sample this many completions and return the n with the highest cumulative logprob; default: n",
    "presence_penalty": "subtracted from the logit of every token already generated, once each",
    "frequency_penalty": "subtracted once for each time that a token was generated",
    "repetition_penalty": "divides positive (multiplies negative) logits of tokens in prompt or output; 1 is off",
    "temperature": "divides the logits: less is more predictable; 0 always takes the most likely token",
    "top_p": "keep the smallest set of most likely tokens whose probability reaches this; 1 is off",
    "top_k": "keep this many of the most likely tokens; 0 or -1 is off",
    "min_p": "drop tokens less likely than this share of the most likely one's probability; 0 is off",
    "seed": "fixes the request's random numbers; default: drawn from the seed of the engine",
    "stop": "text that ends the answer; may be given several times",
    "stop_token_ids": "token ids that end the answer, as in 13,198",
    "bad_words": "word that is never generated; may be given several times",
    "include_stop_str_in_output": "keep the stop text in the answer",
    "ignore_eos": "go on after the end-of-sequence token",
    "max_tokens": "most tokens to generate, refused if the context has no room for them (the default is cut there); "
    "none: as many as it allows",
    "min_tokens": "no end token, not even an ignored one, and no stop token before this many tokens",
    "logprobs": "logprobs of this many most likely tokens at each position, and of the chosen one (shown by --json)",
    "logprob_token_ids": "token ids whose logprobs are returned in place of the most likely ones', as in 13,198",
    "prompt_logprobs": "logprobs of this many most likely tokens at each position of the prompt",
    "detokenize": "turn token ids into text",
    "skip_special_tokens": "leave special tokens out of the text",
    "logit_bias": 'added to the logits of tokens, as in {"13": -5.0}',
    "extra_args": 'arguments of logits processors that --logits-processors loads, as in {"scale": 0.5}',
    "thinking_token_budget": "most tokens of reasoning, of models that mark it; -1: no limit",
    "truncate_prompt_tokens": "keep only this many last tokens of a prompt; -1: as many as leave room for max_tokens",
    "structured_outputs": 'the form of the answer, as in {"regex": "[0-9]+"}; others are json, choice, grammar',
    "allowed_token_ids": "only these token ids may be generated, as in 13,198",
}


def add_sampling_flags(
    parser: Parser, *, defaults: Mapping[str, Any] | None = None, leave_out: Collection[str] = ()
) -> None:
    """Adds a flag for every sampling parameter that can be given as text.

    Args:
        parser: the flags are added to it; one that is not given is absent from the arguments.
        defaults: the command's defaults in place of the fields' own.
        leave_out: parameters that have no meaning for the command.
    """
    group = parser.add_argument_group(
        "sampling options",
        "A default of the model's own (see --generation-config) comes before the one shown here.",
    )
    for field in msgspec.structs.fields(SamplingParams):
        if field.name not in HELP or field.name in leave_out:
            continue
        if field.name not in COMMON_PARAMETERS:
            parser.rare.add(f"{PREFIX}:{field.name}")
        default = (defaults or {}).get(field.name, field.default)
        if default is None and field.default is not None:
            default = "none"  # a value that the command chooses, not the absence of one
        group.add_argument(
            "--" + field.name.replace("_", "-"),
            dest=f"{PREFIX}:{field.name}",
            default=argparse.SUPPRESS,
            help=help_text(HELP[field.name], default),
            **_argument_options(field.type),
        )
    _add_form_flags(group)


def _add_form_flags(group: argparse._ArgumentGroup) -> None:
    """Adds the forms of ``structured_outputs`` that are most used."""
    forms = group.add_mutually_exclusive_group()
    for flag, form, kind, metavar, what in (
        ("--json-schema", "json", _file, "FILE", "the answer is JSON of the schema in this file"),
        ("--regex", "regex", str, "REGEX", "the whole answer matches it"),
        ("--choice", "choice", str, "TEXT", "the answer is one of these texts; given several times"),
        ("--grammar", "grammar", _file, "FILE", "the answer has the grammar in this file, in Lark's notation or GBNF"),
    ):
        forms.add_argument(
            flag,
            dest=f"{PREFIX}:structured_outputs",
            default=argparse.SUPPRESS,
            action=_Form,
            const=form,
            type=kind,
            metavar=metavar,
            help=what,
        )


class _Form(argparse.Action):
    """Stores a form as the field ``const`` of ``structured_outputs``; ``choice`` grows with each use."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        if self.const == "choice":
            values = [*getattr(namespace, self.dest, {}).get("choice", ()), values]
        setattr(namespace, self.dest, {self.const: values})


def _file(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as e:
        raise argparse.ArgumentTypeError(f"cannot read {name}: {e}") from None


def add_beam_flags(parser: Parser) -> None:
    """Adds the parameters of ``BeamSearchParams`` that are not of ``SamplingParams`` too."""
    group = parser.add_argument_group(
        "beam search options",
        "With --beam-width, of the sampling options only those that beam search has may be given.",
    )
    flags: dict[str, dict[str, Any]] = {
        "beam_width": {"type": int, "metavar": "N", "help": "beams, and answers, best first"},
        "length_penalty": {"type": float, "metavar": "X", "help": "above 0 favours long answers (default: 1.0)"},
        "early_stopping": {
            "type": _early_stopping,
            "metavar": "true|false|never",
            "help": "when to end: at N complete answers, when no beam scores better now, or when none can (default: "
            "false)",
        },
    }
    for name, options in flags.items():
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, dest=f"{PREFIX}:{name}", default=argparse.SUPPRESS, **options)


def read_sampling_params(arguments: Arguments, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
    """The parameters that the flags give.

    Raises:
        InvalidRequestError: a value is out of range.
    """
    given = arguments.group(PREFIX)
    return SamplingParams(**defaults_beside(given, defaults or {}), **given)


def read_value(name: str, text: str) -> Any:
    """The value of a parameter of ``HELP`` that somebody has typed; several texts are a JSON list.

    Raises:
        InvalidRequestError: it is of another type; whether it is in range is for ``SamplingParams`` to say.
    """
    kind = next(field.type for field in msgspec.structs.fields(SamplingParams) if field.name == name)
    kinds = typing.get_args(kind) or (kind,)
    if text.lower() == "none" and type(None) in kinds:
        return None
    try:
        if bool in kinds:
            return {"true": True, "on": True, "false": False, "off": False}[text.lower()]
        if list[str] in kinds:
            return json.loads(text) if text.startswith("[") else [text]
        return _argument_options(kind)["type"](text)
    except (ValueError, KeyError, RecursionError, argparse.ArgumentTypeError):
        forms = {bool: "true or false", int: "an integer", float: "a number", list[int]: "token ids, as in 13,198"}
        form = next((form for each, form in forms.items() if each in kinds), "JSON")
        raise InvalidRequestError(f"{name} takes {form}, not {text!r}: {HELP[name]}") from None


def _argument_options(kind: Any) -> dict[str, Any]:
    """The arguments of ``add_argument`` for a value of this type."""
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    kinds = typing.get_args(kind) or (kind,)
    optional = type(None) in kinds
    if int in kinds:
        return {"type": _optional_integer if optional else int, "metavar": "N"}
    if float in kinds:
        return {"type": float, "metavar": "X"}
    if list[int] in kinds:
        return {"type": _integers, "metavar": "ID,..."}
    if list[str] in kinds:
        return {"action": "append", "metavar": "TEXT"}
    return {"type": _json_object, "metavar": "JSON"}


def _optional_integer(text: str) -> int | None:
    return None if text.lower() == "none" else int(text)


def number(text: str) -> float:
    """An integer or a float."""
    try:
        return int(text)
    except ValueError:
        return float(text)


def _early_stopping(text: str) -> bool | str:
    values: dict[str, bool | str] = {"true": True, "false": False}
    return values.get(text.lower(), text.lower())  # BeamSearchParams checks the rest


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, not {text!r}")
    return value


# argparse names the function in its message: "invalid integer value: 'x'".
_optional_integer.__name__ = "integer"
_integers.__name__ = "list of token ids"
_json_object.__name__ = "JSON"
