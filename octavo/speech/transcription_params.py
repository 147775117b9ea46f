"""What a caller may say of a transcription."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from octavo.core.errors import InvalidRequestError

Task = Literal["transcribe", "translate"]
TASKS: tuple[Task, ...] = ("transcribe", "translate")
#: Tried one after the other where an answer looks wrong (Radford et al. 2022, section 4.5).
DEFAULT_TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_MAX_TEMPERATURES = 16
_MAX_TEXT = 10_000


class TranscriptionParams(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Parameters of one recording, with the names that users of Whisper know.

    >>> TranscriptionParams(language="en", word_timestamps=True)

    Raises:
        InvalidRequestError: a value is out of range or of the wrong type.
    """

    #: Code or name of the language that is spoken. None: it is detected in the first 30 s.
    language: str | None = None
    #: "transcribe": text in the language that is spoken; "translate": in English, of multilingual models.
    task: Task = "transcribe"
    #: Text before the recording, which sets its style and how names are written.
    prompt: str | None = None
    #: Words that may occur; they come before what precedes each window.
    hotwords: str | None = None
    #: One, or several, of which the next is taken where an answer fails a threshold. None: 0, 0.2, ... 1.
    temperature: float | tuple[float, ...] | None = None
    #: An answer whose text zlib makes smaller than by this factor is not one that repeats itself. None: no matter.
    compression_ratio_threshold: float | None = 2.4
    #: Least mean logprob of an answer's tokens. None: no matter.
    logprob_threshold: float | None = -1.0
    #: A window that is silent with more than this probability, and whose answer is below ``logprob_threshold``, has no
    #: text. None: no matter.
    no_speech_threshold: float | None = 0.6
    #: Whether the text of the windows before comes before each window, if it was not drawn at a high temperature.
    condition_on_previous_text: bool = True
    #: Whether each word has its times, too.
    word_timestamps: bool = False
    #: Whether answers have times at all. Without them a window is one segment, and the next begins where it ends.
    timestamps: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise InvalidRequestError(f"task must be 'transcribe' or 'translate', not {self.task!r}")
        for name in ("language", "prompt", "hotwords"):
            _check_text(name, getattr(self, name))
        for name in ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold"):
            if (value := getattr(self, name)) is not None:
                _check_number(name, value, -math.inf, math.inf)
        self._check_temperatures()
        for name in ("condition_on_previous_text", "word_timestamps", "timestamps"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.word_timestamps and not self.timestamps:
            raise InvalidRequestError("word_timestamps=True needs timestamps=True")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise InvalidRequestError(f"seed must be an integer, not {self.seed!r}")

    def _check_temperatures(self) -> None:
        given = self.temperature
        if given is None:
            return
        values = tuple(given) if isinstance(given, list | tuple) else (given,)
        if not 1 <= len(values) <= _MAX_TEMPERATURES:
            raise InvalidRequestError(f"temperature must be 1 to {_MAX_TEMPERATURES} numbers, not {len(values)}")
        for value in values:
            _check_number("temperature", value, 0.0, 2.0)

    @property
    def temperatures(self) -> tuple[float, ...]:
        """The temperatures to try, in order."""
        if self.temperature is None:
            return DEFAULT_TEMPERATURES
        return tuple(self.temperature) if isinstance(self.temperature, list | tuple) else (self.temperature,)


def _check_text(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, str):
        raise InvalidRequestError(f"{name} must be text, not {value!r}")
    if value is not None and len(value) > _MAX_TEXT:
        raise InvalidRequestError(f"{name} may have at most {_MAX_TEXT} characters, not {len(value)}")


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequestError(f"{name} must be a finite number, not {value!r}")
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be in [{low:g}, {high:g}], not {value}")
