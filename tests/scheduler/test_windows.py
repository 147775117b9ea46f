"""KV groups with an attention window, under the scheduler."""

from __future__ import annotations

from octavo.core.config import SchedulerOptions
from octavo.core.request import EngineCoreRequest, Generate
from octavo.core.sampling_params import SamplingParams
from octavo.memory.block_manager import BlockManager
from octavo.memory.content_index import common_prefix
from octavo.memory.kv_groups import GroupBlocks
from octavo.scheduler.step import Step
from tests.scheduler.fake_worker import Engine, check_nothing_held, tokens_alone


def test_recomputed_sequences_share_only_blocks_of_equal_tokens_though_the_window_has_passed_them() -> None:
    options = SchedulerOptions(max_num_seqs=2, max_num_batched_tokens=8, preemption_mode="recompute")
    blocks = BlockManager([GroupBlocks(40, window=2)], 1, max_num_batched_tokens=8)
    engine = Engine(blocks, options, max_model_len=40)
    params = SamplingParams(n=2, max_tokens=20, ignore_eos=True)
    request = EngineCoreRequest(group_id=1, prompt_token_ids=[1, 2, 3, 4], task=Generate(params, 3))
    answer = engine.add(request)
    for _ in range(12):
        engine.step()
    first, second = answer.group.seqs
    alike = common_prefix(first.token_ids, second.token_ids)
    assert alike < first.num_computed - 4, "they differ before the window"
    engine.scheduler._preemption.preempt(answer.group, Step(0.0, 0))
    assert second.shared_prefix == (first, alike)
    engine.run()
    assert answer.tokens == {index: tokens_alone(request, index, 40) for index in (0, 1)}
    assert answer.reasons == {0: "length", 1: "length"}
    check_nothing_held(engine)
