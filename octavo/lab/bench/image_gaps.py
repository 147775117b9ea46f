"""What text streams lose while images are encoded: the gaps between their tokens, alone and beside images."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.core.sampling_params import SamplingParams
from octavo.loader.resolve import resolve_model

if TYPE_CHECKING:
    from octavo.engine.async_llm import AsyncLLM

#: Tokens of an answer about an image.
_ANSWER = 8

# The default model: the shape of SmolVLM-256M, without splitting of images.

_IMAGE = "<image>"
_SPECIAL = [_IMAGE, "<fake_token_around_image>", "<global-img>"]
_TEXT_SHAPE = {
    **{"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30},
    **{"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192},
    **{"rope_theta": 100000, "rms_norm_eps": 1e-5},
}
_VISION_SHAPE = {
    **{"model_type": "idefics3_vision", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12},
    **{"num_attention_heads": 12, "image_size": 512, "patch_size": 16},
}
_CONFIG = {
    **{"architectures": ["Idefics3ForConditionalGeneration"], "model_type": "idefics3", "dtype": "bfloat16"},
    **{"scale_factor": 4, "vision_config": _VISION_SHAPE},
}
_PREPROCESSOR = {
    "image_processor_type": "Idefics3ImageProcessor",
    "do_image_splitting": False,
    "size": {"longest_edge": 512},
    "max_image_size": {"longest_edge": 512},
}


def write_shape(folder: Path) -> None:
    """The files of that model, to be loaded with ``load_format="dummy"``: with the demo model's tokenizer."""
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_file(str(resolve_model("smollm2-135m") / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    text = {**_TEXT_SHAPE, "vocab_size": tokenizer.get_vocab_size()}
    config = {**_CONFIG, "text_config": text, "image_token_id": tokenizer.token_to_id(_IMAGE)}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(_PREPROCESSOR))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


@dataclass(frozen=True)
class GapFigures:
    """Gaps between tokens of text streams, in milliseconds."""

    #: Requests with an image that came at once; 0: text alone.
    images: int
    streams: int
    seconds: float
    tokens_per_s: float
    median_ms: float
    p99_ms: float
    worst_ms: float
    #: Seconds to the first token of the first and of the last request with an image.
    first_s: float | None = None
    last_s: float | None = None


async def measure(llm: AsyncLLM, clients: int, side: int, seconds: float) -> tuple[GapFigures, GapFigures]:
    """``clients`` streams of text, alone for ``seconds``; then beside as many requests with an image of side x side.

    The images are all different, and come at once; the second measurement ends with the last answer.
    """
    await llm.ready()
    placeholder, rng = llm.front_end.inputs.image_prompts, np.random.default_rng(0)
    assert placeholder is not None, "the model sees images"
    place = placeholder.processor.placeholder
    texts: list[list[list[float]]] = [[] for _ in range(clients)]
    streams = [asyncio.create_task(_text(llm, i, texts[i])) for i in range(clients)]
    try:
        while not all(times and times[0] for times in texts):
            for task in streams:
                if task.done():
                    task.result()  # it ends with an error alone
            await asyncio.sleep(0.01)
        begin = time.monotonic()
        await asyncio.sleep(seconds)
        alone = _figures(texts, begin, time.monotonic(), images=0)
        images = [rng.integers(0, 256, (side, side, 3), dtype=np.uint8) for _ in range(clients)]
        answers: list[list[float]] = [[] for _ in images]
        begin = time.monotonic()
        await asyncio.gather(
            *(
                _stream(
                    llm,
                    f"image {i}",
                    {"prompt": f"{place}{i}", "multi_modal_data": {"image": image}},
                    _ANSWER,
                    answers[i],
                )
                for i, image in enumerate(images)
            )
        )
        end, waits = time.monotonic(), sorted(answer[0] - begin for answer in answers)
        return alone, _figures(texts, begin, end, images=clients, first_s=waits[0], last_s=waits[-1])
    finally:
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


async def _text(llm: AsyncLLM, number: int, times: list[list[float]]) -> None:
    """Requests of one client, one after the other, each with the times of its tokens."""
    for count in itertools.count():
        times.append([])
        prompt = {"prompt": f"Text {number}"}
        await _stream(llm, f"text {number}, {count}", prompt, llm.max_model_len // 2, times[-1])


async def _stream(llm: AsyncLLM, name: str, prompt: Any, tokens: int, times: list[float]) -> None:
    """Adds the time of each token to ``times``."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    async for _ in await llm.submit(name, prompt, params):
        times.append(time.monotonic())


def _figures(texts: list[list[list[float]]], begin: float, end: float, **fields: Any) -> GapFigures:
    """Of the gaps that end between these times."""
    streams = itertools.chain.from_iterable(texts)
    gaps = sorted(1000 * (b - a) for times in streams for a, b in itertools.pairwise(times) if begin < b <= end)

    def percentile(share: float) -> float:
        return gaps[max(0, math.ceil(share * len(gaps)) - 1)] if gaps else math.nan

    return GapFigures(
        streams=len(texts),
        seconds=end - begin,
        tokens_per_s=len(gaps) / (end - begin),
        median_ms=percentile(0.5),
        p99_ms=percentile(0.99),
        worst_ms=percentile(1.0),
        **fields,
    )
