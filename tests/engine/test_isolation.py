"""A request at which the scheduler itself raises, wherever that is: it costs itself, and no other request a bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo import LLM, PoolingParams, SamplingParams
from octavo.core.sampling_params import RequestOutputKind
from octavo.engine.llm_engine import LLMEngine
from octavo.scheduler import scheduler as scheduler_module
from octavo.scheduler.admission import Admission
from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.running import Running
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.state import SchedulingState
from octavo.scheduler.step_results import Results
from tests.embedding_models import make_encoder
from tests.engine.test_resumption import PARAMS, PROMPTS, engine, finish
from tests.whole_outputs import everything

DELTA = RequestOutputKind.DELTA
LONG = SamplingParams(temperature=1.0, seed=1, n=2, max_tokens=40, ignore_eos=True, output_kind=DELTA)
#: Its user's name tells the request at which the scheduler raises.
POISON = "poison"


def is_poison(group: SequenceGroup) -> bool:
    return group.request.options.user == POISON


def holds_poison(scheduler: Scheduler, tokens: int = 0) -> bool:
    """Whether it is in the scheduler with so many tokens of output."""
    groups = scheduler.queues.groups.values()
    return any(is_poison(g) and any(len(s.token_ids) >= s.num_prompt_tokens + tokens for s in g.seqs) for g in groups)


def raise_of(method: str) -> None:
    raise IndexError(f"in {method}")


def before(patch: pytest.MonkeyPatch, owner: Any, name: str, guilty: Callable[..., bool]) -> None:
    """Has a function raise before it does anything, where ``guilty`` says so of its arguments."""
    original = getattr(owner, name)

    def raising(*args: Any, **options: Any) -> Any:
        if guilty(*args):
            raise_of(name)
        return original(*args, **options)

    patch.setattr(owner, name, raising)


def after(patch: pytest.MonkeyPatch, owner: Any, name: str, guilty: Callable[..., bool]) -> None:
    """Has a function raise when it has done everything."""
    original = getattr(owner, name)

    def raising(*args: Any, **options: Any) -> Any:
        answer = original(*args, **options)
        if guilty(*args):
            raise_of(name)
        return answer

    patch.setattr(owner, name, raising)


#: Where the scheduler raises, at the beginning of the request or when it has 5 tokens.
PLACES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "add": lambda p: before(p, Scheduler, "add", lambda s, request: request.options.user == POISON),
    "after it was added": lambda p: after(p, SchedulingState, "add", lambda q, request: request.options.user == POISON),
    "admission": lambda p: before(p, Admission, "admit_waiting", lambda a, group, step: is_poison(group)),
    "look-up of the prefix": lambda p: before(p, Admission, "_match", lambda a, group: is_poison(group)),
    "when it was admitted": lambda p: after(p, SchedulingState, "start_running", lambda q, group: is_poison(group)),
    "in the middle of admission": lambda p: after(p, SchedulingState, "_remove", lambda q, group: is_poison(group)),
    "schedule": lambda p: before(p, Scheduler, "schedule", holds_poison),
    "schedule, with 5 tokens": lambda p: before(p, Scheduler, "schedule", lambda s: holds_poison(s, 5)),
    "a plan that is lost": lambda p: after(p, Scheduler, "schedule", lambda s: holds_poison(s, 5)),
    "decode": lambda p: before(
        p, Running, "_decode", lambda r, group, step: is_poison(group) and len(group.seqs[0].token_ids) > 30
    ),
    "advance": lambda p: after(
        p, scheduler_module, "advance", lambda queues, step: any(is_poison(s.group) for s in step.decodes.seqs)
    ),
    "update": lambda p: before(p, Scheduler, "update", lambda s, plan, result: holds_poison(s, 5)),
    "update that is lost": lambda p: after(p, Scheduler, "update", lambda s, plan, result: holds_poison(s, 5)),
    "registering": lambda p: before(
        p, Results, "_register_filled", lambda r, step: any(is_poison(seq.group) for seq, _ in step.filled)
    ),
    "its end": lambda p: before(p, SchedulingState, "end_sequence", lambda q, seq, status: is_poison(seq.group)),
}


def serve(model: Path, poison: bool = True, **options: Any) -> tuple[LLMEngine, list[Any], Any]:
    """The answers of 16 streams, and the output of the request at which the scheduler raises."""
    llm = engine(model, **options)
    for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True), len(PROMPTS)):
        if isinstance(params, SamplingParams):
            params = msgspec.structs.replace(params, output_kind=DELTA)
        llm.add_request(str(number), prompt + " again", params)
    first = []
    for _ in range(3):
        first += llm.step()
    if poison:
        llm.add_request("poison", "the quick brown fox jumps", LONG, user=POISON)
    outputs = {output.request_id: output for output, _ in finish_from(llm, first)}
    its = outputs.pop("poison", None)
    return llm, [everything(outputs[name]) for name in sorted(outputs)], its


def finish_from(llm: LLMEngine, first: list[Any]) -> list[Any]:
    """As ``finish``, of an engine that has given these outputs."""
    step, held = llm.step, [first]
    llm.step = lambda: [*held.pop(), *step()] if held else step()  # type: ignore[method-assign]
    return finish(llm)


@pytest.fixture(scope="module")
def right(tiny_model: Path) -> list[Any]:
    return serve(tiny_model, poison=False)[1]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": True},
        pytest.param(
            {"num_gpu_blocks_override": 60, "preemption_mode": "swap", "num_host_blocks_override": 60},
            marks=pytest.mark.slow,
        ),
        pytest.param({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, marks=pytest.mark.slow),
    ],
    ids=["one step", "two steps", "swapping", "drafts"],
)
def test_a_request_at_which_the_scheduler_raises_costs_itself_alone(
    place: str, options: dict[str, Any], tiny_model: Path, right: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        PLACES[place](patch)
        llm, answers, its = serve(tiny_model, **options)
    assert answers == right
    assert its is not None and its.finished
    if place == "its end":  # all of its tokens were there
        assert [(c.finish_reason, len(c.token_ids)) for c in its.outputs] == [("length", 40)] * 2
    else:
        assert {completion.finish_reason for completion in its.outputs} == {"error"}
        assert all("IndexError" in completion.error for completion in its.outputs)
    stats = llm.core.scheduler.stats()
    assert (stats.blocks_used, stats.num_running, stats.num_waiting, stats.num_swapped) == (0, 0, 0, 0)
    assert not llm.core.has_work


def test_the_engine_goes_on_after_many_of_them(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PLACES["schedule"](monkeypatch)
    llm = engine(tiny_model)
    whole = [everything(output) for output, _ in finish(llm)]
    for _ in range(10):
        llm.add_request("poison", "x", LONG, user=POISON)
        [its] = [output for output, _ in finish(llm)]
        assert its.outputs[0].finish_reason == "error"
    llm = engine(tiny_model)
    assert [everything(output) for output, _ in finish(llm)] == whole


def test_an_abort_at_which_the_scheduler_raises(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [everything(output) for output, _ in finish(engine(tiny_model))]
    llm = engine(tiny_model)
    llm.add_request("poison", "x", LONG, user=POISON)
    first = llm.step()
    with monkeypatch.context() as patch:
        before(patch, SchedulingState, "end_group", lambda q, group, status: is_poison(group))
        llm.abort_request("poison")
        outputs = [output for output, _ in finish_from(llm, [o for o in first if o.request_id != "poison"])]
    assert [everything(output) for output in outputs] == whole


def test_where_only_company_fails_requests_go_on_one_at_a_time(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [everything(output) for output, _ in finish(engine(tiny_model))]
    before(monkeypatch, Scheduler, "schedule", lambda scheduler: len(scheduler.queues.groups) > 1)
    assert [everything(output) for output, _ in finish(engine(tiny_model))] == whole


def test_a_scheduler_that_always_raises_ends_each_request(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine(tiny_model)
    before(monkeypatch, Scheduler, "schedule", lambda scheduler: True)
    assert {o.finish_reason for output, _ in finish(llm) for o in output.outputs} == {"error"}


def test_vectors_go_on_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(make_encoder(tmp_path)), max_num_batched_tokens=16)
    texts = [f"a river {i}" for i in range(9)]
    alone = [output.outputs.data.tobytes() for output in llm.encode(texts, use_tqdm=False)]
    PLACES["admission"](monkeypatch)
    users = ["", POISON, *[""] * 7]
    outputs = llm.encode(texts, PoolingParams(task="embed"), user=users, use_tqdm=False)
    assert [o.outputs.data.tobytes() for o in outputs[:1] + outputs[2:]] == alone[:1] + alone[2:]
    assert "IndexError" in str(outputs[1].outputs.error)
