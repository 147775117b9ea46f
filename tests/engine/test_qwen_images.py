"""Images in Qwen2.5-VL, Qwen3-VL and Qwen3.5: equal to transformers, and the same bits however prompts are cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, RequestOutput, SamplingParams
from octavo.core.errors import InvalidRequestError
from octavo.models.vision import patch_rows
from tests.image_models import picture, save_qwen2_5_vl, save_qwen3_5, save_qwen3_vl
from tests.models.tower_harness import CLIP_PIXELS
from tests.whole_outputs import all_of

pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")

PLACE = "<|image_pad|>"
#: Wide, high, one of the least size, one that is made smaller, and the first again, which is found.
PICTURES = [picture(40, 56, 1), picture(90, 31, 2), picture(9, 8, 3), picture(150, 120, 4), picture(40, 56, 1)]
PROMPTS: list[dict[str, Any]] = [
    {"prompt": f"{PLACE}what is this?", "multi_modal_data": {"image": PICTURES[0]}},
    {"prompt": f"compare {PLACE} and {PLACE}, {PLACE}", "multi_modal_data": {"image": PICTURES[1:4]}},
    {"prompt": f"once {PLACE} more text, {PLACE} and more", "multi_modal_data": {"image": PICTURES[3:]}},
    {"prompt": "no image"},
]
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("qwen")
    return folder, save_qwen2_5_vl(folder)


def load(folder: Path, **options: Any) -> LLM:
    defaults = {"dtype": "float32", "num_gpu_blocks_override": 300, "max_num_seqs": 4, "max_num_batched_tokens": 512}
    return LLM(str(folder), **{**defaults, **options})


@pytest.fixture(scope="module")
def at_once(saved: tuple[Path, Any]) -> list[RequestOutput]:
    """Each prompt in one step."""
    return load(saved[0]).generate(PROMPTS, GREEDY, use_tqdm=False)


def theirs(pixels: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and grid of an image uint8 [height, width, 3] as transformers' network takes them: two frames of it."""
    lines, columns = (side // 4 for side in pixels.shape[:2])
    rows = patch_rows(CLIP_PIXELS.rows(pixels), 4, 2).reshape(lines * columns, 3, 1, 16)
    doubled = np.repeat(rows, 2, axis=2).reshape(lines * columns, -1)
    return torch.from_numpy(doubled), torch.tensor([[1, lines, columns]])


def test_equal_to_transformers(saved: tuple[Path, Any], at_once: list[RequestOutput]) -> None:
    check_against_transformers(*saved, at_once)


def check_against_transformers(folder: Path, model: Any, outputs: list[RequestOutput]) -> None:
    """Greedy tokens and their logprobs."""
    images = load(folder).llm_engine.front_end.inputs.image_prompts
    assert images is not None
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        pictures = prompt.get("multi_modal_data", {}).get("image", [])
        pictures = pictures if isinstance(pictures, list) else [pictures]
        sizes = [images.processor.process(each).image.array()[0] for each in pictures]
        completion = output.outputs[0]
        prompt_ids, answer = list(output.prompt_token_ids or []), list(completion.token_ids)
        image = model.config.image_token_id
        if image in answer:  # transformers would look for a feature of it
            answer = answer[: answer.index(image) + 1]
        ids = torch.tensor([[*prompt_ids, *answer[:-1]]])
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if sizes:
            rows, grids = zip(*map(theirs, sizes), strict=True)
            types = (ids == model.config.image_token_id).int()
            inputs |= {"pixel_values": torch.cat(rows), "image_grid_thw": torch.cat(grids), "mm_token_type_ids": types}
        with torch.no_grad():
            logits = model(**inputs).logits[0]
        expected = logits[len(prompt_ids) - 1 :].log_softmax(-1)
        assert expected.argmax(-1).tolist() == answer
        found = [p[token].logprob for p, token in zip(completion.logprobs or [], answer, strict=False)]
        assert (torch.tensor(found) - expected.gather(1, torch.tensor(answer)[:, None])[:, 0]).abs().max() < 1e-3


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 24},
        {"max_num_batched_tokens": 9, "block_size": 5, "enable_prefix_caching": False, "image_step_ms": 0.001},
        {
            "num_gpu_blocks_override": 48,
            "block_size": 4,
            "watermark": 0.0,
            "preemption_mode": "swap",
            "swap_space": 0.01,
        },
        {"num_gpu_blocks_override": 48, "block_size": 4, "watermark": 0.0, "preemption_mode": "recompute"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        pytest.param({"tensor_parallel_size": 2, "max_num_batched_tokens": 40}, marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_size": 2, "max_num_batched_tokens": 40}, marks=pytest.mark.slow),
    ],
    ids=["chunks", "small chunks", "swap", "recompute", "drafts", "two ranks", "two stages"],
)
def test_the_same_bits(saved: tuple[Path, Any], at_once: list[RequestOutput], options: dict[str, Any]) -> None:
    llm = load(saved[0], **options)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert all_of(outputs) == all_of(at_once)
    again = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert all_of(again) == all_of(at_once)
    if "watermark" in options:  # the images are there: all that fit begin at once
        assert sum(output.metrics.num_preemptions for output in again) > 0


@pytest.mark.parametrize("save", [save_qwen2_5_vl, save_qwen3_vl, save_qwen3_5])
def test_prompts_without_images_need_no_tower(save: Callable[[Path], Any], tmp_path: Path) -> None:
    save(tmp_path)
    text, images = PROMPTS[3], PROMPTS[0]
    [expected] = load(tmp_path).generate(text, GREEDY, use_tqdm=False)
    llm = load(tmp_path, limit_mm_per_prompt={"image": 0})
    assert all_of(llm.generate(text, GREEDY, use_tqdm=False)) == all_of([expected])
    assert llm.llm_engine.front_end.inputs.image_prompts is None
    with pytest.raises(InvalidRequestError):
        llm.generate(images, GREEDY, use_tqdm=False)


def test_pictures_of_the_same_tokens_and_other_sides_are_told_apart(saved: tuple[Path, Any]) -> None:
    llm = load(saved[0], block_size=4)
    prompt = f"{PLACE}what is this?"
    wide, high = picture(16, 64), picture(64, 16)
    outputs = [
        llm.generate({"prompt": prompt, "multi_modal_data": {"image": image}}, GREEDY, use_tqdm=False)[0]
        for image in (wide, high, np.ascontiguousarray(wide.swapaxes(0, 1)), wide)
    ]
    assert len({tuple(output.prompt_token_ids or []) for output in outputs}) == 1
    assert [output.metrics.num_cached_tokens > 0 for output in outputs] == [False, False, False, True]
    assert all_of(outputs)[0] == all_of(outputs)[3]
    assert len({str(each) for each in all_of(outputs)}) == 3


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"quantization": "int8", "kv_cache_dtype": "int8"}], ids=str
)
def test_the_same_bits_in_other_types(saved: tuple[Path, Any], options: dict[str, Any]) -> None:
    whole = load(saved[0], **options).generate(PROMPTS, GREEDY, use_tqdm=False)
    cut = load(saved[0], max_num_batched_tokens=19, **options).generate(PROMPTS, GREEDY, use_tqdm=False)
    assert all_of(cut) == all_of(whole)


def test_children_of_a_prompt_go_on_at_its_positions(saved: tuple[Path, Any], at_once: list[RequestOutput]) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=8, ignore_eos=True, logprobs=0)
    alone = SamplingParams(temperature=1.0, seed=6, max_tokens=8, ignore_eos=True, logprobs=0)
    [forked] = load(saved[0]).generate(PROMPTS[1], params, use_tqdm=False)
    [single] = load(saved[0]).generate(PROMPTS[1], alone, use_tqdm=False)
    assert forked.outputs[1].token_ids == single.outputs[0].token_ids
    assert forked.outputs[1].cumulative_logprob == single.outputs[0].cumulative_logprob


QWEN3: dict[str, Callable[[Path], Any]] = {
    "qwen3_vl": save_qwen3_vl,
    "qwen3_vl_moe": partial(save_qwen3_vl, experts=True),
    "qwen3_5": save_qwen3_5,
}


@pytest.fixture(scope="module", params=QWEN3)
def qwen3(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any, list[RequestOutput]]:
    """A model of the family, and each prompt in one step."""
    folder = tmp_path_factory.mktemp(request.param)
    model = QWEN3[request.param](folder)
    return folder, model, load(folder).generate(PROMPTS, GREEDY, use_tqdm=False)


def test_qwen3_is_equal_to_transformers(qwen3: tuple[Path, Any, list[RequestOutput]]) -> None:
    check_against_transformers(*qwen3)


def test_features_of_early_layers_count_in_the_cache(qwen3: tuple[Path, Any, list[RequestOutput]]) -> None:
    folder, model, _ = qwen3
    vectors = 1 + len(getattr(model.config.vision_config, "deepstack_visual_indexes", ()))
    prompts = load(folder).llm_engine.front_end.inputs.image_prompts
    assert prompts is not None
    _, features = prompts.expand([prompts.placeholder_id], PICTURES[:1])
    [feature], [image] = features.features, features.images
    assert (feature.length, image.size) == (35, 4 * 35 * vectors * 64)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 9, "block_size": 5, "enable_prefix_caching": False, "image_step_ms": 0.001},
        {"num_gpu_blocks_override": 48, "block_size": 4, "watermark": 0.0, "preemption_mode": "recompute"},
        pytest.param({"tensor_parallel_size": 2, "max_num_batched_tokens": 40}, marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_size": 2, "max_num_batched_tokens": 40}, marks=pytest.mark.slow),
    ],
    ids=["small chunks", "recompute", "two ranks", "two stages"],
)
def test_qwen3_has_the_same_bits(qwen3: tuple[Path, Any, list[RequestOutput]], options: dict[str, Any]) -> None:
    folder, model, at_once = qwen3
    if "layer_types" in model.config.text_config.to_dict():  # states are kept every so many tokens
        options = {**options, "state_checkpoint_tokens": 2 * options.get("block_size", 16)}
        if "watermark" in options:  # a block of keys and values stands for many of such numbers
            options["num_gpu_blocks_override"] = 9
    llm = load(folder, **options)
    assert all_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == all_of(at_once)
    again = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert all_of(again) == all_of(at_once)
    if "watermark" in options:
        assert sum(output.metrics.num_preemptions for output in again) > 0
