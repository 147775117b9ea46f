"""Flags for sampling parameters, made from the fields of ``SamplingParams``."""

from __future__ import annotations

import argparse
import json
import typing
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from octavo.cli.engine_flags import help_text
from octavo.cli.parsing import Arguments, Parser
from octavo.core.sampling_params import SamplingParams

PREFIX = "sampling"

#: One line of help for each field that can be given as text.
HELP = {
    "n": "completions of each prompt",
    "best_of": "sample this many completions and give the n likeliest of them",
    "presence_penalty": "subtracted from the logit of every token already generated, once each",
    "frequency_penalty": "subtracted once for each time that a token was generated",
    "repetition_penalty": "divides positive (multiplies negative) logits of tokens in prompt or output; 1 is off",
    "temperature": "0 always takes the most likely token",
    "top_p": "keep the smallest set of most likely tokens whose probability reaches this; 1 is off",
    "top_k": "keep this many of the most likely tokens; 0 is off",
    "min_p": "drop tokens less likely than this share of the most likely one's probability; 0 is off",
    "seed": "fixes the random numbers",
    "stop": "text that ends the answer; may be given several times",
    "stop_token_ids": "token ids that end the answer, as in 13,198",
    "bad_words": "word that is never generated; may be given several times",
    "include_stop_str_in_output": "keep the stop text in the answer",
    "ignore_eos": "go on after the end-of-sequence token",
    "max_tokens": "most tokens to generate, refused if the context has no room for them (the default is cut there); "
    "none: as many as it allows",
    "min_tokens": "no end and no stop token before this many tokens",
    "logprobs": "logprobs of this many most likely tokens at each position (see --json)",
    "prompt_logprobs": "the same for each token of the prompt",
    "detokenize": "turn token ids into text",
    "skip_special_tokens": "leave special tokens out of the text",
    "logit_bias": 'added to the logits of tokens, as in {"13": -5.0}',
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
    group = parser.add_argument_group("sampling options")
    for field in msgspec.structs.fields(SamplingParams):
        if field.name not in HELP or field.name in leave_out:
            continue
        default = {**dict(defaults or {})}.get(field.name, field.default)
        group.add_argument(
            "--" + field.name.replace("_", "-"),
            dest=f"{PREFIX}:{field.name}",
            default=argparse.SUPPRESS,
            help=help_text(HELP[field.name], default),
            **_argument_options(field.type),
        )


def read_sampling_params(arguments: Arguments, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
    """The parameters that the flags give.

    Raises:
        InvalidRequestError: a value is out of range.
    """
    return SamplingParams(**{**dict(defaults or {}), **arguments.group(PREFIX)})


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
