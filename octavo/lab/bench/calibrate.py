"""``octavo bench calibrate``: fits a step profile to measured steps of a model on this machine."""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import ConfigError
from octavo.core.outputs import RequestOutput
from octavo.core.plan import StepPlan
from octavo.core.plugins import how_to_install
from octavo.engine.llm import LLM
from octavo.engine.llm_engine import LLMEngine
from octavo.executor.executor import Executor
from octavo.kernels import resolve_device
from octavo.lab.bench.offline import greedy, random_prompts
from octavo.lab.simulate.step_profile import FitError, Overhead, StepProfile
from octavo.lab.simulate.work import StepWork, count_work
from octavo.models.network import build_without_weights, kv_bytes_per_token

#: Tokens of a step at which the curve of the matrix products may bend.
_KNOTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
#: Costs beside that curve, each a field of ``StepProfile`` and what of the work it multiplies.
_COSTS = {"sampled": "sampled", "context": "context", "pairs": "pairs", "chunk": "chunks"}
#: Decoding sequences; and lengths of their prompts, with the most of them that are run at once: the first of the same
#: prompts each time, so that most prompts come from the prefix cache, and steps with prompts are those of ``_MIXES``.
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_LENGTHS = {16: 64, 130: 64, 700: 16, 2000: 2}
#: Tokens that each of a batch generates.
_OUTPUT = 12
#: Runs of prompts of random lengths that come one after the other: how many of them, and median and deviation (of the
#: logarithm) of the lengths.
_MIXES = 3 * ((24, 80, 1.0), (10, 400, 0.6))


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """What a step did, and how long it took in seconds."""

    work: StepWork
    seconds: float

    @property
    def kind(self) -> str:
        """``decode``, ``prefill`` or ``mixed``."""
        return "mixed" if self.work.chunks and self.work.decodes else "prefill" if self.work.chunks else "decode"


class StepWatch:
    """Stands before an engine's executor and counts the work of each plan; all else passes through."""

    def __init__(self, engine: LLMEngine) -> None:
        """Watches from now on."""
        self._engine, self._executor = engine, engine.core.executor
        self.works: list[StepWork] = []
        self._counting = 0.0
        #: Plans submitted whose results are not received.
        self._ahead = 0
        self.steps: list[MeasuredStep] = []
        engine.core.executor = cast(Executor, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def submit(self, plan: StepPlan) -> Any:
        """``Executor.submit``."""
        start = time.perf_counter()
        self.works.append(count_work(plan, self._engine.core.scheduler.queues)[0])
        self._counting += time.perf_counter() - start
        return self._executor.submit(plan)

    def step(self) -> list[RequestOutput]:
        """One step of the engine; it is measured if one plan was submitted meanwhile."""
        before, start, counting = len(self.works), time.perf_counter(), self._counting
        outputs = self._engine.step()
        seconds = time.perf_counter() - start - (self._counting - counting)
        submitted = len(self.works) - before
        work = self.works[before - self._ahead]
        # Copies of blocks are a matter of a few steps, whose cost is not fitted.
        if submitted == 1 and work.tokens and not work.copied:
            self.steps.append(MeasuredStep(work, seconds))
        self._ahead += submitted - 1
        return outputs

    def stop(self) -> None:
        """Watches no longer."""
        self._engine.core.executor = self._executor


def calibrate(llm: LLM, device: str, *, rounds: int = 3, seed: int = 0) -> tuple[StepProfile, list[MeasuredStep]]:
    """Measures steps of an idle engine and fits a profile; returns both.

    The machine should be quiet: the profile describes it as it is now.

    Args:
        llm: a network that keeps all tokens, on one worker.
        device: its name in the profile.
        rounds: how often the same steps are measured; each counts with its median time, so that what disturbs one
            round does not matter.
        seed: of the prompts.

    Raises:
        ConfigError: the engine has several workers or layers with windows.
    """
    engine, core = llm.llm_engine, llm.llm_engine.core
    if (
        core.executor.num_stages > 1
        or core.options.world_size > 1
        or any(group.window is not None for group in core.blocks.groups)
    ):
        raise ConfigError(
            "octavo bench calibrate measures networks without attention windows and recurrent states on one worker"
        )
    rng = random.Random(seed)
    _drive(engine, [random_prompts(engine, 1, 16, rng)[0] for _ in range(4)], rng, _OUTPUT)  # buffers, GPU graphs
    measured: list[list[MeasuredStep]] = []
    adding: list[float] = []
    for _ in range(rounds):
        engine.reset_prefix_cache()
        rng, watch = random.Random(seed), StepWatch(engine)
        try:
            for prompts in _loads(engine, rng):
                adding += _drive(engine, prompts, rng, _OUTPUT, watch)
        finally:
            watch.stop()
        measured.append(watch.steps)
    steps = median_steps(measured)
    return fit_profile(steps, **_facts(llm, device, adding)), steps


def median_steps(rounds: list[list[MeasuredStep]]) -> list[MeasuredStep]:
    """The steps of rounds that ran the same loads: those of equal place and work are one, with their median time."""
    alike: dict[tuple[int, ...], list[MeasuredStep]] = {}
    for steps in rounds:
        for place, step in enumerate(steps):
            alike.setdefault((place, *dataclasses.astuple(step.work)), []).append(step)
    return [MeasuredStep(same[0].work, statistics.median(s.seconds for s in same)) for same in alike.values()]


def fit_profile(steps: list[MeasuredStep], **facts: Any) -> StepProfile:
    """The profile whose costs fit the steps best; ``facts`` are its other fields."""
    most = max(step.work.tokens for step in steps)
    knots = np.array([knot for knot in _KNOTS if knot < most] + [most], float)
    knots = knots if len(knots) > 1 else np.array([1.0, 2.0])
    costs = np.array([[getattr(step.work, name) for name in _COSTS.values()] for step in steps], float)
    tokens = np.array([step.work.tokens for step in steps], float)
    seconds = np.array([step.seconds for step in steps])
    fit = relative_fit(np.hstack([_ramps(tokens, knots), costs]), seconds)
    curve = np.cumsum(fit[: len(knots)])
    facts |= zip(_COSTS, map(float, fit[len(knots) :]), strict=True)
    profile = StepProfile(
        origin="fitted",
        products=[(float(x), float(y)) for x, y in zip(knots, curve, strict=True)],
        fixed=0.0,
        **facts,
    )
    return msgspec.structs.replace(profile, errors=errors_of(profile, steps))


def errors_of(profile: StepProfile, steps: list[MeasuredStep]) -> dict[str, FitError]:
    """Relative errors of a profile on measured steps: of ``all``, and by kind."""
    kinds: dict[str, list[MeasuredStep]] = {"all": steps}
    for step in steps:
        kinds.setdefault(step.kind, []).append(step)
    return {kind: _error(profile, of_kind) for kind, of_kind in kinds.items()}


def _error(profile: StepProfile, steps: list[MeasuredStep]) -> FitError:
    fitted = np.array([profile.seconds(step.work) for step in steps])
    measured = np.array([step.seconds for step in steps])
    relative = np.abs(fitted / measured - 1)
    median, p90 = np.percentile(relative, (50, 90))
    return FitError(len(steps), float(median), float(p90), float(relative.max()), float(fitted.sum() / measured.sum()))


def _ramps(tokens: NDArray[np.float64], knots: NDArray[np.float64]) -> NDArray[np.float64]:
    """[steps, knots]: the first column is 1, each other one rises from 0 at the knot before to 1 at its own.

    With non-negative coefficients, their sum is a curve of straight lines between the knots that never falls.
    """
    columns = [np.ones_like(tokens)]
    for low, high in itertools.pairwise(knots):
        columns.append(np.clip((tokens - low) / (high - low), 0.0, 1.0))
    return np.stack(columns, axis=1)


def _loads(engine: LLMEngine, rng: random.Random) -> Iterator[list[list[int]]]:
    """Prompts that run together."""
    longest = engine.core.max_model_len - 2 * _OUTPUT
    for length, most in _LENGTHS.items():
        prompts = random_prompts(engine, min(most, engine.core.options.max_num_seqs), min(length, longest), rng)
        for batch in _BATCHES:
            if batch <= len(prompts):
                yield prompts[:batch]
    for count, median, sigma in _MIXES:
        lengths = [min(longest, max(4, round(median * rng.lognormvariate(0, sigma)))) for _ in range(count)]
        yield [random_prompts(engine, 1, length, rng)[0] for length in lengths]


def _drive(
    engine: LLMEngine, prompts: list[list[int]], rng: random.Random, output: int, watch: StepWatch | None = None
) -> list[float]:
    """Runs prompts to their end: all at once if they are as long as one another, else one after the other.

    Returns:
        The seconds that it took to add each.
    """
    seconds, waiting = [], list(enumerate(prompts))
    now = len(waiting) if len(set(map(len, prompts))) == 1 else 1
    while waiting or engine.has_unfinished_requests():
        for number, prompt in waiting[:now]:
            start = time.perf_counter()
            engine.add_request(str(number), prompt, greedy(output + number % 5), streaming=False)
            seconds.append(time.perf_counter() - start)
        del waiting[:now]
        now = int(rng.random() < 0.4)
        if watch is not None:
            watch.step()
        else:
            engine.step()
    return seconds


def _facts(llm: LLM, device: str, adding: list[float]) -> dict[str, Any]:
    """The fields of the profile that are not fitted."""
    core = llm.llm_engine.core
    network = build_without_weights(core.model_config, core.dtype, kv_cache_dtype=core.options.kv_cache_dtype)
    moved = core.executor.measure_swap() / core.options.block_size
    return {
        "model": core.options.model,
        "device": device,
        "device_type": "cpu" if resolve_device(core.options.device) == "cpu" else "gpu",
        "max_model_len": core.max_model_len,
        "kv_cache_tokens": core.blocks.groups[0].device.num_blocks * core.options.block_size,
        "kv_bytes_per_token": kv_bytes_per_token(network),
        "moved": moved,
        "copied": moved,
        "offline": Overhead(request=statistics.median(adding)),
    }


def relative_fit(
    a: NDArray[np.float64], b: NDArray[np.float64], *, rounds: int = 8, tail: float = 3.0
) -> NDArray[np.float64]:
    """The x >= 0 for which the relative errors (a x - b) / b are small; b > 0.

    Squares, but for errors above ``tail`` times the median one, which count by their size (Huber 1964), so that a few
    rows disturbed by something else decide nothing.
    """
    nnls = least_squares()
    rows = a / b[:, None]
    scale = np.linalg.norm(rows, axis=0)
    rows = rows / np.where(scale == 0, 1.0, scale)
    ones = np.ones_like(b)
    weights = ones
    for _ in range(rounds):
        root = np.sqrt(weights)
        x, _ = nnls(rows * root[:, None], ones * root)
        errors = np.abs(rows @ x - 1)
        limit = max(tail * float(np.median(errors)), 1e-9)
        weights = np.minimum(1.0, limit / np.maximum(errors, 1e-12))
    solution: NDArray[np.float64] = x / np.where(scale == 0, 1.0, scale)
    return solution


def least_squares() -> Callable[..., Any]:
    """scipy's least squares with non-negative coefficients.

    Raises:
        ConfigError: scipy is not installed.
    """
    try:
        from scipy.optimize import nnls
    except ImportError:
        raise ConfigError(f"a fit needs scipy, which is not installed: {how_to_install('lab')}") from None
    solve: Callable[..., Any] = nnls
    return solve
