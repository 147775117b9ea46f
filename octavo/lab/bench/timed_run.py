"""A workload on an engine in this process, by the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from octavo.core.outputs import RequestOutput
from octavo.core.sampling_params import SamplingParams
from octavo.engine.llm_engine import LLMEngine
from octavo.lab.simulate.figures import Completions
from octavo.lab.workloads.tokens import token_ids
from octavo.lab.workloads.work_items import WorkItem


def to_its_length(item: WorkItem) -> SamplingParams:
    """Greedy; the request states the length of its output."""
    return SamplingParams(temperature=0, max_tokens=item.output_len, ignore_eos=True, detokenize=False)


def run_timed(
    engine: LLMEngine,
    items: Iterable[WorkItem],
    params: Callable[[WorkItem], SamplingParams] = to_its_length,
    step: Callable[[], list[RequestOutput]] | None = None,
) -> Completions:
    """Sends each item when it is due and steps until all have ended, each with its user, priority and targets.

    The engine must have no other requests. Items come in the order of their arrival; times count from the call.
    ``params``: must make each end after its ``output_len``. ``step``: what watches the engine's steps.

    Raises:
        InvalidRequestError: an item is too long, or has a priority or targets that the policy does not look at.
    """
    done, start, upcoming = Completions(), time.monotonic(), iter(items)
    sent: dict[str, WorkItem] = {}
    ids = (0, engine.core.model_config.vocab_size - 1)
    following = next(upcoming, None)
    while following is not None or sent:
        while following is not None and start + following.at <= time.monotonic():
            number = len(done.sent) + sum(done.failed.values()) + len(sent)
            sent[str(number)] = following
            engine.add_request(
                str(number),
                following.prompt if isinstance(following.prompt, str) else token_ids(following, ids),
                params(following),
                arrival_time=start + following.at,
                priority=following.priority,
                user=following.user,
                ttft_target=following.ttft_target,
                tpot_target=following.tpot_target,
                streaming=False,
            )
            following = next(upcoming, None)
        if not sent:
            assert following is not None
            time.sleep(max(0.0, start + following.at - time.monotonic()))
            continue
        for output in (step or engine.step)():
            item, times = sent.pop(output.request_id), output.metrics
            reason = output.outputs[0].finish_reason
            if reason not in ("stop", "length") or times.first_token_time is None or times.finished_time is None:
                done.fail(item, str(reason))
                continue
            first, last = times.first_token_time - start, times.finished_time - start
            tokens = len(output.outputs[0].token_ids)
            done.add(int(output.request_id), item, item.at, first, last, tokens)
    return done
