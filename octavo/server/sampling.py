"""From the fields of a request to the engine's parameters."""

from __future__ import annotations

from typing import Any

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.sampling_params import SamplingParams
from octavo.server.errors import unsupported
from octavo.server.protocol import GenerationRequest

#: Fields that mean the same there, under the same name.
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
)
#: Of these, what beam search has no use for though clients send it: it draws no random numbers, and its choice of
#: the likeliest is not that of one temperature.
_WITHOUT_EFFECT_ON_BEAMS = frozenset({"n", "best_of", "temperature", "top_p", "top_k", "min_p", "seed"})
_BEAM_FIELDS = ("length_penalty", "early_stopping", "ignore_eos", "skip_special_tokens")


def sampling_params(
    body: GenerationRequest, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """The parameters of a request without beam search.

    Raises:
        InvalidRequestError: a value is out of range.
        ApiError: an option of beam search was given.
    """
    for name in ("length_penalty", "early_stopping"):
        if getattr(body, name) is not None:
            raise unsupported(name, f"{name} is of beam search only; set use_beam_search to true with it")
    return SamplingParams(
        **_given(body, _SHARED), max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs
    )


def beam_search_params(body: GenerationRequest, max_tokens: int) -> BeamSearchParams:
    """The parameters of a request with beam search: as wide as ``best_of``, or ``n``.

    Raises:
        InvalidRequestError: a value is out of range.
        ApiError: a field was given that beam search does not know and that would change the answer.
    """
    neutral = SamplingParams()
    for name, value in _given(body, (*_SHARED, "prompt_logprobs")).items():
        if name in _WITHOUT_EFFECT_ON_BEAMS or name in _BEAM_FIELDS or value == getattr(neutral, name):
            continue
        raise unsupported(name, f"{name} is not supported with use_beam_search")
    # As SamplingParams checks them: n at most best_of.
    width = SamplingParams(n=body.n or 1, best_of=body.best_of).num_sequences
    return BeamSearchParams(beam_width=width, max_tokens=max_tokens, **_given(body, _BEAM_FIELDS))


def _given(body: GenerationRequest, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(body, name)) is not None}
