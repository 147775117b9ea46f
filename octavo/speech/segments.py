"""Segments of a transcription: what was said from when to when."""

from __future__ import annotations

import string
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.files import MAX_TOKENIZER, read_object
from octavo.core.sampling_params import TimestampRules

# The languages that Whisper models know, by their codes.

#: ISO 639-1 codes (and two of 639-3), in the order of the models' tokens, and names.
LANGUAGES = {
    "en": "english", "zh": "chinese", "de": "german", "es": "spanish", "ru": "russian", "ko": "korean", "fr": "french",
    "ja": "japanese", "pt": "portuguese", "tr": "turkish", "pl": "polish", "ca": "catalan", "nl": "dutch",
    "ar": "arabic", "sv": "swedish", "it": "italian", "id": "indonesian", "hi": "hindi", "fi": "finnish",
    "vi": "vietnamese", "he": "hebrew", "uk": "ukrainian", "el": "greek", "ms": "malay", "cs": "czech",
    "ro": "romanian", "da": "danish", "hu": "hungarian", "ta": "tamil", "no": "norwegian", "th": "thai", "ur": "urdu",
    "hr": "croatian", "bg": "bulgarian", "lt": "lithuanian", "la": "latin", "mi": "maori", "ml": "malayalam",
    "cy": "welsh", "sk": "slovak", "te": "telugu", "fa": "persian", "lv": "latvian", "bn": "bengali", "sr": "serbian",
    "az": "azerbaijani", "sl": "slovenian", "kn": "kannada", "et": "estonian", "mk": "macedonian", "br": "breton",
    "eu": "basque", "is": "icelandic", "hy": "armenian", "ne": "nepali", "mn": "mongolian", "bs": "bosnian",
    "kk": "kazakh", "sq": "albanian", "sw": "swahili", "gl": "galician", "mr": "marathi", "pa": "punjabi",
    "si": "sinhala", "km": "khmer", "sn": "shona", "yo": "yoruba", "so": "somali", "af": "afrikaans", "oc": "occitan",
    "ka": "georgian", "be": "belarusian", "tg": "tajik", "sd": "sindhi", "gu": "gujarati", "am": "amharic",
    "yi": "yiddish", "lo": "lao", "uz": "uzbek", "fo": "faroese", "ht": "haitian creole", "ps": "pashto",
    "tk": "turkmen", "nn": "nynorsk", "mt": "maltese", "sa": "sanskrit", "lb": "luxembourgish", "my": "myanmar",
    "bo": "tibetan", "tl": "tagalog", "mg": "malagasy", "as": "assamese", "tt": "tatar", "haw": "hawaiian",
    "ln": "lingala", "ha": "hausa", "ba": "bashkir", "jw": "javanese", "su": "sundanese", "yue": "cantonese",
}  # fmt: skip
#: Other names.
_OTHER_NAMES = {
    "burmese": "my", "valencian": "ca", "flemish": "nl", "haitian": "ht", "letzeburgesch": "lb", "pushto": "ps",
    "panjabi": "pa", "moldavian": "ro", "moldovan": "ro", "sinhalese": "si", "castilian": "es", "mandarin": "zh",
}  # fmt: skip


def language_code(language: str) -> str:
    """A language's code, from a code (also with a region: "en-US") or name; raises InvalidRequestError."""
    name = language.strip().lower()
    codes = {name: code for code, name in LANGUAGES.items()} | _OTHER_NAMES
    for candidate in (name, name.replace("_", "-").split("-")[0]):
        if candidate in LANGUAGES:
            return candidate
        if candidate in codes:
            return codes[candidate]
    raise InvalidRequestError(
        f"{language!r} is not known; expected a code such as 'en', or a name: 'english'", path="language"
    )


# The special tokens of a Whisper model, and its settings of generation.

#: Seconds between two timestamps.
TIME_STEP = 0.02
_SPEC_TOKENS = {
    "end": "<|endoftext|>", "start": "<|startoftranscript|>", "translate": "<|translate|>",
    "transcribe": "<|transcribe|>", "previous": "<|startofprev|>", "no_times": "<|notimestamps|>",
}  # fmt: skip
#: New and old name.
_NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")
#: The id of ``end`` in multilingual models; English ones have another.
_MULTILINGUAL_END = 50257


@dataclass(frozen=True)
class SpeechTokens:
    end: int
    start: int
    translate: int
    transcribe: int
    previous: int
    no_speech: int
    no_times: int
    #: Maximum tokens of prompt and answer.
    context: int
    #: By code; empty: the model is English.
    languages: dict[str, int] = field(default_factory=dict)
    suppress: tuple[int, ...] = ()
    suppress_first: tuple[int, ...] = ()
    latest_first: int = 50
    #: (layer, head) whose cross attention follows the speech.
    alignment_heads: tuple[tuple[int, int], ...] = ()

    @property
    def first_time(self) -> int:
        return self.no_times + 1

    @property
    def most_tokens(self) -> int:
        return self.context // 2

    def prompt(self, language: str | None, task: str, *, has_times: bool) -> list[int]:
        tokens = [self.start]
        if self.languages:
            tokens += [self.languages[language or "en"], self.translate if task == "translate" else self.transcribe]
        return tokens if has_times else [*tokens, self.no_times]

    def rules(self, *, has_times: bool) -> TimestampRules:
        never = {*self.suppress, self.start, self.translate, self.transcribe, self.previous, self.no_speech}
        never |= {self.no_times, *self.languages.values()}
        return TimestampRules(
            self.end, self.first_time, sorted(never), sorted(self.suppress_first), has_times, self.latest_first
        )

    def check_task(self, task: str) -> None:
        if task == "translate" and not self.languages:
            raise InvalidRequestError(
                "'translate' needs a multilingual model: this one knows English alone", path="task"
            )

    def check_language(self, language: str) -> str:
        """The code of one of the model's languages; raises InvalidRequestError for others."""
        code = language_code(language)
        if not self.languages and code != "en":
            raise InvalidRequestError(f"must be 'en', not {language!r}: the model is English", path="language")
        if self.languages and code not in self.languages:
            raise InvalidRequestError(
                f"{language!r} is none of the model's: {', '.join(self.languages)}", path="language"
            )
        return code


def read_speech_tokens(folder: Path) -> SpeechTokens:
    """Reads a model folder in transformers' layout; raises ConfigError if a file is missing or invalid."""
    if (folder / "tokenizer.json").is_file():
        added = read_object(folder / "tokenizer.json", most=MAX_TOKENIZER).get("added_tokens") or ()
        ids = {str(token["content"]): int(token["id"]) for token in added}
    else:  # a slow tokenizer
        ids = {str(name): int(token) for name, token in read_object(folder / "added_tokens.json").items()}
    if missing := [name for name in _SPEC_TOKENS.values() if name not in ids]:
        raise ConfigError(f"the tokenizer in {folder} is not Whisper's: it lacks the token {missing[0]}")
    config = read_object(folder / "config.json")
    file = folder / "generation_config.json"
    generation = read_object(file) if file.is_file() else config
    is_multilingual = generation.get("is_multilingual", ids[_SPEC_TOKENS["end"]] == _MULTILINGUAL_END)
    languages = {code: ids[f"<|{code}|>"] for code in LANGUAGES if f"<|{code}|>" in ids} if is_multilingual else {}
    heads = generation.get("alignment_heads") or ()
    return SpeechTokens(
        **{name: ids[token] for name, token in _SPEC_TOKENS.items()},
        no_speech=next((ids[name] for name in _NO_SPEECH if name in ids), ids["<|notimestamps|>"] - 1),
        context=int(config.get("max_target_positions", 448)),
        languages=languages,
        suppress=_ids(generation, "suppress_tokens"),
        suppress_first=_ids(generation, "begin_suppress_tokens"),
        latest_first=int(generation.get("max_initial_timestamp_index") or 50),
        alignment_heads=tuple((int(layer), int(head)) for layer, head in heads),
    )


def _ids(values: dict[str, Any], name: str) -> tuple[int, ...]:
    return tuple(int(token) for token in values.get(name) or () if int(token) >= 0)


# Segments of a window's answer.

#: Time steps of a second.
_LEAST_STEPS = round(1 / TIME_STEP)


@dataclass(frozen=True)
class Word:
    """A word; times are seconds from the recording's start."""

    word: str
    start: float
    end: float
    #: Mean of its tokens' probabilities.
    probability: float = 0.0


@dataclass(frozen=True)
class Segment:
    """A segment of a recording; times are seconds from its start."""

    id: int
    start: float
    end: float
    text: str
    #: Text and timestamp tokens.
    tokens: list[int]
    #: Start of its window, in hundredths of a second.
    seek: int = 0
    #: Of the window's answer; the compression ratio is zlib's. Probability of silence, None: not computed.
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech_prob: float | None = None
    words: list[Word] | None = None


@dataclass(frozen=True)
class Transcription:
    text: str
    language: str
    duration: float
    segments: list[Segment] = field(default_factory=list)
    task: str = "transcribe"
    prompt_tokens: int = 0
    completion_tokens: int = 0
    #: Error message, if one of several recordings failed.
    error: str | None = None


@dataclass(frozen=True)
class Span:
    """The tokens of a segment, and its times in steps from the window's start."""

    start: int
    end: int
    tokens: list[int]


def cut_answer(tokens: Sequence[int], steps: int, special: SpeechTokens) -> tuple[list[Span], int]:
    """Cuts a window's answer, without its end token, at its pairs of timestamps; ``steps``: the window's length.

    Returns the spans, and the steps after which the next window starts: the text behind the last pair is heard again,
    unless the answer ends with a single timestamp, after which there is nothing. At least a second, to bound windows.
    """
    is_time = [token >= special.first_time for token in tokens]
    pairs = [i for i in range(1, len(tokens)) if is_time[i - 1] and is_time[i]]
    ends_alone = is_time[-2:] == [False, True]
    if not pairs:
        times = [token - special.first_time for token, time in zip(tokens, is_time, strict=True) if time]
        end = times[-1] if times and times[-1] > 0 else steps
        return [Span(0, end, list(tokens))], steps
    spans, first = [], 0
    for last in [*pairs, len(tokens)] if ends_alone else pairs:
        part = list(tokens[first:last])
        spans.append(Span(part[0] - special.first_time, part[-1] - special.first_time, part))
        first = last
    return spans, steps if ends_alone else max(_LEAST_STEPS, spans[-1].end)


def text_ids(tokens: Sequence[int], special: SpeechTokens) -> list[int]:
    return [token for token in tokens if token < special.end]


def compression_ratio(text: str) -> float:
    """Length of the text over its length compressed by zlib: high for repetitions."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0


def as_segments(
    spans: Sequence[Span], offset: float, decode: Callable[[list[int]], str], special: SpeechTokens
) -> Iterator[tuple[float, float, str, list[int]]]:
    """(start, end, text, tokens) of a window's non-empty spans; the window starts at ``offset`` seconds."""
    for span in spans:
        text = decode(text_ids(span.tokens, special)).rstrip()
        if span.start != span.end and text.strip():
            yield offset + span.start * TIME_STEP, offset + span.end * TIME_STEP, text, span.tokens


# Times of words, by dynamic time warping of cross attention.

#: Width of the median filter over time, in steps.
_MEDIAN = 7
#: Smaller deviations of attention between tokens are rounding errors.
_LEAST_DEVIATION = 1e-8
#: Languages without spaces: each character is a word.
_WITHOUT_SPACES = {"zh", "ja", "th", "lo", "my", "yue"}
#: Punctuation of the word after it, and of the word before it.
_OPENING = "\"'“¿([{-"
_CLOSING = "\"'.。,，!！?？:：”)]}、"  # noqa: RUF001 - those of Chinese and Japanese
_SENTENCE_ENDS = frozenset(".。!！?？")  # noqa: RUF001
#: A word at a sentence's edge lasts at most twice the median word; the median counts as at most this many seconds.
_MOST_MEDIAN = 0.7


def add_words(
    segments: Sequence[Segment],
    weights: NDArray[np.float32],
    probabilities: NDArray[np.float32],
    offset: float,
    special: SpeechTokens,
    decode: Callable[[list[int]], str],
    language: str,
) -> list[Segment]:
    """The segments of a window, which starts at ``offset`` seconds, with their words.

    ``weights``: float32 [heads, tokens + 1, steps], cross attention of the alignment heads where each text token of the
    segments, and then the end token, is predicted; ``probabilities``: float32 [tokens + 1], of these tokens.
    """
    tokens = [text_ids(segment.tokens, special) for segment in segments]
    starts = token_starts(weights) * TIME_STEP + offset
    made, at = [], 0
    for segment, ids in zip(segments, tokens, strict=True):
        words: list[Word] = []
        for text, part in split_words(ids, decode, by_character=language in _WITHOUT_SPACES):
            end = at + len(part)
            words.append(Word(text, float(starts[at]), float(starts[end]), float(np.mean(probabilities[at:end]))))
            at = end
        words = [
            replace(word, start=round(word.start, 2), end=round(word.end, 2))
            for word in _shorten_long_words(_join_punctuation(words))
        ]
        made.append(replace(segment, words=words))
    return made


def token_starts(weights: NDArray[np.float32]) -> NDArray[np.int64]:
    """The step at which each token starts, int64 [tokens]; ``weights``: float32 [heads, tokens, steps]."""
    weights = weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)
    deviation = weights.std(axis=-2, keepdims=True)
    weights = (weights - weights.mean(axis=-2, keepdims=True)) / np.maximum(deviation, _LEAST_DEVIATION)
    half = _MEDIAN // 2
    if weights.shape[-1] > half:
        padded = np.pad(weights, [(0, 0), (0, 0), (half, half)], mode="reflect")
        windows = np.lib.stride_tricks.sliding_window_view(padded, _MEDIAN, axis=-1)
        weights = np.median(windows, axis=-1).astype(np.float32)
    tokens, steps = warping_path(-weights.mean(axis=0))
    return steps[np.flatnonzero(np.diff(tokens, prepend=-1))]


def warping_path(cost: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and columns of the cheapest monotonic path through a matrix, from first to last entry."""
    rows, columns = cost.shape
    # Computed along anti-diagonals, whose entries are independent: skewed[d, i] is the entry of row i and column d - i.
    skewed = np.full((rows + columns - 1, rows), np.inf)
    row = np.arange(rows)
    for i in range(rows):
        skewed[i : i + columns, i] = cost[i]
    moves = np.zeros((rows + columns - 1, rows), np.int8)
    before, last = np.full(rows, np.inf), np.full(rows, np.inf)
    last[0] = skewed[0, 0]
    for d in range(1, rows + columns - 1):
        diagonal, up = np.roll(before, 1), np.roll(last, 1)
        diagonal[0] = up[0] = np.inf
        choices = np.stack([diagonal, up, last])
        moves[d] = best = choices.argmin(axis=0)
        before, last = last, skewed[d] + choices[best, row]
    i, j = rows - 1, columns - 1
    path = [(i, j)]
    while i or j:
        move = moves[i + j, i]
        i, j = i - (move != 2), j - (move != 1)
        path.append((i, j))
    points = np.array(path[::-1], np.int64)
    return points[:, 0], points[:, 1]


def split_words(
    tokens: list[int], decode: Callable[[list[int]], str], *, by_character: bool
) -> list[tuple[str, list[int]]]:
    """Words and their tokens: split at spaces and punctuation, or at each character."""
    parts = _whole_characters(tokens, decode)
    if by_character:
        return parts
    words: list[tuple[str, list[int]]] = []
    for text, ids in parts:
        if not words or text.startswith(" ") or text.strip() in string.punctuation:
            words.append((text, ids))
        else:
            words[-1] = (words[-1][0] + text, words[-1][1] + ids)
    return words


def _whole_characters(tokens: list[int], decode: Callable[[list[int]], str]) -> list[tuple[str, list[int]]]:
    """The fewest tokens that make text: a character may have several."""
    parts: list[tuple[str, list[int]]] = []
    current: list[int] = []
    for token in tokens:
        current.append(token)
        text = decode(current)
        # A replacement character stands for incomplete or invalid bytes.
        if "\ufffd" not in text or len(current) > 4:
            parts.append((text, current))
            current = []
    if current:
        parts.append((decode(current), current))
    return parts


def _join_punctuation(words: list[Word]) -> list[Word]:
    opened: list[Word] = []
    for word in reversed(words):
        after = opened[-1] if opened else None
        if after is not None and word.word.startswith(" ") and word.word.strip() in _OPENING:
            opened[-1] = replace(after, word=word.word + after.word, start=word.start)
        else:
            opened.append(word)
    closed: list[Word] = []
    for word in reversed(opened):
        if closed and word.word.strip() in _CLOSING and not closed[-1].word.endswith(" "):
            closed[-1] = replace(closed[-1], word=closed[-1].word + word.word)
        else:
            closed.append(word)
    return closed


def _shorten_long_words(words: list[Word]) -> list[Word]:
    """Shortens words at the edges of sentences, which the path gives the pauses."""
    if not (lengths := [word.end - word.start for word in words if word.end > word.start]):
        return words
    most = 2 * min(_MOST_MEDIAN, float(np.median(lengths)))
    made: list[Word] = []
    for word in words:
        if word.end - word.start > most:
            if word.word.strip()[-1:] in _SENTENCE_ENDS:
                word = replace(word, end=word.start + most)
            elif not made or made[-1].word.strip()[-1:] in _SENTENCE_ENDS:
                word = replace(word, start=word.end - most)
        made.append(word)
    return made
