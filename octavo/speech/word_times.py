"""Times of words, by dynamic time warping of attention over the recording.

Of some heads the cross attention of a token lies where in the recording it is said. The path of least cost through
their mean is monotonic in tokens and time (Radford et al. 2022 do not describe it; it is the method of their program,
after Sakoe and Chiba 1978).
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from octavo.speech.segments import Segment, Word, text_ids
from octavo.speech.speech_tokens import TIME_STEP, SpeechTokens

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
