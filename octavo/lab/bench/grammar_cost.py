"""What structured output costs: the masks of grammars of growing size, throughput, and the delay of a first token."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import WorkerError
from octavo.core.request import Generate
from octavo.core.sampling_params import Grammar, SamplingParams, StructuredOutputsParams
from octavo.grammar.matcher import GrammarTokenizer, compile_grammar
from octavo.sampling.logits_processors import CompiledGrammar, GrammarMask, GrammarMasks

if TYPE_CHECKING:
    from octavo.engine.input_processor import InputProcessor
    from octavo.engine.llm import LLM

_Tokens = NDArray[np.int32]

#: Properties of the ten schemas.
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
#: Sequences whose masks a step computes.
ROWS = 64
#: Steps of ``ROWS`` sequences, and of one, that are timed of each schema.
_STEPS, _STEPS_ALONE = 100, 2000
#: Requests one after the other, each with and without a schema.
_DELAYS = 30

_WORDS = ("alpha", "blue", "casting", "drum", "engine room", "forty-two", "green", "harbour", "in", "Jupiter")


@dataclass(frozen=True)
class VocabularyFigures:
    """What is made once, for the first grammar of an engine's life."""

    vocab_size: int
    #: Of processor time.
    seconds: float


@dataclass(frozen=True)
class MaskFigures:
    """The masks of one schema, over outputs that it allows."""

    properties: int
    schema_bytes: int
    vocab_size: int
    compile_ms: float
    #: Of an output, and how many of them the schema forces.
    output_tokens: float
    forced_share: float
    #: Microseconds of processor time of a mask and of the token before it, of one sequence: half take less, and 99 %.
    mask_us_p50: float
    mask_us_p99: float
    #: Milliseconds by the clock of the masks of a step of ``ROWS`` sequences.
    step_ms_p50: float
    step_ms_p99: float


@dataclass(frozen=True)
class ThroughputFigures:
    """A batch in which every request has a schema, against one in which none has; in turns."""

    batch: int
    #: Output tokens a second, medians of the rounds; and the median of the ratios of the rounds.
    tokens_per_s_free: float
    tokens_per_s: float
    ratio: float
    #: The same ratio of tokens a second of processor time, of all threads: less depends on what else the machine does.
    processor_ratio: float


@dataclass(frozen=True)
class DelayFigures:
    """The first token of a request alone, whose schema was used before; medians."""

    free_ms: float
    bound_ms: float
    #: Median of the differences of two requests that followed each other.
    added_ms: float
    #: The same of processor time, of all threads.
    added_processor_ms: float


def make_schema(properties: int) -> dict[str, Any]:
    """A schema of an object with so many properties of seven kinds, at most eight to an object."""
    fields = {f"{_WORDS[i % 10].replace(' ', '_')}_{i}": _KINDS[i % len(_KINDS)][0] for i in range(properties)}
    return _nested(fields)


def _nested(fields: dict[str, Any]) -> dict[str, Any]:
    while len(fields) > 8:
        names = list(fields)
        parts = [names[i : i + 8] for i in range(0, len(names), 8)]
        fields = {f"part_{i}": _object({name: fields[name] for name in part}) for i, part in enumerate(parts)}
    return _object(fields)


def _object(fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def make_document(schema: dict[str, Any], rng: random.Random) -> Any:
    """A value of a schema of ``make_schema``."""
    if "properties" in schema:
        return {name: make_document(part, rng) for name, part in schema["properties"].items()}
    return next(draw for kind, draw in _KINDS if kind == schema)(rng)


def _text(rng: random.Random) -> str:
    return " ".join(rng.choices(_WORDS, k=rng.randint(1, 6)))


_KINDS: list[tuple[dict[str, Any], Any]] = [
    ({"type": "string"}, _text),
    ({"type": "integer"}, lambda rng: rng.randrange(10**6)),
    ({"enum": ["red", "green", "dark blue"]}, lambda rng: rng.choice(["red", "green", "dark blue"])),
    ({"type": "array", "items": {"type": "string"}}, lambda rng: [_text(rng) for _ in range(rng.randint(0, 3))]),
    ({"type": "boolean"}, lambda rng: rng.random() < 0.5),
    ({"type": "string", "pattern": "^[a-z]{2,8}@[a-z]+\\.com$"}, lambda rng: rng.choice(["ab@cd.com", "jo@mail.com"])),
    ({"type": "number"}, lambda rng: round(rng.uniform(-99, 99), 3)),
]


# --- masks ----------------------------------------------------------------------------------------------------------


def measure_masks(llm: LLM, num_threads: int, seed: int = 0) -> Iterator[VocabularyFigures | MaskFigures]:
    """The masks of ten schemas with the model's vocabulary, along outputs of random values."""
    inputs, config = llm.llm_engine.inputs, llm.llm_engine.core.model_config
    start = time.process_time()
    tokenizer = GrammarTokenizer(inputs.tokenizer.backend, config.vocab_size, config.eos_token_ids)
    yield VocabularyFigures(config.vocab_size, time.process_time() - start)
    for properties in SIZES:
        yield _measure_schema(inputs, tokenizer, properties, num_threads, seed)


def _measure_schema(
    inputs: InputProcessor, tokenizer: GrammarTokenizer, properties: int, num_threads: int, seed: int
) -> MaskFigures:
    schema, rng = make_schema(properties), random.Random(seed)
    form = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    grammar = inputs.grammars.compile(form)
    start = time.perf_counter()
    compiled = CompiledGrammar(compile_grammar(grammar.source, tokenizer), tokenizer)
    compile_seconds = time.perf_counter() - start
    outputs = [_output(inputs, make_document(schema, rng)) for _ in range(ROWS)]
    one: list[float] = []
    steps: list[float] = []
    for turn in range(ROWS):
        walk = _Walk(compiled, grammar, [outputs[turn]], 1, time.thread_time)
        one += walk.take(min(_STEPS_ALONE - len(one), len(outputs[turn])))
    while len(steps) < _STEPS:
        walk = _Walk(compiled, grammar, outputs, num_threads, time.perf_counter)
        # Sequences of a step are at different places in their outputs.
        walk.spread()
        steps += walk.take(min(_STEPS - len(steps), max(2, min(map(len, outputs)) // 2)))
    return MaskFigures(
        properties=properties,
        schema_bytes=len(json.dumps(schema, separators=(",", ":"))),
        vocab_size=tokenizer.network_vocab_size,
        compile_ms=1e3 * compile_seconds,
        output_tokens=statistics.mean(map(len, outputs)),
        forced_share=statistics.mean(_forced_share(compiled, grammar, tokens) for tokens in outputs[:4]),
        mask_us_p50=1e6 * float(np.quantile(one, 0.5)),
        mask_us_p99=1e6 * float(np.quantile(one, 0.99)),
        step_ms_p50=1e3 * float(np.quantile(steps, 0.5)),
        step_ms_p99=1e3 * float(np.quantile(steps, 0.99)),
    )


def _output(inputs: InputProcessor, document: Any) -> _Tokens:
    text = json.dumps(document, separators=(",", ":"))
    return np.array(inputs.tokenizer.encode(text, add_special_tokens=False), np.int32)


def _begin(compiled: CompiledGrammar, grammar: Grammar) -> GrammarMask:
    return GrammarMask(compiled, Generate(SamplingParams(max_tokens=None), 0, grammar=grammar), 0)


class _Walk:
    """Sequences that write given outputs, under the masks of one grammar."""

    def __init__(
        self,
        compiled: CompiledGrammar,
        grammar: Grammar,
        outputs: list[_Tokens],
        num_threads: int,
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._masks = GrammarMasks(compiled.tokenizer.network_vocab_size, num_threads)
        self._rows = [_begin(compiled, grammar) for _ in outputs]
        self._outputs = outputs
        self._lengths = [0] * len(outputs)

    def spread(self) -> None:
        """Each has written another part of the first half of its output."""
        for i, tokens in enumerate(self._outputs):
            self._lengths[i] = i * (len(tokens) // 2) // len(self._outputs)
            self._rows[i].advance(tokens[: self._lengths[i]])

    def take(self, steps: int) -> list[float]:
        """Seconds of each step: masks are computed, and each sequence gets its next token."""
        seconds = []
        for _ in range(steps):
            self._lengths = [length + 1 for length in self._lengths]
            start = self._clock()
            for row, tokens, length in zip(self._rows, self._outputs, self._lengths, strict=True):
                row.advance(tokens[:length])
            failed = self._masks.add_to({}, dict(enumerate(self._rows)))
            seconds.append(self._clock() - start)
            if failed:
                raise WorkerError(f"a measured grammar failed: {next(iter(failed.values()))}")
        return seconds


def _forced_share(compiled: CompiledGrammar, grammar: Grammar, tokens: _Tokens) -> float:
    """Share of the tokens of an output, as the grammar forces them, that are not sampled."""
    library = compiled.tokenizer.lltokenizer
    mask, text = _begin(compiled, grammar), library.decode_bytes(tokens.tolist())
    produced: list[int] = []
    num_forced = written = 0
    while True:
        forced = mask.forced_tokens(np.array(produced, np.int32))
        num_forced += len(forced)
        produced += forced
        written += len(library.decode_bytes(forced))
        if written >= len(text):
            return num_forced / len(produced)
        following = library.tokenize_bytes(text[written : written + 64])[0]
        produced.append(following)
        written += len(library.decode_bytes([following]))


# --- requests -------------------------------------------------------------------------------------------------------


def measure_throughput(
    llm: LLM, batches: Sequence[int], output_len: int, rounds: int, seed: int = 0
) -> Iterator[ThroughputFigures]:
    """Batches of equal lengths whose requests all write lists of objects, or what they like."""
    item = make_schema(8)
    form = StructuredOutputsParams(json={"type": "array", "items": item, "minItems": 1000}, disable_any_whitespace=True)
    for batch in batches:
        free: list[tuple[float, float]] = []
        bound: list[tuple[float, float]] = []
        for turn in range(rounds + 1):
            order = [(None, free), (form, bound)]
            for wanted, rates in order if turn % 2 else order[::-1]:
                rate = _run(llm, batch, output_len, wanted, seed)
                if turn:  # the first is a warm-up
                    rates.append(rate)
        yield ThroughputFigures(
            batch=batch,
            tokens_per_s_free=statistics.median(rate for rate, _ in free),
            tokens_per_s=statistics.median(rate for rate, _ in bound),
            ratio=statistics.median(b / f for (b, _), (f, _) in zip(bound, free, strict=True)),
            processor_ratio=statistics.median(b / f for (_, b), (_, f) in zip(bound, free, strict=True)),
        )


def _run(llm: LLM, batch: int, output_len: int, form: StructuredOutputsParams | None, seed: int) -> tuple[float, float]:
    """Output tokens a second, by the clock and of processor time."""
    rng = random.Random(seed)
    prompts = [f"{_text(rng)} {i}: " for i in range(batch)]
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=output_len, ignore_eos=True, structured_outputs=form)
        for i in range(batch)
    ]
    start, busy = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    failed = next((o.outputs[0].error for o in outputs if o.outputs[0].finish_reason != "length"), None)
    if failed is not None:
        raise WorkerError(f"a measured request failed: {failed}")
    tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
    return tokens / seconds, tokens / busy


def measure_delay(llm: LLM) -> DelayFigures:
    """Requests of one token, one after the other; every second one has a schema, always the same."""
    form = StructuredOutputsParams(json=make_schema(32), disable_any_whitespace=True)
    seconds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for turn in range(_DELAYS + 2):
        for bound in (False, True):
            params = SamplingParams(temperature=0.0, max_tokens=1, structured_outputs=form if bound else None)
            start, busy = time.perf_counter(), time.process_time()
            llm.generate(f"request {turn}", params, use_tqdm=False)
            if turn >= 2:
                seconds[bound].append((time.perf_counter() - start, time.process_time() - busy))
    free, constrained = np.array(seconds[False]) * 1e3, np.array(seconds[True]) * 1e3
    added, added_busy = np.median(constrained - free, axis=0).tolist()
    return DelayFigures(float(np.median(free[:, 0])), float(np.median(constrained[:, 0])), added, added_busy)
