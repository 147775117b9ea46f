"""Faults planted in the memory of recurrent states: the machines of memory and scheduler find each of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo.memory.checkpoints import StateCache
from octavo.memory.kv_group import KVGroup, PendingMoves
from octavo.memory.prefix_cache import KnownBlock, PrefixChain
from tests.memory.test_memory_machine import run_seed
from tests.scheduler.test_scheduler_machine import WITH_STATES, run_cases

Patch = pytest.MonkeyPatch


def forks_share_a_state_without_a_copy(patch: Patch) -> None:
    tables_with = KVGroup._num_tables_with

    def mutated(group: KVGroup, block: int) -> int:
        return 1 if group.has_states else tables_with(group, block)

    patch.setattr(KVGroup, "_num_tables_with", mutated)


def a_prefix_hit_is_longer_than_its_checkpoint(patch: Patch) -> None:
    last_state, state_at = StateCache.last_state, StateCache.state_at

    def longer(cache: StateCache, token_ids: list[int], chain: PrefixChain, limit: int) -> int:
        end = last_state(cache, token_ids, chain, limit)
        return min(end + 1, limit) if end else 0

    def state_before(cache: StateCache, token_ids: list[int], chain: PrefixChain, end: int) -> list[KnownBlock | None]:
        hits = state_at(cache, token_ids, chain, end)
        if hits and hits[-1] is None:
            hits[-1] = cache.find(chain.digest(token_ids, end - 1))
        return hits

    patch.setattr(StateCache, "last_state", longer)
    patch.setattr(StateCache, "state_at", state_before)


def a_swap_in_forgets_the_state(patch: Patch) -> None:
    swap_in = KVGroup.swap_in

    def mutated(group: KVGroup, seq_ids: list[int]) -> None:
        with pytest.MonkeyPatch.context() as moves:
            if group.has_states:
                moves.setattr(PendingMoves, "swap_in", lambda *_: None)
            swap_in(group, seq_ids)

    patch.setattr(KVGroup, "swap_in", mutated)


def a_state_is_freed_that_the_next_token_reads(patch: Patch) -> None:
    free_outside_window = KVGroup.free_outside_window

    def mutated(group: KVGroup, seq_id: int, num_computed: int, max_blocks: int) -> None:
        free_outside_window(group, seq_id, num_computed + group.has_states, max_blocks)

    patch.setattr(KVGroup, "free_outside_window", mutated)


def a_digest_leaves_out_the_last_token_before_a_state(patch: Patch) -> None:
    digest = PrefixChain.digest

    def mutated(chain: PrefixChain, token_ids: list[int], end: int) -> bytes:
        return digest(chain, [*token_ids[: end - 1], 0], end)

    patch.setattr(PrefixChain, "digest", mutated)


MUTATIONS = [
    forks_share_a_state_without_a_copy,
    a_prefix_hit_is_longer_than_its_checkpoint,
    a_swap_in_forgets_the_state,
    a_state_is_freed_that_the_next_token_reads,
    a_digest_leaves_out_the_last_token_before_a_state,
]


def memory_machine() -> None:
    for seed in range(150):
        run_seed(seed, 60)


def scheduler_machine() -> None:
    run_cases(3000, 80, WITH_STATES)


@pytest.mark.parametrize("machine", [memory_machine, scheduler_machine])
@pytest.mark.parametrize("plant", MUTATIONS)
def test_a_planted_fault_is_found(plant: Callable[[Patch], None], machine: Callable[[], None]) -> None:
    """By the seeds of the machines' own tests."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        with pytest.raises(AssertionError) as found:
            machine()
    assert isinstance(found.value.__cause__ or found.value, AssertionError), "a check, and no other exception"
