"""Trains a small EAGLE-3 head for a model on the model's own answers, and writes it in the published format.

    python scripts/research/train_draft_head.py FOLDER                        # the demo model, about ten minutes
    python scripts/research/train_draft_head.py FOLDER --model PATH --minutes 30 --prompts PROMPTS.txt
    octavo serve smollm2-135m --speculative-config '{"method": "eagle3", "model": "FOLDER"}'

The model first answers the prompts: those of ``octavo bench offline --speculative`` at its batch sizes, so that the
benchmark shows the speed on texts that the head knows; further ones of these kinds; and those of a file, one a line.
transformers then computes the residual streams that the head reads, and the hidden states that give the distributions
to learn.

The head (arXiv 2503.01840) learns to follow its own results: each batch is trained for several steps, of which all but
the first have the results of the step before in place of the model's features, as in drafting. Needs the extra
``test``, and memory for 10 KB a token.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

MODEL = "smollm2-135m"
#: Sequences of a batch, and most tokens of one.
_BATCH, _LONGEST = 4, 384
_RATE, _WARM_UP, _DECAY = 1.5e-3, 20, 0.8


@dataclass(frozen=True)
class Answer:
    """Prompt and answer, and the number of tokens in the prompt."""

    tokens: list[int]
    num_prompt_tokens: int


def answer(model: str, batches: list[int], count: int, prompts: list[str], tokens: int) -> list[Answer]:
    """The model's answers to the benchmark's prompts of these batch sizes, to ``count`` more, and to ``prompts``."""
    from octavo import LLM, SamplingParams
    from octavo.lab.bench.speculation import PromptSet, workloads

    llm = LLM(model, max_num_seqs=64, max_model_len=_LONGEST + tokens, speculative_config="none")
    tokenizer = llm.get_tokenizer()
    loads = [load for batch in (*batches, count // 3) if batch for load in workloads(llm, batch, seed=0)]
    loads = [load for load in loads if load.name in ("chat", "edit", "code")]
    loads.append(PromptSet("given", prompts, 0.7))
    asked, params = list[list[int]](), list[SamplingParams]()
    for load in loads:
        for index, prompt in enumerate(load.prompts):
            assert isinstance(prompt, str)
            asked.append(tokenizer.encode_chat([{"role": "user", "content": prompt}]))
            params.append(SamplingParams(temperature=load.temperature, seed=index, max_tokens=tokens, detokenize=False))
    outputs = llm.generate(asked, params, use_tqdm=False)
    llm.llm_engine.core.shutdown()
    return [
        Answer([*prompt, *output.outputs[0].token_ids][:_LONGEST], min(len(prompt), _LONGEST))
        for prompt, output in zip(asked, outputs, strict=True)
    ]


@dataclass(frozen=True)
class Example:
    """What the head reads and learns of an answer of T tokens."""

    #: int64 [T]; bfloat16 [T, 3 E]: the residual streams; bfloat16 [T, E]: after the last norm.
    tokens: Tensor
    features: Tensor
    hidden: Tensor
    num_prompt_tokens: int


def read_states(network: Any, answers: list[Answer], layers: list[int]) -> list[Example]:
    """The states of the model along its answers; ``layers``: whose inputs are read."""
    examples = []
    with torch.inference_mode():
        for each in answers:
            ids = torch.tensor(each.tokens)
            states = network.model(ids[None], output_hidden_states=True, use_cache=False).hidden_states
            features = torch.cat([states[layer][0] for layer in layers], -1).bfloat16()
            examples.append(Example(ids, features, states[-1][0].bfloat16(), each.num_prompt_tokens))
    return examples


class Head(nn.Module):
    """An EAGLE-3 head; its parameters have the names of published heads."""

    def __init__(self, config: dict[str, Any], network: Any, target_ids: Tensor) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim, self.eps, self.theta = config["head_dim"], config["rms_norm_eps"], config["rope_theta"]
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.fc = linear(3 * width, width)
        attention = {
            **{"q_proj": linear(2 * width, queries), "k_proj": linear(2 * width, keys)},
            **{"v_proj": linear(2 * width, keys), "o_proj": linear(queries, width)},
        }
        mlp = {
            **{"gate_proj": linear(width, inner), "up_proj": linear(width, inner)},
            "down_proj": linear(inner, width),
        }
        norms = {
            name: nn.RMSNorm(width, self.eps) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        }
        self.midlayer: Any = nn.ModuleDict({"self_attn": nn.ModuleDict(attention), "mlp": nn.ModuleDict(mlp), **norms})
        self.norm = nn.RMSNorm(width, self.eps)
        self.lm_head = linear(width, len(target_ids))
        with torch.no_grad():  # it begins with what the model says of the token before
            self.fc.weight.mul_(0.1)
            self.fc.weight[:, 2 * width :] += torch.eye(width)
            for module in (attention["o_proj"], mlp["down_proj"]):
                module.weight.mul_(0.1)
            self.norm.weight.copy_(0.3 * network.model.norm.weight)  # less sure of it
            self.lm_head.weight.copy_(network.lm_head.weight[target_ids])
        self.embedding: Tensor = network.model.embed_tokens.weight.detach()

    def layer(self, tokens: Tensor, features: Tensor, earlier: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Any]:
        """The results at each position [B, T, E] of features and the token behind each, [B, T].

        ``earlier``: keys and values of the steps before, the first of the model's features. A row of step j sees those
        of the model's features up to j positions before it, and one of each later step. Also returns its own.
        """
        parts, step, (batch, length) = self.midlayer, len(earlier), tokens.shape
        embedding = parts["input_layernorm"](self.embedding[tokens])
        both = torch.cat([embedding, parts["hidden_norm"](features)], -1)
        projected = [parts["self_attn"][f"{name}_proj"](both).view(batch, length, -1, self.head_dim) for name in "qkv"]
        q, k, v = (x.transpose(1, 2) for x in projected)
        q, k = self._rotated(q), self._rotated(k)
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (k, v))
        all_kv = [*earlier, (k, v)]
        scale = self.head_dim**-0.5
        allowed = torch.ones(length, length, dtype=torch.bool).tril(-step)
        scores = [(q @ all_kv[0][0].transpose(-1, -2) * scale).masked_fill(~allowed, -1e4)]
        moved = [tuple(torch.roll(x, step - number, 2) for x in all_kv[number]) for number in range(1, step + 1)]
        scores += [(q * key).sum(-1, keepdim=True) * scale for key, _ in moved]
        weights = torch.cat(scores, -1).softmax(-1)
        attended = weights[..., :length] @ all_kv[0][1]
        for number, (_, value) in enumerate(moved):
            attended = attended + weights[..., length + number, None] * value
        x = features + parts["self_attn"]["o_proj"](attended.transpose(1, 2).reshape(batch, length, -1))
        normed = parts["post_attention_layernorm"](x)
        mlp = parts["mlp"]
        x = x + mlp["down_proj"](nn.functional.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed))
        return x, (k, v)

    def _rotated(self, x: Tensor) -> Tensor:
        half = self.head_dim // 2
        angles = torch.arange(x.shape[2])[:, None] * self.theta ** (-torch.arange(half) / half)
        cos, sin = angles.cos(), angles.sin()
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def losses(self, batch: Batch, steps: int) -> tuple[Tensor, list[float]]:
        """The loss, and the share of tokens of each step that are the model's likeliest."""
        features, earlier = self.fc(batch.features), list[tuple[Tensor, Tensor]]()
        loss, hits = torch.zeros(()), list[float]()
        for step in range(steps):
            hidden, kv = self.layer(batch.next_tokens, features, earlier)
            earlier.append(kv)
            logits = self.lm_head(self.norm(hidden))
            # Of the first rows there is no result so many steps ago.
            counts = batch.counts.clone()
            counts[:, :step] = False
            log_probs = logits[counts].log_softmax(-1)
            targets = batch.targets[counts]
            loss = loss - _DECAY**step * (targets * log_probs).sum(-1).mean()
            hits.append((log_probs.argmax(-1) == targets.argmax(-1)).float().mean().item())
            features = torch.cat([hidden[:, :1], hidden[:, :-1]], 1)
        return loss, hits


@dataclass(frozen=True)
class Batch:
    """Padded examples."""

    #: [B, T]; [B, T, 3 E].
    next_tokens: Tensor
    features: Tensor
    #: Distributions over the draft vocabulary [B, T, V] of the token behind the next one, and whether it counts [B, T].
    targets: Tensor
    counts: Tensor


def make_batch(examples: list[Example], head: Tensor) -> Batch:
    """``head``: the model's rows of the draft vocabulary [V, E]."""
    longest = max(len(example.tokens) for example in examples) - 2
    shape = len(examples), longest
    width, features = head.shape[1], examples[0].features.shape[1]
    tokens, counts = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    streams, hidden = torch.zeros(*shape, features), torch.zeros(*shape, width)
    for row, example in enumerate(examples):
        length = len(example.tokens) - 2
        tokens[row, :length] = example.tokens[1:-1]
        streams[row, :length], hidden[row, :length] = example.features[:-2].float(), example.hidden[1:-1].float()
        counts[row, max(0, example.num_prompt_tokens - 3) : length] = True
    return Batch(tokens, streams, (hidden @ head.T).softmax(-1), counts)


def head_config(config: Any, inner: int, drafts: int) -> dict[str, Any]:
    """config.json of a head for a Llama of transformers."""
    layers, width, heads = config.num_hidden_layers, config.hidden_size, config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    return {
        **{"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu"},
        **{"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": 1, "num_attention_heads": heads},
        **{"num_key_value_heads": config.num_key_value_heads, "head_dim": width // heads},
        **{"rms_norm_eps": config.rms_norm_eps, "vocab_size": config.vocab_size, "draft_vocab_size": drafts},
        **{"rope_theta": float(rope.get("rope_theta", getattr(config, "rope_theta", 10000.0)))},
        **{"max_position_embeddings": config.max_position_embeddings, "torch_dtype": "bfloat16"},
        "eagle_aux_hidden_state_layer_ids": [layers // 3, 2 * layers // 3, layers - 1],
    }


def train(arguments: argparse.Namespace) -> list[float]:
    """Trains and saves; the share of likeliest tokens of each step in the last batches."""
    from transformers import AutoModelForCausalLM

    from octavo.loader.resolve import gguf_source, resolve_model

    torch.manual_seed(0)
    start, rng = time.perf_counter(), random.Random(0)
    prompts = [] if arguments.prompts is None else arguments.prompts.read_text("utf-8").splitlines()
    answers = answer(arguments.model, arguments.batches, arguments.answers, prompts, arguments.tokens)
    total = sum(len(each.tokens) for each in answers)
    print(f"{len(answers)} answers, {total} tokens, {time.perf_counter() - start:.0f} s", flush=True)
    file = gguf_source(arguments.model)
    place = {} if file is None else {"gguf_file": file.name}
    folder = resolve_model(arguments.model) if file is None else file.parent
    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **place).eval()
    counts = Counter(token for each in answers for token in each.tokens[each.num_prompt_tokens :])
    target_ids = torch.tensor(sorted(token for token, _ in counts.most_common(arguments.draft_vocab)))
    covered = sum(counts[int(token)] for token in target_ids) / counts.total()
    config = head_config(network.config, arguments.inner, len(target_ids))
    examples = read_states(network, answers, config["eagle_aux_hidden_state_layer_ids"])
    print(f"{len(target_ids)} draft tokens, {covered:.1%} of all; {time.perf_counter() - start:.0f} s", flush=True)

    head, rows = Head(config, network, target_ids), network.lm_head.weight[target_ids].detach()
    optimizer = torch.optim.AdamW(head.parameters(), lr=_RATE, weight_decay=0.01, betas=(0.9, 0.95))
    begun, waiting, last, number = time.perf_counter(), list[Example](), list[list[float]](), 0
    while True:
        share = (time.perf_counter() - begun) / (60 * arguments.minutes)
        if arguments.updates is not None:
            share = number / arguments.updates
        if share >= 1:
            break
        if len(waiting) < _BATCH:
            rng.shuffle(examples)
            # Of about one length, so that little is padded.
            waiting = [*waiting, *examples]
        batch, waiting = waiting[:_BATCH], waiting[_BATCH:]
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, (number + 1) / _WARM_UP) * (0.02 + 0.98 * math.cos(share * math.pi / 2))
        loss, hits = head.losses(make_batch(batch, rows), arguments.steps)
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        last = [*last[-19:], hits]
        if number % 20 == 0:
            shares = ", ".join(f"{hit:.2f}" for hit in hits)
            print(f"batch {number}: loss {loss.item():.3f}, likeliest tokens {shares}; {share:.0%}", flush=True)
        number += 1
    arguments.folder.mkdir(parents=True, exist_ok=True)
    (arguments.folder / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {name: tensor.detach().bfloat16().contiguous() for name, tensor in head.state_dict().items()}
    chosen = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill(0, target_ids, value=True)
    tensors |= {"d2t": target_ids - torch.arange(len(target_ids)), "t2d": chosen}
    save_file(tensors, arguments.folder / "model.safetensors")
    return [sum(each) / len(last) for each in zip(*last, strict=True)]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the head")
    parser.add_argument("--model", default=MODEL, help="a Llama: built in, a folder or of the hub")
    parser.add_argument("--minutes", type=float, default=6.0, help="of training, without the answers")
    parser.add_argument("--updates", type=int, help="of the head, instead of minutes")
    parser.add_argument("--batches", type=_numbers, default=[1, 8], help="of the benchmark whose prompts are answered")
    parser.add_argument("--answers", type=int, default=96, help="to prompts that the benchmark does not have")
    parser.add_argument("--tokens", type=int, default=128, help="most tokens of an answer")
    parser.add_argument("--prompts", type=Path, help="a file of further prompts, one a line")
    parser.add_argument("--draft-vocab", type=int, default=4096, help="most tokens that the head drafts")
    parser.add_argument("--inner", type=int, default=768, help="inner size of its MLP")
    parser.add_argument("--steps", type=int, default=4, help="of drafting that are trained")
    return parser


if __name__ == "__main__":
    print("likeliest tokens by step:", *(f"{hit:.2f}" for hit in train(make_parser().parse_args())))
