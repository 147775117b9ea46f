"""Conversations with models that keep recurrent states: what a turn computes again, and that answers stay the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.runner.cache_engine import CacheEngine
from tests.models.test_lfm2 import LFM2
from tests.models.test_qwen3_next import qwen3_5
from tests.models.zoo import ON_GPU, Zoo, answer_of

#: Default of ``state_checkpoint_tokens``.
DISTANCE = 512
LONG = {"max_model_len": 8192, "num_gpu_blocks_override": 1200, "max_num_batched_tokens": 1024}


class Conversation:
    """Messages as token ids. A turn's prompt is a system prompt and all messages, with or without earlier answers."""

    def __init__(self, engine: LLM, system: list[int], seed: int = 0, *, drops_answers: bool = False) -> None:
        self.engine, self.system, self.drops_answers = engine, system, drops_answers
        self._draw = random.Random(seed)
        self.messages: list[list[int]] = []
        self._before: list[int] = []
        self._known = 0

    def ask(self, question: Sequence[int] | None = None, answer_tokens: int = 12) -> tuple[int, Any]:
        """Tokens that this turn computed again, and its output."""
        self.messages.append(self.words(self._draw.randint(20, 60)) if question is None else [*question])
        prompt = self.system + [token for message in self.messages for token in message]
        params = SamplingParams(temperature=0.0, max_tokens=answer_tokens, ignore_eos=True, logprobs=1)
        (output,) = self.engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        pairs = zip(prompt[: self._known], self._before, strict=False)
        common = next((i for i, (one, other) in enumerate(pairs) if one != other), min(self._known, len(prompt)))
        answer = list(output.outputs[0].token_ids)
        self._before, self._known = prompt + answer, len(prompt) + len(answer) - 1
        if not self.drops_answers:
            self.messages.append(answer)
        return common - output.num_cached_tokens, output

    def words(self, count: int) -> list[int]:
        return [self._draw.randrange(1, 100) for _ in range(count)]


def system_prompt(count: int, seed: int = 99) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1, 100) for _ in range(count)]


@pytest.fixture
def qwen(zoo: Zoo) -> Zoo:
    zoo.save(qwen3_5(max_position_embeddings=8192))
    return zoo


def test_a_turn_computes_its_new_tokens_alone(qwen: Zoo) -> None:
    engine = qwen.engine(**LONG)
    chat = Conversation(engine, system_prompt(2000))
    again = [chat.ask()[0] for _ in range(20)]
    assert again == [0] * 20
    # The history is edited: all behind the edit is new, the rest goes on from the last checkpoint before it.
    chat.messages[20] = chat.words(30)
    edited, output = chat.ask()
    assert 0 <= edited <= DISTANCE and output.num_cached_tokens > 2000
    assert chat.ask()[0] == 0


def test_a_template_that_drops_parts_of_answers_computes_at_most_one_distance_again(qwen: Zoo) -> None:
    engine = qwen.engine(**LONG)
    chat = Conversation(engine, system_prompt(2000), drops_answers=True)
    assert [chat.ask(answer_tokens=600 if turn == 2 else 12)[0] for turn in range(6)] == [0] * 6
    # A prompt that ends with tokens that the history has not.
    marked = Conversation(engine, system_prompt(2000, seed=1), drops_answers=True)
    again = []
    for turn in range(6):
        again.append(marked.ask([*marked.words(40), 7, 8, 9])[0])
        marked.messages[turn] = marked.messages[turn][:-3]
    assert max(again) <= DISTANCE and again[0] == 0


def test_a_system_prompt_is_computed_twice_up_to_its_end_and_then_found_whole(qwen: Zoo) -> None:
    engine = qwen.engine(**LONG)
    system = system_prompt(2000)
    found = [Conversation(engine, system, seed).ask([seed + 1] * 30)[1].num_cached_tokens for seed in range(4)]
    assert found == [0, 1536, 2000, 2000]
    same = [Conversation(engine, system, 9).ask([50] * 300)[1].num_cached_tokens for _ in range(3)]
    assert same[1:] == [2048, 2299], "of the same prompt, all but the last token is found from the third time on"


def test_conversations_that_compete_for_memory_lose_no_more_than_a_distance(zoo: Zoo) -> None:
    """Eight of them have blocks for all their tokens, and states for less than the ends of all their last turns."""
    zoo.save(qwen3_5(max_position_embeddings=8192, linear_num_value_heads=16, linear_value_head_dim=64))
    engine = zoo.engine(**{**LONG, "num_gpu_blocks_override": 26, "max_num_seqs": 2})
    blocks, states = (group.device.num_blocks for group in engine.llm_engine.core.blocks.groups)
    assert blocks > 8 * 70 and 10 <= states < 2 * 8
    chats = [Conversation(engine, system_prompt(700, seed), seed) for seed in range(8)]
    again = [chat.ask()[0] for _ in range(8) for chat in chats]
    assert max(again) <= DISTANCE
    assert sum(again) / len(again) <= 12, "the tokens of an answer: its end is what they lose first"


@pytest.mark.parametrize("network", ["lfm2", "qwen3_5"])
def test_answers_have_the_bits_of_an_engine_without_a_prefix_cache(zoo: Zoo, network: str) -> None:
    from transformers import Lfm2Config

    longer = {"max_position_embeddings": 192}
    zoo.save(Lfm2Config(**{**LFM2, **longer}) if network == "lfm2" else qwen3_5(**longer))
    options = {"max_model_len": 192, "block_size": 4, "state_checkpoint_tokens": 16, "max_num_batched_tokens": 24}
    plain = zoo.engine(enable_prefix_caching=False, **options)
    few = {"num_gpu_blocks_override": 32 if network == "lfm2" else 14, "max_num_seqs": 1}
    engines = [
        zoo.engine(**options, async_scheduling=True),
        zoo.engine(**options, **few),
        zoo.engine(**options, **few, host_prefix_cache=True, num_host_blocks_override=300),
    ]
    for seed in range(3):
        for engine in engines:
            chats = [Conversation(engine, system_prompt(21, seed), n) for n in range(2)]
            theirs = [Conversation(plain, system_prompt(21, seed), n) for n in range(2)]
            for turn in range(3):
                for number, (chat, other) in enumerate(zip(chats, theirs, strict=True)):
                    question = [turn + number + 1] * 7
                    again, output = chat.ask(question, 5)
                    assert answer_of(output) == answer_of(other.ask(question, 5)[1])
                    assert engine is not engines[0] or again <= 0
    cores = [engine.llm_engine.core for engine in engines]
    if ON_GPU and network == "lfm2":
        return  # blocks are padded there: these sizes hold all conversations
    assert cores[2].scheduler.counts().swapped_in_blocks > 0, "states come back from the host"
    assert cores[1].blocks.groups[1].cache.num_evicted > 0


def test_a_failed_step_leaves_no_state_that_it_has_not_computed(qwen: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, plain = qwen.engine(), qwen.engine(enable_prefix_caching=False)
    prompt, more = system_prompt(20), [5] * 4

    move, failures = CacheEngine.move, [ZeroDivisionError()]

    def fails_once(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return move(*arguments)

    monkeypatch.setattr(CacheEngine, "move", fails_once)
    assert answer_of(Conversation(engine, prompt).ask([])[1]) == answer_of(Conversation(plain, prompt).ask([])[1])
    assert not failures
    output = Conversation(engine, prompt + more).ask([])[1]
    assert answer_of(output) == answer_of(Conversation(plain, prompt + more).ask([])[1])
