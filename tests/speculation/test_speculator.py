"""Adaptive lengths on a virtual machine, and whether steps wait for results."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from octavo.speculation.speculator import DraftLengths, StepCosts, Waiting, best_lengths


def cpu(rows: int) -> float:
    """Weights are read in the time of 8 rows; from there on each row takes its time."""
    return 8.0 + 0.6 * max(0, rows - 8)


def gpu(rows: int) -> float:
    return 10.0 + 0.01 * rows


def seconds_a_token(seconds: Callable[[int], float], batch: int, right: float, steps: int, adaptive: bool) -> float:
    """Seconds of ``steps`` steps of ``batch`` sequences, by their tokens; drafts are right with this probability."""
    rng, lengths = random.Random(1), DraftLengths(7)
    total, tokens = 0.0, 0
    for _ in range(steps):
        left = lengths.begin_step(batch, 0) if adaptive else 0
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
        lengths.observe_step(batch, len(drafts), sum(n for _, n in drafts), took)
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
    assert found < 1.12 * best


def test_costs_are_those_that_were_measured_and_lie_between_them() -> None:
    costs = StepCosts()
    assert costs.seconds(3) == 0.0
    costs.observe(4, 1.0)
    assert costs.seconds(4) == costs.seconds(100) == costs.seconds(1) == 1.0
    costs.observe(8, 2.0)
    assert costs.seconds(6) == pytest.approx(1.5) and costs.seconds(12) == pytest.approx(3.0)
    costs.observe(8, 200.0)  # another process had the processor
    assert costs.seconds(8) == 2.0
    for _ in range(3):
        costs.observe(8, 3.0)
    assert costs.seconds(8) == 3.0
    costs.observe(20, 90.0)
    for _ in range(300):
        costs.observe(4, 1.0)
    assert costs.largest == 4 and costs.seconds(8) == 1.0  # what has not occurred for long is forgotten


@pytest.mark.parametrize("num_seqs", [1, 5, 40])
def test_free_rows_are_all_taken_and_dear_ones_are_not(num_seqs: int) -> None:
    free, dear = StepCosts(), StepCosts()
    for rows in range(1, 250):
        free.observe(rows, 1.0)
        dear.observe(rows, float(rows))
    assert best_lengths(free, num_seqs, num_seqs, 5)[-1].length == 5
    assert [best.length for best in best_lengths(dear, num_seqs, num_seqs, 5)] == [0] * 16
    assert [best.length for best in best_lengths(free, num_seqs, num_seqs, 5, pass_seconds=1.0)] == [0] * 16
    assert best_lengths(free, num_seqs, num_seqs, 5, pass_seconds=0.5)[-1].length == 5


def with_a_draft_model(
    batch: int, right: float, of_model: float, prompt: int, output: int, adaptive: bool, most: int = 7
) -> float:
    """Seconds of sequences, one after the other in each of ``batch`` places, by those without drafts.

    A pass of the drafter takes ``of_model`` of a step of the model, and a token of a prompt as much of a row.
    """
    rng, lengths = random.Random(1), DraftLengths(most, adaptive=adaptive)
    computed, known = [0] * batch, [0] * batch
    seq_ids, total, plain, ended = list(range(batch)), 0.0, 0.0, 0
    while ended < 24 * batch:
        left = lengths.begin_step(batch, 0)
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
        lengths.observe_step(batch, len(drafts), sum(drafts.values()), took)
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


@pytest.mark.parametrize("batch", [1, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("right", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("of_model", [0.05, 0.5])
@pytest.mark.parametrize(("prompt", "output"), [(100, 200), (2000, 40)])
def test_the_time_of_a_drafter_counts(batch: int, right: float, of_model: float, prompt: int, output: int) -> None:
    found = with_a_draft_model(batch, right, of_model, prompt, output, True)
    fixed = min(with_a_draft_model(batch, right, of_model, prompt, output, False, n) for n in (1, 3, 7))
    assert found < 1.03
    assert found < 1.15 * fixed


# Whether steps wait for results, by what drafts bring and what waiting costs.


def share_of_waits(accepted: float, idle: float, steps: int = 1000) -> float:
    waiting, waits = Waiting(), 0
    for _ in range(steps):
        waits += waiting.waits
        waiting.observe(waiting.waits, accepted if waiting.waits else 0.0, idle if waiting.waits else 0.0)
    return waits / steps


CASES = [(0.0, 0.2, 0.1), (0.1, 0.2, 0.1), (0.01, 0.0, 0.1), (0.3, 0.2, 1.0), (0.1, 0.0, 1.0)]


@pytest.mark.parametrize(("accepted", "idle", "waits"), CASES)
def test_steps_wait_where_drafts_bring_more_than_a_device_loses(accepted: float, idle: float, waits: float) -> None:
    assert share_of_waits(accepted, idle) == pytest.approx(waits, abs=0.06)


def test_it_is_seen_when_drafts_begin_to_pay_and_new_sequences_are_tried() -> None:
    waiting = Waiting()
    for _ in range(300):
        waiting.observe(waiting.waits, 0.0, 0.2)
    waits = 0
    for _ in range(60):
        waits += waiting.waits
        waiting.observe(waiting.waits, 4.0 if waiting.waits else 0.0, 0.2)
    assert waits >= 40
    for _ in range(300):
        waiting.observe(waiting.waits, 0.0, 0.2)
    while waiting.waits:
        waiting.observe(True, 0.0, 0.2)
    waiting.begin()
    assert waiting.waits


def test_workers_may_spend_time_on_drafts_that_are_all_empty() -> None:
    lengths = DraftLengths(4)
    lengths.observe_drafting(2, 0, 0.1, 0, 0.0)
    lengths.observe_drafting(2, 4, 0.4, 0, 0.0)
    assert lengths._drafting.pass_seconds(2) == pytest.approx(0.1)
