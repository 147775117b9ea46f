"""Policies of users that raise: the request that they raise about fails, and nothing else is lost."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import pytest

from octavo.core.errors import ConfigError
from octavo.scheduler import groups
from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.policies import Policy, load_policy
from tests.scheduler.builders import make, request
from tests.scheduler.fake_preparations import adapter_options, lora
from tests.scheduler.fake_worker import Engine, check_accounting, check_nothing_held, tokens_alone

ABOUT_GROUPS = ["key", "displaces", "lane", "on_arrival", "on_admit", "on_preempt", "on_sequence_end", "on_end"]


class Raising(Policy):
    """By priority; raises where it is told to."""

    dynamic = preemptive = waiting_keys_grow = limits_prompts = True
    #: The method that raises, about group 3 or with this probability.
    method: ClassVar[str] = ""
    probability: ClassVar[float | None] = None
    #: What the key is where it raises, instead.
    value: ClassVar[Any] = None
    rng: ClassVar[random.Random] = random.Random(0)

    def _call(self, method: str, group: SequenceGroup | None) -> None:
        hit = group is None or group.group_id == 3 if self.probability is None else self.rng.random() < self.probability
        if hit and self.method in (method, "any"):
            raise KeyError("no such user")

    def key(self, group: SequenceGroup) -> Any:
        if self.method == "value" and group.group_id == 3:
            return self.value
        self._call("key", group)
        return group.priority, group.num_tokens

    def displaces(self, waiting: SequenceGroup, running: SequenceGroup) -> bool:
        self._call("displaces", waiting)
        return super().displaces(waiting, running)

    def prompt_limit(self, group: SequenceGroup, prompts: Sequence[tuple[SequenceGroup, int]]) -> int | None:
        self._call("prompt_limit", group)
        return None

    def lane(self, group: SequenceGroup) -> Hashable:
        self._call("lane", group)
        return group.priority

    def on_arrival(self, group: SequenceGroup) -> None:
        self._call("on_arrival", group)

    def on_admit(self, group: SequenceGroup) -> None:
        self._call("on_admit", group)

    def on_preempt(self, group: SequenceGroup) -> None:
        self._call("on_preempt", group)

    def on_step(self, now: float, running: Sequence[SequenceGroup]) -> None:
        self._call("on_step", None)

    def on_sequence_end(self, seq: groups.Sequence, status: Any) -> None:
        self._call("on_sequence_end", seq.group)

    def on_end(self, group: SequenceGroup) -> None:
        self._call("on_end", group)


NAME = f"{__name__}:{Raising.__name__}"


@pytest.fixture(autouse=True)
def _reset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("method", "probability", "value", "rng"):
        monkeypatch.setattr(Raising, name, getattr(Raising, name))


def serve(adapters: bool = False, batching: str = "mixed") -> Engine:
    """Two groups run; a third displaces one of them, or is displaced; one of its sequences ends before the other."""
    engine = make(
        blocks=8,
        adapters=adapter_options(2, 4) if adapters else None,
        scheduling_policy=NAME,
        max_num_seqs=4,
        batching=batching,
        preemption_mode="recompute",
    )
    ref = lora("A") if adapters else None
    of_third = 8 if Raising.method == "on_preempt" else 3
    for group_id, priority, n in [(1, 4, 1), (2, 5, 1), (3, of_third, 2), (4, 1, 1), (5, 6, 1)]:
        engine.add(request(group_id, 9, priority=priority, n=n, max_tokens=8, adapter=ref, arrival=float(group_id)))
        for _ in range(2):
            engine.step()
            check_accounting(engine)
            if Raising.method == "on_sequence_end" and 3 in engine.answers and engine.answers[3].tokens:
                engine.stop(3, 0)
    engine.run()
    check_nothing_held(engine)
    for group_id, answer in engine.answers.items():
        assert answer.finished
        if answer.group_reason is None:
            for index, tokens in answer.tokens.items():
                assert tokens == tokens_alone(answer.request, index, engine.max_model_len), group_id
    return engine


@pytest.mark.parametrize("batching", ["mixed", "prefill_first"])
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("method", ABOUT_GROUPS)
def test_the_group_that_a_policy_raises_about_fails_alone(method: str, adapters: bool, batching: str) -> None:
    Raising.method = method
    engine = serve(adapters, batching)
    failed = {i: a.error for i, a in engine.answers.items() if a.group_reason is not None}
    error = f"scheduling_policy {NAME!r}: {method}() raised KeyError: 'no such user'"
    assert failed == ({3: error} if method != "on_end" else {})  # it has all its tokens by then


@pytest.mark.parametrize("value", [None, float("nan"), "high", object()])
def test_a_key_that_cannot_be_compared_fails_its_group(value: Any) -> None:
    Raising.method, Raising.value = "value", value
    engine = serve()
    failed = {i: a.error for i, a in engine.answers.items() if a.group_reason is not None}
    assert list(failed) == [3]
    assert f"scheduling_policy {NAME!r}: key() raised" in str(failed[3])


class Flagged(Policy):
    """Every flag differs from the default."""

    dynamic = uses_targets = uses_clock = preemptive = waiting_keys_grow = limits_prompts = True
    uses_priority = ages = False

    def key(self, group: SequenceGroup) -> int:
        return 0


def test_a_guarded_policy_has_the_flags_of_the_policy() -> None:
    flags = [name for name, value in vars(Policy).items() if isinstance(value, bool)]
    assert "uses_clock" in flags
    guarded = load_policy(f"{__name__}:Flagged")
    for flag in flags:
        assert getattr(guarded, flag) == getattr(Flagged, flag) != getattr(Policy, flag), flag


def test_what_is_raised_about_no_group_ends_none(caplog: pytest.LogCaptureFixture) -> None:
    Raising.method = "on_step"
    engine = serve()
    assert all(a.group_reason is None for a in engine.answers.values())
    assert len([r for r in caplog.records if "on_step() raised KeyError" in r.getMessage()]) == 1


@pytest.mark.parametrize("probability", [0.01, 0.1, 1.0])
def test_whatever_a_policy_raises_every_request_ends(probability: float) -> None:
    Raising.method, Raising.probability = "any", probability
    for seed in range(15):
        Raising.rng = random.Random(seed)
        for answer in serve(adapters=seed % 3 == 0).answers.values():
            assert answer.group_reason is None or NAME in str(answer.error)


class Moody(Policy):
    """Its keys are other ones whenever they are asked for."""

    dynamic = waiting_keys_grow = True
    count = 0

    def key(self, group: SequenceGroup) -> int:
        self.count += 1
        return self.count

    def lane(self, group: SequenceGroup) -> Hashable:
        self.count += 1
        return self.count


def test_keys_and_lanes_that_are_never_the_same_end_nothing() -> None:
    engine = make(scheduling_policy=f"{__name__}:Moody", max_num_seqs=2)
    for group_id in range(1, 8):
        engine.add(request(group_id, 5, max_tokens=3))
    engine.run()
    check_nothing_held(engine)
    assert all(a.group_reason is None for a in engine.answers.values())


class Unmakeable(Policy):
    def __init__(self) -> None:
        raise RuntimeError("no table of users")

    def key(self, group: SequenceGroup) -> int:
        return 0


def test_a_policy_that_cannot_be_made_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"test_policies_raising:Unmakeable' cannot be made: .*no table of users"):
        load_policy(f"{__name__}:Unmakeable")
