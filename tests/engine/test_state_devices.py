"""Networks with recurrent states end to end on every device: see ``test_devices``, whose places and sizes these are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.test_devices import (
    CPU,
    CUDA,
    CUDA_EAGER,
    CUDA_FIXED,
    FIXED_SLOW,
    TWO_FIXED,
    Place,
    agrees,
    everything,
    greedy,
    load,
    prompts,
    run,
)

pytestmark = pytest.mark.usefixtures("quick_interpreter")

SIZES = {
    **{"vocab_size": 258, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
    **{"bos_token_id": 0, "eos_token_id": 1},
}
#: Checkpoints and blocks are so near to each other that prompts of some tokens have several.
NEAR = {"block_size": 8, "state_checkpoint_tokens": 16}


def lfm2() -> Any:
    from transformers import Lfm2Config

    return Lfm2Config(**SIZES, layer_types=["conv", "full_attention", "conv"])


def qwen3_next() -> Any:
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        **SIZES,
        **{"layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 16},
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_num_key_heads": 2},
        **{"linear_num_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        **{"shared_expert_intermediate_size": 32, "mlp_only_layers": [0]},
    )


MAMBA_SIZES = {
    name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "bos_token_id", "eos_token_id")
} | {"pad_token_id": 0}


def mamba() -> Any:
    from transformers import MambaConfig

    return MambaConfig(**MAMBA_SIZES, state_size=8, time_step_rank=6)


def mamba2() -> Any:
    from transformers import Mamba2Config

    heads = {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 24}
    return Mamba2Config(**MAMBA_SIZES, **heads)


ON_GPU = [pytest.param(config, marks=pytest.mark.gpu) for config in (mamba, mamba2)]


@pytest.fixture(scope="module", params=[lfm2, qwen3_next, *ON_GPU], ids=lambda config: config.__name__)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with a random model, and the model of transformers."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(request.param(), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    folder = tmp_path_factory.mktemp(request.param.__name__)
    network.save_pretrained(folder)
    return folder, network


def engine(model: tuple[Path, Any], place: Place, **options: Any) -> Any:
    near = {**NEAR, "block_size": 16} if model[1].config.model_type.startswith("mamba") else NEAR
    return load(model[0], place, skip_tokenizer_init=True, **{**near, **options})


@pytest.mark.parametrize("place", [CPU, TWO_FIXED, FIXED_SLOW, CUDA, CUDA_EAGER, CUDA_FIXED])
def test_greedy_tokens_are_those_of_transformers(model: tuple[Path, Any], place: Place) -> None:
    asked = prompts(place.requests)
    outputs = run(engine(model, place, max_num_batched_tokens=48), asked, greedy(place))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [place.max_tokens] * place.requests
    for prompt, output in zip(asked[:8], outputs, strict=False):  # all lengths; transformers is slow
        assert agrees(model[1], prompt, list(output.outputs[0].token_ids), tie=1e-3)


@pytest.mark.parametrize("place", [CPU, FIXED_SLOW, CUDA_FIXED])
def test_bit_for_bit_the_same_in_any_company(model: tuple[Path, Any], place: Place) -> None:
    """Alone and whole, against together, in chunks, preempted by both kinds, from a checkpoint, and forked."""
    asked, params = prompts(place.requests), greedy(place)
    alone = engine(model, place, dtype="bfloat16", enable_prefix_caching=False)
    expected = [everything(run(alone, [prompt], params)[0]) for prompt in asked]
    longest = max(map(len, asked)) + place.max_tokens
    tight = {"max_num_batched_tokens": 35, "max_model_len": longest, "num_host_blocks_override": 400, "watermark": 0.0}
    for mode in ("recompute", "swap"):
        llm = engine(
            model, place, dtype="bfloat16", num_gpu_blocks_override=longest // 8 + 4, preemption_mode=mode, **tight
        )
        outputs = run(llm, asked, params)
        assert [everything(output) for output in outputs] == expected
        # The short requests of the interpreter, and those that only have states, may fit.
        if place.requests > 5 and not model[1].config.model_type.startswith("mamba"):
            assert sum(output.metrics.num_preemptions for output in outputs) > 0
    llm = engine(model, place, dtype="bfloat16", max_num_batched_tokens=200)
    for cached in (0, 32):
        outputs = run(llm, asked, params)
        assert [everything(output) for output in outputs] == expected
        assert outputs[1].num_cached_tokens >= cached
    params.n = 2
    for output, (tokens, _) in zip(run(llm, asked, params), expected, strict=True):
        assert [list(completion.token_ids) for completion in output.outputs] == [list(tokens)] * 2


@pytest.mark.gpu
def test_graphs_change_no_bit(model: tuple[Path, Any]) -> None:
    place = Place({"device": "cuda", "deterministic": True}, 24, 40)
    asked, params = prompts(place.requests), greedy(place)
    results = [
        [everything(o) for o in run(engine(model, place, **options), asked, params)]
        for options in ({"enforce_eager": True}, {"graph_capture": "lazy"}, {"graph_capture": "start"})
    ]
    assert results[0] == results[1] == results[2]
