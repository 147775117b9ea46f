"""Positions of images in time, height and width: equal to transformers', in chunks or not, beside other sequences."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.plan import NewSequence, StepPlan, TableChange
from octavo.core.request import Feature, Generate
from octavo.core.sampling_params import SamplingParams
from octavo.runner.images import RotaryPositions, image_positions
from octavo.runner.input_batch import FlatInputs, InputBatch

torch = pytest.importorskip("torch")

GREEDY = Generate(SamplingParams(temperature=0.0), 0)
#: Texts and images by turns: tokens, and the features of an image along height and width.
prompts = st.lists(
    st.tuples(st.integers(1, 5), st.tuples(st.integers(1, 5), st.integers(1, 5))), min_size=1, max_size=4
)


def features_of(prompt: list[tuple[int, tuple[int, int]]], key: bytes = b"") -> list[Feature]:
    features, offset = [], 0
    for text, (height, width) in prompt:
        features.append(Feature(offset + text, height * width, key, grid=(1, height, width)))
        offset += text + height * width
    return features


def expected(prompt: list[tuple[int, tuple[int, int]]], length: int) -> np.ndarray:
    """Those of transformers, of a sequence of so many tokens: [3, length]."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

    types = [part for text, (h, w) in prompt for part in [0] * text + [1] * h * w]
    types += [0] * (length - len(types))
    grids = torch.tensor([[1, 2 * h, 2 * w] for _, (h, w) in prompt])
    model = SimpleNamespace(
        config=Qwen2_5_VLConfig(), get_vision_position_ids=partial(Qwen2_5_VLModel.get_vision_position_ids, None)
    )
    ids = torch.zeros(1, length, dtype=torch.long)
    positions, _ = Qwen2_5_VLModel.get_rope_index(model, ids, torch.tensor([types]), grids)
    values: np.ndarray = positions[:, 0].numpy()
    return values


@settings(max_examples=60, deadline=None)
@given(prompts, st.integers(0, 30))
def test_positions_are_those_of_transformers(prompt: list[tuple[int, tuple[int, int]]], tail: int) -> None:
    features = features_of(prompt)
    length = features[-1].offset + features[-1].length + tail
    want = expected(prompt, length)
    beginning = image_positions(features)
    assert (beginning == want[:, : beginning.shape[1]]).all()
    rotary = RotaryPositions(4)
    rotary.add(NewSequence(1, [7] * length, length, 0, GREEDY, features=features), 2)
    arrays: dict[str, np.ndarray] = {"positions": np.arange(length), "query_start_loc": np.array([0, length], np.int32)}
    rotary.add_arrays(FlatInputs(arrays, 0, length, False), np.array([2]), np.array([0]))
    assert (arrays["rotary_positions"] == want).all()
    assert (want <= np.arange(length)).all(), "tables are long enough"


def test_an_image_needs_the_grid_of_its_features() -> None:
    for grid in (None, (1, 2, 2)):
        with pytest.raises(RuntimeError, match=r"6 features has the grid (None|\(1, 2, 2\))"):
            image_positions([Feature(3, 6, b"", grid=grid)])


@pytest.mark.parametrize("seed", range(6))
def test_steps_have_the_positions_of_their_sequences(seed: int) -> None:
    """Sequences with images and without, cut into chunks at any place, forked, forgotten and decoding."""
    rng = random.Random(seed)
    batch = InputBatch(4, 200, 16, features=[RotaryPositions(4)])
    want: dict[int, np.ndarray] = {}
    done: dict[int, int] = {}

    def add(seq_id: int) -> None:
        prompt = [(rng.randrange(1, 6), (rng.randrange(1, 5), rng.randrange(1, 5))) for _ in range(rng.randrange(3))]
        features = features_of(prompt)
        length = (features[-1].offset + features[-1].length if features else 1) + rng.randrange(3)
        want[seq_id] = expected(prompt, 200) if prompt else np.tile(np.arange(200), (3, 1))
        done[seq_id] = rng.randrange(length)  # of a prefix hit, or before a preemption
        batch.add(NewSequence(seq_id, [7] * length, length, done[seq_id], GREEDY, features=features))
        batch.change_table(TableChange(seq_id, 0, list(range(13))))

    add(1)
    add(2)
    for step in range(60):
        event = rng.randrange(8)
        if event == 0 and len(want) > 1:
            gone = rng.choice(list(want))
            del want[gone], done[gone]
            batch.forget(gone)
        elif event == 1 and len(want) < 4:
            add(100 + step)
        elif event == 2 and len(want) < 4:
            parent, child = rng.choice(list(want)), 200 + step
            batch.fork(parent, child)
            batch.change_table(TableChange(child, 0, list(range(13))))
            want[child], done[child] = want[parent], done[parent]
        scheduled = rng.sample(list(want), rng.randrange(1, len(want) + 1)) if rng.random() < 0.5 else list(want)
        known = {s: int(batch.tokens.num_tokens[batch.row(s)]) for s in scheduled}
        scheduled = [s for s in scheduled if known[s] < 150]
        if not scheduled:
            break
        counts = [rng.randrange(1, known[s] - done[s] + 1) if rng.random() < 0.7 else 1 for s in scheduled]
        inputs = batch.build(StepPlan(step=step, seq_ids=scheduled, num_tokens=counts))
        by_id = dict(zip(scheduled, counts, strict=True))
        parts = [want[s][:, done[s] : done[s] + by_id[s]] for s in inputs.seq_ids]
        assert (inputs.arrays["rotary_positions"] == np.concatenate(parts, axis=1)).all()
        assert inputs.arrays["rotary_positions"].flags.c_contiguous
        new = batch.advance(inputs, inputs.rows[inputs.sampling])
        batch.fill(new, np.full(len(new.rows), 5))
        for seq_id in inputs.seq_ids:
            done[seq_id] += by_id[seq_id]


def test_the_token_after_an_image_at_the_end_of_a_prompt_is_no_repetition() -> None:
    batch = InputBatch(2, 40, 16, features=[RotaryPositions(2)])
    batch.add(NewSequence(1, [7] * 8, 8, 7, GREEDY, features=[Feature(2, 6, b"", grid=(1, 2, 3))]))
    batch.change_table(TableChange(1, 0, [0, 1, 2]))
    columns = []
    for step in range(3):
        inputs = batch.build(StepPlan(step=step, seq_ids=[1], num_tokens=[1]))
        columns.append(inputs.arrays["rotary_positions"][:, 0].tolist())
        batch.fill(batch.advance(inputs, inputs.rows), np.array([5]))
    assert columns == [[2, 3, 4], [5, 5, 5], [6, 6, 6]]


def test_networks_without_such_positions_have_none() -> None:
    batch = InputBatch(2, 40, 16)
    batch.add(NewSequence(1, [7] * 8, 8, 7, GREEDY))
    batch.change_table(TableChange(1, 0, [0]))
    assert batch.build(StepPlan(step=1, seq_ids=[1], num_tokens=[1])).arrays["rotary_positions"].size == 0
