"""Generated traffic: whatever arrives, grows, is aborted or preempted, every request gets the tokens it gets alone."""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest

from octavo.config.kv_spec import STATE_WINDOW, GroupBlocks, window_blocks
from octavo.config.options import SchedulerOptions
from octavo.core.errors import AdapterError
from octavo.core.request import (
    AnyTask,
    Beam,
    EncoderInput,
    EngineCoreRequest,
    Feature,
    Generate,
    PromptImage,
    RequestOptions,
    SequenceStatus,
)
from octavo.core.sampling_params import BeamSearchParams, SamplingParams
from octavo.memory.block_manager import BlockManager
from octavo.scheduler.groups import Sequence, SequenceGroup
from octavo.scheduler.image_time import ImageTime
from octavo.scheduler.policies import POLICIES, Policy
from octavo.scheduler.preparations import PreparationState
from octavo.speculation.drafter import DraftedSequence, Drafter
from tests.scheduler.fake_preparations import (
    IMAGE_MEMORY,
    FakePreparations,
    adapter_options,
    grammar,
    limits_for,
    load,
    lora,
    prompt_adapter,
)
from tests.scheduler.fake_stores import FakeStores
from tests.scheduler.fake_worker import (
    EOS,
    VOCABULARY,
    Answer,
    Engine,
    check_accounting,
    check_nothing_held,
    hypotheses_alone,
    tokens_alone,
    watch_displacement,
)

MAX_STEPS = 3000


class Guessing(Drafter):
    """Guesses what the fake model gives, and is wrong now and then."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def propose(self, sequence: DraftedSequence, num_tokens: int) -> list[int]:
        assert isinstance(sequence, Sequence)
        request = sequence.group.request
        known = len(sequence.token_ids) - sequence.num_prompt_tokens
        guesses = tokens_alone(request, sequence.index, 1000)[known : known + self._rng.randint(0, num_tokens)]
        if guesses and self._rng.random() < 0.4:
            guesses[self._rng.randrange(len(guesses))] ^= 1
        return guesses


class FewestSequencesFirst(Policy):
    """A policy of a user's own."""

    def key(self, group: SequenceGroup) -> int:
        return group.request.task.num_sequences


OWN_POLICY = f"{__name__}:FewestSequencesFirst"


class GroupCase(NamedTuple):
    """A group of KV layers."""

    window: int | None = None
    #: Its blocks as a share of those it could use at most.
    share: float = 1.0
    #: Of recurrent states: blocks of the other groups between two checkpoints.
    ratio: int | None = None


@dataclass(frozen=True)
class Case:
    """All that a run depends on."""

    seed: int
    block_size: int
    num_blocks: int
    num_host_blocks: int
    watermark: float
    prefix_caching: bool
    host_cache: bool
    options: SchedulerOptions
    max_model_len: int
    num_requests: int
    abort_rate: float
    failure_rate: float
    #: Most steps in flight.
    depth: int
    #: Of LoRA adapters: slots, and places in host memory; None: requests have none.
    slots: tuple[int, int] | None = None
    groups: tuple[GroupCase, ...] = (GroupCase(),)
    #: Whether some requests have a grammar.
    grammars: bool = False
    #: Whether there are drafts, some of them right.
    drafts: bool = False
    #: Whether most requests have an input for an encoder.
    contexts: bool = False
    #: Whether most prompts have images.
    images: bool = False
    #: Whether there are KV stores, which an engine before it has filled.
    stores: bool = False


def make_case(seed: int) -> Case:
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 3, 4, 5])
    num_blocks = rng.randint(4, rng.choice([8, 12, 24]))
    max_num_seqs = rng.choice([1, 3, 4, 5, 6, 8, 8])
    batching = rng.choice(["mixed", "prefill_first"])
    policy = rng.choice([*POLICIES, OWN_POLICY])
    chunked = rng.random() < 0.7
    max_model_len = min(num_blocks * block_size, rng.choice([20, 40, 60]))
    threshold = rng.choice([0, 0, 3, 8])
    delay = rng.choice([0.0, 0.0, 0.5, 2.0])
    least = max(max_num_seqs, 1 if chunked else max_model_len)
    options = SchedulerOptions(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=least + rng.choice([0, 1, 3, 8, 30] if batching == "mixed" else [8, 30]),
        batching=batching,
        scheduling_policy=policy,
        user_weights={"a": 3.0} if policy == "fair" else None,
        ttft_target=5.0 if policy == "deadline" and seed % 2 else None,
        preemption_mode=rng.choice(["auto", "recompute", "swap", "by_sequences"]),
        preemption_victim=rng.choice(["last", "least_computed", "most_blocks"]),
        priority_preemption=policy == "static" and rng.random() < 0.6,
        aging_limit=rng.choice([None, 0.0, 5.0, 20.0, 60.0]),
        enable_chunked_prefill=chunked,
        max_num_partial_prefills=rng.choice([None, None, 1, 2]),
        long_prefill_token_threshold=threshold,
        scheduler_delay_factor=delay if batching == "prefill_first" else 0.0,
    )
    return Case(
        seed=seed,
        block_size=block_size,
        num_blocks=num_blocks,
        num_host_blocks=rng.choice([0, 2, 6, 16]),
        watermark=rng.choice([0.0, 0.05, 0.3]),
        prefix_caching=rng.random() < 0.6,
        host_cache=rng.random() < 0.5,
        options=options,
        max_model_len=max_model_len,
        num_requests=rng.randint(3, 10),
        abort_rate=rng.choice([0.0, 0.0, 0.05, 0.2]),
        failure_rate=rng.choice([0.0, 0.0, 0.0, 0.05]),
        depth=rng.choice([1, 2, 2, 3]),
    )


class Run:
    """One generated run."""

    def __init__(self, case: Case, *, shares_prefixes: bool = False, stores: FakeStores | None = None) -> None:
        """``shares_prefixes``: prefixes are pinned and released now and then."""
        self.case = case
        self.rng = random.Random(case.seed + 1)
        in_flight = case.options.token_budget * case.depth
        sizes = []
        for window, share, ratio in case.groups:
            size, count = case.block_size * (ratio or 1), case.num_blocks
            if window is not None:  # enough for one sequence, in the shortest chunks that may be, or more
                chunk = 1 if case.options.cuts_prompts else -(-in_flight // size)
                one = min(-(-case.max_model_len // size), chunk + window_blocks(window, size))
                count = one + int(share * (count - one))
            state_tokens = None if ratio is None else size
            sizes.append(GroupBlocks(count, case.num_host_blocks, window, state_tokens=state_tokens))
        blocks = BlockManager(
            sizes,
            case.block_size,
            watermark=case.watermark,
            prefix_caching=case.prefix_caching,
            host_cache=case.host_cache,
            max_num_batched_tokens=in_flight,
            cuts_prompts=case.options.cuts_prompts,
            stores=None if stores is None else stores.limits(),
        )
        self.adapter_rng = random.Random(case.seed + 3)
        self.grammar_rng = random.Random(case.seed + 4)
        adapters = adapter_options(*case.slots) if case.slots else None
        self.engine = Engine(
            blocks,
            case.options,
            case.max_model_len,
            max_in_flight=case.depth,
            preparations=FakePreparations(limits_for(adapters), self.adapter_rng.choice([0, 0, 1, 3])),
            drafter=Guessing(case.seed) if case.drafts else None,
            stores=stores,
            image_time=ImageTime(random.Random(case.seed + 7).choice([0.0, 0.003, 0.05])),
        )
        watch_displacement(self.engine.scheduler, self.engine.worker)
        #: Adapters that requests name, and those of them whose loads fail now.
        self.refs = [*map(lora, "ABCDE"), *map(prompt_adapter, "PQR")]
        # Sometimes there are so few candidates that beams become fewer.
        self.own_rng = random.Random(case.seed)
        self.engine.worker.vocabulary = self.own_rng.choice([VOCABULARY, 2])
        self.engine.worker.seconds_per_move = self.rng.choice([1e-5, 1e-1])
        self.context_rng = random.Random(case.seed + 5)
        self.image_rng = random.Random(case.seed + 6)
        self.prefixes = [self._tokens(20) for _ in range(2)]
        self.added = 0
        self.pin_rng = random.Random(case.seed + 2)
        self.pin_rate = self.pin_rng.choice([0.0, 0.1, 0.4]) if shares_prefixes and case.prefix_caching else 0.0
        #: By name, which is that of its latest request.
        self.pinned: dict[str, EngineCoreRequest] = {}

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(1, VOCABULARY) for _ in range(count)]

    def request(self) -> EngineCoreRequest:
        rng, limit = self.rng, self.case.max_model_len
        length = rng.randint(1, min(limit - 1, rng.choice([4, 8, 8, 40])))
        shared = rng.randint(0, length) if rng.random() < 0.7 else 0
        prompt = (rng.choice(self.prefixes)[:shared] + self._tokens(length))[:length]
        max_tokens = rng.choice([1, 4, 10, 20, None])
        n = rng.choice([1, 1, 1, 2, 3, 4])
        penalty = 0.5 if rng.random() < 0.08 else 0.0  # its sampling looks at tokens
        params = SamplingParams(n=n, max_tokens=max_tokens, logprobs=rng.choice([None, 2]), presence_penalty=penalty)
        task: AnyTask = Generate(params, rng.randrange(1000), [EOS])
        if rng.random() < 0.25:
            beam = BeamSearchParams(
                beam_width=rng.randint(2, 4),
                max_tokens=max_tokens or 9,
                early_stopping=rng.choice([True, False, "never"]),
            )
            task = Beam(beam, [EOS])
        elif self.own_rng.random() < 0.1:
            params.max_tokens = 0
        if isinstance(task, Generate) and self.case.grammars and self.grammar_rng.random() < 0.7:
            task.grammar = grammar(self.grammar_rng.choice("ABCDE"))
        self.added += 1
        images, features = self.images(length) if self.case.images else ([], [])
        return EngineCoreRequest(
            images=images,
            features=features,
            group_id=self.added,
            prompt_token_ids=prompt,
            task=task,
            arrival_time=self.engine.now,
            options=RequestOptions(
                priority=rng.randint(0, 3),
                cache_salt=rng.choice(["", "", "other"]),
                user=self.own_rng.choice("abc"),
                ttft_target=self.own_rng.choice([None, 2.0, 30.0]),
                tpot_target=self.own_rng.choice([None, 1.0]),
            ),
            adapter=self.adapter_rng.choice([None, None, *self.refs]) if self.case.slots else None,
            encoder_input=self.encoder_input() if self.case.contexts else None,
        )

    def encoder_input(self) -> EncoderInput | None:
        """One of a few, or none."""
        number = self.context_rng.randrange(5)
        tokens = [0, 1, 5, 9, 3 * self.case.block_size][number]
        return EncoderInput("tokens", f"input {number}", tokens, b"") if tokens else None

    def images(self, length: int) -> tuple[list[PromptImage], list[Feature]]:
        """Some of a few images, with features anywhere in a prompt, that fit into memory together."""
        rng = self.image_rng
        images: dict[str, PromptImage] = {}
        features, position = [], rng.choice([0, 0, 1, 5])
        while position < length and rng.random() < 0.7:
            number = rng.randrange(5)
            key, size = f"image {number}", 1 + number % 3
            count = min(1 + number, length - position)
            if key not in images and sum(image.size for image in images.values()) + size > IMAGE_MEMORY:
                break
            images[key] = PromptImage(key, b"pixels of %d" % number, size)
            # As a prefix is shared, tokens are those that requests have there by chance.
            is_whole = number in (1, 3) and count <= self.case.options.token_budget - self.case.options.max_num_seqs
            features.append(Feature(position, count, f"{key}, {count}".encode(), key, 0, is_whole))
            position += count + rng.choice([0, 1, 2])
        return list(images.values()), features

    def share_prefix(self) -> None:
        """Pins a prefix, or releases one that is pinned."""
        rng = self.pin_rng
        if rng.random() >= self.pin_rate:
            return
        name = rng.choice("ab")
        known = self.pinned.get(name)
        if known is not None and not self.engine.answers[known.group_id].finished:
            return  # not computed yet
        self.engine.blocks.pinned.remove(name)
        if known is not None and rng.random() < 0.5:
            del self.pinned[name]
            return
        count = rng.randint(1, max(1, min(20, self.case.max_model_len)))
        prompt = rng.choice(self.prefixes)[:count]
        if len(prompt) <= self.case.max_model_len:
            task = Generate(SamplingParams(max_tokens=0), 0, [])
            group_id = 1000 + self.pin_rng.randrange(10**9)
            request = EngineCoreRequest(
                group_id=group_id,
                prompt_token_ids=prompt,
                task=task,
                arrival_time=self.engine.now,
                options=RequestOptions(pin_as=name),
            )
            self.pinned[name] = request
            self.engine.add(request)

    def disturb_adapters(self) -> None:
        """Pins and unpins adapters; makes loads fail for a while."""
        rng, preparations = self.adapter_rng, self.engine.scheduler.preparations
        if rng.random() < 0.05:
            ref = rng.choice(self.refs)
            with contextlib.suppress(AdapterError):
                preparations.pin(load(ref), ref.name)
        if rng.random() < 0.1:
            preparations.unpin(rng.choice(self.refs).key)
        if rng.random() < 0.1:
            self.engine.worker.preparations.failing[rng.choice(self.refs).key] = "unreadable"

    def disturb_grammars(self) -> None:
        """Makes grammars fail for a while."""
        rng = self.grammar_rng
        if rng.random() < 0.1:
            self.engine.worker.preparations.failing[grammar(rng.choice("ABCDE")).key] = "unusable"

    def check_pinned(self) -> None:
        """A pinned prefix is found whole, or up to its last checkpoint of states, until it is released."""
        step = max((g.block_size for g in self.engine.blocks.groups if g.has_states), default=1)
        for name, request in self.pinned.items():
            tokens, blocks = request.prompt_token_ids, self.engine.blocks
            answer = self.engine.answers[request.group_id]
            if answer.group_reason != "length":
                assert name not in blocks.pinned._blocks
                continue
            longer = [*tokens, 1]
            assert (
                blocks.prefixes.match(longer, blocks.prefixes.chain(longer, request.cache_context)).num_tokens
                >= len(tokens) // step * step
            )

    def disturb(self) -> None:
        """Aborts a group, or ends a sequence that has sampled, now and then."""
        rng = self.rng
        if rng.random() >= self.case.abort_rate:
            return
        open_ = [a for a in self.engine.answers.values() if not a.finished]
        if not open_:
            return
        answer = rng.choice(open_)
        sampled = [i for i in answer.tokens if i not in answer.reasons]
        if sampled and isinstance(answer.request.task, Generate) and rng.random() < 0.6:
            self.engine.stop(answer.request.group_id, rng.choice(sampled))
        else:
            self.engine.abort(answer.request.group_id)

    def __call__(self) -> None:
        engine, rng = self.engine, self.rng
        for _ in range(MAX_STEPS):
            while self.added < self.case.num_requests and rng.random() < 0.6:
                engine.add(self.request())
            if self.added == self.case.num_requests and not engine.loop.has_work:
                break
            self.disturb()
            self.share_prefix()
            self.engine.worker.preparations.failing = {}
            if self.case.slots:
                self.disturb_adapters()
            if self.case.grammars:
                self.disturb_grammars()
            self.step()
            self.check_pinned()
            engine.now += rng.choice([0.1, 1.0, 5.0])
        else:
            raise AssertionError(f"still busy after {MAX_STEPS} steps: {engine.queues}")
        check_nothing_held(engine)
        for answer in engine.answers.values():
            self.check_answer(answer)

    def step(self) -> None:
        groups = list(self.engine.scheduler.queues.groups.values())
        compiling = {g.group_id for g in groups if self.waits_for_preparation(g) or g.is_held}
        before = {g.group_id: (g, g.status) for g in groups}

        def between() -> None:
            self.check_bound(before, compiling)
            self.disturb()

        where = self.rng.choice(["before moving", "before computing"])
        # An engine whose own request fails twice in a row gives up.
        spares = self.engine.loop._isolation.is_probing or self.engine.loop._isolation._probes
        fails = self.rng.random() < self.case.failure_rate and not spares
        plan = self.engine.step(between, where if fails else "")
        assert plan.total_tokens <= self.case.options.token_budget
        check_accounting(self.engine)

    def waits_for_preparation(self, group: SequenceGroup) -> bool:
        by_key = self.engine.scheduler.preparations.by_key
        needs = [p for p in group.preparations if p.kind in ("grammar", "encoder_input", "image")]
        return any(by_key[p.key].state is not PreparationState.READY for p in needs)

    def check_bound(self, before: dict[int, tuple[SequenceGroup, SequenceStatus]], compiling: set[int]) -> None:
        """No later arrival is admitted or kept running before a group that has waited beyond the ageing limit.

        But groups in ``compiling``, whose grammar or input is not prepared, hold up no others.
        """
        limit, now = self.case.options.aging_limit, self.engine.now
        if limit is None or not self.engine.scheduler.queues.policy.ages:
            return
        running = {g.group_id for g in self.engine.scheduler.queues.running}
        for group, status in before.values():
            outside = group.status in (SequenceStatus.WAITING, SequenceStatus.SWAPPED)
            if not outside or now - group.request.arrival_time <= limit or group.group_id in compiling:
                continue
            if group.request.images and self.waits_for_preparation(group):
                continue  # one of its images made room for those of a group that goes before it
            if any(thing.is_preparing for thing in self.engine.scheduler.preparations.needs(group)):
                continue  # has its place
            takes_scarce = needs_scarce(group)
            for other_id in running & before.keys():  # others: suspects of a failed step, and the engine's own request
                other, was = before[other_id]
                if takes_scarce and not needs_scarce(other):
                    continue  # goes on while slots become free
                if other.arrival > group.arrival:
                    kept = status is SequenceStatus.RUNNING
                    came_in = was is not SequenceStatus.RUNNING
                    if takes_scarce and not came_in:
                        continue  # ends first, if it has the slot that the group waits for
                    assert not came_in and not kept, f"{other_id} went before {group.group_id}"

    def check_answer(self, answer: Answer) -> None:
        request, limit = answer.request, self.case.max_model_len
        assert answer.finished
        if answer.group_reason is not None and answer.hypotheses is None:
            assert answer.group_reason in ("abort", "ignored", "error") or not request.task.samples
            assert (answer.error is None) == (answer.group_reason in ("abort", "length"))
            if answer.error == "unreadable":
                assert request.adapter is not None and answer.group_reason == "error"
                return
            if answer.error == "unusable":
                assert isinstance(request.task, Generate) and request.task.grammar and answer.group_reason == "error"
                return
        plain = request.options.pin_as is None and request.encoder_input is None
        if request.task.num_sequences == 1 and not self.case.failure_rate and plain:
            reasons = ("max_num_batched_tokens", "an image of")
            refused = any(reason in (answer.error or "") for reason in reasons)
            assert answer.group_reason in (None, "abort", "length") or refused
        if isinstance(request.task, Beam):
            assert not answer.tokens
            if answer.group_reason == "stop":
                assert answer.hypotheses == hypotheses_alone(request, limit, self.engine.worker.vocabulary)
            return
        for index, tokens in answer.tokens.items():
            alone = tokens_alone(request, index, limit)
            reason = answer.reasons.get(index)
            if reason in ("stop", "length"):
                assert tokens == alone
                assert (reason == "stop") == (alone[-1] == EOS)
            else:
                assert tokens == alone[: len(tokens)]


def needs_scarce(group: SequenceGroup) -> bool:
    """Whether it needs something of which running groups may hold all there is."""
    return group.request.adapter is not None or bool(group.request.images)


#: Full layers with others that have a short and a long window; all layers with a window.
WITH_WINDOWS: list[tuple[GroupCase, ...]] = [
    (GroupCase(), GroupCase(3, 0.0)),
    (GroupCase(), GroupCase(9, 0.3), GroupCase(1), GroupCase()),
    (GroupCase(4, 0.0),),
    (GroupCase(6, 0.0), GroupCase(2)),
]
#: Full layers with states, with few of them, and with a window too; states alone.
WITH_STATES: list[tuple[GroupCase, ...]] = [
    (GroupCase(), GroupCase(STATE_WINDOW, 0.3, 2)),
    (GroupCase(), GroupCase(STATE_WINDOW, 0.0, 3)),
    (GroupCase(), GroupCase(4, 0.3), GroupCase(STATE_WINDOW, 0.5, 4)),
    (GroupCase(STATE_WINDOW, 0.4, 1),),
    (GroupCase(), GroupCase(STATE_WINDOW, 0.2, 1)),
]


def run_cases(
    first: int,
    count: int,
    groups: list[tuple[GroupCase, ...]] | None = None,
    *,
    adapters: bool = False,
    grammars: bool = False,
    contexts: bool = False,
    images: bool = False,
    stores: bool = False,
) -> None:
    for seed in range(first, first + count):
        case = make_case(seed)
        if groups is not None:
            size = 1 + seed % 2  # long against the windows
            count = -(-case.max_model_len // size) + seed % 7
            case = replace(case, block_size=size, num_blocks=count, groups=groups[seed // 2 % len(groups)])
        if groups is WITH_STATES:
            case = replace(case, drafts=seed % 3 > 0)
        if seed % 3 == 0:  # leaves room for pinned blocks
            case = replace(case, max_model_len=-(-case.max_model_len // 2))
        if adapters:
            rng = random.Random(seed)
            slots = rng.randint(1, 3)
            case = replace(case, slots=(slots, slots + rng.choice([0, 0, 1, 2, 5])))
        if grammars:  # with two steps in flight no tokens are forced
            depth = random.Random(seed).choice([1, 1, case.depth])
            case = replace(case, grammars=True, depth=depth, drafts=seed % 4 == 0)
        if contexts:
            budget = random.Random(seed).choice([None, 4, 9, 20])
            options = case.options.model_copy(update={"max_num_encoder_input_tokens": budget})
            case = replace(case, contexts=True, host_cache=False, options=options, drafts=seed % 5 == 0)
        if images:
            case = replace(case, images=True, drafts=seed % 5 == 0)
        if stores:
            case = replace(case, stores=True, prefix_caching=True, drafts=seed % 5 == 0)
        try:
            kept = FakeStores(seed, lossy=seed % 4 > 0) if stores else None
            for _ in range(2 if stores else 1):  # the second engine finds what the first has computed
                Run(case, shares_prefixes=not (contexts or images), stores=kept)()
        except Exception as e:
            raise AssertionError(f"in {case}") from e


def parts(numbers: list[int], count: int, *, by_default: list[int], few: int) -> list[Any]:
    """First seeds and numbers of them: a few of some by default, all in slow tests."""
    every = [pytest.param(1000 * number, count, marks=pytest.mark.slow) for number in numbers]
    return [*((1000 * number, few) for number in by_default), *every]


@pytest.mark.parametrize(("first", "count"), parts([*range(10)], 400, by_default=[0], few=80))
def test_generated_traffic(first: int, count: int) -> None:
    run_cases(first, count)


@pytest.mark.parametrize(("first", "count"), parts([*range(5)], 200, by_default=[2], few=50))
def test_generated_traffic_with_windows(first: int, count: int) -> None:
    run_cases(first, count, WITH_WINDOWS)


@pytest.mark.parametrize(("first", "count"), parts([*range(5)], 200, by_default=[3], few=80))
def test_generated_traffic_with_states(first: int, count: int) -> None:
    run_cases(first, count, WITH_STATES)


@pytest.mark.parametrize(("first", "count"), parts([*range(5)], 150, by_default=[4], few=50))
def test_generated_traffic_with_adapters(first: int, count: int) -> None:
    run_cases(first, count, adapters=True)


@pytest.mark.parametrize(("first", "count"), parts([*range(4)], 60, by_default=[0, 2, 3], few=25))
def test_generated_traffic_with_grammars(first: int, count: int) -> None:
    run_cases(first, count, WITH_WINDOWS if first == 3000 else None, grammars=True, adapters=first == 2000)


@pytest.mark.parametrize(("first", "count"), parts([*range(5)], 200, by_default=[1], few=60))
def test_generated_traffic_with_contexts(first: int, count: int) -> None:
    run_cases(first, count, contexts=True)


@pytest.mark.parametrize(("first", "count"), parts([0, 3, 4], 200, by_default=[0, 3, 4], few=25))
def test_generated_traffic_with_images(first: int, count: int) -> None:
    run_cases(first, count, WITH_WINDOWS if first == 4000 else None, images=True, adapters=first == 3000)


@pytest.mark.parametrize(("first", "count"), parts([0, 1, 2, 3, 4], 200, by_default=[0, 1, 2, 4], few=25))
def test_generated_traffic_with_stores(first: int, count: int) -> None:
    groups = {1000: WITH_WINDOWS, 4000: WITH_STATES}.get(first)
    run_cases(first, count, groups, stores=True, images=first == 2000)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_much_generated_traffic_with_contexts(part: int) -> None:
    run_cases(400_000 + part * 1000, 1000, contexts=True)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_much_generated_traffic_with_grammars(part: int) -> None:
    run_cases(300_000 + part * 1000, 1000, WITH_WINDOWS if part % 4 == 0 else None, grammars=True)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_much_generated_traffic_with_adapters(part: int) -> None:
    run_cases(200_000 + part * 1000, 1000, WITH_WINDOWS if part % 4 == 0 else None, adapters=True)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_much_generated_traffic_with_states(part: int) -> None:
    grammars, images = part % 4 == 1, part % 4 == 2
    run_cases(500_000 + part * 1000, 1000, WITH_STATES, grammars=grammars, images=images)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(50))
def test_much_generated_traffic(part: int) -> None:
    run_cases(100_000 + part * 1000, 1000, None if part % 2 else WITH_WINDOWS)


@pytest.mark.parametrize(("first", "count"), parts([*range(4)], 60, by_default=[0], few=20))
def test_planning_ahead_changes_no_answer(first: int, count: int) -> None:
    for seed in range(first, first + count):
        case = replace(make_case(seed), abort_rate=0.0, failure_rate=0.0)
        alone, ahead, deep = (answers(replace(case, depth=depth)) for depth in (1, 2, 4))
        assert ahead == alone, f"in {case}"
        # A group that fits only as its sequences end in time may be preempted on another way, and not fit again.
        outgrown = {i for i, answer in deep.items() if answer == ("error", None)}
        assert {i: a for i, a in deep.items() if i not in outgrown} == {
            i: a for i, a in alone.items() if i not in outgrown
        }, f"in {case}"


def answers(case: Case) -> dict[int, object]:
    """What becomes of the case's requests, which come all at once; of those that fail, only that they do."""
    run = Run(case)
    while run.added < case.num_requests:
        run.engine.add(run.request())
    run()
    items = run.engine.answers.items()
    return {i: (a.tokens, a.reasons) if a.group_reason is None else (a.group_reason, a.hypotheses) for i, a in items}
