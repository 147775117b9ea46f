"""``SamplingParams`` and ``BeamSearchParams`` from the fields of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.sampling_params import SamplingParams, defaults_beside
from octavo.server.api_errors import unsupported
from octavo.server.formats import read_form
from octavo.server.protocol import GenerationRequest

#: Fields of the same name and meaning in ``SamplingParams``.
_SHARED = (
    "n",
    "best_of",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "bad_words",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "logit_bias",
    "allowed_token_ids",
    "logprob_token_ids",
    "thinking_token_budget",
)
#: Shared fields that clients send with beam search and that do not affect it: it draws no random numbers.
_IGNORED_BY_BEAM_SEARCH = frozenset({"n", "best_of", "temperature", "top_p", "top_k", "min_p", "seed"})
_BEAM_FIELDS = ("length_penalty", "early_stopping", "ignore_eos", "skip_special_tokens")


def make_sampling_params(
    body: GenerationRequest,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """The parameters of a request without beam search; ``defaults`` for fields that the body leaves out.

    Raises:
        InvalidRequestError: a value is out of range.
        ApiError: a field of beam search was given.
    """
    for name in ("length_penalty", "early_stopping"):
        if getattr(body, name) is not None:
            raise unsupported(name, f"{name} is of beam search only; set use_beam_search to true with it")
    form = read_form(body)
    fields = {
        "max_tokens": max_tokens,
        "logprobs": logprobs if body.logprob_token_ids is None else 0,
        "prompt_logprobs": prompt_logprobs,
        "structured_outputs": None if form is None else form.params,
        "extra_args": body.vllm_xargs,
    }
    given = {**_given(body, _SHARED), **fields}
    return SamplingParams(**defaults_beside(given, defaults), **given)


def make_beam_search_params(body: GenerationRequest, max_tokens: int) -> BeamSearchParams:
    """The parameters of a request with beam search; the width is ``best_of``, or ``n``.

    Raises:
        InvalidRequestError: a value is out of range.
        ApiError: a field that beam search does not support was given.
    """
    neutral = SamplingParams()
    for name, value in _given(body, (*_SHARED, "prompt_logprobs")).items():
        if name in _IGNORED_BY_BEAM_SEARCH or name in _BEAM_FIELDS or value == getattr(neutral, name):
            continue
        raise unsupported(name, f"{name} is not supported with use_beam_search")
    if (form := read_form(body)) is not None:
        raise unsupported(form.field, f"{form.field} is not supported with use_beam_search")
    # SamplingParams checks n and best_of.
    width = SamplingParams(n=body.n or 1, best_of=body.best_of).num_sequences
    return BeamSearchParams(beam_width=width, max_tokens=max_tokens, **_given(body, _BEAM_FIELDS))


def _given(body: GenerationRequest, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(body, name)) is not None}
