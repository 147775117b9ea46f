"""What decodes lose while images are encoded: gaps between tokens of text streams, alone and beside images.

    scripts/research/image_gaps.py [--step-ms 50]

A network of the shape of SmolVLM-256M with random weights: what is measured does not depend on their values. Streams of
text decode all the time; then as many requests with an image of 512 x 512 each, all different, come at once.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer

from octavo import AsyncLLM, SamplingParams
from octavo.loader.resolve import resolve_model

IMAGE = "<image>"
SPECIAL = [IMAGE, "<fake_token_around_image>", "<global-img>"]
CONFIG = {
    "architectures": ["Idefics3ForConditionalGeneration"],
    "model_type": "idefics3",
    "scale_factor": 4,
    "dtype": "bfloat16",
    "text_config": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_theta": 100000,
        "rms_norm_eps": 1e-5,
    },
    "vision_config": {
        "model_type": "idefics3_vision",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 512,
        "patch_size": 16,
    },
}
PREPROCESSOR = {
    "image_processor_type": "Idefics3ImageProcessor",
    "do_image_splitting": False,
    "size": {"longest_edge": 512},
    "max_image_size": {"longest_edge": 512},
}


def write_model(folder: Path) -> None:
    """The files of a model without weights, with the demo model's tokenizer."""
    tokenizer = Tokenizer.from_file(str(resolve_model("smollm2-135m") / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    vocab = tokenizer.get_vocab_size()
    config = {**CONFIG, "image_token_id": tokenizer.token_to_id(IMAGE)}
    config["text_config"] = {**CONFIG["text_config"], "vocab_size": vocab}  # type: ignore[dict-item]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


async def stream(llm: AsyncLLM, name: str, prompt: object, tokens: int, times: list[float]) -> int:
    """The times of a stream's tokens; how many there are."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    count = 0
    async for output in await llm.submit(name, prompt, params):  # type: ignore[arg-type]
        count += len(output.outputs[0].token_ids)
        times.append(time.monotonic())
    return count


def say(name: str, times: list[list[float]], begin: float, end: float) -> None:
    """Prints the gaps between tokens that end in a span of time, in milliseconds."""
    gaps = sorted(1000 * (b - a) for stream in times for a, b in itertools.pairwise(stream) if begin < b <= end)
    print(
        f"{name}: gap between tokens {statistics.median(gaps):.0f} ms (median), {gaps[int(0.99 * len(gaps))]:.0f} ms "
        f"(99 %), {gaps[-1]:.0f} ms (worst); {len(gaps) / (end - begin):.0f} tokens/s"
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=16, help="streams of text, and requests with an image")
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=10.0, help="of text alone")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name))
        options = {"load_format": "dummy", "max_model_len": 4096, "image_step_ms": args.step_ms}
        async with AsyncLLM(name, **options) as llm:
            times: list[list[float]] = [[] for _ in range(args.clients)]
            texts = [
                asyncio.create_task(stream(llm, f"text {i}", {"prompt": f"Text {i}"}, 4000, times[i]))
                for i in range(args.clients)
            ]
            while not all(times):
                await asyncio.sleep(0.01)
            begin = time.monotonic()
            await asyncio.sleep(args.seconds)
            say("text alone", times, begin, time.monotonic())
            images = [rng.integers(0, 256, (512, 512, 3), dtype=np.uint8) for _ in range(args.clients)]
            begin = time.monotonic()
            first: list[list[float]] = [[] for _ in range(args.clients)]
            counts = await asyncio.gather(
                *(
                    stream(
                        llm, f"image {i}", {"prompt": f"{IMAGE}{i}", "multi_modal_data": {"image": image}}, 8, first[i]
                    )
                    for i, image in enumerate(images)
                )
            )
            end = time.monotonic()
            assert counts == [8] * args.clients
            say("beside images", times, begin, end)
            waits = sorted(times[0] - begin for times in first)
            print(f"first token of a request with an image: {waits[0]:.1f} s (first) to {waits[-1]:.1f} s (last)")
            for task in texts:
                task.cancel()
            await asyncio.gather(*texts, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main())
