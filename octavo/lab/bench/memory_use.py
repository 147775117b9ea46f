"""Utilisation of the KV cache, and the blocks and tokens that sharing saves."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from octavo.config.options import SchedulerOptions
from octavo.core.request import EngineCoreRequest, Generate, Prompt
from octavo.core.sampling_params import BeamSearchParams, SamplingParams
from octavo.lab.bench.scheduler_cost import sampled
from octavo.memory.block_manager import BlockManager
from octavo.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from octavo.engine.llm import LLM

_TOKEN = 7

#: Prompts for parallel sampling and beam search.
PROMPTS = (
    "Write a short story about a lighthouse keeper who finds a message in a bottle on the morning after a storm.",
    "Explain to a ten-year-old why the sky is blue during the day and red in the evening, in three short paragraphs.",
    "List five things to check before buying a used bicycle, and say for each of them what goes wrong most often.",
    "Summarise the plot of a film in which two rival bakers have to run one shop together for a whole winter.",
)

_EXAMPLES = (
    ("The weather is beautiful today.", "Il fait beau aujourd'hui."),
    ("Where is the nearest train station?", "Où est la gare la plus proche ?"),
    ("I would like a cup of coffee, please.", "Je voudrais une tasse de café, s'il vous plaît."),
    ("She has been living in Lyon for three years.", "Elle vit à Lyon depuis trois ans."),
    ("We will meet again next Tuesday at noon.", "Nous nous reverrons mardi prochain à midi."),
)
_SENTENCES = (
    "The book is on the table.",
    "My brother works in a hospital.",
    "Can you help me with this exercise?",
    "It rained all night long.",
    "The children are playing in the garden.",
    "He forgot his keys at the office.",
    "This soup needs a little more salt.",
    "They arrived late because of the traffic.",
)


@dataclass(frozen=True)
class UseFigures:
    """Averages over the steps of a trace in which requests wait for memory."""

    block_size: int
    requests: int
    steps: int
    running: float
    #: Share of the slots of blocks in use that hold a token; the rest is the end of each last block.
    share_of_used_blocks: float
    #: Share of all slots of the KV cache that hold a token; slots of free blocks count as lost too.
    share_of_cache: float
    #: The same if each request were given one contiguous piece of ``max_model_len`` slots.
    share_if_contiguous: float
    running_if_contiguous: float


def trace(requests: int, max_model_len: int, seed: int) -> list[tuple[int, int]]:
    """(prompt, output) lengths as in chat logs: lognormal, medians 80 and 180 tokens, truncated."""
    rng = random.Random(seed)
    lengths = []
    for _ in range(requests):
        prompt = min(max(4, int(rng.lognormvariate(4.4, 1.1))), max_model_len // 2)
        output = min(max(2, int(rng.lognormvariate(5.2, 0.9))), max_model_len - prompt)
        lengths.append((prompt, output))
    return lengths


def measure_use(
    block_size: int, slots: int = 65536, max_model_len: int = 2048, requests: int = 1500, seed: int = 0
) -> UseFigures:
    """Runs a trace of more requests than fit into ``slots`` tokens through the scheduler, without a model."""
    blocks = BlockManager(slots // block_size, block_size, watermark=0.01)
    options = SchedulerOptions(max_num_seqs=1024, max_num_batched_tokens=2048)
    scheduler = Scheduler(blocks, options, max_model_len)
    lengths = trace(requests, max_model_len, seed)
    for i, (prompt, output) in enumerate(lengths):
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        scheduler.add(EngineCoreRequest(group_id=i, prompt_token_ids=[_TOKEN] * prompt, task=Generate(params, seed=i)))
    used, cache, running, saturated = 0.0, 0.0, 0, False
    steps = 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        scheduler.update(plan, sampled(plan, scheduler))
        stats = scheduler.stats()
        # Counts from the first step with full memory to the last step with waiting requests.
        saturated = saturated or blocks.state.available <= 2 * blocks.groups[0].watermark_blocks
        if saturated and stats.num_waiting:
            held = stats.blocks_used * block_size - stats.empty_slots
            used += held / (stats.blocks_used * block_size)
            cache += held / slots
            running += stats.num_running
            steps += 1
    share, count = _contiguous(lengths, slots, max_model_len)
    return UseFigures(block_size, requests, steps, running / steps, used / steps, cache / steps, share, count)


def _contiguous(lengths: list[tuple[int, int]], slots: int, max_model_len: int) -> tuple[float, float]:
    """(average share of slots with tokens, running requests) with contiguous pieces of ``max_model_len`` slots."""
    places = slots // max_model_len
    waiting = list(reversed(lengths))
    running: list[list[int]] = []
    share, steps = 0.0, 0
    while waiting:
        while waiting and len(running) < places:
            prompt, output = waiting.pop()
            running.append([prompt, output])
        share += sum(held for held, _ in running) / slots
        steps += 1
        for request in running:
            request[0] += 1
            request[1] -= 1
        running = [r for r in running if r[1] > 0]
    return share / steps, float(places)


@dataclass(frozen=True)
class SharingFigures:
    """Blocks or tokens saved by sharing in one kind of decoding."""

    kind: str
    width: int
    #: Blocks (or prompt tokens) without sharing and with it, summed over steps (or requests).
    without: int
    with_sharing: int

    @property
    def saved(self) -> float:
        """Saved share."""
        return 1 - self.with_sharing / self.without


def measure_sharing(llm: LLM, output_len: int = 64) -> Iterator[SharingFigures]:
    """Blocks saved by parallel sampling and beam search, and prompt tokens saved by shared examples; real outputs.

    Of an encoder-decoder model, blocks of the encoder's output among them, and tokens of inputs that come again.
    """
    for width in (2, 4, 6):
        params = SamplingParams(n=width, temperature=1.0, seed=0, max_tokens=output_len, ignore_eos=True)
        yield SharingFigures("parallel sampling", width, *_blocks(llm, params))
    for width in (2, 4, 6):
        beams = BeamSearchParams(beam_width=width, max_tokens=output_len, ignore_eos=True)
        yield SharingFigures("beam search", width, *_blocks(llm, beams))
    if llm.inputs.encoder_prompts is not None:
        yield SharingFigures("same input", len(_SENTENCES), *_input_tokens(llm))
        return
    for shots in (1, 5):
        yield SharingFigures("shared examples", shots, *_prefix_tokens(llm, shots))


def _blocks(llm: LLM, params: SamplingParams | BeamSearchParams) -> tuple[int, int]:
    """(block table entries, distinct blocks), summed over the steps of all prompts as one batch."""
    engine = llm.llm_engine
    engine.reset_prefix_cache()
    scheduler = engine.core.scheduler
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(f"prompt-{i}", _prompt(llm, prompt), params, streaming=False)
    entries = distinct = 0
    while engine.has_unfinished_requests():
        engine.step()
        tables = []
        for group in scheduler.queues.running:
            context = [] if group.cross is None else scheduler.blocks.table(group.cross.context_id)
            tables += [context + scheduler.blocks.table(seq_id) for seq_id in group.seq_ids]
        entries += sum(map(len, tables))
        distinct += len({block for table in tables for block in table})
    return entries, distinct


def _prompt(llm: LLM, text: str) -> Prompt:
    """A prompt of the model: the text as a question, or many times as the input of an encoder, or as long a silence."""
    reader = llm.inputs.encoder_prompts
    if reader is None:
        return llm.tokenizer.encode_chat([{"role": "user", "content": text}])
    if reader.facts.takes_audio:
        # Other inputs are other recordings: each has a click at a place of its own.
        samples = np.zeros(reader.facts.audio_samples, np.float32)
        samples[len(text)] = 1.0
        return {"encoder_prompt": {"multi_modal_data": {"audio": (samples, reader.facts.audio_rate)}}}
    ids = llm.tokenizer.encode(" ".join([text] * 16))
    return {"encoder_prompt": ids[: min(reader.longest, 400)]}


def _input_tokens(llm: LLM) -> tuple[int, int]:
    """(tokens, computed tokens) of prompts with one input and other beginnings of the decoder."""
    llm.reset_prefix_cache()
    prompt, tokens, cached = dict(cast("Mapping[str, Any]", _prompt(llm, PROMPTS[0]))), 0, 0
    for number in range(len(_SENTENCES)):
        beginning = [1 + number] * number
        output = llm.generate(
            {**prompt, "decoder_prompt": beginning}, SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False
        )[0]
        tokens += output.num_prompt_tokens
        cached += output.num_cached_tokens
    return tokens, tokens - cached


def _prefix_tokens(llm: LLM, shots: int) -> tuple[int, int]:
    """(prompt tokens, computed prompt tokens) of translations with the same examples before them."""
    engine = llm.llm_engine
    engine.reset_prefix_cache()
    examples = "".join(f"English: {en}\nFrench: {fr}\n\n" for en, fr in _EXAMPLES[:shots])
    prompt_tokens = cached = 0
    for sentence in _SENTENCES:
        prompt = f"Translate English to French.\n\n{examples}English: {sentence}\nFrench:"
        output = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)[0]
        prompt_tokens += len(output.prompt_token_ids)
        cached += output.metrics.num_cached_tokens
    return prompt_tokens, prompt_tokens - cached
