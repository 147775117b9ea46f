"""What a request knows of later ones: which prefix of its prompt they will share, and for how long."""

from __future__ import annotations

import msgspec

#: Seconds of Anthropic's ``ttl`` of a ``cache_control``; without one it is "5m".
ANTHROPIC_SECONDS = {"5m": 300.0, "1h": 3600.0}
#: Seconds of OpenAI's ``prompt_cache_retention``: ten minutes without use, or a day.
RETENTION_SECONDS = {"in_memory": 600.0, "in-memory": 600.0, "24h": 86400.0}
#: Seconds of the only ``ttl`` of OpenAI's ``prompt_cache_options``, "30m".
OPTIONS_SECONDS = {"30m": 1800.0}
#: Marks that a request may have, in both APIs.
MAX_BREAKPOINTS = 4


class Breakpoint(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The end of a prefix that later requests will share."""

    #: Tokens of the prompt up to here.
    num_tokens: int
    #: Seconds since the last request with this prefix for which its blocks are held.
    ttl: float


class CacheHints(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The prefixes of a prompt whose blocks the prefix cache holds (``memory.retention``); no answer depends on it."""

    breakpoints: tuple[Breakpoint, ...] = ()
    #: Seconds to hold the whole prompt; 0: not.
    ttl: float = 0.0
    #: The conversation: its latest prompt takes the place of the one before. Requests with one key go to one replica.
    key: str = ""
    #: The name of a prefix that an operator holds until it is released.
    pin: str = ""

    def shifted(self, num_tokens: int) -> CacheHints:
        """The hints of a prompt with this number of virtual tokens before it."""
        marks = tuple(Breakpoint(mark.num_tokens + num_tokens, mark.ttl) for mark in self.breakpoints)
        return msgspec.structs.replace(self, breakpoints=marks)

    def prefixes(self, num_tokens: int) -> list[Breakpoint]:
        """The prefixes of a prompt of ``num_tokens`` tokens, longest first; each is held longer than those before."""
        marks = [Breakpoint(min(mark.num_tokens, num_tokens), mark.ttl) for mark in self.breakpoints]
        if self.ttl:
            marks.append(Breakpoint(num_tokens, self.ttl))
        held: list[Breakpoint] = []
        for mark in sorted(marks, key=lambda mark: (-mark.num_tokens, -mark.ttl)):
            if mark.num_tokens > 0 and (not held or mark.ttl > held[-1].ttl):
                held.append(mark)
        return held
