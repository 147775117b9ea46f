"""Arrays of the CPU kernels: views of memory as numpy has them, and nothing that a recorded step would leave out."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.dtypes import DType
from octavo.core.errors import UnrecordableError

pytest.importorskip("octavo._cpu")

from octavo.kernels.cpu.array import CpuArray
from octavo.kernels.cpu.tape import Arena


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize("dtype", list(DType))
def test_an_array_is_over_the_memory_of_numpys(dtype: DType) -> None:
    values = np.arange(6).reshape(2, 3).astype(dtype.numpy)
    array = CpuArray.over(values)
    assert (array.shape, array.dtype, array.nbytes) == ((2, 3), dtype, 6 * dtype.itemsize)
    array.numpy()[1, 2] = 0
    assert values[1, 2] == 0


def test_memory_lives_as_long_as_a_view_of_it() -> None:
    array = CpuArray.empty((4, 4), DType.FLOAT32)
    owner = weakref.ref(array.owner)
    view = array[1:3].numpy()
    del array
    gc.collect()
    assert owner() is not None
    view[:] = 1
    del view
    gc.collect()
    assert owner() is None


INDICES = st.one_of(st.integers(-3, 2), st.slices(3).filter(lambda s: s.step in (None, 1)), st.none())


@given(st.lists(INDICES, max_size=4).filter(lambda items: sum(item is not None for item in items) <= 3))
def test_a_view_is_numpys(items: list[int | slice | None]) -> None:
    values = numbers(3, 3, 3)
    assert np.array_equal(CpuArray.over(values)[tuple(items)].numpy(), values[tuple(items)])


@given(
    st.sampled_from([(6, 8), (2, 3, 8), (6, 2, 4), (48,), (6, -1, 4), (3, 16), (6, 8, 1), (4, 12)]),
    st.sampled_from([slice(None), slice(2, 5)]),
    st.sampled_from([slice(None), slice(0, 4), slice(4, 8)]),
)
def test_another_shape_is_a_view_or_refused(shape: tuple[int, ...], rows: slice, columns: slice) -> None:
    values = numbers(6, 8)
    part = values[rows, columns]
    if part.size % abs(int(np.prod(shape))) or (part.size != np.prod(shape) and -1 not in shape):
        with pytest.raises(ValueError, match="cannot reshape"):
            CpuArray.over(values)[rows, columns].reshape(*shape)
        return
    expected = part.reshape(shape)
    try:
        view = CpuArray.over(values)[rows, columns].reshape(*shape)
    except UnrecordableError:
        assert not np.shares_memory(expected, values)  # numpy copies
    else:
        assert np.shares_memory(view.numpy(), values)
        assert np.array_equal(view.numpy(), expected)


@pytest.mark.parametrize("index", [slice(None, None, 2), [0, 1], np.array([0]), 1.0])
def test_what_is_no_view_is_refused(index: object) -> None:
    with pytest.raises(UnrecordableError):
        CpuArray.over(numbers(4, 4))[index]


def test_an_index_out_of_range_is_refused() -> None:
    with pytest.raises(IndexError, match="4"):
        CpuArray.over(numbers(4, 4))[4]


def test_there_is_no_arithmetic() -> None:
    array = CpuArray.over(numbers(4, 4))
    with pytest.raises(TypeError):
        array + array  # type: ignore[operator]
    with pytest.raises(TypeError):
        array * 2  # type: ignore[operator]


def test_a_buffer_is_used_again_when_no_view_of_it_is_left() -> None:
    arena = Arena()
    first = arena.take((4, 8), DType.FLOAT32, "tokens")
    view, address = first[1:], first.address
    del first
    second = arena.take((4, 8), DType.FLOAT32, "tokens")
    assert second.address != address
    del view
    third = arena.take((8, 4), DType.FLOAT32, "sampled")
    assert (third.address, third.owner.rows, third.address % 64) == (address, "sampled", 0)
