"""Throughput with speculative decoding against without, on texts that differ in how much of them repeats.

The answers are the same: a run whose tokens differ from those without drafts is an error.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.config.options import SpeculativeConfig
from octavo.core.errors import WorkerError
from octavo.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.core.stats import SpeculationStats
    from octavo.engine.llm import LLM
    from octavo.engine.tokenizer import Tokenizer

#: Tokens of a prompt of random tokens.
_RANDOM_PROMPT = 128

_NAMES = ("Martha", "Joseph", "Amina", "Pavel", "Ingrid", "Tomas", "Leila", "Hugo", "Noriko", "Samuel")
_PLACES = ("Lisbon", "Oslo", "Nairobi", "Osaka", "Quito", "Tallinn", "Perth", "Dakar", "Bergen", "Porto")
_SENTENCES = (
    "{name} opened the meeting in {place} at {hour} o'clock and read out the minutes of the last one.",
    "The report of the harbour in {place} lists {count} ships, of which {few} stayed longer than a week.",
    "Nobody objected when {name} proposed to move the office from {place} to the other side of the river.",
    "The repair of the roof will cost {count} euros, and {name} will ask two firms for their prices.",
    "In {place} the library was closed for {few} days because the heating had failed during the night.",
    "{name} thanked the {count} volunteers who had cleaned the park and planted {few} trees beside the road.",
    "The train to {place} leaves at {hour} o'clock from platform {few}, and the last one an hour before midnight.",
    "A letter from {place} was lost, so {name} wrote another one and sent it by registered mail.",
)
_FUNCTIONS = (
    '''def read_{noun}s(path, limit={count}):
    """The first {noun}s of a file, one a line."""
    {noun}s = []
    with open(path) as file:
        for line in file:
            if len({noun}s) == limit:
                break
            {noun}, separator, rest = line.partition(":")
            if not separator:
                raise ValueError(f"line without a colon: {{line!r}}")
            {noun}s.append(({noun}.strip(), int(rest)))
    return {noun}s
''',
    '''class {Noun}Queue:
    """Keeps at most {few} {noun}s for each owner, the oldest first."""

    def __init__(self):
        self._{noun}s = {{}}
        self._dropped = 0

    def add(self, owner, {noun}):
        queue = self._{noun}s.setdefault(owner, [])
        if len(queue) == {few}:
            queue.pop(0)
            self._dropped += 1
        queue.append({noun})

    def take(self, owner):
        queue = self._{noun}s.get(owner)
        return queue.pop(0) if queue else None
''',
    '''def total_by_{noun}(rows):
    """Sums, means and counts of the values of each {noun}."""
    totals, counts = {{}}, {{}}
    for {noun}, value in rows:
        if value < 0 or value > {count}:
            continue
        totals[{noun}] = totals.get({noun}, 0) + value
        counts[{noun}] = counts.get({noun}, 0) + 1
    means = {{{noun}: totals[{noun}] / counts[{noun}] for {noun} in totals}}
    return totals, means, counts
''',
)
_NOUNS = ("order", "ticket", "parcel", "invoice", "sensor", "recipe", "player", "vessel")
_QUESTIONS = (
    "Why is the sky blue in {place}, and red in the evening?",
    "Tell a short story about {name}, who finds an old map in {place}.",
    "What should somebody pack for {few} days in {place} in winter?",
    "Explain to {name}, who is ten years old, how a bicycle stays upright.",
    "Give {few} ideas for a birthday party in {place} and say what each of them costs.",
    "How does a refrigerator work, and why does it need {count} watts?",
    "Write a letter in which {name} asks the landlord in {place} to repair a window.",
    "What are the advantages of trains over aeroplanes between {place} and Paris?",
)


@dataclass(frozen=True)
class PromptSet:
    """Prompts of one kind, as texts of a chat or as token ids."""

    name: str
    prompts: Sequence[str] | Sequence[list[int]]
    temperature: float
    #: Whether the same prompts have been answered just before.
    repeated: bool = False


@dataclass(frozen=True)
class SpeculationFigures:
    """One configuration on one workload, against no drafts in the same run."""

    workload: str
    batch: int
    #: Of the drafter, with the fields that were given for this configuration alone: its label.
    method: str
    #: Output tokens a second, prefill included; medians of the rounds.
    tokens_per_s: float
    tokens_per_s_without: float
    #: Median of the ratios of the rounds.
    speedup: float
    #: Share of the draft tokens that were accepted, and tokens that a draft gave, the one after it included; None
    #: without a draft.
    acceptance: float | None
    tokens_per_draft: float | None
    output_tokens: int


#: Makes an engine that drafts so, or not at all.
MakeLLM = Callable[[SpeculativeConfig | None], "LLM"]


def measure(
    make: MakeLLM,
    configs: Mapping[str, SpeculativeConfig],
    batches: Sequence[int],
    output_len: int,
    rounds: int,
    seed: int,
) -> Iterator[SpeculationFigures]:
    """Runs each workload with each of the ``configs``, which have labels, and without drafts, in turns.

    Each run is on a new engine with room for the largest batch.

    With the method ``prediction`` each request predicts its whole answer: drafts cannot bring more.
    """
    plain = make(None)
    loads = [load for batch in batches for load in workloads(plain, batch, seed)]
    plain.llm_engine.core.shutdown()
    for load in loads:
        yield from _measure(make, load, configs, output_len, rounds)


def workloads(llm: LLM, count: int, seed: int) -> list[PromptSet]:
    """``count`` requests of each kind. A model without tokenizer, as one of dummy weights is, has random prompts alone.

    ``greedy``: what networks of random weights answer to random prompts soon repeats itself.
    """
    rng = random.Random(seed)
    vocab_size = llm.llm_engine.core.model_config.vocab_size
    noise = [[rng.randrange(vocab_size) for _ in range(_RANDOM_PROMPT)] for _ in range(count)]
    if llm.llm_engine.core.options.skip_tokenizer_init:
        return [PromptSet("greedy", noise, 0.0), PromptSet("random", noise, 1.0)]
    prompts = example_prompts(count, rng)
    chats = prompts[:count]
    return [
        PromptSet("edit", prompts[count:], 0.0),
        PromptSet("chat", chats, 0.7),
        PromptSet("chat again", chats, 0.7, repeated=True),
        PromptSet("random", noise, 1.0),
        PromptSet("code", [_code(i, rng) for i in range(count)], 0.0),
    ]


def example_prompts(count: int, rng: random.Random) -> list[str]:
    """So many questions, and then as many texts to write out again with a change."""
    questions = [_fill(_QUESTIONS[i % len(_QUESTIONS)], rng) for i in range(count)]
    return questions + [_edit(rng) for _ in range(count)]


def _fill(text: str, rng: random.Random) -> str:
    few, count = rng.randrange(2, 10), rng.randrange(100, 1000)
    return text.format(
        name=rng.choice(_NAMES), place=rng.choice(_PLACES), hour=rng.randrange(7, 12), few=few, count=count
    )


def _edit(rng: random.Random) -> str:
    """A text to be written out again with a small change."""
    text = " ".join(_fill(sentence, rng) for sentence in rng.sample(_SENTENCES, 5))
    return f"Write the following text again, with every number as a word, and write nothing else.\n\n{text}"


def _code(number: int, rng: random.Random) -> str:
    """A function or class to be written out again with another name in it."""
    noun, few, count = rng.choice(_NOUNS), rng.randrange(2, 10), rng.randrange(100, 1000)
    text = _FUNCTIONS[number % len(_FUNCTIONS)].format(noun=noun, Noun=noun.title(), few=few, count=count)
    return (
        f"Rename {noun} to entry everywhere in this Python code and write out the whole code.\n\n```python\n{text}```"
    )


def _measure(
    make: MakeLLM, load: PromptSet, configs: Mapping[str, SpeculativeConfig], output_len: int, rounds: int
) -> Iterator[SpeculationFigures]:
    params = [
        SamplingParams(temperature=load.temperature, seed=i, max_tokens=output_len, detokenize=False)
        for i in range(len(load.prompts))
    ]
    turns: list[tuple[str, SpeculativeConfig | None]] = [("", None), *configs.items()]
    rates: dict[str, list[float]] = {label: [] for label, _ in turns}
    stats: dict[str, SpeculationStats | None] = {}
    expected: list[list[int]] = []
    for turn in range(rounds):
        for label, config in turns if turn % 2 == 0 else turns[::-1]:
            llm = make(config)
            prompts = _tokenized(llm.get_tokenizer(), load)
            if load.repeated:
                _run(llm, prompts, params)
            else:  # its memory is touched for the first time
                _run(llm, [prompts[0][:1]], [SamplingParams(max_tokens=1, detokenize=False)])
            predictions = expected if config is not None and config.method == "prediction" else None
            seconds, tokens = _run(llm, prompts, params, predictions)
            expected = expected or tokens
            if tokens != expected:
                raise WorkerError(f"workload {load.name!r}: answers with {label or 'no'} drafts differ from the others")
            rates[label].append(sum(map(len, tokens)) / seconds)
            stats[label] = llm.llm_engine.core.scheduler.counts().speculation
            llm.llm_engine.core.shutdown()
    for label in configs:
        yield _figures(load.name, len(params), label, rates, stats[label], expected)


def _figures(
    workload: str,
    batch: int,
    label: str,
    rates: Mapping[str, list[float]],
    stats: SpeculationStats | None,
    tokens: list[list[int]],
) -> SpeculationFigures:
    drafted = stats is not None and stats.drafts > 0
    return SpeculationFigures(
        workload=workload,
        batch=batch,
        method=label,
        tokens_per_s=statistics.median(rates[label]),
        tokens_per_s_without=statistics.median(rates[""]),
        speedup=statistics.median(rate / plain for rate, plain in zip(rates[label], rates[""], strict=True)),
        acceptance=stats.accepted_tokens / stats.draft_tokens if stats is not None and drafted else None,
        tokens_per_draft=1 + stats.accepted_tokens / stats.drafts if stats is not None and drafted else None,
        output_tokens=sum(map(len, tokens)),
    )


def _tokenized(tokenizer: Tokenizer, load: PromptSet) -> list[list[int]]:
    return [
        tokenizer.encode_chat([{"role": "user", "content": prompt}]) if isinstance(prompt, str) else prompt
        for prompt in load.prompts
    ]


def _run(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], predictions: list[list[int]] | None = None
) -> tuple[float, list[list[int]]]:
    """Seconds of a run, and the tokens of each answer."""
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, prediction=predictions, use_tqdm=False)
    seconds = time.perf_counter() - start
    failed = next((o.outputs[0].error for o in outputs if o.outputs[0].error is not None), None)
    if failed is not None:
        raise WorkerError(f"a measured request failed: {failed}")
    return seconds, [list(o.outputs[0].token_ids) for o in outputs]
