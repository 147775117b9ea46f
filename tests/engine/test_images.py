"""Images in prompts: equal to transformers, and the same bits alone, in company, in chunks, preempted, or cached."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from octavo import LLM, AsyncLLM, BeamSearchParams, RequestOutput, SamplingParams
from octavo.core.errors import InvalidRequestError
from octavo.core.request import ImageInput, RequestOptions
from octavo.images import image_reader
from tests.image_models import (
    picture,
    save_gemma3,
    save_gemma4,
    save_granite4_vision,
    save_internvl,
    save_lfm2_vl,
    save_llava,
    save_llava_next,
    save_mistral3,
    save_smolvlm,
)
from tests.images.image_cases import file_of
from tests.models.tower_harness import (
    CLIP_PIXELS,
    SIGLIP_PIXELS,
    normal_pixels,
    padded_patches,
    padded_pixels,
    padded_tiles,
    placed_patches,
)
from tests.whole_outputs import all_of, everything

pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")

SAVE: dict[str, Callable[[Path], Any]] = {
    "llava": save_llava,
    "smolvlm": save_smolvlm,
    "gemma3": save_gemma3,
    "gemma4": functools.partial(save_gemma4, features=16),
    "mistral3": save_mistral3,
    "internvl": save_internvl,
    "lfm2_vl": save_lfm2_vl,
    "next": save_llava_next,
    "granite4": save_granite4_vision,
}
PLACE = dict.fromkeys(SAVE, "<image>") | {
    "gemma3": "<start_of_image>",
    "gemma4": "<|image|>",
    "mistral3": "[IMG]",
    "internvl": "<IMG_CONTEXT>",
}
FAMILIES = list(SAVE)


Models = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """By family: the folder, and transformers' model."""

    @functools.cache
    def make(name: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(name)
        return folder, SAVE[name](folder)

    return make


def load(folder: Path, **options: Any) -> LLM:
    defaults = {"dtype": "float32", "num_gpu_blocks_override": 300, "max_num_seqs": 8, "max_num_batched_tokens": 128}
    return LLM(str(folder), **{**defaults, **options})


def prompts(family: str) -> list[dict[str, Any]]:
    """Images at the beginning, at the end, beside each other, the same twice, and none at all."""
    place = PLACE[family]
    a, b, c = picture(40, 56, 1), picture(90, 31, 2), picture(32, 32, 3)
    return [
        {"prompt": f"{place}what is this?", "multi_modal_data": {"image": a}},
        {"prompt": f"compare {place} and {place}, then {place}", "multi_modal_data": {"image": [a, b, c]}},
        {"prompt": f"twice {place}{place} the same", "multi_modal_data": {"image": [b, b]}},
        {"prompt": f"{place}what is this?", "multi_modal_data": {"image": c}},
        {"prompt": "no image"},
        {"prompt": f"a longer text before it, of many tokens, so that chunks end anywhere {place}" + "x" * 30,
         "multi_modal_data": {"image": [c]}},
    ]  # fmt: skip


PARAMS = [
    SamplingParams(temperature=0.0 if i % 2 else 0.8, seed=i, max_tokens=20 + i, ignore_eos=True, logprobs=2)
    for i in range(6)
]


@pytest.fixture(scope="module")
def alone(models: Models) -> Callable[[str], list[Any]]:
    """What each request gives alone, in an engine that finds no blocks again."""

    @functools.cache
    def record(family: str) -> list[Any]:
        llm = load(models(family)[0], enable_prefix_caching=False)
        return [
            everything(llm.generate(prompt, params, use_tqdm=False)[0])
            for prompt, params in zip(prompts(family), PARAMS, strict=True)
        ]

    return record


TIGHT: dict[str, Any] = {"num_gpu_blocks_override": 40, "block_size": 4, "watermark": 0.0}
COMPANY: dict[str, dict[str, Any]] = {
    "one batch": {},
    "chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 4},
    "small blocks": {"max_num_batched_tokens": 20, "max_num_seqs": 3, "block_size": 5, "num_gpu_blocks_override": 60},
    "recomputed": {**TIGHT, "preemption_mode": "recompute"},
    "swapped": {**TIGHT, "preemption_mode": "swap", "swap_space": 0.01},
    "encoded apart": {"image_step_ms": 0.001},
    "few features": {"image_cache_bytes": 1 << 20, "enable_prefix_caching": False},
    "no chunks": {"num_threads": 1, "enable_chunked_prefill": False, "max_num_batched_tokens": 512},
}


def options_of(family: str, **options: Any) -> dict[str, Any]:
    """With checkpoints of states at every other block, and room for images of many tokens."""
    if family == "lfm2_vl":
        options["state_checkpoint_tokens"] = 2 * options.get("block_size", 16)
    if family == "next" and options.get("num_gpu_blocks_override") == 40:
        options["num_gpu_blocks_override"] = 56
    return options


#: By default all with one family; what cuts and repeats prompts with the one whose images' tokens see each other; and
#: one each with inputs of each layer, lines of features, vectors of more layers, tiles whose features are put together,
#: and recurrent states.
BY_DEFAULT = {
    *(("llava", company) for company in COMPANY),
    *(
        ("gemma3", "chunks"),
        ("gemma3", "recomputed"),
        ("gemma4", "chunks"),
        ("gemma4", "swapped"),
        ("mistral3", "chunks"),
        ("next", "chunks"),
        ("granite4", "recomputed"),
        ("lfm2_vl", "swapped"),
    ),
}


@pytest.mark.parametrize(
    ("family", "company"),
    [
        pytest.param(*case, marks=() if case in BY_DEFAULT else pytest.mark.slow)
        for case in itertools.product(FAMILIES, COMPANY)
    ],
)
def test_the_same_bits_in_company(models: Models, alone: Callable[[str], list[Any]], family: str, company: str) -> None:
    options = options_of(family, **COMPANY[company])
    llm = load(models(family)[0], **options)
    # Enough to preempt each other, also with states in the place of keys and values, or room for many tokens.
    times = 3 if "watermark" in options and family in ("lfm2_vl", "next") else 1
    outputs = llm.generate(prompts(family) * times, PARAMS * times, use_tqdm=False)
    assert all_of(outputs) == alone(family) * times
    # Again, with features and blocks that are there.
    again = llm.generate(prompts(family), PARAMS, use_tqdm=False)
    assert all_of(again) == alone(family)
    if "watermark" in options:
        assert sum(output.metrics.num_preemptions for output in [*outputs, *again]) > 0
    if not options:
        assert again[1].metrics.num_cached_tokens > 0


def test_an_image_of_an_aborted_request_is_given_up(models: Models, alone: Callable[[str], list[Any]]) -> None:
    llm = load(models("llava")[0], image_step_ms=0.001)
    engine, given = llm.llm_engine, prompts("llava")
    executor: Any = engine.core.executor
    preparations = executor._worker.runner.loaded.preparations
    engine.add_request("text", given[4], PARAMS[4])
    engine.add_request("aborted", given[1], PARAMS[1])
    while not preparations._computing:
        engine.step()
    engine.abort_request("aborted")
    while engine.has_unfinished_requests():
        engine.step()
    assert not (preparations._computing or preparations._preparing or preparations._kept)
    again = llm.generate([given[1], given[4]], [PARAMS[1], PARAMS[4]], use_tqdm=False)
    assert all_of(again) == [alone("llava")[i] for i in (1, 4)]


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, marks=() if (family, layout) == ("llava", "tensor") else pytest.mark.slow)
        for family in ("llava", "mistral3", "internvl", "lfm2_vl", "next")
        for layout in ("tensor", "pipeline")
    ],
)
def test_the_same_bits_of_several_workers(
    models: Models, alone: Callable[[str], list[Any]], family: str, layout: str
) -> None:
    llm = load(models(family)[0], **{f"{layout}_parallel_size": 2})
    assert all_of(llm.generate(prompts(family), PARAMS, use_tqdm=False)) == alone(family)


def test_the_same_bits_after_sleep(models: Models, alone: Callable[[str], list[Any]]) -> None:
    llm = load(models("llava")[0])
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        assert all_of(llm.generate(prompts("llava"), PARAMS, use_tqdm=False)) == alone("llava")


@pytest.mark.parametrize("family", ["llava", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_branches_and_beams_share_what_they_see(models: Models, family: str) -> None:
    folder, given = models(family)[0], prompts(family)
    params = SamplingParams(n=3, temperature=0.9, seed=4, max_tokens=6, logprobs=1, prompt_logprobs=0)
    llm, one_by_one = load(folder), load(folder, enable_prefix_caching=False)
    together = llm.generate(given, params, use_tqdm=False)
    assert all_of(together) == [everything(one_by_one.generate(p, params, use_tqdm=False)[0]) for p in given]
    beams = BeamSearchParams(beam_width=3, max_tokens=6)
    found = llm.beam_search(given, beams)
    for output, prompt in zip(found, given, strict=True):
        [one] = one_by_one.beam_search([prompt], beams)
        assert [s.tokens for s in output.sequences] == [s.tokens for s in one.sequences]


def test_a_killed_engine_is_a_pause(models: Models, alone: Callable[[str], list[Any]]) -> None:
    async def main() -> list[Any]:
        async with AsyncLLM(models("llava")[0], dtype="float32", num_gpu_blocks_override=300) as llm:
            taken = 0

            async def answer(number: int) -> RequestOutput:
                nonlocal taken
                total = None
                async for output in await llm.submit(str(number), prompts("llava")[number], PARAMS[number]):
                    total = output if total is None else total + output
                    taken += 1
                    if taken == 12 and (pid := llm.replica_states()[0].pid) is not None:
                        os.kill(pid, signal.SIGKILL)
                assert total is not None
                return total

            answers = await asyncio.gather(*map(answer, range(6)))
            assert llm.replica_states()[0].num_restarts == 1
            return [everything(output) for output in answers]

    assert asyncio.run(main()) == alone("llava")


@pytest.mark.parametrize("family", FAMILIES)
def test_other_images_are_not_found_in_the_prefix_cache(models: Models, family: str) -> None:
    llm, place = load(models(family)[0], **options_of(family, block_size=4)), PLACE[family]
    params = SamplingParams(temperature=0, max_tokens=4)
    texts = [{"prompt": f"{place}what?", "multi_modal_data": {"image": picture(60, 60, seed)}} for seed in (1, 2, 1)]
    outputs = [llm.generate(text, params, use_tqdm=False)[0] for text in texts]
    assert all(output.metrics.num_cached_tokens < 4 for output in outputs[:2])  # at most what is before the image
    assert outputs[2].metrics.num_cached_tokens >= 16
    assert outputs[2].prompt_token_ids == outputs[0].prompt_token_ids == outputs[1].prompt_token_ids


#: Pixels as the families were trained with.
PIXELS = dict.fromkeys(FAMILIES, SIGLIP_PIXELS) | dict.fromkeys(("llava", "mistral3", "internvl"), CLIP_PIXELS)


def inputs_there(family: str, pictures: list[np.ndarray], images: list[ImageInput]) -> dict[str, torch.Tensor]:
    """Images as transformers' network of the family takes them."""
    if not images:
        return {}
    normalisation = PIXELS[family]
    if family == "mistral3":
        return padded_pixels(images, normalisation)
    if family == "gemma4":
        return placed_patches(images, 4)
    if family == "lfm2_vl":
        return padded_patches(images, 8, normalisation)
    if family in ("next", "granite4"):
        sizes = torch.tensor([each.shape[:2] for each in pictures])
        return {"pixel_values": padded_tiles(images, normalisation), "image_sizes": sizes}
    pixels = torch.cat([normal_pixels(image, normalisation) for image in images])
    return {"pixel_values": pixels[None] if family == "smolvlm" else pixels}


def logprobs_there(model: Any, family: str, output: RequestOutput, images: dict[str, torch.Tensor]) -> torch.Tensor:
    """transformers' logprobs of the output's tokens."""
    answer = list(output.outputs[0].token_ids)
    if (image := model.config.image_token_id) in answer:  # transformers would look for a feature of it
        answer = answer[: answer.index(image) + 1]
    ids = torch.tensor([[*output.prompt_token_ids, *answer[:-1]]])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **images}
    if family == "gemma3":
        inputs["token_type_ids"] = (ids == model.config.image_token_id).long()
    with torch.no_grad():
        logits = model(**inputs).logits[0]
    if family == "next":  # transformers leaves out the factor that a Granite has alone
        logits = logits / model.config.text_config.logits_scaling
    rows = logits[len(output.prompt_token_ids) - 1 :].log_softmax(-1)
    assert rows.argmax(-1).tolist() == answer
    return rows.gather(1, torch.tensor(answer)[:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_transformers(models: Models, family: str) -> None:
    folder, model = models(family)
    llm = load(folder)
    prompt_images = llm.llm_engine.front_end.inputs.image_prompts
    assert prompt_images is not None
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    given = prompts(family)
    for prompt, output in zip(given, llm.generate(given, params, use_tqdm=False), strict=True):
        pictures = prompt.get("multi_modal_data", {}).get("image", [])
        pictures = pictures if isinstance(pictures, list) else [pictures]
        images = [prompt_images.processor.process(each).image for each in pictures]
        completion = output.outputs[0]
        expected = logprobs_there(model, family, output, inputs_there(family, pictures, images))
        found = torch.tensor(
            [p[t].logprob for p, t in zip(completion.logprobs or [], completion.token_ids, strict=True)]
        )
        assert (found[: len(expected)] - expected).abs().max() < 1e-3


def test_bad_prompts_fail_alone(models: Models) -> None:
    llm = load(models("llava")[0], limit_mm_per_prompt={"image": 2})
    image = picture(20, 20)
    wrong: list[tuple[Any, str]] = [
        ({"prompt": "<image> x"}, "1 places for images .*but 0 images"),
        ({"prompt": "x", "multi_modal_data": {"image": image}}, "0 places for images .*but 1 images"),
        ({"prompt": "<image>" * 3, "multi_modal_data": {"image": [image] * 3}}, "may have at most 2"),
        ({"prompt": "<image>", "multi_modal_data": {"video": image}}, "'image' alone"),
        ({"prompt": "<image>", "multi_modal_data": {"image": "cat.png"}}, "image"),
        ({"prompt": "<image>", "multi_modal_data": {"image": image.astype(np.float64)}}, "uint8"),
    ]
    for prompt, message in wrong:
        with pytest.raises(InvalidRequestError, match=message):
            llm.generate(prompt, SamplingParams(max_tokens=2), use_tqdm=False)
    good = {"prompt": "<image> x", "multi_modal_data": {"image": image}}
    assert llm.generate(good, SamplingParams(max_tokens=2), use_tqdm=False)[0].finished


@pytest.fixture
def not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is decoded in this process is an error."""

    def refuse(*_: object) -> None:
        raise AssertionError("a file was decoded in this process")

    monkeypatch.setattr(image_reader, "decode_image", refuse)


def sandboxes() -> int:
    return sum("octavo.process.sandbox_process" in child.cmdline() for child in psutil.Process().children())


@pytest.mark.usefixtures("not_here")
def test_files_are_decoded_in_the_sandbox_which_texts_and_pixels_do_not_need(models: Models) -> None:
    before, llm = sandboxes(), load(models("llava")[0])
    a, b = picture(40, 56, 1), picture(90, 31, 2)

    def answer(first: Any, second: Any) -> list[Any]:
        prompt: Any = {"prompt": "<image> and <image>", "multi_modal_data": {"image": [first, second]}}
        return all_of(llm.generate([prompt, {"prompt": "x"}], PARAMS[:2], use_tqdm=False))

    pixels = answer(a, b)
    assert sandboxes() == before
    assert answer(file_of(a), b) == answer(a, file_of(b)) == answer(file_of(a), file_of(b)) == pixels
    assert sandboxes() > before
    bad = {"prompt": "<image><image>", "multi_modal_data": {"image": [file_of(a), file_of(b)[:60]]}}
    with pytest.raises(InvalidRequestError, match="image 2 is damaged or cut off"):
        llm.generate(bad, use_tqdm=False)
    assert answer(a, b) == pixels


@pytest.mark.usefixtures("not_here")
def test_with_an_event_loop_images_are_read_beside_it(models: Models) -> None:
    front_end = load(models("llava")[0]).llm_engine.front_end
    image = picture(40, 56, 1)
    prompt: Any = {"prompt": "<image>x", "multi_modal_data": {"image": file_of(image)}}
    read: Any = asyncio.run(front_end.prepare(prompt, None, RequestOptions()))[0]
    [processed] = read["multi_modal_data"]["image"]
    assert front_end.inputs.image_prompts is not None
    assert processed == front_end.inputs.image_prompts.processor.process(image)


def test_a_text_model_refuses_images(tiny_model: Path) -> None:
    with pytest.raises(InvalidRequestError, match="text alone"):
        load(tiny_model).generate({"prompt": "x", "multi_modal_data": {"image": picture(8, 8)}}, use_tqdm=False)


def test_images_need_more_memory_than_there_is(models: Models) -> None:
    llm = load(models("llava")[0], image_cache_bytes=1 << 20, max_model_len=512)
    # One has 16 features of 48 numbers: 3 kB; no prompt of 512 tokens has too many of them.
    assert llm.generate(
        {"prompt": "<image>" * 20, "multi_modal_data": {"image": [picture(20, 20, i) for i in range(20)]}},
        SamplingParams(max_tokens=2), use_tqdm=False,
    )[0].finished  # fmt: skip
