"""Encoder-decoder networks other than BART through the engine: transformers' answers, alone and in company."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.core.request import EncoderInput
from octavo.models.whisper import FEATURES
from tests.loader.test_marian_tokenizer import VOCABULARY
from tests.loader.test_marian_tokenizer import folder as marian_files
from tests.models.test_encoder_decoders import save, whisper

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "num_gpu_blocks_override": 400,
    "max_num_seqs": 16,
    "block_size": 4,
    "max_model_len": 64,
    "num_threads": 1,
}
DOCUMENT = [(i * 37 + 11) % 97 + 3 for i in range(40)]
TEXTS = [DOCUMENT, DOCUMENT[:1], DOCUMENT[7:15], DOCUMENT[::-1][:30]]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1, detokenize=False)


@dataclass
class Case:
    """A saved model of transformers, what our engine is asked, and the same for transformers."""

    folder: Path
    model: Any
    prompts: list[Any]
    inputs: list[dict[str, Any]]
    #: First token of the decoder.
    start: int


def of_text(family: str, start: int) -> Callable[[Path], Case]:
    def make(folder: Path) -> Case:
        model = save(folder, family)
        inputs = [{"input_ids": torch.tensor([text])} for text in TEXTS]
        return Case(folder, model, list(TEXTS), inputs, start)

    return make


def of_sound(folder: Path) -> Case:
    model, sound = whisper(folder, pad_token_id=0)
    windows = [sound, sound.flip(1), torch.zeros_like(sound)]
    start = {"prompt_token_ids": [2], "num_forced": 0}
    prompts = [
        {**start, "encoder_input": EncoderInput.of(FEATURES, window.contiguous().numpy().tobytes(), 30)}
        for window in windows
    ]
    return Case(folder, model, prompts, [{"input_features": window[None]} for window in windows], 2)


CASES = {
    "T5": of_text("T5", 0),
    "T5 1.1": of_text("T5 1.1", 0),
    "UMT5": of_text("UMT5", 0),
    "Marian": of_text("Marian", 2),
    "Pegasus": of_text("Pegasus", 2),
    "mBART": of_text("mBART", 2),
    "Whisper": of_sound,
}


#: The others are their relatives, whose networks are compared in tests/models.
DIFFERENT = ("T5", "Marian", "Whisper")


@pytest.fixture(
    scope="module", params=[name if name in DIFFERENT else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return CASES[request.param](tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(case: Case) -> LLM:
    return LLM(str(case.folder), **OPTIONS)


def everything(output: Any) -> list[Any]:
    """Tokens, scores and the bits of all logprobs of an answer."""
    return [
        (list(c.token_ids), c.cumulative_logprob, [{t: p.logprob for t, p in at.items()} for at in c.logprobs or []])
        for c in output.outputs
    ]


def test_greedy_tokens_and_logprobs_are_those_of_transformers(case: Case, llm: LLM) -> None:
    for inputs, output in zip(case.inputs, llm.generate(case.prompts, GREEDY, use_tqdm=False), strict=True):
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        with torch.inference_mode():
            logits = case.model(**inputs, decoder_input_ids=torch.tensor([[case.start, *tokens]])).logits[0]
        scores = logits[:-1].log_softmax(-1)
        ours = [place[token].logprob for token, place in zip(tokens, completion.logprobs or [], strict=True)]
        theirs = scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (theirs - torch.tensor(ours)).abs().max() < 1e-3
        assert tokens == scores.argmax(-1).tolist()


def test_beams_are_those_of_transformers(case: Case, llm: LLM) -> None:
    from transformers import GenerationConfig
    from transformers.generation.utils import GenerationMixin  # Whisper's own generate speaks of windows

    params = BeamSearchParams(beam_width=4, max_tokens=12)
    config = GenerationConfig(
        max_new_tokens=12,
        num_beams=4,
        num_return_sequences=4,
        do_sample=False,
        decoder_start_token_id=case.start,
        eos_token_id=1,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    case.model.generation_config = config
    for inputs, output in zip(case.inputs, llm.generate(case.prompts, params, use_tqdm=False), strict=True):
        first = next(iter(inputs.values()))
        options = {"attention_mask": torch.ones(first.shape[:2], dtype=torch.long)} if first.ndim == 2 else {}
        theirs = GenerationMixin.generate(case.model, **inputs, **options, generation_config=config)
        expected = [[t for t in row[1:].tolist() if t] for row in theirs.sequences]
        assert [[t for t in c.token_ids if t] for c in output.outputs] == expected
        ours = torch.tensor([c.score for c in output.outputs])
        torch.testing.assert_close(ours, theirs.sequences_scores, atol=1e-3, rtol=0)


def test_an_answer_has_the_same_bits_in_company(case: Case, llm: LLM) -> None:
    params: list[Any] = [
        SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=14, logprobs=1, ignore_eos=True, detokenize=False),
        GREEDY,
        BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=5, n=2, max_tokens=12, logprobs=0, ignore_eos=True, detokenize=False),
    ]
    asked = [(prompt, params[i % 4]) for i, prompt in enumerate(case.prompts)]
    alone = LLM(str(case.folder), **OPTIONS, enable_prefix_caching=False)
    expected = [everything(alone.generate([prompt], [p], use_tqdm=False)[0]) for prompt, p in asked]
    tight = LLM(
        str(case.folder),
        **{**OPTIONS, "num_gpu_blocks_override": 48, "watermark": 0.0, "max_num_batched_tokens": 16, "num_threads": 2},
    )
    for engine in (llm, tight):
        outputs = engine.generate([p for p, _ in asked] * 2, [p for _, p in asked] * 2, use_tqdm=False)
        assert [everything(output) for output in outputs] == expected * 2


@pytest.mark.slow  # processes of two workers
def test_two_ranks_give_the_bits_of_one(case: Case, llm: LLM) -> None:
    two = LLM(str(case.folder), **OPTIONS, tensor_parallel_size=2)
    one, other = (engine.generate(case.prompts, GREEDY, use_tqdm=False) for engine in (llm, two))
    assert [everything(output) for output in one] == [everything(output) for output in other]


def marian_with_text(folder: Path) -> None:
    """A model of random weights with both tokenizers of Marian."""
    start = {"eos_token_id": 0, "decoder_start_token_id": 56, "pad_token_id": 56}
    save(folder, "Marian", vocab_size=len(VOCABULARY), **start)
    config = (folder / "config.json").read_text()
    marian_files(folder)
    (folder / "config.json").write_text(config)


def test_marian_reads_with_one_tokenizer_and_writes_with_another(tmp_path: Path) -> None:
    marian_with_text(tmp_path)
    llm = LLM(str(tmp_path), **{**OPTIONS, "skip_tokenizer_init": False})
    params = SamplingParams(temperature=0, max_tokens=5)
    text = "hello the world"
    prompts: list[Any] = [text, {"encoder_prompt": text, "decoder_prompt": "hallo welt"}]
    plain, both = llm.generate(prompts, params, use_tqdm=False)
    source = [VOCABULARY[piece] for piece in ("▁hello", "▁the", "▁world", "</s>")]
    assert plain.encoder_prompt_token_ids == both.encoder_prompt_token_ids == source
    assert plain.prompt_token_ids == [56]
    assert both.prompt_token_ids == [56, VOCABULARY["▁hallo"], VOCABULARY["▁welt"]]
    assert plain.outputs[0].text == llm.get_tokenizer().decode(plain.outputs[0].token_ids)
