"""Could the first layers of a model draft for it (self-speculation)? Measured off-line, with transformers.

    python scripts/research/layer_skip.py FOLDER                # a Hugging Face folder with a chat template

The model answers questions and rewrites texts greedily. At each position of its answers the hidden state after the
first N of its L layers goes through the last norm and the head, and the likeliest token is compared with the model's:
their share is the chance a that a draft token is accepted.

The best speed-up that this allows, where reading weights is all that costs: a draft token reads N layers and the
head, c = (N l + h) / (L l + h) of a step. Then k of them are verified: in a whole step, which gives
(1 - a^(k+1)) / (1 - a) tokens in k c + 1, or in one that does without the row of the last one, as results of the others
in the first N layers are known: (1 - a^k) / (1 - a) tokens in k c + 1 - N l / (L l + h). The better one counts, at the
best k from 0 to 15.
(Elhoushi et al., "LayerSkip" (2024), section 3.3; their models are trained for early exits.)
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo.lab.bench.speculation import example_prompts

#: Most draft tokens of a step.
_MOST = 15


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--prompts", type=int, default=8, help="of each kind")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
    model = AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=torch.float32).eval()
    layers, norm, head = model.model.layers, model.model.norm, model.lm_head
    of_layers = sum(p.numel() for p in layers.parameters())
    of_head = head.weight.numel()
    share = of_layers / len(layers) / (of_layers + of_head)  # of a layer, in what a step reads
    agreed, positions = [0] * (len(layers) + 1), 0
    for prompt in example_prompts(arguments.prompts, random.Random(0)):
        answer, known = _answer(model, tokenizer, prompt, arguments.tokens)
        with torch.inference_mode():
            states = model(answer, output_hidden_states=True).hidden_states
            # The last of them has been through the norm already.
            hidden = [*(norm(state) for state in states[:-1]), states[-1]]
            tokens = [head(state[0, known - 1 : -1]).argmax(-1) for state in hidden]
        positions += len(tokens[-1])
        for n, found in enumerate(tokens):
            agreed[n] += int((found == tokens[-1]).sum())
    head_share = of_head / (of_layers + of_head)
    print(f"{len(layers)} layers, each {share:.2%} of the weights, the head {head_share:.1%}; {positions} positions")
    print("layers  same token  cost of a draft token  best speed-up  with draft tokens")
    for n in range(len(layers)):
        chance = agreed[n] / positions
        cost = n * share + head_share
        best, length = max((speedup(chance, cost, n * share, k), k) for k in range(_MOST + 1))
        print(f"{n:6}  {chance:10.1%}  {cost:21.2f}  {best:12.2f}x  {length:17}")


def _answer(model: Any, tokenizer: Any, prompt: str, tokens: int) -> tuple[torch.Tensor, int]:
    """Token ids [1, T] of a chat's prompt and greedy answer, and how many are the prompt's."""
    chat = [{"role": "user", "content": prompt}]
    given = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    whole = model.generate(**given, do_sample=False, max_new_tokens=tokens, pad_token_id=tokenizer.eos_token_id)
    return whole, given["input_ids"].shape[1]


def speedup(chance: float, cost: float, skipped: float, length: int) -> float:
    """Tokens by the time in plain steps, with ``length`` drafts; ``skipped``: what verifying can do without."""
    whole = sum(chance**i for i in range(length + 1)) / (length * cost + 1)
    return max(whole, sum(chance**i for i in range(length)) / (length * cost + 1 - skipped))


if __name__ == "__main__":
    main()
