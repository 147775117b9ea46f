"""Parameters of beam search."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from octavo.core.errors import InvalidRequestError
from octavo.core.sampling_params import DEFAULT_MAX_TOKENS, check_integer, check_number

#: A step looks at ``beam_width`` candidates of each beam and one for each stop token; at most 100 are computed.
MAX_BEAM_WIDTH = 32


class BeamSearchParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Beam search: keep the ``beam_width`` most likely continuations at every step.

    >>> BeamSearchParams(beam_width=4, max_tokens=64)

    The search and its scores are those of ``transformers``' ``generate(num_beams=beam_width)``: a hypothesis scores its
    summed logprobs divided by ``generated_tokens ** length_penalty``.

    Raises:
        InvalidRequestError: a value is out of range or of the wrong type.
    """

    #: Hypotheses kept at every step, and returned at the end, best first.
    beam_width: int
    #: Most tokens to generate; as in ``SamplingParams``.
    max_tokens: int = DEFAULT_MAX_TOKENS
    #: Above 0 favours long hypotheses, below 0 short ones.
    length_penalty: float = 1.0
    #: True: end when ``beam_width`` hypotheses are complete. False: continue while a running one scores better now.
    #: "never": continue while a running one could still score better at any length.
    early_stopping: bool | Literal["never"] = False
    #: Continue after the end-of-sequence token.
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    #: Of other engines; 0 here, as nothing is drawn.
    temperature: float = 0.0

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Checks every field.

        Raises:
            InvalidRequestError: naming the field, its value and what would be right.
        """
        check_integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        check_integer("max_tokens", self.max_tokens, 1, None)
        check_number("length_penalty", self.length_penalty, -math.inf, math.inf)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidRequestError(f"early_stopping must be True, False or 'never', not {self.early_stopping!r}")
        check_number("temperature", self.temperature, 0.0, math.inf)
        if self.temperature:
            raise InvalidRequestError(
                f"temperature must be 0 with beam search, not {self.temperature!r}: it takes the likeliest tokens"
            )
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be True or False, not {getattr(self, name)!r}")
