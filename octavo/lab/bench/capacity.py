"""The capacity of an engine, from a run in which all requests are there at the start."""

from __future__ import annotations

import numpy as np

from octavo.lab.simulate.figures import Completions
from octavo.lab.workloads.lengths import Lengths
from octavo.lab.workloads.workload import Workload

#: Requests of such a run.
REQUESTS = 400


def full_load(inputs: Lengths, outputs: Lengths, seed: int = 0, requests: int = REQUESTS) -> Workload:
    """Requests of these lengths, all at once."""
    return Workload(requests=requests, inputs=inputs, outputs=outputs, seed=seed, name="capacity")


def capacity_of(done: Completions) -> float:
    """Requests a second in the middle half of a run under full load; in all of it, if that half ended at once."""
    ends = np.sort(np.asarray(done.last))
    quarter = len(ends) // 4
    seconds = ends[3 * quarter] - ends[quarter]
    return float(2 * quarter / seconds) if seconds > 0 else len(ends) / float(ends[-1])
