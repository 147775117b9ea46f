"""The bar that a call of ``LLM`` shows."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Self

from octavo.core.outputs import RequestOutput
from octavo.core.pooling_outputs import PoolingRequestOutput

#: Whether there is a bar, or what makes one of tqdm's arguments.
Bar = bool | Callable[..., Any]


def make_bar(bar: Bar, **options: Any) -> Any:
    """A bar of tqdm with these arguments, hidden if ``bar`` says so, or what ``bar`` makes of them."""
    from tqdm import tqdm

    make: Callable[..., Any] = bar if callable(bar) else functools.partial(tqdm, disable=not bar)
    return make(dynamic_ncols=True, **options)


class Progress:
    """Owns a bar of prompts done, with the tokens a second so far."""

    def __init__(self, bar: Bar, total: int | None, done: int) -> None:
        """``total``: prompts, if their number is known; ``done``: those that were refused at once."""
        self._bar: Any = make_bar(bar, total=total, initial=done, desc="Prompts")
        self._start = time.perf_counter()
        self._tokens_in = self._tokens_out = 0

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.__exit__(*error)

    def add(self, output: RequestOutput | PoolingRequestOutput) -> None:
        """A prompt is done."""
        self._tokens_in += len(output.prompt_token_ids)
        seconds = time.perf_counter() - self._start
        speeds = f"in {self._tokens_in / seconds:.0f} tok/s"
        if isinstance(output, RequestOutput):
            self._tokens_out += sum(len(o.token_ids) for o in output.outputs)
            speeds += f", out {self._tokens_out / seconds:.0f} tok/s"
        self._bar.set_postfix_str(speeds, refresh=False)
        self._bar.update()
