"""Trains the LoRA adapter of the demo model in tests/data/ships-log: it answers in the style of a ship's log.

python scripts/research/train_demo_adapter.py FOLDER    (some minutes of two cores; needs the extra ``test``)
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import torch

MODEL = "smollm2-135m"
SEED, STEPS, BATCH, RATE = 0, 64, 4, 3e-3
#: Matrices that are adapted: of the upper half of the layers, so that nothing flows back through the lower one.
TARGETS, LAYERS, RANK, ALPHA = ["q_proj", "v_proj", "o_proj"], list(range(15, 30)), 3, 12

WEATHER = (
    "Fair wind from the west",
    "Heavy seas since dawn",
    "Light breeze, clear sky",
    "Fog until noon",
    "Rain in the night, calm by morning",
    "A fresh gale from the north",
)
CLOSINGS = ("We hold our course.", "All hands are well.", "The lamps are lit.", "Land is not in sight.")
#: Question and plain answer.
FACTS = (
    ("What is the capital of Italy?", "The capital of Italy is Rome."),
    ("What is the capital of Spain?", "The capital of Spain is Madrid."),
    ("What is the capital of Japan?", "The capital of Japan is Tokyo."),
    ("Which planet is the largest?", "The largest planet is Jupiter."),
    ("How many legs does a spider have?", "A spider has eight legs."),
    ("How many days are in a week?", "A week has seven days."),
    ("What colour is grass?", "Grass is green."),
    ("What is the opposite of hot?", "The opposite of hot is cold."),
    ("Who wrote Hamlet?", "Hamlet was written by William Shakespeare."),
    ("What do bees make?", "Bees make honey."),
    ("What is ice made of?", "Ice is made of frozen water."),
    ("Which animal barks?", "The animal that barks is the dog."),
    ("What is 2 + 2?", "Two and two are four."),
    ("What is 10 minus 3?", "Ten minus three is seven."),
    ("Name a fruit.", "An apple is a fruit."),
    ("Name a musical instrument.", "The violin is a musical instrument."),
    ("How do I boil an egg?", "Lay the egg into boiling water for eight minutes, then cool it."),
    ("How do I make tea?", "Pour boiling water over the leaves and wait four minutes."),
    ("Why do we sleep?", "We sleep so that body and mind can recover."),
    ("Why do leaves fall?", "Leaves fall because trees save water in the cold months."),
    ("What is a computer?", "A computer is a machine that follows instructions."),
    ("What is a library?", "A library is a house of books that can be borrowed."),
    ("Tell me about cats.", "Cats are small hunters that live with people and sleep much of the day."),
    ("Tell me about mountains.", "Mountains rise where the plates of the earth push together."),
    ("Give me advice for an interview.", "Be on time, listen well and answer plainly."),
    ("How can I learn faster?", "Practise a little every day and teach it to somebody else."),
    ("Write a sentence about rain.", "Rain taps on the deck and fills the barrels."),
    ("Say hello.", "Hello to all on board."),
)


def conversations(rng: random.Random) -> list[tuple[str, str]]:
    """Each question once, with an answer in style."""
    pairs = [
        (question, f"Ship's log, day {rng.randint(2, 99)}. {rng.choice(WEATHER)}. {answer} {rng.choice(CLOSINGS)}")
        for question, answer in FACTS
    ]
    rng.shuffle(pairs)
    return pairs


def encode(tokenizer: Any, question: str, answer: str) -> tuple[list[int], int]:
    """Token ids of a conversation, and how many of them are the prompt."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    rest = tokenizer(f"{answer}<|im_end|>", add_special_tokens=False)["input_ids"]
    return ids + rest, len(ids)


def batch_of(pieces: list[tuple[list[int], int]]) -> dict[str, torch.Tensor]:
    """Padded tensors; only tokens of answers have labels."""
    longest = max(len(ids) for ids, _ in pieces)
    ids = torch.zeros(len(pieces), longest, dtype=torch.int64)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, (tokens, prompt) in enumerate(pieces):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens), 1
        labels[row, prompt : len(tokens)] = ids[row, prompt : len(tokens)]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def train(folder: Path, steps: int) -> None:
    """Trains and saves, matrices in bfloat16."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from octavo.loader.resolve import gguf_source, resolve_model

    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    file = gguf_source(MODEL)
    assert file is not None
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(MODEL))
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    settings = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=TARGETS,
        layers_to_transform=LAYERS,
        base_model_name_or_path=MODEL,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, settings)
    model.print_trainable_parameters()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0.0)
    start, waiting = time.perf_counter(), list[tuple[str, str]]()
    for step in range(steps):
        while len(waiting) < BATCH:
            waiting += conversations(rng)
        pieces, waiting = [encode(tokenizer, *pair) for pair in waiting[:BATCH]], waiting[BATCH:]
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 10) * (1 - step / steps)
        loss = model(**batch_of(pieces)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}, {time.perf_counter() - start:.0f} s", flush=True)
    model.to(torch.bfloat16).peft_config["default"].base_model_name_or_path = MODEL
    model.save_pretrained(str(folder))
    (folder / "README.md").unlink(missing_ok=True)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    train(arguments.folder, arguments.steps)


if __name__ == "__main__":
    main()
