"""Checkpoints of recurrent states: where a prompt finds them, and which of them are evicted first."""

from __future__ import annotations

import pytest

from octavo.config.kv_spec import GroupBlocks
from octavo.memory.block_manager import BlockManager
from octavo.memory.prefix_cache import FeatureSpan

SIZE, DISTANCE = 4, 16


class Memory:
    """Blocks of 4 tokens without end, and few states, every 16 tokens and at ends."""

    def __init__(self, states: int, host: int = 0) -> None:
        sizes = [GroupBlocks(2000, host and 2000), GroupBlocks(states, host, window=2, state_tokens=DISTANCE)]
        self.blocks = BlockManager(sizes, SIZE, prefix_caching=True, host_cache=host > 0, max_num_batched_tokens=64)
        self.next_id = 0

    def turn(self, prompt: list[int], answer: list[int], step: int = 5) -> int:
        """Computes a prompt and an answer but for its last token; returns the tokens that were found."""
        prefixes, seq_id, tokens = self.blocks.prefixes, self.next_id, prompt + answer
        self.next_id += 1
        match = prefixes.match(prompt, prefixes.chain(prompt, ""))
        prefixes.adopt(seq_id, match)
        computed = match.num_tokens
        for end in (len(prompt), len(tokens) - 1):
            while computed < end:
                stop = min(computed + step, end)
                assert self.blocks.grow([(seq_id, computed, stop)]) is not None
                self.blocks.take_moves()
                prefixes.register(seq_id, tokens, stop, "")
                computed = stop
            prefixes.register_end(seq_id, tokens, computed, "", of_prompt=end == len(prompt))
        self.blocks.free(seq_id)
        return match.num_tokens

    def found(self, tokens: list[int]) -> int:
        return self.blocks.prefixes.match([*tokens, -1], self.blocks.prefixes.chain([*tokens, -1], "")).num_tokens

    def states(self, tokens: list[int]) -> list[int]:
        """All positions of a chain with a state, on the device or the host."""
        return [end for end in range(1, len(tokens) + 1) if self.found(tokens[:end]) == end]


def words(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def test_a_turn_goes_on_from_the_end_of_the_last_answer_or_of_its_prompt() -> None:
    memory = Memory(20)
    prompt, answer = words(37), words(10, 100)
    assert memory.turn(prompt, answer) == 0
    assert memory.states(prompt + answer) == [16, 32, 37, 46]
    assert memory.turn(prompt + answer + words(5, 200), answer) == 46
    assert memory.turn(prompt + words(5, 300), answer) == 37, "another answer"
    assert memory.found(prompt[:36]) == 32 and memory.found([*prompt[:35], 9]) == 32
    assert memory.blocks.state.used == 0


def test_an_end_within_an_image_is_named_by_the_image() -> None:
    memory = Memory(8)
    prefixes, tokens = memory.blocks.prefixes, [0] * 12
    images = [[FeatureSpan(2, 8, key)] for key in (b"one", b"two")]
    assert memory.blocks.grow([(0, 0, 6)]) is not None
    assert prefixes.register_end(0, tokens, 6, "", images[0])
    found = [prefixes.match(tokens, prefixes.chain(tokens, "", image), None).num_tokens for image in (*images, [])]
    assert found == [6, 0, 0]


def test_first_to_go_are_states_that_a_later_turn_has_passed_those_that_save_least_first() -> None:
    memory = Memory(9)
    chat = words(30) + words(10, 100)
    memory.turn(chat[:30], chat[30:])
    chat += words(16, 200) + words(10, 300)
    memory.turn(chat[:56], chat[56:])
    assert memory.states(chat) == [16, 30, 32, 39, 48, 56, 64, 65]
    memory.turn(words(3, 900), [])  # its prompt and its answer are one
    assert memory.states(chat) == [16, 30, 32, 39, 48, 56, 64, 65], "one was free"
    memory.turn(words(3, 800), [])
    assert memory.states(chat) == [16, 32, 39, 48, 56, 64, 65] or memory.states(chat) == [16, 30, 39, 48, 56, 64, 65]
    for first in (700, 600, 500):
        memory.turn(words(3, first), [])
    left = memory.states(chat)
    assert {56, 65} <= set(left), "the ends of the last turn"
    assert max(b - a for a, b in zip([0, *left], left, strict=False)) <= 39


def test_of_ends_those_go_first_that_save_few_tokens_and_those_of_old_chats() -> None:
    memory = Memory(4)
    chats = [words(12, 1000 * n) for n in range(9)]
    short = words(3, 9000)
    for chat in chats[:3]:
        memory.turn(chat, [])
    memory.turn(short, [])
    memory.turn(chats[3], [])
    assert [memory.found(chat) for chat in (*chats[:4], short)] == [12, 12, 12, 12, 0]
    for chat in chats[4:]:
        memory.turn(chat, [])
    assert [memory.found(chat) for chat in chats] == [0] * 5 + [12] * 4


def test_a_state_that_is_hit_stays_longer() -> None:
    memory = Memory(4)
    chats = [words(12, 1000 * n) for n in range(9)]
    for chat in chats:
        memory.turn(chat, [])
        memory.turn([*chats[0], 5], [])  # the system prompt of many
    assert memory.found(chats[0]) == 12


def test_evicted_states_go_to_the_host_and_come_back() -> None:
    memory = Memory(3, host=20)
    chats = [words(12, 1000 * n) for n in range(9)]
    for chat in chats:
        memory.turn(chat, [])
    state = memory.blocks.groups[1]
    assert state.device.num_cached <= 3
    assert [memory.found(chat) for chat in chats] == [12] * 9
    match = memory.blocks.prefixes.match([*chats[0], 5], memory.blocks.prefixes.chain([*chats[0], 5], ""))
    assert match.hits[1][-1] is not None and match.hits[1][-1].pool is state.host
    memory.blocks.prefixes.adopt(99, match)
    moves = memory.blocks.take_moves()
    first_host, last_host = state.host.first, state.host.first + state.host.num_blocks
    assert any(first_host <= source < last_host for source, _ in moves.swap_in)
    assert memory.blocks.groups[1].device.is_private(memory.blocks.table(99, 1)[-1]), "written in place"


@pytest.mark.parametrize("states", [3, 5])
def test_where_a_prompt_leaves_what_is_cached(states: int) -> None:
    memory = Memory(states)
    system = words(30)
    memory.turn(system + words(8, 100), [])
    prompt = system + words(8, 200)
    match = memory.blocks.prefixes.match(prompt, memory.blocks.prefixes.chain(prompt, ""))
    assert (match.num_tokens, match.num_without_states) == (16, 30)
    assert memory.blocks.prefixes.branch(match) == 30
    memory.turn(system[:18] + words(8, 300), [])
    near = [*system[:17], *words(8, 400)]
    match = memory.blocks.prefixes.match(near, memory.blocks.prefixes.chain(near, ""))
    assert memory.blocks.prefixes.branch(match) == 0, "computing one token again costs less than a step"
