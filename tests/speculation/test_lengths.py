"""Adaptive lengths on a virtual machine: what they bring where drafts are right, and cost where they are not."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from octavo.speculation.draft_lengths import AdaptiveLength, FixedLength, MedianSeconds


def cpu(rows: int) -> float:
    """Weights are read in the time of 8 rows; from there on each row takes its time."""
    return 8.0 + 0.6 * max(0, rows - 8)


def gpu(rows: int) -> float:
    return 10.0 + 0.01 * rows


def seconds_a_token(seconds: Callable[[int], float], batch: int, right: float, steps: int, adaptive: bool) -> float:
    """Seconds of ``steps`` steps of ``batch`` sequences, by their tokens; drafts are right with this probability."""
    rng, lengths = random.Random(1), AdaptiveLength(7)
    total, tokens = 0.0, 0
    for _ in range(steps):
        left = lengths.begin_step(batch, False) if adaptive else 0
        drafts = []
        for seq_id in range(batch):
            wanted = min(left, lengths.length(seq_id, False)) if left > 0 else 0
            left -= wanted
            if wanted:
                drafts.append((seq_id, wanted))
        took = seconds(batch + sum(n for _, n in drafts)) * rng.uniform(0.98, 1.02)
        total, tokens = total + took, tokens + batch
        for seq_id, n in drafts:
            accepted = 0
            while accepted < n and rng.random() < right:
                accepted += 1
            tokens += accepted
            lengths.observe([(seq_id, n, accepted)])
        lengths.observe_step(batch, sum(n for _, n in drafts), took)
    return total / tokens


@pytest.mark.parametrize("machine", [cpu, gpu])
@pytest.mark.parametrize("batch", [1, 4, 16, 64])
@pytest.mark.parametrize("right", [0.0, 0.1, 0.3, 0.6, 0.95])
def test_drafts_never_cost_much_and_bring_most_of_what_they_can(
    machine: Callable[[int], float], batch: int, right: float
) -> None:
    plain = seconds_a_token(machine, batch, right, 600, False)
    found = seconds_a_token(machine, batch, right, 600, True)
    # The best length of all that are the same in every step.
    best = min(machine(batch * (1 + n)) / batch / sum(right**i for i in range(n + 1)) for n in range(8))
    assert found < 1.03 * plain
    assert found < 1.2 * best


def test_costs_are_medians_of_the_latest_and_measured_again() -> None:
    cost = MedianSeconds()
    assert cost.value == 0.0 and not cost.is_fresh
    for seconds in (2.0, 2.0, 200.0):  # another process had the processor
        cost.add(seconds)
    assert cost.value == 2.0 and cost.is_fresh
    cost.age = 64
    assert not cost.is_fresh
    for _ in range(3):
        cost.add(3.0)
    assert cost.value == 3.0 and cost.is_fresh
    cost.age = 255
    assert cost.is_fresh
    cost.age = 256
    assert not cost.is_fresh


@pytest.mark.parametrize("num_seqs", [1, 5, 40])
@pytest.mark.parametrize(("row", "of_pass", "length"), [(0.0, 0.0, 5), (1.0, 0.0, 0), (0.0, 1.0, 0), (0.0, 0.5, 5)])
def test_free_rows_are_all_taken_and_dear_ones_are_not(num_seqs: int, row: float, of_pass: float, length: int) -> None:
    """``row``, ``of_pass``: seconds of a draft token and of a pass for all, by those of a token and of a step."""
    lengths = AdaptiveLength(5)
    lengths.begin_step(num_seqs, False)
    lengths.observe_step(num_seqs, 0, float(num_seqs))
    lengths.begin_step(num_seqs, False)
    for seq_id in range(num_seqs):
        lengths.length(seq_id, False)
        for _ in range(20):
            lengths.observe([(seq_id, 5, 5)])
    lengths.observe_step(num_seqs, num_seqs, num_seqs + row * num_seqs)
    if of_pass:
        lengths.observe_drafting(num_seqs, 1, of_pass * num_seqs, 0, 0.0)
    lengths.begin_step(num_seqs, False)
    assert {lengths.length(seq_id, False) for seq_id in range(num_seqs)} == {length}


def with_a_draft_model(
    batch: int, right: float, of_model: float, prompt: int, output: int, adaptive: bool, most: int = 7
) -> float:
    """Seconds of sequences, one after the other in each of ``batch`` places, by those without drafts.

    A pass of the drafter takes ``of_model`` of a step of the model, and a token of a prompt as much of a row.
    """
    rng, lengths = random.Random(1), AdaptiveLength(most) if adaptive else FixedLength(most)
    computed, known = [0] * batch, [0] * batch
    seq_ids, total, plain, ended = list(range(batch)), 0.0, 0.0, 0
    while ended < 24 * batch:
        left = lengths.begin_step(batch, False)
        drafts, backlog = {}, 0
        for place, seq_id in enumerate(seq_ids):
            behind = prompt + known[place] - computed[place]
            wanted = min(left, lengths.length(seq_id, False, behind)) if left > 0 else 0
            left -= wanted
            if wanted:
                drafts[place] = wanted
                backlog, computed[place] = backlog + behind, prompt + known[place]
        noise = rng.uniform(0.98, 1.02)
        took = cpu(batch + sum(drafts.values())) * noise
        passes, catching_up = max(drafts.values(), default=0), 0.6 * of_model * backlog * noise
        drafting = of_model * passes * cpu(len(drafts)) * noise if drafts else 0.0
        total += took + drafting + catching_up
        if drafts:
            lengths.observe_drafting(len(drafts), passes, drafting, backlog, catching_up)
        lengths.observe_step(batch, sum(drafts.values()), took)
        for place, seq_id in enumerate(seq_ids):
            accepted = 0
            while accepted < drafts.get(place, 0) and rng.random() < right:
                accepted += 1
            if place in drafts:
                lengths.observe([(seq_id, drafts[place], accepted)])
                computed[place] += accepted + 1
            known[place] += accepted + 1
            plain += cpu(batch) / batch * (accepted + 1)
            if known[place] >= output:
                plain -= cpu(batch) / batch * (known[place] - output)
                lengths.forget(seq_id)
                seq_ids[place] = max(seq_ids) + 1
                computed[place] = known[place] = 0
                ended += 1
                total, plain = total + 0.6 * prompt, plain + 0.6 * prompt
    return total / plain


@pytest.mark.parametrize("batch", [1, 6])
@pytest.mark.parametrize("right", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("of_model", [0.05, 0.5])
@pytest.mark.parametrize(("prompt", "output"), [(100, 200), (2000, 40)])
def test_the_time_of_a_drafter_counts(batch: int, right: float, of_model: float, prompt: int, output: int) -> None:
    found = with_a_draft_model(batch, right, of_model, prompt, output, True)
    fixed = min(with_a_draft_model(batch, right, of_model, prompt, output, False, n) for n in (1, 3, 7))
    assert found < 1.03
    assert found < 1.15 * fixed
