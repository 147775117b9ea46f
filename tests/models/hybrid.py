"""What tests of hybrid networks share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo import SamplingParams
from tests.models.zoo import ON_GPU, OUTPUT, PARAMS, PROMPTS, Zoo, answer_of, answers, prompts_of


def check_continues_from_checkpoints(
    zoo: Zoo, tight: Mapping[str, Any], crowd: list[list[int]] = PROMPTS, *, recomputes: bool = False
) -> None:
    """Equal answers of the saved model in int8: alone, from a checkpoint, in three forks, and while others preempt.

    Args:
        zoo: with a saved model whose states have checkpoints every 8 tokens.
        tight: options of an engine in which the requests of ``crowd`` preempt each other.
        recomputes: whether they preempt by recompute, too.
    """
    plenty = {name: value for name, value in tight.items() if name != "num_gpu_blocks_override"}
    options, prompt = {**plenty, "max_num_batched_tokens": 16, "quantization": "int8"}, PROMPTS[3]
    alone = zoo.engine(enable_prefix_caching=False, quantization="int8")
    wanted = [answers(alone, [prompt])[0] for prompt in [PROMPTS[3], *crowd]]
    engine = zoo.engine(**options)
    assert answers(engine, [prompt]) == wanted[:1]
    (again,) = engine.generate(prompts_of([prompt]), PARAMS, use_tqdm=False)
    assert answer_of(again) == wanted[0]
    assert again.num_cached_tokens == 32, "the last checkpoint before the prompt's last token"
    many = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, n=3)
    (forks,) = engine.generate(prompts_of([prompt]), many, use_tqdm=False)
    assert [list(completion.token_ids) for completion in forks.outputs] == [wanted[0][0]] * 3
    swap = {"preemption_mode": "swap", "num_host_blocks_override": 64}
    for mode in (swap, {"preemption_mode": "recompute"}) if recomputes else (swap,):
        crowded = zoo.engine(watermark=0.0, **{**options, **tight, **mode})
        outputs = crowded.generate(prompts_of(crowd), PARAMS, use_tqdm=False)
        assert sum(output.metrics.num_preemptions for output in outputs) > 0 or ON_GPU
        assert [answer_of(output) for output in outputs] == wanted[1:]
