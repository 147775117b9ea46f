"""What a caller may say of a request beside prompt and parameters."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo.core.adapters import LoRARequest, one_adapter
from octavo.core.errors import InvalidRequestError
from octavo.core.foreign_options import check_keywords
from octavo.core.reasoning import ReasoningMarks
from octavo.core.sampling_params import check_number
from octavo.core.timestamp_rules import TimestampRules


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The keywords of ``LLM.generate`` and its like: made and checked once, from keywords, JSON or flags.

    They go with the request to the engine core; what the front end resolves is a field of ``EngineCoreRequest`` there.

    Raises:
        InvalidRequestError: a value is of another type, or out of range.
    """

    #: An integer or a finite float; the lower goes first. Refused, if not 0, under a policy that does not look at it.
    priority: int | float = 0
    #: Whose request it is, for the policies that share by user or learn from users.
    user: str = ""
    #: Seconds from its arrival to the first token, and between its tokens from there, that the ``deadline`` policy aims
    #: at; None: as the option of this name says. Refused under a policy that does not look at them.
    ttft_target: float | None = None
    tpot_target: float | None = None
    #: Requests with different salts share no cached prefix. That of a prompt comes before it.
    cache_salt: str = ""
    #: A past moment in seconds of ``time.monotonic()``; None: now. Policies, ageing, the scheduler's delay and the
    #: metrics count from it.
    arrival_time: float | None = None
    #: The adapter that it runs with, which is loaded if it is not yet. Needs ``enable_lora``, or
    #: ``enable_prompt_adapter`` if it is a prompt adapter; that may be named ``prompt_adapter_request``.
    lora_request: LoRARequest | None = None
    #: What the output is likely to be, as text or token ids: tokens that it has indeed come sooner, and the output does
    #: not depend on it.
    prediction: str | Sequence[int] | None = None
    #: Special tokens that are part of the text although others are not.
    visible_tokens: frozenset[int] = frozenset()
    #: How the model marks its reasoning, where it is known better than by its chat template.
    reasoning: ReasoningMarks | None = None
    #: Of a transcription.
    timestamps: TimestampRules | None = None
    #: Of a transcription: (layer, head) whose cross attention weights are asked for, of a prompt without an answer.
    alignment_heads: Sequence[tuple[int, int]] = ()
    #: Who asks; clients take turns with what has to be compiled.
    client: str = ""
    #: Of a shared prefix, which samples nothing: the name under which its blocks are pinned once computed.
    pin_as: str | None = None

    def __post_init__(self) -> None:
        check_number("priority", self.priority, -math.inf, math.inf)
        for name in ("user", "cache_salt", "client"):
            if not isinstance(getattr(self, name), str):
                raise InvalidRequestError(f"{name} must be text, not {getattr(self, name)!r}")
        for name, target in (("ttft_target", self.ttft_target), ("tpot_target", self.tpot_target)):
            if target is not None:
                check_number(name, target, 0, math.inf)
                if not target:
                    raise InvalidRequestError(f"{name} must be above 0 seconds, not {target}")
        if not isinstance(self.prediction, str | list | tuple | None):
            raise InvalidRequestError(f"prediction must be text or a list of token ids, not {self.prediction!r}")
        moment, now = self.arrival_time, time.monotonic()
        if moment is not None and (
            isinstance(moment, bool) or not isinstance(moment, (int, float)) or not -math.inf < moment <= now
        ):
            raise InvalidRequestError(
                f"arrival_time must be a past moment in seconds of time.monotonic(), which is at {now:.3f}, not "
                f"{moment!r}"
            )


DEFAULT_OPTIONS = RequestOptions()
#: Fields that are set by the engine's own front ends alone.
_INTERNAL = {"pin_as", "reasoning", "timestamps", "alignment_heads"}
#: Names of keywords that are fields of ``RequestOptions``, or that stand for one.
KEYWORDS = {*RequestOptions.__struct_fields__, "prompt_adapter_request"} - _INTERNAL


def check_request_keywords(method: str, keywords: Mapping[str, Any]) -> None:
    """Refuses keywords that are neither in ``KEYWORDS`` nor another engine's, with a value that means nothing here.

    Raises:
        TypeError, InvalidRequestError: see ``check_keywords``.
    """
    check_keywords(method, {name: value for name, value in keywords.items() if name not in KEYWORDS})


def options_from_keywords(
    method: str, keywords: Mapping[str, Any], options: RequestOptions = DEFAULT_OPTIONS
) -> RequestOptions:
    """The options with those fields that the keywords of a method give; None is as if it were not given.

    Raises:
        TypeError: a keyword is neither one of ``KEYWORDS`` nor one of another engine's.
        InvalidRequestError: a value is wrong, or one of ``FOREIGN_KEYWORDS`` that is not accepted.
        AdapterError: there are two adapters.
    """
    if not keywords:
        return options
    check_request_keywords(method, keywords)
    fields = {name: value for name, value in keywords.items() if name in KEYWORDS and value is not None}
    if (named := fields.pop("prompt_adapter_request", None)) is not None:
        fields["lora_request"] = one_adapter(fields.get("lora_request"), named)
    return msgspec.structs.replace(options, **fields)


def options_for_each(method: str, keywords: Mapping[str, Any], count: int) -> list[RequestOptions]:
    """The options of each of ``count`` requests; a keyword has one value for all, or a list with one for each.

    Raises:
        InvalidRequestError: a list is of another length.
        TypeError, InvalidRequestError, AdapterError: as ``options_from_keywords``.
    """
    columns = {name: value for name, value in keywords.items() if name in KEYWORDS and _is_one_each(name, value)}
    for name, column in columns.items():
        check_one_each(name, column, count)
    options = options_from_keywords(method, {name: value for name, value in keywords.items() if name not in columns})
    if not columns:
        return [options] * count
    rows = zip(*columns.values(), strict=True)
    return [options_from_keywords(method, dict(zip(columns, row, strict=True)), options) for row in rows]


def check_one_each(name: str, value: Any, count: int) -> None:
    """Refuses what is no sequence of ``count`` values."""
    if not isinstance(value, Sequence) or len(value) != count:
        what = f"{len(value)} of them" if isinstance(value, Sequence) else repr(value)
        raise InvalidRequestError(f"{name} must be one for all prompts or one for each of the {count}, not {what}")


def _is_one_each(name: str, value: object) -> bool:
    """Whether this is a list of values; a list of integers is one prediction."""
    if not isinstance(value, (list, tuple)):
        return False
    return name != "prediction" or not all(isinstance(token, int) for token in value)
