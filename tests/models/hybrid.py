"""What tests of hybrid networks share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo import SamplingParams
from tests.models.zoo import ON_GPU, OUTPUT, PARAMS, PROMPTS, Zoo, answer_of, answers, prompts_of


def check_continues_from_checkpoints(zoo: Zoo, tight: Mapping[str, Any]) -> None:
    """Equal answers of the saved model in int8: alone, from a checkpoint, in three forks, and after swaps.

    Args:
        zoo: with a saved model whose states have checkpoints every 8 tokens.
        tight: options of an engine in which the four requests preempt each other.
    """
    plenty = {name: value for name, value in tight.items() if name != "num_gpu_blocks_override"}
    options = {**plenty, "max_num_batched_tokens": 16, "quantization": "int8"}
    prompt = PROMPTS[3]
    (wanted,) = answers(zoo.engine(enable_prefix_caching=False, quantization="int8"), [prompt])
    engine = zoo.engine(**options)
    assert answers(engine, [prompt]) == [wanted]
    (again,) = engine.generate(prompts_of([prompt]), PARAMS, use_tqdm=False)
    assert answer_of(again) == wanted
    assert again.num_cached_tokens == 32, "the last checkpoint before the prompt's last token"
    many = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, n=3)
    (forks,) = engine.generate(prompts_of([prompt]), many, use_tqdm=False)
    assert [list(completion.token_ids) for completion in forks.outputs] == [wanted[0]] * 3
    swapping = zoo.engine(watermark=0.0, preemption_mode="swap", num_host_blocks_override=64, **{**options, **tight})
    outputs = swapping.generate(prompts_of(PROMPTS), PARAMS, use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0 or ON_GPU
    assert answer_of(outputs[3]) == wanted
