"""The prefix cache: what is found, what it costs, what is evicted, and the second level on the host."""

from __future__ import annotations

import pytest

from octavo.memory.block_manager import BlockManager
from octavo.memory.block_pool import OutOfBlocksError
from octavo.memory.prefix_cache import FeatureSpan, PrefixChain, PrefixMatch

SALT = ""


def cached_manager(num_blocks: int = 8, *, num_host_blocks: int = 0, host_cache: bool = False) -> BlockManager:
    return BlockManager(num_blocks, 4, num_host_blocks=num_host_blocks, prefix_caching=True, host_cache=host_cache)


def compute(manager: BlockManager, seq_id: int, token_ids: list[int], salt: str = SALT) -> list[int]:
    """Runs a sequence up to its last token, in one step, and leaves it there; returns its table."""
    assert manager.grow([(seq_id, 0, len(token_ids))]) is not None
    manager.take_moves()
    manager.prefixes.register(seq_id, token_ids, len(token_ids), salt)
    return manager.table(seq_id)


def leave(manager: BlockManager, token_ids: list[int], salt: str = SALT) -> list[int]:
    """The same, and the sequence ends; returns what was its table."""
    table = compute(manager, 1000, token_ids, salt)
    manager.free(1000)
    return table


def match(manager: BlockManager, token_ids: list[int], salt: str = SALT) -> PrefixMatch:
    return manager.prefixes.match(token_ids, manager.prefixes.chain(token_ids, salt))


def adopt(manager: BlockManager, seq_id: int, token_ids: list[int]) -> PrefixMatch:
    found = match(manager, token_ids)
    manager.prefixes.adopt(seq_id, found)
    return found


def blocks_of(found: PrefixMatch, group: int = 0) -> list[int | None]:
    return [hit.block if hit is not None else None for hit in found.hits[group]]


def figures(manager: BlockManager) -> tuple[int, int, int]:
    return manager.state.used, manager.state.free, manager.state.cached


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


# --- look-up --------------------------------------------------------------------------------------------------------


def test_full_blocks_stay_cached_and_are_found() -> None:
    manager = cached_manager()
    table = leave(manager, tokens(10))
    assert figures(manager) == (0, 6, 2)
    found = adopt(manager, 1, [*tokens(8), 99])
    assert (found.num_tokens, found.num_full) == (8, 2)
    assert manager.table(1) == table[:2]
    assert figures(manager) == (2, 6, 0)


def test_only_what_is_computed_is_registered() -> None:
    manager = cached_manager()
    manager.grow([(0, 0, 12)])
    manager.take_moves()
    manager.prefixes.register(0, tokens(12), 7, SALT)
    assert match(manager, tokens(12)).num_tokens == 4
    manager.prefixes.register(0, tokens(12), 8, SALT)
    assert match(manager, tokens(12)).num_tokens == 8


def test_a_block_is_found_only_after_the_same_blocks() -> None:
    manager = cached_manager()
    leave(manager, tokens(8))
    assert match(manager, [50, 51, 52, 53, *tokens(4, 4), 9]).num_tokens == 0
    assert match(manager, [*tokens(4, 4), 9]).num_tokens == 0


def test_salts_do_not_share() -> None:
    manager = cached_manager()
    leave(manager, tokens(8), "alice")
    assert match(manager, tokens(9), "alice").num_tokens == 8
    assert match(manager, tokens(9), "bob").num_tokens == 0
    assert match(manager, tokens(9), "").num_tokens == 0


def test_a_running_sequence_shares_what_it_has_computed() -> None:
    manager = cached_manager()
    table = compute(manager, 0, tokens(8))
    found = match(manager, tokens(9))
    assert manager.prefixes.cost(found) == 0
    manager.prefixes.adopt(1, found)
    assert manager.table(1) == table


def test_the_last_token_of_a_cached_prompt_is_computed() -> None:
    manager = cached_manager()
    table = leave(manager, tokens(8))
    found = adopt(manager, 1, tokens(8))
    assert (found.num_tokens, found.num_full, len(found.hits[0])) == (7, 1, 2)
    assert manager.table(1) == table
    growths = manager.grow([(1, 7, 8)])
    assert growths is not None
    assert growths[0].index == 1
    assert manager.take_moves().copy == [(table[1], growths[0].blocks[0])]
    assert match(manager, tokens(9)).num_tokens == 8


@pytest.mark.parametrize(("agreeing", "num_tokens"), [(0, 4), (1, 5), (2, 6), (3, 7)])
def test_a_block_that_agrees_in_part_is_shared_and_copied_when_written(agreeing: int, num_tokens: int) -> None:
    manager = cached_manager()
    table = leave(manager, tokens(8))
    prompt = [*tokens(4 + agreeing), 77, 78, 79, 80, 81]
    found = adopt(manager, 1, prompt)
    assert (found.num_tokens, found.num_full) == (num_tokens, 1)
    growths = manager.grow([(1, num_tokens, len(prompt))])
    assert growths is not None
    assert growths[0].index == 1
    copies = manager.take_moves().copy
    assert copies == ([(table[1], growths[0].blocks[0])] if agreeing else [])


def test_the_partial_match_with_the_longest_common_prefix_is_used() -> None:
    manager = cached_manager()
    leave(manager, [0, 1, 9, 9])
    best = leave(manager, [0, 1, 2, 9])
    leave(manager, [0, 9, 9, 9])
    found = match(manager, [0, 1, 2, 3, 4])
    assert found.num_tokens == 3
    assert blocks_of(found) == best


def test_few_children_are_compared_but_a_full_match_is_always_found() -> None:
    manager = cached_manager(32)
    oldest = [0, 1, 2, 3]
    leave(manager, oldest)
    for i in range(20):
        leave(manager, [0, 50 + i, 2, 3])
    assert match(manager, oldest).num_tokens == 3
    assert match(manager, [0, 1, 2, 9, 9]).num_tokens == 1


def test_the_same_content_computed_twice_is_cached_once() -> None:
    manager = cached_manager()
    first = compute(manager, 0, tokens(8))
    compute(manager, 1, tokens(8))
    assert manager.state.used == 4
    manager.free(1)
    assert figures(manager) == (2, 6, 0)
    manager.free(0)
    assert figures(manager) == (0, 6, 2)
    assert blocks_of(match(manager, tokens(9))) == first


def test_forks_go_on_from_their_parents_chain() -> None:
    manager = cached_manager()
    compute(manager, 0, tokens(6))
    manager.fork(0, 1)
    manager.fork_prefix(0, 2, 1)
    for seq_id, more in ((1, [60, 61]), (2, [4, 5, 62, 63])):
        known = [*tokens(6), *more] if seq_id == 1 else [*tokens(4), *more]
        assert manager.grow([(seq_id, 8 - len(more), 8)]) is not None
        manager.take_moves()
        manager.prefixes.register(seq_id, known, 8, SALT)
        assert match(manager, [*known, 1]).num_tokens == 8


def test_a_fork_of_a_prompt_computed_in_part_may_go_on_with_other_tokens() -> None:
    manager = cached_manager()
    adopt(manager, 0, tokens(9))
    assert manager.grow([(0, 0, 6)]) is not None
    manager.take_moves()
    manager.fork(0, 1)
    other = [*tokens(6), 50, 51]
    assert manager.grow([(1, 6, 8)]) is not None
    manager.take_moves()
    manager.prefixes.register(1, other, 8, SALT)
    assert match(manager, tokens(9)).num_tokens == 6
    assert match(manager, [*other, 1]).num_tokens == 8


def test_a_match_changes_nothing_and_adopting_counts_it() -> None:
    manager = cached_manager()
    leave(manager, tokens(8))
    for _ in range(3):
        match(manager, tokens(10))
    assert figures(manager) == (0, 6, 2)
    assert (manager.prefixes.cached_queries, manager.prefixes.cached_hits) == (0, 0)
    adopt(manager, 1, tokens(10))
    assert (manager.prefixes.cached_queries, manager.prefixes.cached_hits) == (10, 8)
    adopt(manager, 2, tokens(5, 100))
    assert (manager.prefixes.cached_queries, manager.prefixes.cached_hits) == (15, 8)
    manager.free(1)
    manager.free(2)
    assert manager.num_tables == 0


def test_a_chain_costs_one_hash_a_block_and_names_only_full_ones() -> None:
    chain = PrefixChain("s", 4)
    chain.extend(tokens(11), 2)
    assert len(chain) == 2
    longer = chain.first(2)
    longer.extend(tokens(12), 3)
    assert longer.digests[:3] == chain.digests
    assert len(chain) == 2
    assert len(set(longer.digests)) == 4
    assert all(len(digest) == 16 for digest in longer.digests)


def test_without_prefix_caching_nothing_is_kept() -> None:
    manager = BlockManager(4, 4)
    leave(manager, tokens(8))
    assert figures(manager) == (0, 4, 0)
    assert adopt(manager, 1, tokens(9)).num_tokens == 0
    assert manager.table(1) == []
    assert manager.prefixes.cached_queries == 0


# --- allocation and eviction -----------------------------------------------------------------------------------------


def test_cached_blocks_count_as_available_until_they_are_referenced() -> None:
    manager = cached_manager(4)
    leave(manager, tokens(12))
    assert manager.state.available == 4
    found = match(manager, tokens(12))
    assert manager.prefixes.cost(found) == 3
    manager.prefixes.adopt(1, found)
    assert manager.state.available == 1


def test_a_match_that_does_not_fit_is_refused_and_nothing_changes() -> None:
    manager = cached_manager(3, num_host_blocks=4, host_cache=True)
    leave(manager, tokens(8))
    manager.grow([(1, 0, 12)])  # all of the device: the content goes to the host
    manager.take_moves()
    found = match(manager, tokens(9))
    assert manager.prefixes.cost(found) == 2
    with pytest.raises(OutOfBlocksError, match="2 blocks asked for, 0 available of 3"):
        manager.prefixes.adopt(2, found)
    assert manager.table(2) == []
    assert manager.num_tables == 1


def test_free_blocks_are_allocated_before_cached_ones_and_old_content_is_evicted_first() -> None:
    manager = cached_manager(4)
    old, new = tokens(4, 10), tokens(4, 20)
    leave(manager, old)
    leave(manager, new)
    manager.grow([(0, 0, 8)])
    manager.grow([(1, 0, 4)])
    assert match(manager, [*old, 1]).num_tokens == 0
    assert match(manager, [*new, 1]).num_tokens == 4


def test_a_use_makes_content_most_recently_used() -> None:
    manager = cached_manager(2)
    old, new = tokens(4, 10), tokens(4, 20)
    leave(manager, old)
    leave(manager, new)
    adopt(manager, 1, [*old, 1])
    manager.free(1)
    manager.grow([(2, 0, 4)])
    assert match(manager, [*old, 1]).num_tokens == 4
    assert match(manager, [*new, 1]).num_tokens == 0


def test_a_chain_is_evicted_from_its_end() -> None:
    manager = cached_manager(3)
    leave(manager, tokens(12))
    for held, left in ((1, 8), (2, 4), (3, 0)):
        manager.grow([(held, 0, 4)])
        assert match(manager, tokens(13)).num_tokens == left


def test_a_chain_is_evicted_from_its_end_also_if_its_beginning_was_released_first() -> None:
    manager = cached_manager(4)
    compute(manager, 0, tokens(4))
    compute(manager, 1, tokens(8))  # its first block is a second copy of what is cached
    manager.free(0)
    manager.free(1)
    manager.grow([(2, 0, 12)])
    assert match(manager, tokens(9)).num_tokens == 4


def test_a_sequence_that_fills_the_pool_overwrites_the_block_it_would_copy() -> None:
    manager = cached_manager(2)
    table = leave(manager, tokens(8))
    adopt(manager, 1, tokens(8))
    assert manager.state.available == 0
    growths = manager.grow([(1, 7, 8)])
    assert growths == []
    assert manager.table(1) == table
    assert manager.take_moves().copy == []
    assert match(manager, tokens(9)).num_tokens == 4
    manager.prefixes.register(1, tokens(8), 8, SALT)
    assert match(manager, tokens(9)).num_tokens == 8


def test_a_shared_cached_block_is_never_overwritten() -> None:
    manager = cached_manager(2)
    leave(manager, tokens(8))
    adopt(manager, 1, tokens(8))
    adopt(manager, 2, tokens(8))
    assert manager.grow([(1, 7, 8)]) is None


def test_shared_blocks_are_not_overwritten_when_no_block_is_available_for_a_copy() -> None:
    manager = cached_manager(3)
    shared, alone = tokens(4), tokens(4, 50)
    leave(manager, shared)
    leave(manager, alone)
    adopt(manager, 1, shared)
    adopt(manager, 2, shared)
    adopt(manager, 3, alone)
    assert manager.grow([(1, 3, 4), (3, 3, 4)]) is not None
    assert manager.table(1) != manager.table(2)
    assert match(manager, [*shared, 1]).num_tokens == 4
    assert match(manager, [*alone, 1]).num_tokens == 0


def test_reset_forgets_all_and_frees_cached_blocks() -> None:
    manager = cached_manager(4, num_host_blocks=2, host_cache=True)
    leave(manager, tokens(8))
    manager.grow([(0, 0, 12)])
    manager.take_moves()
    assert match(manager, tokens(9)).num_tokens == 8
    manager.reset_prefix_cache()
    assert match(manager, tokens(9)).num_tokens == 0
    assert figures(manager) == (3, 1, 0)


def test_sequences_with_blocks_from_before_a_reset_register_none() -> None:
    manager = cached_manager(8, num_host_blocks=4)
    compute(manager, 0, tokens(4))
    manager.reset_prefix_cache()
    manager.fork(0, 1)
    assert manager.swap_out([0])
    manager.take_moves()
    assert manager.swap_in([0])
    manager.take_moves()
    manager.prefixes.register(0, tokens(4), 4, SALT)
    manager.prefixes.register(1, tokens(4), 4, SALT)
    assert match(manager, tokens(5)).num_tokens == 0
    manager.free(0)
    compute(manager, 0, tokens(4))
    assert match(manager, tokens(5)).num_tokens == 4


def test_blocks_are_registered_again_after_a_swap() -> None:
    manager = cached_manager(2, num_host_blocks=2)
    compute(manager, 0, tokens(8))
    assert manager.swap_out([0])
    manager.grow([(1, 0, 8)])
    manager.take_moves()
    manager.free(1)
    assert manager.swap_in([0])
    manager.take_moves()
    assert match(manager, tokens(9)).num_tokens == 0
    manager.prefixes.register(0, tokens(8), 8, SALT)
    assert match(manager, tokens(9)).num_tokens == 8


# --- the second level -----------------------------------------------------------------------------------------------


def test_evicted_content_moves_to_the_host_and_is_swapped_in() -> None:
    manager = cached_manager(2, num_host_blocks=2, host_cache=True)
    table = leave(manager, tokens(8))
    manager.grow([(0, 0, 8)])
    out = manager.take_moves().swap_out
    assert {block for block, _ in out} == set(table)
    assert manager.state.host_used == 0
    manager.free(0)
    found = adopt(manager, 1, tokens(9))
    assert found.num_tokens == 8
    back = dict(manager.take_moves().swap_in)
    on_host = dict(out)
    assert manager.table(1) == [back[on_host[block]] for block in table]
    assert manager.prefixes.cost(match(manager, tokens(9))) == 0  # known on the device again


def test_content_that_is_on_the_host_already_is_not_moved_again() -> None:
    manager = cached_manager(1, num_host_blocks=1, host_cache=True)
    leave(manager, tokens(4))
    leave(manager, tokens(4, 50))
    manager.take_moves()
    adopt(manager, 1, tokens(5, 50))
    manager.free(1)
    manager.take_moves()
    manager.grow([(2, 0, 1)])
    assert len(manager.take_moves().swap_out) == 1


def test_a_partial_match_on_the_host_is_swapped_in_as_a_private_block() -> None:
    manager = cached_manager(2, num_host_blocks=2, host_cache=True)
    leave(manager, tokens(8))
    manager.grow([(0, 0, 8)])
    manager.take_moves()
    manager.free(0)
    found = adopt(manager, 1, [*tokens(6), 90, 91])
    assert (found.num_tokens, found.num_full) == (6, 1)
    assert manager.groups[0].demand([(1, 6, 8)]) == (0, 0)
    assert manager.grow([(1, 6, 8)]) is not None
    moves = manager.take_moves()
    assert len(moves.swap_in) == 2
    assert moves.copy == []
    manager.free(1)
    assert figures(manager) == (0, 1, 1)


def test_swapped_sequences_evict_cached_host_blocks() -> None:
    manager = cached_manager(2, num_host_blocks=2, host_cache=True)
    leave(manager, tokens(8))
    manager.grow([(0, 0, 8)])
    manager.take_moves()
    assert manager.groups[0].host.num_available == 2
    assert manager.swap_out([0])
    assert match(manager, tokens(9)).num_tokens == 0
    assert manager.state.host_used == 2


def test_without_host_room_evicted_content_is_lost() -> None:
    manager = cached_manager(2, num_host_blocks=1, host_cache=True)
    manager.grow([(0, 0, 4)])
    assert manager.swap_out([0])
    manager.take_moves()
    leave(manager, tokens(8))
    manager.grow([(1, 0, 8)])
    assert manager.take_moves().swap_out == []
    assert match(manager, tokens(9)).num_tokens == 0


def test_what_is_adopted_is_not_evicted_to_make_room_for_the_rest() -> None:
    """The first block is on the device, the second on the host, and bringing it in evicts on both levels."""
    manager = cached_manager(3, num_host_blocks=1, host_cache=True)
    leave(manager, tokens(8))
    manager.grow([(0, 0, 8)])  # evicts the second block
    manager.take_moves()
    manager.free(0)
    leave(manager, tokens(8, 50))
    found = adopt(manager, 1, tokens(9))
    assert found.num_tokens == 8
    assert len(set(manager.table(1))) == 2
    moves = manager.take_moves()
    assert moves.swap_out == []  # the only host block was the one being read
    assert [target for _, target in moves.swap_in] == manager.table(1)[1:]


# --- names ----------------------------------------------------------------------------------------------------------

IMAGE, OTHER_IMAGE = b"image", b"other"


def leave_with(manager: BlockManager, token_ids: list[int], features: list[FeatureSpan], context: bytes = b"") -> None:
    """Runs a sequence with features, and ends it."""
    assert manager.grow([(0, 0, len(token_ids))]) is not None
    manager.take_moves()
    manager.prefixes.register(0, token_ids, len(token_ids), context, features)
    manager.free(0)


def found_with(manager: BlockManager, token_ids: list[int], features: list[FeatureSpan], context: bytes = b"") -> int:
    return manager.prefixes.match(token_ids, manager.prefixes.chain(token_ids, context, features)).num_tokens


def test_a_context_of_bytes_names_the_beginning() -> None:
    manager = cached_manager()
    leave_with(manager, tokens(8), [], b"adapter")
    assert found_with(manager, tokens(9), [], b"adapter") == 8
    assert found_with(manager, tokens(9), [], b"other") == 0
    assert match(manager, tokens(9), "adapter").num_tokens == 8


def test_equal_placeholders_of_other_features_are_no_hit() -> None:
    manager = cached_manager()
    prompt = [1, 2, 9, 9, 9, 9, 3, 4, 5]
    leave_with(manager, prompt, [FeatureSpan(2, 4, IMAGE)])
    assert found_with(manager, prompt, [FeatureSpan(2, 4, IMAGE)]) == 8
    assert found_with(manager, prompt, [FeatureSpan(2, 4, OTHER_IMAGE)]) == 2
    assert found_with(manager, prompt, []) == 2


def test_a_feature_decides_the_blocks_after_it() -> None:
    manager = cached_manager()
    prompt = [9, 9, 1, 2, 3, 4, 5, 6, 7]
    leave_with(manager, prompt, [FeatureSpan(0, 2, IMAGE)])
    assert found_with(manager, prompt, [FeatureSpan(0, 2, OTHER_IMAGE)]) == 0


def test_a_feature_that_begins_in_the_block_before_decides_its_end() -> None:
    """The second blocks of both hold the same tokens of the same images, at other places in them."""
    chains = []
    for offset in (0, 1):
        chain = PrefixChain("", 4, [FeatureSpan(offset, 6, IMAGE)])
        chain.extend([9] * 8, 2)
        chains.append(chain)
    assert chains[0].content([9] * 8, 4, 8) != chains[1].content([9] * 8, 4, 8)
    assert chains[0].digests[1] != chains[1].digests[1]


@pytest.mark.parametrize(("offset", "length", "num_tokens"), [(0, 2, 0), (1, 2, 1), (2, 1, 2), (3, 1, 3)])
def test_a_partial_match_ends_before_a_feature_with_another_key(offset: int, length: int, num_tokens: int) -> None:
    manager = cached_manager()
    leave_with(manager, [9] * 8, [FeatureSpan(offset, length, IMAGE)])
    assert found_with(manager, [9, 9, 9, 9, 5], [FeatureSpan(offset, length, OTHER_IMAGE)]) == num_tokens
    assert found_with(manager, [9, 9, 9, 9, 5], [FeatureSpan(offset, length, IMAGE)]) == 4


def test_keys_and_places_of_several_features_are_not_confused() -> None:
    spans = [
        [FeatureSpan(0, 1, b"ab"), FeatureSpan(1, 1, b"c")],
        [FeatureSpan(0, 1, b"a"), FeatureSpan(1, 1, b"bc")],
        [FeatureSpan(0, 2, b"abc")],
        [FeatureSpan(0, 1, b"abc")],
        [FeatureSpan(1, 1, b"abc")],
        [],
    ]
    chains = [PrefixChain("", 4, features) for features in spans]
    for chain in chains:
        chain.extend([9] * 4, 1)
    assert len({chain.digests[1] for chain in chains}) == len(spans)
    assert len({tuple(chain.content([9] * 4, 0, 4)) for chain in chains}) == len(spans)
