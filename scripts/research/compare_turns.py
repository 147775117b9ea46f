"""How many prompt tokens does each turn of a conversation compute again? Octavo, and llama.cpp's server beside it.

    python scripts/research/compare_turns.py                          # a small random model in the shape of Qwen3.5
    python scripts/research/compare_turns.py MODEL --options '{"kv_cache_memory_bytes": "2GiB"}'
    python scripts/research/compare_turns.py MODEL --llama-server ~/llama.cpp/build/bin/llama-server --gguf MODEL.gguf

A turn's prompt is the system prompt, all earlier questions and answers, and a new question; all are random tokens. Its
new tokens are those behind the beginning that it shares with the turn before, answer included; the last token of an
answer is new, as it was sampled and not computed. The other tokens that are not found in the cache are computed again.

chat       one conversation
edited     one in which a question in the middle of the history is rewritten at --edit-at
no answers one whose history has the questions only, as of a template that drops the reasoning
together   --chats conversations, one turn of each in turn; --chat-options are those of Octavo there, and llama.cpp's
           server has a slot for each

The server's figures are ``timings.prompt_n`` of its answers. Everything goes one request at a time.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

#: The smallest network with every part of Qwen3.5, for random weights.
QWEN3_5 = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 512, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 16, "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 1 << 17, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip

#: Conversations one after the other.
ALONE = ("chat", "edited", "no answers")
#: (number of the conversation, prompt, tokens of the answer) -> (prompt tokens that were computed, answer).
Ask = Callable[[int, list[int], int], tuple[int, list[int]]]


class Turn(NamedTuple):
    prompt: int
    new: int
    again: int


@dataclass
class Chat:
    number: int
    sizes: argparse.Namespace
    keeps_answers: bool = True
    seed: int = 0
    messages: list[list[int]] = field(default_factory=list)
    _before: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._draw = random.Random(f"{self.seed} {self.number}")
        self._system = self.words(self.sizes.system)

    def words(self, count: int) -> list[int]:
        return [self._draw.randrange(16, self.sizes.vocab) for _ in range(count)]

    def ask(self, ask: Ask) -> Turn:
        self.messages.append(self.words(self.sizes.question))
        prompt = self._system + [token for message in self.messages for token in message]
        computed, answer = ask(self.number, prompt, self.sizes.answer)
        pairs = zip(prompt, self._before, strict=False)
        common = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(prompt), len(self._before)))
        self._before = prompt + answer[:-1]
        if self.keeps_answers:
            self.messages.append(answer)
        return Turn(len(prompt), len(prompt) - common, computed - (len(prompt) - common))


def one_chat(ask: Ask, sizes: argparse.Namespace, name: str) -> list[Turn]:
    chat, turns = Chat(0, sizes, name != "no answers", 1 + ALONE.index(name)), list[Turn]()
    for number in range(1, sizes.turns + 1):
        if name == "edited" and number == sizes.edit_at:
            chat.messages[number // 2 * 2] = chat.words(sizes.question)
        turns.append(chat.ask(ask))
    return turns


def many_chats(ask: Ask, sizes: argparse.Namespace) -> list[Turn]:
    chats = [Chat(number, sizes) for number in range(sizes.chats)]
    return [chat.ask(ask) for _ in range(sizes.turns) for chat in chats]


def octavo(model: str, options: dict[str, Any]) -> Ask:
    from octavo import LLM, SamplingParams

    llm = LLM(model, skip_tokenizer_init=True, **options)
    core = llm.llm_engine.core
    kinds = [(group.device.num_blocks, "states" if group.has_states else "blocks") for group in core.blocks.groups]
    print(
        "octavo:", " and ".join(f"{count} {kind}" for count, kind in kinds[::-1]), f"of {core.blocks.block_size} tokens"
    )

    def ask(number: int, prompt: list[int], count: int) -> tuple[int, list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return len(prompt) - (output.num_cached_tokens or 0), list(output.outputs[0].token_ids)

    return ask


@contextmanager
def llama_server(command: str, gguf: str, sizes: argparse.Namespace, slots: int) -> Iterator[Ask]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    length = slots * (sizes.system + sizes.turns * (sizes.question + sizes.answer) + sizes.answer + 64)
    fixed = ["-m", gguf, "--port", str(port), "-np", str(slots), "-c", str(length), "--host", "127.0.0.1"]
    process = subprocess.Popen([*shlex.split(command), *fixed], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            with suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            if process.poll() is not None:
                raise SystemExit(f"{command} has ended with {process.returncode}")
            time.sleep(0.5)

        def ask(number: int, prompt: list[int], count: int) -> tuple[int, list[int]]:
            body = {"prompt": prompt, "n_predict": count, "temperature": 0, "cache_prompt": True, "id_slot": number}
            body |= {"return_tokens": True, "ignore_eos": True}
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{url}/completion", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=3600) as response:
                answer = json.load(response)
            timings = answer["timings"]
            cached = timings.get("cache_n")
            if cached is not None and cached + timings["prompt_n"] != len(prompt):
                raise SystemExit(f"the server counts {cached} + {timings['prompt_n']} tokens of {len(prompt)}")
            return timings["prompt_n"], answer["tokens"]

        yield ask
    finally:
        process.terminate()
        process.wait()


def show(name: str, columns: dict[str, list[Turn]]) -> None:
    """One conversation: a line for each turn."""
    print(f"\n{name}\nturn  prompt    new" + "".join(f"  {engine + ' again':>16}" for engine in columns))
    for number, turns in enumerate(zip(*columns.values(), strict=True), 1):
        again = "".join(f"  {turn.again:16}" for turn in turns)
        print(f"{number:4}  {turns[0].prompt:6}  {turns[0].new:5}{again}")


def show_sums(name: str, columns: dict[str, list[Turn]], chats: int) -> None:
    """Many conversations: tokens that a turn computed again, without the first turn of each."""
    print(f"\n{name}\n{'':12}turns  mean new  mean again  largest")
    for engine, turns in columns.items():
        later = turns[chats:]
        again, new = [turn.again for turn in later], [turn.new for turn in later]
        print(f"{engine:12}{len(later):5}  {statistics.mean(new):8.1f}  {statistics.mean(again):10.1f}  {max(again):7}")


def main() -> None:
    """Runs the conversations and prints a table of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="default: random weights in the shape of Qwen3.5")
    parser.add_argument("--options", type=json.loads, default={}, help="engine options of Octavo, as JSON")
    parser.add_argument("--chat-options", type=json.loads, default={}, help="more of them, for conversations together")
    parser.add_argument("--llama-server", help="command of llama.cpp's server, with options")
    parser.add_argument("--gguf", help="its model file")
    for name, default in (("turns", 20), ("system", 2000), ("question", 40), ("answer", 60), ("edit-at", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=512, help="random token ids are below it")
    parser.add_argument("--json", type=Path, help="file for all turns")
    sizes = parser.parse_args()
    if (sizes.llama_server is None) != (sizes.gguf is None):
        parser.error("--llama-server and --gguf go together")
    with tempfile.TemporaryDirectory() as folder:
        options = {"max_model_len": sizes.system + sizes.turns * (sizes.question + sizes.answer) + 64, **sizes.options}
        if sizes.model is None:
            (Path(folder) / "config.json").write_text(json.dumps(QWEN3_5))
            options = {"load_format": "dummy", "dtype": "float32", "num_gpu_blocks_override": 1000, **options}
            sizes.chat_options = {"num_gpu_blocks_override": 72, **sizes.chat_options}
        tables: dict[str, dict[str, list[Turn]]] = {}
        ask = octavo(sizes.model or folder, options)
        for name in ALONE:
            tables[name] = {"octavo": one_chat(ask, sizes, name)}
        del ask
        tables["together"] = {"octavo": many_chats(octavo(sizes.model or folder, options | sizes.chat_options), sizes)}
    if sizes.llama_server is not None:
        for name in ALONE:
            with llama_server(sizes.llama_server, sizes.gguf, sizes, 1) as ask:
                tables[name]["llama.cpp"] = one_chat(ask, sizes, name)
        with llama_server(sizes.llama_server, sizes.gguf, sizes, sizes.chats) as ask:
            tables["together"]["llama.cpp"] = many_chats(ask, sizes)
    for name, columns in tables.items():
        if name == "together":
            show_sums(name, columns, sizes.chats)
        else:
            show(name, columns)
    if sizes.json:
        rows = {
            name: {engine: [t._asdict() for t in turns] for engine, turns in c.items()} for name, c in tables.items()
        }
        sizes.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
