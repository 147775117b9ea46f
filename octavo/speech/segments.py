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
    "en": "english",
    "zh": "chinese",
    "de": "german",
    "es": "spanish",
    "ru": "russian",
    "ko": "korean",
    "fr": "french",
    "ja": "japanese",
    "pt": "portuguese",
    "tr": "turkish",
    "pl": "polish",
    "ca": "catalan",
    "nl": "dutch",
    "ar": "arabic",
    "sv": "swedish",
    "it": "italian",
    "id": "indonesian",
    "hi": "hindi",
    "fi": "finnish",
    "vi": "vietnamese",
    "he": "hebrew",
    "uk": "ukrainian",
    "el": "greek",
    "ms": "malay",
    "cs": "czech",
    "ro": "romanian",
    "da": "danish",
    "hu": "hungarian",
    "ta": "tamil",
    "no": "norwegian",
    "th": "thai",
    "ur": "urdu",
    "hr": "croatian",
    "bg": "bulgarian",
    "lt": "lithuanian",
    "la": "latin",
    "mi": "maori",
    "ml": "malayalam",
    "cy": "welsh",
    "sk": "slovak",
    "te": "telugu",
    "fa": "persian",
    "lv": "latvian",
    "bn": "bengali",
    "sr": "serbian",
    "az": "azerbaijani",
    "sl": "slovenian",
    "kn": "kannada",
    "et": "estonian",
    "mk": "macedonian",
    "br": "breton",
    "eu": "basque",
    "is": "icelandic",
    "hy": "armenian",
    "ne": "nepali",
    "mn": "mongolian",
    "bs": "bosnian",
    "kk": "kazakh",
    "sq": "albanian",
    "sw": "swahili",
    "gl": "galician",
    "mr": "marathi",
    "pa": "punjabi",
    "si": "sinhala",
    "km": "khmer",
    "sn": "shona",
    "yo": "yoruba",
    "so": "somali",
    "af": "afrikaans",
    "oc": "occitan",
    "ka": "georgian",
    "be": "belarusian",
    "tg": "tajik",
    "sd": "sindhi",
    "gu": "gujarati",
    "am": "amharic",
    "yi": "yiddish",
    "lo": "lao",
    "uz": "uzbek",
    "fo": "faroese",
    "ht": "haitian creole",
    "ps": "pashto",
    "tk": "turkmen",
    "nn": "nynorsk",
    "mt": "maltese",
    "sa": "sanskrit",
    "lb": "luxembourgish",
    "my": "myanmar",
    "bo": "tibetan",
    "tl": "tagalog",
    "mg": "malagasy",
    "as": "assamese",
    "tt": "tatar",
    "haw": "hawaiian",
    "ln": "lingala",
    "ha": "hausa",
    "ba": "bashkir",
    "jw": "javanese",
    "su": "sundanese",
    "yue": "cantonese",
}
#: Other names.
_OTHER_NAMES = {
    "burmese": "my",
    "valencian": "ca",
    "flemish": "nl",
    "haitian": "ht",
    "letzeburgesch": "lb",
    "pushto": "ps",
    "panjabi": "pa",
    "moldavian": "ro",
    "moldovan": "ro",
    "sinhalese": "si",
    "castilian": "es",
    "mandarin": "zh",
}


def language_code(language: str) -> str:
    """The code of a language given by code or name, in any case; of a code with a region the first part counts.

    Raises:
        InvalidRequestError: it is not known.
    """
    name = language.strip().lower()
    codes = {known: code for code, known in LANGUAGES.items()} | _OTHER_NAMES
    for candidate in (name, name.replace("_", "-").split("-")[0]):
        if candidate in LANGUAGES:
            return candidate
        if candidate in codes:
            return codes[candidate]
    raise InvalidRequestError(f"language {language!r} is not known; expected a code such as 'en', or a name: 'english'")


# The special tokens of a Whisper model, and what its files say of generation.

#: Seconds between two times that a model can say.
TIME_STEP = 0.02
_SPEC_TOKENS = {
    "end": "<|endoftext|>",
    "start": "<|startoftranscript|>",
    "translate": "<|translate|>",
    "transcribe": "<|transcribe|>",
    "previous": "<|startofprev|>",
    "no_times": "<|notimestamps|>",
}
#: Its name has changed.
_NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")
#: The id of ``end`` of models that tell languages apart; in English ones it is another.
_MULTILINGUAL_END = 50257


@dataclass(frozen=True)
class SpeechTokens:
    """Ids of special tokens, and bounds."""

    end: int
    start: int
    translate: int
    transcribe: int
    previous: int
    no_speech: int
    no_times: int
    #: Longest prompt and answer in tokens.
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
        """The token of time 0."""
        return self.no_times + 1

    @property
    def most_tokens(self) -> int:
        """Most tokens of the answer to a window."""
        return self.context // 2

    def prompt(self, language: str | None, task: str, *, has_times: bool) -> list[int]:
        """The tokens that an answer begins after; ``language`` is a code."""
        tokens = [self.start]
        if self.languages:
            tokens += [self.languages[language or "en"], self.translate if task == "translate" else self.transcribe]
        return tokens if has_times else [*tokens, self.no_times]

    def rules(self, *, has_times: bool) -> TimestampRules:
        """What answers may look like."""
        never = {*self.suppress, self.start, self.translate, self.transcribe, self.previous, self.no_speech}
        never |= {self.no_times, *self.languages.values()}
        return TimestampRules(
            self.end, self.first_time, sorted(never), sorted(self.suppress_first), has_times, self.latest_first
        )

    def check_task(self, task: str) -> None:
        """Raises:
        InvalidRequestError: an English model cannot translate.
        """
        if task == "translate" and not self.languages:
            raise InvalidRequestError("task 'translate' needs a multilingual model: this one knows English alone")

    def check_language(self, language: str) -> str:
        """The code of a language that the model knows.

        Raises:
            InvalidRequestError: it is none, or another one than English of an English model.
        """
        code = language_code(language)
        if not self.languages and code != "en":
            raise InvalidRequestError(f"language must be 'en', not {language!r}: the model is English")
        if self.languages and code not in self.languages:
            raise InvalidRequestError(f"language {language!r} is none of the model's: {', '.join(self.languages)}")
        return code


def read_speech_tokens(folder: Path) -> SpeechTokens:
    """Of a model folder as transformers has it.

    Raises:
        ConfigError: a file is missing or not readable, or the tokenizer is not Whisper's.
    """
    ids = _special_ids(folder)
    missing = [name for name in _SPEC_TOKENS.values() if name not in ids]
    if missing:
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


def _special_ids(folder: Path) -> dict[str, int]:
    """Of tokenizer.json, or of added_tokens.json beside the files of a slow tokenizer."""
    if (folder / "tokenizer.json").is_file():
        added = read_object(folder / "tokenizer.json", most=MAX_TOKENIZER).get("added_tokens") or ()
        return {str(token["content"]): int(token["id"]) for token in added}
    return {str(name): int(token) for name, token in read_object(folder / "added_tokens.json").items()}


#: Steps of a second.
_LEAST_STEPS = round(1 / TIME_STEP)


@dataclass(frozen=True)
class Word:
    """A word; times are seconds from the recording's beginning."""

    word: str
    start: float
    end: float
    #: Of its tokens, the mean.
    probability: float = 0.0


@dataclass(frozen=True)
class Segment:
    """A part of a recording; times are seconds from its beginning."""

    id: int
    start: float
    end: float
    text: str
    #: Those of its text and its times.
    tokens: list[int]
    #: Where the window begins that it is in, in hundredths of a second.
    seek: int = 0
    #: Of the answer to this window: what it was drawn at, mean logprob of its tokens, how much zlib shrinks its text,
    #: and the probability that the window is silent; None: it was not asked for.
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech_prob: float | None = None
    words: list[Word] | None = None


@dataclass(frozen=True)
class Transcription:
    """What was said in a recording."""

    text: str
    #: Code.
    language: str
    #: Seconds.
    duration: float
    segments: list[Segment] = field(default_factory=list)
    task: str = "transcribe"
    #: Tokens computed: those before answers, and those of answers.
    prompt_tokens: int = 0
    completion_tokens: int = 0
    #: Why there is no text, of one of several recordings that failed alone.
    error: str | None = None


@dataclass(frozen=True)
class Span:
    """The tokens of a segment, and its times in steps from its window's beginning."""

    start: int
    end: int
    tokens: list[int]


def cut_answer(tokens: Sequence[int], steps: int, known: SpeechTokens) -> tuple[list[Span], int]:
    """Cuts a window's answer at the pairs of times in it.

    Args:
        tokens: the answer, without the token that ends it.
        steps: length of the window in steps of time.
        known: the model's tokens.

    Returns:
        The parts, and the steps after which the next window begins: what follows the last pair is heard again, in
        whole, unless the answer ends with a single time, after which there is nothing. It is a second at least, so that
        no answer, whatever it says, makes a recording take more windows than it has seconds.
    """
    is_time = [token >= known.first_time for token in tokens]
    pairs = [i for i in range(1, len(tokens)) if is_time[i - 1] and is_time[i]]
    ends_alone = is_time[-2:] == [False, True]
    if not pairs:
        times = [token - known.first_time for token, time in zip(tokens, is_time, strict=True) if time]
        end = times[-1] if times and times[-1] > 0 else steps
        return [Span(0, end, list(tokens))], steps
    spans, first = [], 0
    for last in [*pairs, len(tokens)] if ends_alone else pairs:
        part = list(tokens[first:last])
        spans.append(Span(part[0] - known.first_time, part[-1] - known.first_time, part))
        first = last
    return spans, steps if ends_alone else max(_LEAST_STEPS, spans[-1].end)


def text_ids(tokens: Sequence[int], known: SpeechTokens) -> list[int]:
    """The tokens of text among these."""
    return [token for token in tokens if token < known.end]


def compression_ratio(text: str) -> float:
    """How many times as long a text is as zlib makes it: high where it repeats itself."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0


def as_segments(
    spans: Sequence[Span], offset: float, decode: Callable[[list[int]], str], known: SpeechTokens
) -> Iterator[tuple[float, float, str, list[int]]]:
    """(start, end, text, tokens) of the parts of a window that begins at ``offset`` seconds, without empty ones."""
    for span in spans:
        text = decode(text_ids(span.tokens, known)).rstrip()
        if span.start != span.end and text.strip():
            yield offset + span.start * TIME_STEP, offset + span.end * TIME_STEP, text, span.tokens


# Times of words, by dynamic time warping of attention over the recording.

#: Steps of the median that smooths attention over time.
_MEDIAN = 7
#: Where attention differs by less between tokens, it differs by rounding.
_LEAST_DEVIATION = 1e-8
#: Languages written without spaces: each character is a word.
_WITHOUT_SPACES = {"zh", "ja", "th", "lo", "my", "yue"}
#: Marks that belong to the word after them, and to the one before.
_OPENING = "\"'“¿([{-"
_CLOSING = "\"'.。,，!！?？:：”)]}、"  # noqa: RUF001 - those of Chinese and Japanese
_SENTENCE_ENDS = frozenset(".。!！?？")  # noqa: RUF001
#: A word at a sentence's edge lasts at most twice as long as the median word, and that counts as this much at most.
_MOST_MEDIAN = 0.7


def add_words(
    segments: Sequence[Segment],
    weights: NDArray[np.float32],
    probabilities: NDArray[np.float32],
    offset: float,
    known: SpeechTokens,
    decode: Callable[[list[int]], str],
    language: str,
) -> list[Segment]:
    """The segments of a window with their words.

    Args:
        segments: of the window.
        weights: float32 [heads, tokens + 1, steps]: cross attention of the alignment heads where each token of text of
            the segments, and then the end, is predicted.
        probabilities: float32 [tokens + 1], of these tokens.
        offset: seconds at which the window begins.
        known: the model's tokens.
        decode: text of tokens.
        language: code.
    """
    tokens = [text_ids(segment.tokens, known) for segment in segments]
    starts = token_starts(weights) * TIME_STEP + offset
    made, first = [], 0
    for segment, ids in zip(segments, tokens, strict=True):
        words, at = [], first
        for text, part in split_words(ids, decode, by_character=language in _WITHOUT_SPACES):
            end = at + len(part)
            words.append(Word(text, float(starts[at]), float(starts[end]), float(np.mean(probabilities[at:end]))))
            at = end
        first += len(ids)
        made.append(replace(segment, words=_rounded(_without_long_words(_joined(words)))))
    return made


def token_starts(weights: NDArray[np.float32]) -> NDArray[np.int64]:
    """The step at which each token begins: int64 [tokens], of attention float32 [heads, tokens, steps]."""
    weights = weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)
    deviation = weights.std(axis=-2, keepdims=True)
    weights = (weights - weights.mean(axis=-2, keepdims=True)) / np.maximum(deviation, _LEAST_DEVIATION)
    tokens, steps = warping_path(-_median(weights).mean(axis=0))
    return steps[np.flatnonzero(np.diff(tokens, prepend=-1))]


def _median(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Each value's median over time, with those around it; ends are reflected."""
    half = _MEDIAN // 2
    if values.shape[-1] <= half:
        return values
    padded = np.pad(values, [(0, 0), (0, 0), (half, half)], mode="reflect")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, _MEDIAN, axis=-1), axis=-1).astype(np.float32)


def warping_path(cost: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The cheapest monotonic path through a matrix [rows, columns], from first to last: its rows, and its columns.

    Computed along anti-diagonals, whose entries do not depend on each other.
    """
    rows, columns = cost.shape
    # skewed[d, i] is the entry of row i and column d - i.
    skewed = np.full((rows + columns - 1, rows), np.inf)
    row = np.arange(rows)
    for i in range(rows):
        skewed[i : i + columns, i] = cost[i]
    moves = np.zeros((rows + columns - 1, rows), np.int8)
    before = np.full(rows, np.inf)
    last = np.full(rows, np.inf)
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
    found = np.array(path[::-1], np.int64)
    return found[:, 0], found[:, 1]


def split_words(
    tokens: list[int], decode: Callable[[list[int]], str], *, by_character: bool
) -> list[tuple[str, list[int]]]:
    """Words and their tokens: at spaces and punctuation, or at each character that is whole."""
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
    """The fewest tokens each that are text: a character may have several."""
    parts: list[tuple[str, list[int]]] = []
    current: list[int] = []
    for token in tokens:
        current.append(token)
        text = decode(current)
        # A replacement character stands for bytes that are not whole, or that never will be.
        if "\ufffd" not in text or len(current) > 4:
            parts.append((text, current))
            current = []
    if current:
        parts.append((decode(current), current))
    return parts


def _joined(words: list[Word]) -> list[Word]:
    """Marks become part of the words that they belong to."""
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


def _without_long_words(words: list[Word]) -> list[Word]:
    """Words at the edges of sentences, to which the path gives the pauses, too, are shortened."""
    lengths = [word.end - word.start for word in words if word.end > word.start]
    if not lengths:
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


def _rounded(words: list[Word]) -> list[Word]:
    return [replace(word, start=round(word.start, 2), end=round(word.end, 2)) for word in words]
