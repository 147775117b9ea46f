"""Draws the pictures of docs/scheduling.md: recordings of the engine's own scheduler and blocks, step by step.

    python scripts/docs_pictures.py [FOLDER]      # docs/pictures; needs the extra octavo[plot]

Most are of simulated engines (``octavo simulate``), which make the plans of the real one block for block, on any
machine. Forks and copies on write are of the engine with the demo model, as the simulator has one completion a request.
The seven tokens are also written as a recording for ``octavo view``.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from octavo.config.engine_config import EngineConfig
from octavo.core.plan import StepPlan
from octavo.core.stats import EngineEvent, ReplicaRow, write_recording
from octavo.engine.core import ViewRecorder
from octavo.lab.commands import simulate_delay
from octavo.lab.plots.style import load_matplotlib, save, styled
from octavo.lab.simulate.delay_factor import FACTORS, DelaySetting, find_point
from octavo.lab.simulate.engine import SimulatedEngine
from octavo.lab.simulate.step_profile import load_profile
from octavo.lab.workloads.lengths import chat_inputs, chat_outputs
from octavo.lab.workloads.work_items import WorkItem
from octavo.memory.block_manager import BlockManager
from octavo.scheduler.scheduler import Scheduler

TARGET = Path(__file__).resolve().parent.parent / "docs" / "pictures"
RECORDINGS = TARGET.parent / "recordings"
#: The prompt of Kwon et al. 2023, figures 6 and 8.
SEVEN_TOKENS = "Four score and seven years ago our"
#: Of requests, in the order of their arrival.
COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bb8844", "#999933")
CACHED, FREE, SHARED = "#dcdcdc", "#ffffff", "#333333"


@dataclass
class Step:
    """What one step did: who holds which device block after it was planned, and tokens by request."""

    #: Block -> requests that hold it, once for each of their sequences.
    held: dict[int, list[int]]
    cached: set[int]
    #: Tokens of prompts and of decodes, by request.
    prefill: dict[int, int] = field(default_factory=dict)
    decode: dict[int, int] = field(default_factory=dict)
    #: (source, target) of copies on write; blocks swapped out and in.
    copies: list[tuple[int, int]] = field(default_factory=list)
    swapped_out: int = 0
    swapped_in: int = 0
    preempted: list[int] = field(default_factory=list)


class Recording:
    """The steps of one run, in order; ``plan`` is called when a step is planned."""

    def __init__(self, scheduler: Scheduler, blocks: BlockManager) -> None:
        self._scheduler, self._blocks = scheduler, blocks
        self.steps: list[Step] = []
        self.num_blocks = blocks.num_blocks
        self._running: set[int] = set()

    def plan(self, plan: StepPlan) -> None:
        """Records a step that the scheduler has just planned."""
        queues, pool = self._scheduler.queues, self._blocks.groups[0].device
        held: dict[int, list[int]] = defaultdict(list)
        for seq_id, seq in queues.sequences.items():
            for block in self._blocks.table(seq_id):
                held[block].append(seq.group.group_id)
        every = range(pool.first, pool.first + pool.num_blocks)
        cached = {block for block in every if block not in held and pool.is_kept(block)}
        step = Step(dict(held), cached, copies=list(plan.blocks_to_copy))
        step.swapped_out, step.swapped_in = len(plan.blocks_to_swap_out), len(plan.blocks_to_swap_in)
        for seq_id, count in zip(plan.seq_ids, plan.num_tokens, strict=True):
            seq = queues.sequences[seq_id]
            # Its tokens count as computed: a prompt's are below the length with which it was planned.
            kind = step.prefill if seq.num_computed - count < seq.num_prompt_tokens else step.decode
            kind[seq.group.group_id] = kind.get(seq.group.group_id, 0) + count
        running = {group.group_id for group in queues.running}
        step.preempted = sorted(number for number in self._running - running if number in queues.groups)
        self._running = running
        self.steps.append(step)


def simulated(items: Iterable[WorkItem], **options: Any) -> Recording:
    """Runs items that all arrive before the step that their ``at`` names, in steps, on a simulated engine."""
    engine = SimulatedEngine(load_profile("smollm2-135m-2-cores"), EngineConfig(model="none", **options))
    recording = Recording(engine.scheduler, engine.blocks)
    engine.on_plan = lambda plan, seconds: recording.plan(plan)
    waiting = sorted(enumerate(items), key=lambda pair: pair[1].at)
    while waiting or engine.has_work:
        while waiting and waiting[0][1].at <= len(recording.steps):
            engine.add(*waiting.pop(0))
        if not engine.has_work:
            raise SystemExit("a picture's run has a gap: give its requests earlier steps")
        engine.step()
    return recording


def forked(max_steps: int) -> Recording:
    """Three completions of one prompt, on the engine with the demo model."""
    from octavo import LLM, SamplingParams

    llm = LLM("smollm2-135m", num_gpu_blocks_override=16, block_size=16, max_model_len=256, seed=1)
    core: Any = llm.llm_engine.core
    recording = Recording(core.scheduler, core.scheduler.queues.blocks)
    submit = core.executor.submit

    def recorded(plan: StepPlan) -> Any:
        recording.plan(plan)
        return submit(plan)

    core.executor.submit = recorded
    prompt = [100 + i for i in range(40)]
    llm.llm_engine.add_request(
        "a", {"prompt_token_ids": prompt}, SamplingParams(n=3, max_tokens=max_steps, ignore_eos=True, seed=1)
    )
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    return recording


@dataclass
class SequenceState:
    """One sequence between two steps."""

    table: list[int]
    #: Texts of the tokens whose KV entries are stored, and of the one that was sampled last.
    stored: list[str]
    sampled: str


@dataclass
class WorkedStep:
    """One step of a worked example: what it copied first, and the sequences after it."""

    copies: list[tuple[int, int]]
    sequences: list[SequenceState]


def seven_tokens(record: Path) -> list[WorkedStep]:
    """Two completions of seven tokens in blocks of four, on the engine with the demo model; writes a recording."""
    from octavo import LLM, SamplingParams

    llm = LLM("smollm2-135m", num_gpu_blocks_override=8, block_size=4, max_model_len=32, seed=1)
    engine, tokenizer = llm.llm_engine, llm.get_tokenizer()
    core: Any = engine.core
    queues, blocks, submit = core.scheduler.queues, core.scheduler.queues.blocks, core.executor.submit
    steps: list[WorkedStep] = []
    views = ViewRecorder(core.scheduler, clock=lambda: float(len(steps)))
    events = []

    def view() -> None:
        now = views.view()
        now.cost, now.state = 0.0, msgspec.structs.replace(now.state)
        events.append(EngineEvent(float(len(steps)), [ReplicaRow(0, "ready", len(queues.groups), 0)], [now]))

    def recorded(plan: StepPlan) -> Any:
        views.planned(plan)
        steps.append(WorkedStep(list(plan.blocks_to_copy), []))
        return submit(plan)

    core.executor.submit = recorded
    params = SamplingParams(n=2, max_tokens=4, ignore_eos=True, temperature=1.0, seed=1)
    engine.add_request("a", SEVEN_TOKENS, params)
    view()
    while engine.has_unfinished_requests():
        engine.step()
        for seq_id, seq in queues.sequences.items():
            texts = [tokenizer.decode([token]).strip() for token in seq.token_ids]
            steps[-1].sequences.append(SequenceState(blocks.table(seq_id), texts[: seq.num_computed], texts[-1]))
        view()
    write_recording(record, "seven tokens in blocks of four: block tables, a fork and a copy on write", events)
    return [step for step in steps if step.sequences]


# --- drawings ---------------------------------------------------------------------------------------------------------


def block_map(axes: Any, recording: Recording, names: str = "request") -> None:
    """One column a step, one row a block: colour says whose it is, a number how many sequences share it."""
    from matplotlib.patches import Patch, Rectangle

    requests: set[int] = set()
    for block in range(recording.num_blocks):
        for begin, end, owners, face in spans(recording, block):
            requests.update(owners)
            axes.add_patch(Rectangle((begin, block), end - begin, 1, facecolor=face, edgecolor="white", linewidth=0.5))
            if len(owners) > 1:
                axes.text(begin + 0.5, block + 0.5, len(owners), color="white", ha="center", va="center", fontsize=6)
    for x, step in enumerate(recording.steps):
        for source, target in step.copies:
            axes.annotate("", (x + 0.5, target + 0.5), (x - 0.5, source + 0.5), arrowprops={"arrowstyle": "->"})
    for x, what in events(recording):
        axes.annotate(
            what, (x + 0.5, recording.num_blocks), (x + 0.5, recording.num_blocks + 1.2), ha="left", va="bottom",
            fontsize=7, rotation=30, arrowprops={"arrowstyle": "-", "linewidth": 0.6}, annotation_clip=False,
        )  # fmt: skip
    axes.set_xlim(0, len(recording.steps))
    axes.set_ylim(0, recording.num_blocks)
    axes.set_xlabel("step")
    axes.set_ylabel("block")
    axes.yaxis.set_major_locator(load_integer_ticks())
    marks = [Patch(color=COLORS[number % len(COLORS)], label=f"{names} {number + 1}") for number in sorted(requests)]
    if any(len(set(owners)) > 1 for step in recording.steps for owners in step.held.values()):
        marks.append(Patch(color=SHARED, label="shared by requests"))
    if any(step.cached for step in recording.steps):
        marks.append(Patch(color=CACHED, label="cached"))
    axes.legend(handles=marks, loc="upper left", bbox_to_anchor=(1, 1))


def spans(recording: Recording, block: int) -> Iterator[tuple[int, int, tuple[int, ...], str]]:
    """(first step, step after the last, who holds the block, colour) of each time in which it is held or cached."""

    def state(step: Step) -> tuple[tuple[int, ...], str]:
        owners = tuple(step.held.get(block, ()))
        if not owners:
            return owners, CACHED if block in step.cached else FREE
        return owners, SHARED if len(set(owners)) > 1 else COLORS[owners[0] % len(COLORS)]

    begin = 0
    for (owners, face), steps in itertools.groupby(map(state, recording.steps)):
        end = begin + len(list(steps))
        if face != FREE:
            yield begin, end, owners, face
        begin = end


def events(recording: Recording) -> Iterator[tuple[int, str]]:
    """(step, what happened) that a block map writes above its columns."""
    for x, step in enumerate(recording.steps):
        for number in step.preempted:
            how = "swapped out" if step.swapped_out else "preempted"
            yield x, f"{number + 1} {how}"
        if step.swapped_in:
            yield x, "swapped in"
        if step.copies:
            yield x, "copy on write"


def load_integer_ticks() -> Any:
    """Ticks at whole numbers alone."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True)


def composition(axes: Any, recording: Recording, title: str) -> None:
    """One bar a step: tokens of decodes, and of each request's prompt above them."""
    from matplotlib.patches import Patch

    requests: set[int] = set()
    for x, step in enumerate(recording.steps):
        below = sum(step.decode.values())
        axes.bar(x, below, width=0.9, color=SHARED)
        for number, count in sorted(step.prefill.items()):
            axes.bar(x, count, bottom=below, width=0.9, color=COLORS[number % len(COLORS)])
            below += count
            requests.add(number)
    axes.set_title(title, loc="left")
    axes.set_ylabel("tokens of the step")
    marks = [Patch(color=COLORS[number % len(COLORS)], label=f"prompt {number + 1}") for number in sorted(requests)]
    axes.legend(handles=[Patch(color=SHARED, label="decodes"), *marks], loc="upper left", bbox_to_anchor=(1, 1))


def worked_step(axes: Any, number: int, step: WorkedStep) -> None:
    """Block tables above, and below them the blocks that they name, with the tokens that are stored."""
    from matplotlib.patches import Rectangle

    size = 4
    axes.set_xlim(-0.9, size + 0.8)
    axes.set_ylim(6.2, -3.9)
    axes.axis("off")
    axes.set_title(f"after step {number}", loc="left", fontsize=9)
    held: dict[int, list[int]] = defaultdict(list)
    for index, sequence in enumerate(step.sequences):
        y = -3.5 + 1.6 * index
        axes.text(-0.9, y, f"sequence {'AB'[index]}, next: {sequence.sampled}", fontsize=7, va="center")
        for place, block in enumerate(sequence.table):
            held[block].append(index)
            filled = min(size, len(sequence.stored) - place * size)
            axes.add_patch(Rectangle((place * 1.3, y + 0.3), 1.2, 0.8, facecolor="white", edgecolor=COLORS[index]))
            axes.text(place * 1.3 + 0.6, y + 0.7, f"{block}: {filled}", fontsize=7, ha="center", va="center")
        axes.text(-0.9, y + 0.7, "table", fontsize=6, va="center")
    for block in range(6):  # no further one is used
        owners = held.get(block, [])
        axes.text(-0.5, block + 0.5, block, fontsize=7, ha="center", va="center")
        if len(owners) > 1:
            axes.text(-0.9, block + 0.5, f"{len(owners)} x", fontsize=6, va="center", color=SHARED)
        texts: list[str] = []
        if owners:
            sequence = step.sequences[owners[0]]
            place = sequence.table.index(block)
            texts = sequence.stored[place * size : (place + 1) * size]
        face = FREE if not owners else SHARED if len(owners) > 1 else COLORS[owners[0]]
        for slot in range(size):
            is_filled = slot < len(texts)
            axes.add_patch(
                Rectangle((slot, block), 1, 0.9, facecolor=face if is_filled else FREE, edgecolor=CACHED, linewidth=0.8)
            )
            if is_filled:
                axes.text(slot + 0.5, block + 0.45, texts[slot], fontsize=6, color="white", ha="center", va="center")
    for source, target in step.copies:
        axes.annotate(
            "", (size + 0.05, target + 0.45), (size + 0.05, source + 0.45), annotation_clip=False,
            arrowprops={"arrowstyle": "->", "connectionstyle": "arc3,rad=-0.6"},
        )  # fmt: skip


def item(at: int, prompt: int, output: int, prefix: tuple[tuple[str, int], ...] = ()) -> WorkItem:
    """A request that arrives before a step."""
    return WorkItem(at=at, input_len=prompt, output_len=output, prefix=prefix, stream=f"{at}-{prompt}-{output}")


def one_map(recording: Recording, names: str = "request") -> Any:
    """A figure with one block map."""
    with styled():
        figure = load_matplotlib()(figsize=(9, 4))
        block_map(figure.subplots(), recording, names)
        return figure


def pictures(recordings: Path) -> Iterator[tuple[str, Any]]:
    """(name, figure) of each picture; ``recordings``: the folder of the recording of seven tokens."""
    small = {"num_gpu_blocks_override": 20, "block_size": 16, "max_model_len": 256, "watermark": 0.0}
    plain = {**small, "enable_prefix_caching": False}
    yield "paging", one_map(simulated([item(0, 40, 40), item(3, 70, 12), item(9, 20, 30), item(20, 60, 20)], **plain))
    system = (("system", 64),)
    shared = [item(0, 90, 16, system), item(4, 80, 20, system), item(8, 100, 14, system), item(30, 84, 12, system)]
    shared.insert(3, item(22, 60, 14))
    yield "sharing", one_map(simulated(shared, **small))
    yield "fork", one_map(forked(24))
    crowd = [item(0, 80, 60), item(1, 70, 60), item(2, 90, 50)]
    with styled():
        figure = load_matplotlib()(figsize=(9, 7))
        upper, lower = figure.subplots(2, 1)
        for axes, mode in ((upper, "recompute"), (lower, "swap")):
            host = {"num_host_blocks_override": 20} if mode == "swap" else {}
            block_map(axes, simulated(crowd, **plain, preemption_mode=mode, **host))
            axes.set_title(f"preemption_mode={mode}", loc="left", pad=34)
    yield "preemption", figure
    with styled():
        steps = seven_tokens(recordings / "seven_tokens.jsonl")
        figure = load_matplotlib()(figsize=(11, 3.6))
        for number, (axes, step) in enumerate(zip(figure.subplots(1, len(steps)), steps, strict=True), 1):
            worked_step(axes, number, step)
    yield "seven_tokens", figure
    profile = load_profile("llama-3.1-8b-h100")
    delay = DelaySetting(profile, chat_inputs(), chat_outputs(), requests=600, tpot_limit=0.009)
    yield "delay", simulate_delay.draw([find_point(delay, factor) for factor in FACTORS])
    arrivals = [item(0, 60, 24), item(1, 50, 24), item(6, 200, 10), item(8, 150, 10)]
    roomy = {"num_gpu_blocks_override": 80, "block_size": 16, "max_model_len": 256, "enable_prefix_caching": False}
    with styled():
        figure = load_matplotlib()(figsize=(9, 5))
        upper, lower = figure.subplots(2, 1, sharex=True, sharey=True)
        mixed = simulated(arrivals, **roomy, batching="mixed", max_num_batched_tokens=64, max_num_seqs=8)
        composition(upper, mixed, "batching=mixed, a budget of 64 tokens")
        first = simulated(arrivals, **roomy, batching="prefill_first", max_num_seqs=8)
        composition(lower, first, "batching=prefill_first")
        lower.set_xlabel("step")
    yield "batching", figure


def main(folder: Path) -> int:
    """Writes all pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in pictures(RECORDINGS if folder == TARGET else folder):
        path = folder / f"{name}.svg"
        save(figure, path)
        print(f"== wrote {path}")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=TARGET, help=f"where the pictures go ({TARGET})")
    sys.exit(main(parser.parse_args().folder))
