"""Whether steps wait for the results of those before them, or are planned ahead of them."""

from __future__ import annotations

#: Weight of the latest step in means.
_LATEST = 0.2
#: Accepted tokens of a sequence and step for which is waited where a device's idle time is not known.
_LEAST = 0.02
#: What new sequences are taken to bring, so that some steps show it.
_NEW = 0.03
#: Most steps ahead until one waits, to see what drafts bring.
_LONGEST = 16


class Waiting:
    """Drafts are proposed behind known tokens: for them a step waits for the result before it, and the device for that.

    It pays if the tokens that drafts add to a step are a greater share than the time in which the device is idle.
    Where it does not, steps run ahead, and one after 1, 2, 4, ... of them waits.
    """

    def __init__(self) -> None:
        self._gain, self._idle = 1.0, 0.0
        self._pause, self._left = 1, 0

    @property
    def waits(self) -> bool:
        """Whether the next step waits."""
        return self._left <= 0

    def begin(self) -> None:
        """A sequence that may have drafts has arrived."""
        self._gain, self._left = max(self._gain, _NEW), 0

    def observe(self, waited: bool, accepted: float, idle: float) -> None:
        """A step without prompts was done; it has waited, or may have been planned ahead.

        ``accepted``: its draft tokens that were, a sequence. ``idle``: the device's seconds before it, by its own.
        """
        if not waited:
            self._left -= 1
            return
        self._gain += _LATEST * (accepted - self._gain)
        self._idle += _LATEST * (idle - self._idle)
        if self._gain > max(self._idle, _LEAST):
            self._pause, self._left = 1, 0
        else:
            self._left, self._pause = self._pause, min(2 * self._pause, _LONGEST)
