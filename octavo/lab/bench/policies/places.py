"""Where scenarios run: on an engine in this process, and simulated; ``server.py`` has the third place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

from octavo.config.engine_config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.core.sampling_params import SamplingParams
from octavo.engine.llm_engine import LLMEngine
from octavo.lab.bench.capacity import REQUESTS
from octavo.lab.bench.policies.kendall import kendall_tau
from octavo.lab.bench.policies.policy_figures import PlaceOutcome
from octavo.lab.bench.restartable import POLICY_OPTIONS, RestartableCore, restarted, start
from octavo.lab.bench.timed_run import run_timed, to_its_length
from octavo.lab.simulate.engine import MaxTokens, SimulatedEngine, exact_max_tokens, run
from octavo.lab.simulate.run import Recorder
from octavo.lab.simulate.step_profile import StepProfile
from octavo.lab.workloads.work_items import WorkItem
from octavo.scheduler.policies import ShortestRemaining

#: Ends requests whose stated limit is longer than they are.
_STOP = 0
#: Runs before what is counted: the first steps of a process touch memory for the first time.
WARM_UP = WorkItem(at=0.0, input_len=16, output_len=8, stream="warm-up")


class Place(ABC):
    """Runs items under options; every run begins with empty blocks and a policy that has learned nothing."""

    name: str
    #: What runs there, for the tables.
    about: str
    #: Whether requests can end before the limit that they state.
    hides_lengths: ClassVar[bool] = True
    #: Whether other processes could slow it down.
    by_the_clock: ClassVar[bool] = True
    #: Requests of the run that finds a capacity: by the clock it takes as long as the scenarios themselves.
    capacity_requests: ClassVar[int] = 120

    @abstractmethod
    def run(self, options: EngineConfig, items: Sequence[WorkItem], limit: int | None) -> PlaceOutcome:
        """Runs items, which come in order of arrival; ``limit``: see ``Scenario.max_tokens``.

        Raises:
            ConfigError: an item or an option is not possible here.
        """

    def close(self) -> None:  # noqa: B027
        """Frees what it holds."""


class Simulated(Place):
    """The scheduler on a virtual clock; equal runs give equal figures."""

    name = "simulated"
    by_the_clock = False
    capacity_requests = REQUESTS

    def __init__(self, profile: StepProfile, mode: Literal["offline", "server"] = "offline") -> None:
        """``mode``: which of the profile's overheads count."""
        self._profile, self._mode = profile, mode
        self.about = f"{profile.model} on {profile.device}, {profile.origin}, {mode}"

    def run(self, options: EngineConfig, items: Sequence[WorkItem], limit: int | None) -> PlaceOutcome:
        """See ``Place``."""
        recorder = Recorder()
        engine = SimulatedEngine(self._profile, options, mode=self._mode, max_tokens=stated(limit))
        run(engine, items, recorder.ended, lambda _: None)
        stats = engine.scheduler.counts()
        preemptions = stats.preemptions_by_recompute + stats.preemptions_by_swap
        return PlaceOutcome(recorder.done, preemptions, _tau(engine.scheduler.queues.policy))


def stated(limit: int | None) -> MaxTokens:
    """What requests state as ``max_tokens``, see ``Scenario.max_tokens``."""
    return exact_max_tokens if limit is None else lambda item: max(limit, item.output_len)


def _tau(policy: object) -> float | None:
    """Kendall's tau of the predictions that a policy has made at arrival, with the lengths; None if it makes none."""
    if not isinstance(policy, ShortestRemaining):
        return None
    predicted, lengths = zip(*policy.predictor.recent, strict=True) if policy.predictor.recent else ((), ())
    return kendall_tau(predicted, lengths)


class InProcess(Place):
    """An engine in this process, whose weights are loaded once for all policies of a scenario."""

    name = "process"

    def __init__(self, about: str) -> None:
        self.about = about
        self._core: RestartableCore | None = None
        self._engine: LLMEngine | None = None
        self._options: EngineConfig | None = None

    def run(self, options: EngineConfig, items: Sequence[WorkItem], limit: int | None) -> PlaceOutcome:
        """See ``Place``."""
        engine = self._started(options)
        params = to_its_length if limit is None else _ending_before(limit, engine.core.model_config.vocab_size)
        done = run_timed(engine, items, params)
        stats = engine.stats()
        preemptions = stats.preemptions_by_recompute + stats.preemptions_by_swap
        return PlaceOutcome(done, preemptions, _tau(engine.core.scheduler.queues.policy))

    def close(self) -> None:
        """See ``Place``."""
        if self._core is not None:
            self._core.shutdown()
        self._core = self._engine = self._options = None

    def _started(self, options: EngineConfig) -> LLMEngine:
        """The engine anew under these options: with the weights that are loaded if its workers may stay."""
        before = self._options
        changes = {} if before is None else {k: v for k, v in options if v != getattr(before, k)}
        if self._core is None or self._engine is None or not changes.keys() <= POLICY_OPTIONS:
            self.close()
            self._core, self._engine = start(options)
            run_timed(self._engine, [WARM_UP])
            changes = {}  # it began with them
        self._engine = restarted(self._core, self._engine, changes)
        self._options = options
        return self._engine


class _EndsAt:
    """A logits processor after which a request of this length ends itself; to the policy that comes unannounced."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, output_ids: Sequence[int], logits: Any) -> Any:
        logits[_STOP] = float("inf") if len(output_ids) + 1 >= self._length else float("-inf")
        return logits


def _ending_before(limit: int, vocab_size: int) -> Callable[[WorkItem], SamplingParams]:
    if vocab_size < 2:
        raise ConfigError("a vocabulary of one token has none that could end a request")

    def params(item: WorkItem) -> SamplingParams:
        return SamplingParams(
            temperature=0,
            max_tokens=max(limit, item.output_len),
            ignore_eos=True,
            stop_token_ids=[_STOP],
            logits_processors=[_EndsAt(item.output_len)],
            detokenize=False,
        )

    return params
