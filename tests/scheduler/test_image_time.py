"""Images share a time per step beside decodes: their tokens come in chunks, features get the rest."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config.options import SchedulerOptions
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import EngineCoreRequest, Feature, Generate, PromptImage
from octavo.core.sampling_params import SamplingParams
from octavo.memory.block_manager import BlockManager
from octavo.scheduler.image_time import ImageTime
from tests.scheduler.fake_preparations import FakePreparations
from tests.scheduler.fake_worker import Engine, tokens_alone

#: Of the fake worker, seconds of a token.
TOKEN = 1e-3


def engine_with(image_time: ImageTime, *, steps: int = 0, prefix_caching: bool = False, **options: Any) -> Engine:
    """``steps``: between an image's first step and its features."""
    blocks = BlockManager(400, 4, prefix_caching=prefix_caching)
    settings = SchedulerOptions(**{"max_num_seqs": 8, "max_num_batched_tokens": 200, **options})
    engine = Engine(blocks, settings, 400, preparations=FakePreparations(steps=steps), image_time=image_time)
    engine.worker.seconds_per_step = 0.02
    return engine


def text(number: int, tokens: int = 4, answer: int = 200) -> EngineCoreRequest:
    return request_of(number, [1 + number % 5] * tokens, answer)


def request_of(number: int, prompt: list[int], answer: int, **fields: Any) -> EngineCoreRequest:
    task = Generate(SamplingParams(max_tokens=answer), 1, [])
    return EngineCoreRequest(group_id=number, prompt_token_ids=prompt, task=task, arrival_time=0.0, **fields)


def picture(number: int, *lengths: int, image: str = "", is_whole: bool = False, answer: int = 3) -> EngineCoreRequest:
    """Features of these lengths, each behind two tokens of text, and three tokens of text at the end."""
    features, end, key = [], 0, image or f"image {number}"
    for length in lengths:
        features.append(Feature(end + 2, length, f"{key} {end}".encode(), key, 0, is_whole))
        end += 2 + length
    images = [PromptImage(key, b"", 1)]
    return request_of(number, [6] * (end + 3), answer, features=features, images=images)


def chunks_of(engine: Engine, number: int) -> list[int]:
    """The tokens of a request's prompt in each step that had any, until it is computed."""
    counts, left = [], len(engine.answers[number].request.prompt_token_ids)
    for plan in engine.plans:
        count = engine.computed(plan).get(number, 0)
        if left > 0 and count:
            counts.append(count)
            left -= count
    return counts


def with_texts(image_time: ImageTime, *requests: EngineCoreRequest, num_texts: int = 4, **options: Any) -> Engine:
    """Runs requests beside texts that decode."""
    engine = engine_with(image_time, **options)
    for number in range(num_texts):
        engine.add(text(100 + number))
    for _ in range(5):
        engine.step()
    for request in requests:
        engine.add(request)
    engine.run()
    for answer in engine.answers.values():
        assert answer.tokens[0] == tokens_alone(answer.request, 0, 400)
    return engine


def test_tokens_of_an_image_take_their_time_of_a_step_and_texts_none() -> None:
    """At first few, until their cost is known; text tokens around them do not count."""
    engine = with_texts(ImageTime(30 * TOKEN), picture(1, 120))
    first, *others, last = chunks_of(engine, 1)
    assert first == 2 + 16 and {*others} <= {29, 30} and last < 30
    engine = with_texts(ImageTime(30 * TOKEN), text(2, 150, 3), picture(1, 120))
    assert chunks_of(engine, 2) == [150] and max(chunks_of(engine, 1)) in (31, 32)


def test_without_decodes_prompts_are_computed_at_once() -> None:
    engine = engine_with(ImageTime(10 * TOKEN))
    engine.add(picture(1, 120))
    engine.run()
    assert chunks_of(engine, 1) == [125]


def test_without_a_clock_in_common_the_tokens_are_not_limited() -> None:
    engine = with_texts(ImageTime(10 * TOKEN, learns=False), picture(1, 120))
    assert chunks_of(engine, 1) == [125]


def test_prompts_share_the_time_and_none_stands_still() -> None:
    """Each computes a token a step at least, so that those behind it in the queue are admitted."""
    engine = with_texts(ImageTime(24 * TOKEN), *(picture(n, 60) for n in range(1, 4)), max_num_seqs=16)
    for plan in engine.plans[8:]:
        counts = engine.computed(plan)
        prompts = [count for number, count in counts.items() if number < 4 and count > 1]
        assert sum(prompts) <= 24 + 3 * (2 + 3) + 3
    assert max(len(chunks_of(engine, n)) for n in range(1, 4)) <= 14


def test_a_whole_image_is_not_cut() -> None:
    engine = with_texts(ImageTime(10 * TOKEN), picture(1, 60, 50, is_whole=True))
    assert sum(chunks_of(engine, 1)) == 117 and max(chunks_of(engine, 1)) >= 60


def test_several_images_of_a_prompt() -> None:
    engine = with_texts(ImageTime(20 * TOKEN), picture(1, 30, 1, 1, 40))
    assert chunks_of(engine, 1) == [2 + 16, 14 + 2 + 1 + 2 + 1 + 2 + 4, 20, 16 + 3]


def test_what_is_in_the_prefix_cache_costs_nothing() -> None:
    engine = with_texts(ImageTime(20 * TOKEN), picture(1, 80, image="a", answer=1), prefix_caching=True)
    engine.add(text(50))
    for _ in range(3):
        engine.step()
    engine.add(picture(2, 80, image="a"))
    engine.run()
    assert sum(chunks_of(engine, 2)) < 8


def seconds_of(plans: list[StepPlan]) -> list[float]:
    return [round(plan.compute_seconds / TOKEN) for plan in plans]


def test_features_get_what_the_tokens_leave() -> None:
    """While features are computed, tokens take half of the time at most."""
    engine = engine_with(ImageTime(40 * TOKEN), steps=12)
    for number in range(4):
        engine.add(text(100 + number))
    engine.add(picture(1, 30))
    for _ in range(16):
        engine.step()
    assert not any(seconds_of(engine.plans[14:])), "no features are computed"
    engine.add(picture(2, 120))
    engine.add(picture(3, 30))
    start = len(engine.plans)
    engine.run()
    assert set(seconds_of(engine.plans[start : start + 12])) == {40}
    beside = [p for p in engine.plans[start:] if engine.computed(p).get(2, 0) > 1 and p.compute_seconds]
    assert len(beside) > 4
    assert set(seconds_of(beside[1:-1])) <= {20, 21} and {engine.computed(p)[2] for p in beside[1:-1]} <= {19, 20}


def test_the_cost_of_a_token_does_not_count_decodes_and_features() -> None:
    image_time = ImageTime(20 * TOKEN)
    with_texts(image_time, picture(1, 90), num_texts=6)
    assert image_time.seconds_per_token == pytest.approx(TOKEN, rel=1e-6)


# Features that nobody waits for any more


def test_features_are_given_up_with_their_last_request() -> None:
    engine = engine_with(ImageTime(), steps=9)
    engine.add(text(100))
    for number in (1, 2):
        engine.add(picture(number, 20, image="a"))
    for _ in range(3):
        engine.step()
    preparations = engine.scheduler.preparations
    engine.abort(1)
    engine.step()
    assert list(engine.worker.preparations.preparing) == ["a"] and preparations.num_computing == 1
    engine.abort(2)
    assert preparations.num_computing == 0 and "a" not in preparations.by_key
    plan = engine.step()
    assert not engine.worker.preparations.preparing and engine.plans[-1] is plan
    assert [p.drop for p in engine.plans if p.drop] == [["a"]]
    engine.add(picture(3, 20, image="a"))
    engine.run()
    assert engine.worker.preparations.num_begun == 2


def test_one_that_no_worker_has_begun_is_not_dropped() -> None:
    engine = engine_with(ImageTime())
    preparations = engine.scheduler.preparations
    engine.add(text(100))
    engine.step()
    engine.add(picture(1, 20))
    preparations.begin(0.0)
    engine.abort(1)
    engine.run()
    assert not any(plan.drop or plan.prepare for plan in engine.plans)


def test_a_late_report_of_what_was_given_up_does_not_count() -> None:
    """With steps in flight, a worker may report features that the scheduler drops, and wants again."""
    engine = engine_with(ImageTime())
    preparations = engine.scheduler.preparations
    group = engine.scheduler.queues.add(picture(1, 20, image="a"))
    plans = [StepPlan(1), StepPlan(2), StepPlan(3)]
    preparations.begin(0.0)
    preparations.add_to(plans[0])
    preparations.remove_waiting(group)
    preparations.add_waiting(group)
    preparations.begin(0.0)
    preparations.add_to(plans[1])
    assert (plans[1].drop, [p.key for p in plans[1].prepare]) == (["a"], ["a"])
    preparations.update(plans[0], StepResult(1, prepared=["a"]))
    assert preparations.by_key["a"].is_preparing
    preparations.update(plans[2], StepResult(3, prepared=["a"]))
    assert not preparations.by_key["a"].is_preparing
