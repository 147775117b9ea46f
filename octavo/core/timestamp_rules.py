"""What a speech model's answer may look like: times between texts (Radford et al. 2022, section 2.3 and 4.5)."""

from __future__ import annotations

import msgspec


class TimestampRules(msgspec.Struct, frozen=True, array_like=True):
    """Token ids and bounds of one model, for one request.

    Tokens from ``first_time`` on are times, in order. Those between ``end`` and ``first_time`` are neither text nor
    time. Logprobs of a request with rules are those of what the rules leave.
    """

    #: The token that ends the answer; ids below are text.
    end: int
    #: The token of time 0.
    first_time: int
    #: Never chosen; and not chosen as the first token.
    suppress: list[int] = []
    suppress_first: list[int] = []
    #: Whether the answer has times: it begins with one, they come in pairs around texts, and never decrease. If not,
    #: it has none.
    has_times: bool = True
    #: Most steps of time that the first one is after 0.
    latest_first: int = 50
