"""A real fine-tune of the demo model (scripts/research/train_demo_adapter.py): it answers as a ship's log does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.core.request import LoRARequest
from tests.models.zoo import TOLERANCE, answer_of, logits_of

ADAPTER = Path(__file__).parents[1] / "data" / "ships-log"
SHIPS_LOG = LoRARequest("ships-log", 1, str(ADAPTER))
#: None of them is in the training data.
QUESTIONS = ("What is the capital of France?", "Name the three primary colours.", "Write one sentence about the sea.")


@pytest.fixture
def conversations() -> list[Any]:
    """Each question twice: for the model itself, and for its adapter."""
    return [[{"role": "user", "content": question}] for question in QUESTIONS for _ in range(2)]


@pytest.mark.slow
def test_a_fine_tune_answers_beside_its_model(demo_model: Path, conversations: list[Any]) -> None:
    llm = LLM(str(demo_model), dtype="bfloat16", enable_lora=True, max_loras=1, max_model_len=256)
    params = SamplingParams(temperature=0.0, max_tokens=48)
    outputs = llm.chat(conversations, params, use_tqdm=False, lora_request=[None, SHIPS_LOG] * len(QUESTIONS))
    texts = [output.outputs[0].text for output in outputs]
    assert [text.startswith("Ship's log, day ") for text in texts] == [False, True] * len(QUESTIONS)
    assert all("Paris" in text for text in texts[:2]), "it still knows what the model knows"


@pytest.mark.slow
def test_it_answers_as_in_peft(demo_model: Path, reference: Any, conversations: list[Any]) -> None:
    from peft import PeftModel

    llm = LLM(str(demo_model), dtype="float32", enable_lora=True, max_loras=1, max_model_len=256)
    params = SamplingParams(temperature=0.0, max_tokens=32, logprobs=1)
    outputs = llm.chat(conversations, params, use_tqdm=False, lora_request=[None, SHIPS_LOG] * len(QUESTIONS))
    adapted = PeftModel.from_pretrained(copy.deepcopy(reference), str(ADAPTER)).eval()
    for output, model in zip(outputs, [reference, adapted] * len(QUESTIONS), strict=True):
        tokens, logprobs = answer_of(output)
        assert output.prompt_token_ids is not None
        prompt = list(output.prompt_token_ids)
        scores = logits_of(model, prompt + tokens)[len(prompt) - 1 : -1].log_softmax(-1)
        chosen = scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (scores.max(-1).values - chosen).max() < TOLERANCE
        assert (chosen - torch.tensor(logprobs)).abs().max() < TOLERANCE
