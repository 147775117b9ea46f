"""What a scenario of the policy lab is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.lab.workloads.lengths import Lengths
from octavo.lab.workloads.work_items import WorkItem


@dataclass(frozen=True)
class Scenario:
    """Requests that every policy gets alike, and the engine's options that the question needs.

    Priorities and targets of items are sent to the policies that look at them; others refuse them and get none.
    """

    name: str
    #: A sentence for the tables: what is in it, and what it asks.
    about: str
    #: Fields of ``EngineConfig`` that it sets, in every place.
    options: Mapping[str, Any]
    #: (capacity in requests a second, seed) -> items in order of arrival; the same for the same arguments.
    make: Callable[[float, int], Iterable[WorkItem]]
    #: Lengths from which the capacity is found: the rate at which requests of such lengths end when all are there at
    #: once. None: ``make`` ignores the capacity, which is then given as infinite.
    inputs: Lengths | None = None
    outputs: Lengths | None = None
    #: Offered load as a share of the capacity, if it has one. Scenarios of one ``family`` differ in the load alone:
    #: their goodput is drawn against it.
    load: float | None = None
    family: str = field(default="", kw_only=True)
    #: Limit that requests state as ``max_tokens``, longer ones their own length, so that policies do not know lengths;
    #: oracles (``oracles.py``) are told the true ones all the same. None: all state their true length.
    max_tokens: int | None = field(default=None, kw_only=True)
