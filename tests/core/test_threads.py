"""Calls in threads whose end is waited for."""

from __future__ import annotations

import asyncio
import threading

import pytest

from octavo.process.children import finish_in_thread
from tests.busy_machine import PATIENCE


class Source:
    """What a thread uses until it is let go."""

    def __init__(self) -> None:
        self.begun, self.go, self.ended, self.closed = (threading.Event() for _ in range(4))

    def use(self) -> Source:
        self.begun.set()
        assert self.go.wait(PATIENCE)
        self.ended.set()
        return self

    def close(self) -> None:
        self.closed.set()


def test_the_result_and_the_error_are_those_of_the_call() -> None:
    assert asyncio.run(finish_in_thread(divmod, 7, 2)) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(finish_in_thread(divmod, 7, 0))


def test_who_is_cancelled_waits_for_the_thread_and_its_result_is_closed() -> None:
    source = Source()

    async def cancel() -> None:
        task = asyncio.create_task(finish_in_thread(source.use))
        await asyncio.to_thread(source.begun.wait, PATIENCE)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done()
        source.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert source.ended.is_set()
        assert source.closed.is_set()

    asyncio.run(cancel())
