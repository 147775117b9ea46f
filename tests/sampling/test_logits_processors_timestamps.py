"""Rules of a speech model's answers, against transformers' processors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from octavo.core.plan import NewSequence
from octavo.core.request import Generate
from octavo.core.sampling_params import SamplingParams, TimestampRules
from octavo.kernels.torch_backend import TorchLogits
from octavo.sampling.logits_processors import TimestampEdit
from octavo.sampling.sampler import Sampler, TokenTable

END, NO_TIMES, FIRST_TIME, VOCAB = 50, 59, 60, 160
PROMPT = [51, 52]
SUPPRESS, SUPPRESS_FIRST = [3, 4, 51, 52, 53, 54, 55, 56, 57, 58, 59], [7, 50]
RULES = TimestampRules(END, FIRST_TIME, SUPPRESS, SUPPRESS_FIRST, True, 20)


def expected(tokens: list[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """transformers' processors, in its order."""
    from transformers import GenerationConfig
    from transformers.generation.logits_process import (
        SuppressTokensAtBeginLogitsProcessor,
        SuppressTokensLogitsProcessor,
        WhisperTimeStampLogitsProcessor,
    )

    config = GenerationConfig(no_timestamps_token_id=NO_TIMES, eos_token_id=END, max_initial_timestamp_index=20)
    config.no_timestamps_token_id = NO_TIMES
    ids, scores = torch.tensor([tokens]), torch.from_numpy(logits.copy())[None]
    scores = SuppressTokensLogitsProcessor(SUPPRESS)(ids, scores)
    scores = SuppressTokensAtBeginLogitsProcessor(SUPPRESS_FIRST, len(PROMPT))(ids, scores)
    scores = WhisperTimeStampLogitsProcessor(config, begin_index=len(PROMPT))(ids, scores)
    return scores[0].numpy()


ANSWERS = [
    [],
    [60],
    [65],
    [65, 10],
    [65, 10, 11],
    [65, 10, 70],
    [65, 10, 70, 70],
    [65, 10, 70, 70, 12],
    [65, 10, 70, 71, 12, 13, 90],
    [65, 10, 159],
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_rows_are_those_of_transformers(answer: list[int]) -> None:
    rng = np.random.default_rng(len(answer))
    for scale, lift in ((1.0, 0.0), (3.0, 0.0), (1.0, 2.0), (1.0, -4.0)):
        logits = (scale * rng.standard_normal(VOCAB)).astype(np.float32)
        logits[FIRST_TIME:] += lift
        tokens = [*PROMPT, *answer]
        row = logits.copy()
        TimestampEdit(RULES, len(PROMPT), VOCAB).apply(row, np.array(tokens, np.int32))
        assert np.array_equal(row, expected(tokens, logits))


def test_a_state_that_grows_is_that_of_a_new_one() -> None:
    rng = np.random.default_rng(0)
    tokens = [*PROMPT, 65, 10, 11, 70, 70, 12, 80, 80, 13]
    edit = TimestampEdit(RULES, len(PROMPT), VOCAB)
    for length in range(len(PROMPT), len(tokens) + 1):
        logits = rng.standard_normal(VOCAB).astype(np.float32)
        rows = [logits.copy(), logits.copy(), logits.copy()]
        known = np.array(tokens[:length], np.int32)
        edit.fork().apply(rows[0], known)
        edit.apply(rows[1], known)
        TimestampEdit(RULES, len(PROMPT), VOCAB).apply(rows[2], known)
        assert np.array_equal(rows[0], rows[1])
        assert np.array_equal(rows[1], rows[2])


def test_answers_without_times_have_none() -> None:
    rules = TimestampRules(END, FIRST_TIME, SUPPRESS, SUPPRESS_FIRST, False)
    logits = np.zeros(VOCAB, np.float32)
    TimestampEdit(rules, len(PROMPT), VOCAB).apply(logits, np.array([*PROMPT, 10], np.int32))
    allowed = np.flatnonzero(np.isfinite(logits))
    assert allowed.max() == END
    assert not set(allowed) & set(SUPPRESS)


Rows = list[tuple[list[int], TimestampRules | None]]


def sampled(rows: Rows, logits: NDArray[np.float32]) -> list[tuple[int, float]]:
    table = TokenTable(len(rows), 32)
    sampler = Sampler(VOCAB, table, TorchLogits(VOCAB))
    for row, (tokens, rules) in enumerate(rows):
        table.ids[row, : len(tokens)] = tokens
        table.num_tokens[row], table.num_prompt[row] = len(tokens), len(PROMPT)
        task = Generate(SamplingParams(temperature=0.0, logprobs=0), 0, timestamps=rules)
        sampler.add(row, NewSequence(row, tokens, len(PROMPT), 0, task))
    output = sampler.start(torch.from_numpy(logits.copy()), np.arange(len(rows))).wait()
    return [(int(token), output.logprobs[i].logprob) for i, token in enumerate(output.token_ids)]


def test_logprobs_are_those_of_what_the_rules_leave() -> None:
    rng = np.random.default_rng(1)
    answer = [*PROMPT, 65, 10]
    logits = rng.standard_normal((3, VOCAB)).astype(np.float32)
    found = sampled([(answer, RULES), (answer, None), (answer, RULES)], logits)
    for i, is_ruled in enumerate((True, False, True)):
        row = expected(answer, logits[i]) if is_ruled else logits[i]
        token, logprob = found[i]
        assert token == row.argmax()
        finite = row[np.isfinite(row)].astype(np.float64)
        assert abs(logprob - (row[token] - np.log(np.exp(finite).sum()))) < 1e-5


def test_a_row_depends_on_itself_alone() -> None:
    rng = np.random.default_rng(2)
    rows: Rows = [([*PROMPT, *answer], RULES) for answer in ANSWERS]
    logits = rng.standard_normal((len(rows), VOCAB)).astype(np.float32)
    together = sampled(rows, logits)
    assert together == [sampled([row], logits[i : i + 1])[0] for i, row in enumerate(rows)]
