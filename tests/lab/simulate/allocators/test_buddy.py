"""The buddy algorithm: extents never overlap, cover everything, and merge back."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.lab.simulate.allocators.buddy import BuddyAllocator, order_of


def check(buddy: BuddyAllocator) -> None:
    allocated, free = buddy.extents()
    extents = sorted({**allocated, **free}.items())
    assert len(extents) == len(allocated) + len(free)
    assert sum(length for _, length in extents) == buddy.size
    assert all(a + length == b for (a, length), (b, _) in itertools.pairwise(extents))
    assert all(length & (length - 1) == 0 and start % length == 0 for start, length in extents)
    assert not any(free.get(start ^ length) == length for start, length in free.items())
    assert buddy.num_free == sum(free.values())


@given(size=st.integers(0, 1000), actions=st.lists(st.tuples(st.booleans(), st.integers(1, 300)), max_size=60))
def test_extents_cover_everything_once_and_merge_back(size: int, actions: list[tuple[bool, int]]) -> None:
    buddy = BuddyAllocator(size)
    untouched = buddy.extents()
    held: list[int] = []
    for allocates, number in actions:
        if allocates:
            fits = any(length >= number for length in buddy.extents()[1].values())
            assert buddy.can_allocate(number) == fits
            start = buddy.allocate(number)
            assert (start is not None) == fits
            if start is not None:
                assert buddy.extents()[0][start] == 1 << order_of(number)
                held.append(start)
        elif held:
            buddy.free(held.pop(number % len(held)))
        check(buddy)
    for start in held:
        buddy.free(start)
        check(buddy)
    assert buddy.extents() == untouched


def test_a_size_that_is_no_power_of_two_is_divided_by_its_binary_digits() -> None:
    # The 15.7K slots of Kwon et al. 2023, table 1, in blocks of 16: seven requests of 2,048 slots, as in figure 13.
    buddy = BuddyAllocator(983)
    assert buddy.extents()[1] == {0: 512, 512: 256, 768: 128, 896: 64, 960: 16, 976: 4, 980: 2, 982: 1}
    assert [buddy.allocate(128) for _ in range(8)] == [768, 512, 640, 0, 128, 256, 384, None]
    assert buddy.num_free == 87


def test_free_addresses_may_be_too_scattered() -> None:
    buddy = BuddyAllocator(4)
    assert [buddy.allocate(1) for _ in range(4)] == [0, 1, 2, 3]
    buddy.free(1)
    buddy.free(2)
    assert buddy.num_free == 2 and not buddy.can_allocate(2) and buddy.allocate(2) is None
    buddy.free(3)
    assert buddy.allocate(2) == 2
    with pytest.raises(KeyError):
        buddy.free(1)
