"""Request-level batching with padding: which requests make a batch, and when they end."""

from __future__ import annotations

import pytest

from octavo.config.engine_config import make_config
from octavo.core.errors import ConfigError
from octavo.lab.simulate.allocators.static_batches import StaticBatching, take_batch
from octavo.lab.simulate.engine import SimulatedEngine
from octavo.lab.simulate.run import Recorder
from octavo.lab.workloads.work_items import WorkItem
from tests.lab.simulate.test_profile import profile


def item(input_len: int, output_len: int, at: float = 0.0) -> WorkItem:
    return WorkItem(at=at, input_len=input_len, output_len=output_len, stream=f"{at}/{input_len}/{output_len}")


def test_a_batch_takes_as_many_as_its_padded_lengths_allow() -> None:
    waiting = [item(10, 6), item(20, 2), item(4, 30), item(4, 4)]
    # Padded to 20 + 6, two blocks of 16 each; the third would make all of them 20 + 30, four blocks each.
    batch = take_batch(waiting, "static-oracle", 11, 16, 64)
    assert batch.items == waiting[:2] and (batch.input_len, batch.output_len, batch.slots) == (20, 6, 26)
    assert [(of.input_len, of.output_len, of.stream) for of in batch.padded] == [
        (20, 6, waiting[0].stream),
        (20, 6, waiting[1].stream),
    ]
    assert len(take_batch(waiting, "static-oracle", 16, 16, 64).items) == 4
    assert len(take_batch(waiting, "static-max", 11, 16, 64).items) == 2  # four blocks of the context each
    assert len(take_batch(waiting, "static-oracle", 99, 16, 40).items) == 2  # 20 + 30 is longer than the context
    with pytest.raises(ConfigError, match="10 \\+ 6 tokens does not fit"):
        take_batch(waiting, "static-max", 3, 16, 64)


def test_padding_is_no_token_of_a_request() -> None:
    batch = take_batch([item(10, 6), item(20, 2)], "static-max", 99, 16, 64)
    assert [batch.tokens(progress) for progress in (0, 10, 20, 22, 26)] == [0, 15, 30, 34, 38]


def test_requests_end_with_their_batch_and_later_ones_wait() -> None:
    options = make_config(
        model="none", num_gpu_blocks_override=8, max_num_batched_tokens=256, enable_prefix_caching=False
    )
    steps = profile(max_model_len=64)
    engine = SimulatedEngine(steps, options)
    recorder, sizes = Recorder(), []
    batching = StaticBatching(engine, "static-max")
    engine.on_plan = lambda plan, seconds: sizes.append(len(plan.seq_ids))
    # Memory holds two contexts. The third arrives during the first step, and the fourth long after the others.
    items = [item(8, 2), item(16, 9), item(8, 3, at=0.001), item(8, 4, at=1000.0)]
    seen = []

    def step(engine: SimulatedEngine) -> None:
        recorder.sample(engine)
        slots = batching.slots(engine)
        seen.append(slots)
        assert slots.tokens + slots.reserved + slots.internal + slots.free == 8 * 16

    batching.run(items, recorder.ended, step)
    done = recorder.done
    assert list(done.number) == [0, 1, 2, 3] and list(done.outputs) == [2, 9, 3, 4] and not done.failed
    assert sizes == [2] * 9 + [1] * 3 + [1] * 4, "the first stays until the second has ended"
    assert done.last[0] == done.last[1] < done.first[2] and done.last[2] < 1000 < done.first[3]
    assert max(slots.tokens for slots in seen) < 8 + 2 + 16 + 9 < max(slots.internal + slots.tokens for slots in seen)
