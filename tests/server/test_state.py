"""What the store of responses keeps, and what it forgets."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.server.http.errors import ApiError
from octavo.server.state import ResponseStore, StoredResponse


def stored(size: int, owner: str = "") -> StoredResponse:
    """A response of so many bytes, half of them in its items."""
    return StoredResponse(b"x" * (size - size // 2), [], size // 2, owner)


@given(
    st.lists(st.tuples(st.sampled_from(["put", "get", "delete"]), st.integers(0, 9), st.integers(0, 120)), max_size=40),
    st.integers(0, 4),
    st.integers(0, 200),
)
def test_the_latest_are_kept_within_both_bounds(steps: list[tuple[str, int, int]], count: int, size: int) -> None:
    store = ResponseStore(count, size)
    kept: list[tuple[str, int]] = []  # oldest first
    for number, (step, which, weight) in enumerate(steps):
        if step == "put":
            store.put(f"r{number}", stored(weight))
            kept.append((f"r{number}", weight))
            while len(kept) > count or sum(weight for _, weight in kept) > size:
                kept.pop(0)
        elif kept:
            entry = kept.pop(which % len(kept))
            if step == "get":
                assert store.get(entry[0], "").size == entry[1]
                kept.append(entry)
            else:
                store.delete(entry[0], "")
                with pytest.raises(ApiError, match="not known"):
                    store.get(entry[0], "")
        assert len(store) == len(kept) and store.num_bytes == sum(weight for _, weight in kept)
    for name, _ in kept:
        store.get(name, "")


def test_a_response_is_of_one_owner() -> None:
    store = ResponseStore(2, 100)
    store.put("a", stored(10, "me"))
    for use in (store.get, store.delete):
        with pytest.raises(ApiError) as caught:
            use("a", "you")
        assert caught.value.status == 404
    assert store.get("a", "me").size == 10


class Run:
    """Counts how often it is ended."""

    ended = 0

    def cancel(self) -> None:
        self.ended += 1


def test_a_run_grows_in_its_place_and_ends_when_it_is_forgotten() -> None:
    store, runs = ResponseStore(3, 100), [Run() for _ in range(3)]
    for name, run in zip("abc", runs, strict=True):
        store.put(name, StoredResponse(b"x" * 10, [], 10, "", run=cast(Any, run), run_size=5))
    store.grow("a", 20)
    assert store.num_bytes == 90 and not any(run.ended for run in runs)
    store.grow("c", 20)  # the oldest goes, though another grew
    assert store.num_bytes == 65 and [run.ended for run in runs] == [1, 0, 0] and "a" not in store
    store.grow("a", 1000)
    store.replace("a", stored(10))
    assert "a" not in store and len(store) == 2
    store.replace("b", stored(30))
    assert store.num_bytes == 70 and store.get("b", "").run is None
    store.grow("c", 200)
    assert store.num_bytes == 30 and [run.ended for run in runs] == [1, 0, 1] and "c" not in store
