"""The engine end to end on every device there is: a CPU, the GPU kernels under Triton's interpreter, a GPU.

The model is tiny and random. On a GPU (``-m gpu``) the same tests run with longer outputs and more requests.
"""

from __future__ import annotations

import importlib.util
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, BeamSearchParams, RequestOutput, SamplingParams

pytestmark = pytest.mark.usefixtures("quick_interpreter")

INTERPRETED = {"device": "cpu", "kernels": "triton"}
INTERPRETED_FIXED = {**INTERPRETED, "deterministic": True}


@dataclass(frozen=True)
class Place:
    """Where an engine runs, and how much it is given to do there."""

    options: dict[str, Any]
    requests: int
    max_tokens: int


def _interpreter() -> list[pytest.MarkDecorator]:
    absent = importlib.util.find_spec("triton") is None
    return [pytest.mark.skipif(absent or torch.cuda.is_available(), reason="no interpreted Triton here")]


CPU = pytest.param(Place({"device": "cpu"}, 6, 12), id="cpu")
TRITON = pytest.param(Place(INTERPRETED, 3, 3), id="interpreted", marks=_interpreter())
FIXED = pytest.param(Place(INTERPRETED_FIXED, 3, 3), id="interpreted fixed", marks=_interpreter())
TWO_FIXED = pytest.param(Place(INTERPRETED_FIXED, 2, 2), id="two interpreted fixed", marks=_interpreter())
CUDA = pytest.param(Place({"device": "cuda"}, 24, 40), id="cuda", marks=pytest.mark.gpu)
CUDA_EAGER = pytest.param(
    Place({"device": "cuda", "enforce_eager": True}, 24, 40), id="cuda eager", marks=pytest.mark.gpu
)
CUDA_FIXED = pytest.param(
    Place({"device": "cuda", "deterministic": True}, 24, 40), id="cuda deterministic", marks=pytest.mark.gpu
)
#: The interpreter is slow: what both kinds of its kernels share is checked with one of them by default.
FIXED_SLOW = pytest.param(*FIXED.values, id=FIXED.id, marks=[*FIXED.marks, pytest.mark.slow])
TRITON_SLOW = pytest.param(*TRITON.values, id=TRITON.id, marks=[*TRITON.marks, pytest.mark.slow])
EVERYWHERE = [CPU, TRITON, FIXED_SLOW, CUDA, CUDA_EAGER, CUDA_FIXED]
INVARIANT = [CPU, TWO_FIXED, FIXED_SLOW, CUDA_FIXED]


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(3)
    lengths = (1, 33, 16, 7, 2, 17, 40, 90)
    return [[rng.randrange(2, 258) for _ in range(lengths[i % len(lengths)])] for i in range(count)]


def load(model: Path, place: Place, **options: Any) -> LLM:
    defaults = {"dtype": "float32", "max_model_len": 160, "num_gpu_blocks_override": 400, "max_num_seqs": 32}
    return LLM(str(model), **{**defaults, **place.options, **options})


def run(llm: LLM, asked: list[list[int]], params: Any) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": p} for p in asked], params, use_tqdm=False)


def everything(output: RequestOutput) -> Any:
    completion = output.outputs[0]
    assert completion.logprobs is not None
    return completion.token_ids, [{t: (p.logprob, p.rank) for t, p in x.items()} for x in completion.logprobs]


def greedy(place: Place) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=place.max_tokens, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def truth(tiny_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


def agrees(truth: Any, prompt: list[int], tokens: list[int], tie: float) -> bool:
    """Whether each token is transformers' own choice after those before it, or as good to within ``tie``."""
    with torch.inference_mode():
        logits = truth(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return bool((logits.max(1).values - chosen <= tie).all())


@pytest.mark.parametrize("place", EVERYWHERE)
def test_greedy_tokens_are_those_of_transformers(tiny_model: Path, truth: Any, place: Place) -> None:
    asked = prompts(place.requests)
    outputs = run(load(tiny_model, place, max_num_batched_tokens=48), asked, greedy(place))
    for prompt, output in zip(asked, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        assert len(tokens) == place.max_tokens
        assert agrees(truth, prompt, tokens, tie=1e-4)


@pytest.mark.parametrize(
    ("place", "mode"),
    [
        pytest.param(*place.values, mode, id=f"{mode}-{place.id}", marks=place.marks)
        for mode in ("recompute", "swap")
        for place in (CPU, TRITON_SLOW, FIXED_SLOW, CUDA, CUDA_EAGER, CUDA_FIXED)
    ],
)
def test_preempted_requests_go_on_as_if_nothing_had_happened(
    tiny_model: Path, truth: Any, place: Place, mode: str
) -> None:
    asked = [p[:15] for p in prompts(place.requests)]
    longest = 15 + place.max_tokens
    params = SamplingParams(temperature=0, max_tokens=place.max_tokens, ignore_eos=True)
    tight = {"num_gpu_blocks_override": 4, "watermark": 0.0, "preemption_mode": mode, "num_host_blocks_override": 400}
    llm = load(tiny_model, place, max_model_len=longest, enable_prefix_caching=False, **tight)
    outputs = run(llm, asked, params)
    assert sum(o.metrics.num_preemptions for o in outputs) > 0
    for prompt, output in zip(asked, outputs, strict=True):
        assert agrees(truth, prompt, list(output.outputs[0].token_ids), tie=1e-4)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.parametrize("place", INVARIANT)
def test_bit_for_bit_the_same_in_any_company(tiny_model: Path, place: Place, dtype: str) -> None:
    """Alone and whole, against together, in chunks, preempted, from the prefix cache."""
    asked, params = prompts(place.requests), greedy(place)
    alone = load(tiny_model, place, dtype=dtype, enable_prefix_caching=False)
    expected = [everything(run(alone, [prompt], params)[0]) for prompt in asked]
    roomy, tight = {"max_num_batched_tokens": 200}, {"max_num_batched_tokens": 35, "num_gpu_blocks_override": 10}
    few = place.requests == 2  # for the interpreter, by default
    for options in [tight] if place.options == INTERPRETED_FIXED else [roomy, tight]:
        llm = load(tiny_model, place, dtype=dtype, watermark=0.0, **options)
        for _ in range(1 if few else 2):  # the second time from the prefix cache
            assert [everything(o) for o in run(llm, asked, params)] == expected


@pytest.mark.parametrize("place", [CPU, TRITON_SLOW, FIXED_SLOW, CUDA, CUDA_EAGER, CUDA_FIXED])
def test_samples_beams_and_several_sequences(tiny_model: Path, place: Place) -> None:
    """Every way to ask runs on every device and gives what was asked for; the same seed gives the same."""
    count = place.max_tokens
    params: list[Any] = [
        SamplingParams(temperature=0.9, seed=1, top_p=0.9, top_k=20, max_tokens=count, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=2, n=2, max_tokens=count, ignore_eos=True, repetition_penalty=1.3),
        BeamSearchParams(beam_width=2, max_tokens=count, ignore_eos=True),
    ]
    llm = load(tiny_model, place)
    asked = prompts(3)
    first, second = (run(llm, asked, params) for _ in range(2))
    assert [len(o.outputs) for o in first] == [1, 2, 2]
    for a, b in zip(first, second, strict=True):
        assert [o.token_ids for o in a.outputs] == [o.token_ids for o in b.outputs]
        assert all(len(o.token_ids) == count for o in a.outputs)


#: By how much each may differ. By default the interpreter has the last ones; tests of kernels have all.
SMALLER: list[tuple[dict[str, str], float]] = [
    ({"dtype": "bfloat16"}, 0.05),
    ({"dtype": "float16"}, 0.02),
    ({"kv_cache_dtype": "int8"}, 0.1),
    ({"kv_cache_dtype": "fp8"}, 0.2),
    ({"quantization": "int8"}, 0.2),
    ({"quantization": "int4"}, 0.6),
    ({"quantization": "fp8"}, 0.3),
    ({"dtype": "bfloat16", "kv_cache_dtype": "int8", "quantization": "int4"}, 0.8),
]


@pytest.mark.parametrize(
    ("place", "options", "bound"),
    [
        pytest.param(*place.values, options, bound, id=f"{options}-{place.id}", marks=place.marks)
        for options, bound in SMALLER
        for place in (TRITON if len(options) > 1 else TRITON_SLOW, CUDA)
    ],
)
def test_smaller_types_stay_near_float32(
    tiny_model: Path, truth: Any, place: Place, options: dict[str, str], bound: float
) -> None:
    """The logprob of each token is near that of the same token in transformers' float32."""
    # A prompt of three blocks, and a token that reads what the prompt has written.
    asked, params = prompts(2), SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=0)
    for prompt, output in zip(asked, run(load(tiny_model, place, **options), asked, params), strict=True):
        tokens = list(output.outputs[0].token_ids)
        with torch.inference_mode():
            logits = truth(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        positions = output.outputs[0].logprobs
        assert positions is not None
        found = torch.tensor([position[t].logprob for position, t in zip(positions, tokens, strict=True)])
        assert (found - expected).abs().max() < bound


@pytest.mark.gpu
def test_graphs_change_no_bit(tiny_model: Path) -> None:
    place = Place({"device": "cuda", "deterministic": True}, 24, 40)
    asked, params = prompts(place.requests), greedy(place)
    results = [
        [everything(o) for o in run(load(tiny_model, place, **options), asked, params)]
        for options in ({"enforce_eager": True}, {"graph_capture": "lazy"}, {"graph_capture": "start"})
    ]
    assert results[0] == results[1] == results[2]


@pytest.mark.gpu
def test_scheduling_ahead_changes_no_bit(tiny_model: Path) -> None:
    place = Place({"device": "cuda", "deterministic": True}, 24, 40)
    asked, params = prompts(place.requests), greedy(place)
    results = [
        [everything(o) for o in run(load(tiny_model, place, async_scheduling=ahead), asked, params)]
        for ahead in (False, True)
    ]
    assert results[0] == results[1]


@pytest.mark.parametrize("place", [CPU, FIXED_SLOW, CUDA_FIXED])
def test_a_draft_model_changes_no_answer(tiny_model: Path, place: Place) -> None:
    """It is the model itself here: it is always right, on kernels whose rows do not depend on their company."""
    asked = prompts(place.requests)
    params = [SamplingParams(max_tokens=2 + place.max_tokens, seed=i, logprobs=1) for i in range(len(asked))]
    config = {"model": str(tiny_model), "num_speculative_tokens": 3, "adaptive": False}
    wanted, found = (load(tiny_model, place, speculative_config=drafts) for drafts in (None, config))
    assert [*map(everything, run(found, asked, params))] == [*map(everything, run(wanted, asked, params))]
    stats = found.llm_engine.core.scheduler.stats().speculation
    assert stats is not None and stats.accepted_tokens == stats.draft_tokens > 0
