"""Times of words: warping paths against transformers', splitting, long words."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.speech.segments import split_words, token_starts, warping_path
from tests.speech.fake_speech import CODEC


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (5, 1), (3, 4), (40, 300), (20, 20)])
def test_paths_are_those_of_transformers(shape: tuple[int, int]) -> None:
    from transformers.models.whisper.generation_whisper import _dynamic_time_warping

    for seed in range(3):
        cost = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
        rows, columns = warping_path(cost)
        expected_rows, expected_columns = _dynamic_time_warping(cost)
        assert rows.tolist() == expected_rows.tolist()
        assert columns.tolist() == expected_columns.tolist()


def test_tokens_begin_where_their_attention_does() -> None:
    rng = np.random.default_rng(1)
    weights = 0.01 * rng.random((3, 6, 200)).astype(np.float32)
    begins = [0, 20, 45, 90, 120, 180]
    for i, (start, end) in enumerate(zip(begins, [*begins[1:], 200], strict=True)):
        weights[:, i, start:end] += 1.0
    assert np.abs(token_starts(weights) - begins).max() <= 4  # half of the median's width


def test_words_begin_at_spaces_and_marks() -> None:
    words = split_words(CODEC.encode(" It's a test, yes"), CODEC.decode, by_character=False)
    assert "".join(text for text, _ in words) == " It's a test, yes"
    assert [text for text, _ in words if text.startswith(" ")] == [" It", " a", " test", " yes"]


def test_characters_of_several_tokens_stay_whole() -> None:
    words = split_words(CODEC.encode("日本"), CODEC.decode, by_character=True)
    assert words == [("日", CODEC.encode("日")), ("本", CODEC.encode("本"))]
