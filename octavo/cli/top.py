"""``octavo top``: the engine of a server in the terminal, live."""

from __future__ import annotations

import os
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from octavo.cli.parsing import EXIT_FAILED, Arguments, Parser
from octavo.core.errors import ConfigError
from octavo.core.stats import (
    MAX_GROUPS,
    BlockMap,
    BlockState,
    Change,
    EngineEvent,
    EngineView,
    GroupRow,
    StepRecord,
    StoreTierStats,
)

if TYPE_CHECKING:
    import httpx


EXAMPLE = """\
examples:
  octavo top
  octavo top http://127.0.0.1:9000
  OCTAVO_API_KEY=... octavo top https://models.example
  octavo top --once

Ctrl-C ends it. It costs the server a few milliseconds a second at most.
"""
DEFAULT = "http://127.0.0.1:8000"
KEY_VARIABLE = "OCTAVO_API_KEY"
#: Seconds without data, after which the server counts as lost.
_TIMEOUT = 15.0


def make_parser() -> Parser:
    parser = Parser(
        prog="octavo top",
        usage="octavo top [options] [URL]",
        description="Shows the blocks, queues, steps and lives of requests of a server's engine as text, live.",
        epilog=EXAMPLE,
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"API key of the server (default: the variable {KEY_VARIABLE})"
    )
    parser.add_argument("--once", action="store_true", help="print the engine as it is now, and end")
    return parser


def run(arguments: Arguments) -> int:
    """Shows the engine until Ctrl-C; returns 1 if the connection ends."""
    from rich.console import Console
    from rich.live import Live

    if len(arguments.words) > 1:
        raise ConfigError(f"octavo top takes one URL, not {len(arguments.words)}")
    url = (arguments.words or [DEFAULT])[0].rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"the URL of a server begins with http:// or https://, not {url!r}")
    key = arguments.api_key or os.environ.get(KEY_VARIABLE)
    console, history = Console(), StepHistory()
    live = not arguments.once and console.is_terminal
    screen = Live(console=console, screen=True, auto_refresh=False) if live else None
    with suppress(KeyboardInterrupt), _events(url, key) as events:
        with screen or nullcontext():
            for event in events:
                history.add(event)
                if screen is not None:
                    screen.update(render(event, history, console.width), refresh=True)
                elif event.views:
                    console.print(render(event, history, console.width))
                    return 0
        print(f"octavo: error: the server at {url} has ended the stream", file=sys.stderr)
        return EXIT_FAILED
    return 0


@contextmanager
def _events(url: str, key: str | None) -> Iterator[Iterator[EngineEvent]]:
    """The events of a server's engine."""
    import httpx
    import msgspec

    def events(response: httpx.Response) -> Iterator[EngineEvent]:
        decoder = msgspec.json.Decoder(EngineEvent)
        for line in response.iter_lines():
            if line.startswith("data: "):
                yield decoder.decode(line.removeprefix("data: "))

    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.stream("GET", f"{url}/engine/events", headers=headers, timeout=_TIMEOUT) as response:
            if response.status_code != 200:
                response.read()
                raise ConfigError(f"the server at {url} answered {response.status_code}: {_message(response)}")
            yield events(response)
    except httpx.HTTPError as e:
        raise ConfigError(f"the server at {url} does not answer: {e or type(e).__name__}") from None


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]


# ---- an engine's state as text for the terminal

_STYLES = {
    BlockState.FREE: "bright_black",
    BlockState.CACHED: "cyan",
    BlockState.USED: "green",
    BlockState.SHARED: "magenta",
    BlockState.PINNED: "yellow",
}
_SPARKS = "▁▂▃▄▅▆▇█"
#: Limits: lines of a block map; listed groups, changes and adapters.
_MAP_LINES, _GROUPS, _CHANGES, _ADAPTERS = 6, 12, 6, 8
#: Columns of a terminal with room for whole request ids, and characters of an id in a narrower one.
_WIDE, _SHORT = 140, 20
#: Events of a life that are kept, and columns of a terminal in which lives are shown.
_LIFE, _LIFE_FROM = 60, 70
#: What a request waits for, by ``GroupRow.waits_for``.
_OBSTACLES = {
    "blocks": "for blocks",
    "sequences": "for a place",
    "prompts": "for other prompts",
    "step": "for its turn",
    "store": "for its prefix",
    "lora": "for its adapter",
    "prompt_adapter": "for its adapter",
    "grammar": "for its grammar",
    "image": "for its images",
    "encoder_input": "for its input",
}
#: By what a request does: its mark in the strip of its life, and the colour.
_MARKS = {
    "waiting": ("·", "bright_black"),
    "fetching": ("~", "cyan"),
    "prompt": ("▒", "yellow"),
    "decoding": ("█", "blue"),
    "preempted": ("x", "red"),
    "swapped": ("▁", "magenta"),
}


class StepHistory:
    """The last steps and changes of each replica, and the lives of its requests."""

    def __init__(self) -> None:
        self.steps: dict[int, deque[StepRecord]] = {}
        #: By group: what it did at each of the last events. A request keeps its group at another core.
        self.lives: dict[int, deque[str]] = {}
        #: Changes, each with the request ids of its view.
        self.changes: dict[int, deque[tuple[Change, dict[int, str]]]] = {}

    def add(self, event: EngineEvent) -> None:
        if event.whole:
            self.steps.clear()
        for view in event.views:
            self.steps.setdefault(view.replica, deque(maxlen=1000)).extend(view.steps)
            self.changes.setdefault(view.replica, deque(maxlen=_CHANGES)).extend(
                (change, view.request_ids) for change in view.changes
            )
            self._add_lives(view)

    def _add_lives(self, view: EngineView) -> None:
        set_back = {life.group_id for life in view.lives if life.kind in ("recompute", "swap")}
        for row in view.groups:
            life = self.lives.setdefault(row.group_id, deque(maxlen=_LIFE))
            life.append("preempted" if row.group_id in set_back else _does(row))
        for life_event in view.lives:
            if life_event.kind == "end":
                self.lives.pop(life_event.group_id, None)
        while len(self.lives) > 4 * MAX_GROUPS:  # their ends were not seen
            del self.lives[next(iter(self.lives))]


def _does(row: GroupRow) -> str:
    if row.status == "running":
        is_computed = row.computed_tokens >= row.prompt_tokens + row.output_tokens - row.num_seqs
        return "decoding" if is_computed and row.computed_tokens else "prompt"
    if row.status == "swapped":
        return "swapped"
    if row.recomputes and not row.is_resumed:
        return "preempted"
    return "waiting" if row.waits_for in ("", "blocks", "sequences", "prompts", "step") else "fetching"


def render(event: EngineEvent, history: StepHistory, width: int) -> RenderableType:
    """An event as text for a terminal of ``width`` columns."""
    parts: list[RenderableType] = []
    if len(event.replicas) > 1 or any(row.status != "ready" for row in event.replicas):
        rows = ", ".join(f"{row.number} {row.status} ({row.open_requests} requests)" for row in event.replicas)
        parts.append(Text(f"engine cores: {rows}"))
    for view in event.views:
        steps = history.steps.get(view.replica, deque())
        parts.append(_headline(view, steps))
        for blocks in view.blocks:
            if not blocks.on_host or blocks.counts[BlockState.FREE] < blocks.num_blocks:
                parts.append(_map(blocks, width))
        parts += [_sparks("tokens ", [s.prefill_tokens + s.decode_tokens for s in steps], width)]
        parts += [_sparks("ms     ", [1e3 * s.seconds for s in steps], width), _queues(view, history, width)]
        parts += [Text(_adapters(view))] if view.adapters else []
        parts += [Text(_store(tier), style="red" if tier.trouble else "") for tier in _tiers(view)]
        changes = history.changes.get(view.replica, ())
        parts += [Text(_words(change, ids, width), style="dim") for change, ids in changes]
    return Group(*(parts or [Text("no engine core answers")]))


def _headline(view: EngineView, steps: deque[StepRecord]) -> Text:
    state = view.state
    hits = f"{state.prefix_hit_tokens / state.prefix_queried_tokens:.0%}" if state.prefix_queried_tokens else "-"
    words = [
        f"replica {view.replica}",
        f"step {state.steps}",
        f"{state.num_running} running, {state.num_waiting} waiting{_obstacle(view)}, {state.num_swapped} swapped",
        f"{_rate(steps):.1f} output tokens/s",
        f"KV cache {state.kv_cache_usage:.0%}",
        f"prefix hits {hits}",
        f"preempted {state.preemptions_by_recompute} + {state.preemptions_by_swap}",
    ]
    if state.speculation is not None and state.speculation.draft_tokens:
        words.append(f"drafts accepted {state.speculation.accepted_tokens / state.speculation.draft_tokens:.0%}")
    if state.adapters is not None:
        words.append(f"adapters in slots {state.adapters.in_slots}")
    return Text(" · ".join(words), style="bold")


def _obstacle(view: EngineView) -> str:
    """What most of the waiting requests wait for."""
    reasons = Counter(row.waits_for for row in view.groups if row.status == "waiting")
    [(reason, _)] = reasons.most_common(1) or [("", 0)]
    return f" {_OBSTACLES[reason]}" if reason in _OBSTACLES else ""


def _rate(steps: deque[StepRecord], seconds: float = 5.0) -> float:
    """Decode tokens per second over the last steps."""
    last = [step for step in steps if step.at > steps[-1].at - seconds]
    if not last:
        return 0.0
    time = last[-1].at - (last[0].at - last[0].seconds)
    return sum(step.decode_tokens for step in last) / time if time > 0 else 0.0


def _map(shown: BlockMap, width: int) -> Text:
    """A map of cells, each of several blocks if needed: a cell shows its most frequent state."""
    if shown.bins:
        states = [BlockState(i) for counts in shown.bins for i, count in enumerate(counts) for _ in range(count)]
    else:
        states = [BlockState(run.state) for run in shown.runs for _ in range(run.count)]
    cells, left_out = max(1, width) * _MAP_LINES, ""
    if shown.runs and len(states) > cells:  # few used blocks would be lost among the free ones
        states, left_out = [state for state in states if state is not BlockState.FREE], ", free ones are not drawn"
    each = max(1, -(-len(states) // cells))
    where = "host" if shown.on_host else "device" if not shown.group else f"device, KV group {shown.group}"
    counts = ", ".join(f"{count} {BlockState(i).name.lower()}" for i, count in enumerate(shown.counts) if count)
    blocks = "recurrent states" if shown.has_states else "blocks"
    text = Text(
        f"{where}: {shown.num_blocks} {blocks}: {counts}"
        + (f" (a cell is {each})" if each > 1 else "")
        + left_out
        + "\n"
    )
    for start in range(0, len(states), each):
        part = states[start : start + each]
        state = max(set(part), key=lambda one: (part.count(one), one))
        text.append("·" if state is BlockState.FREE else "■", style=_STYLES[state])
    return text


def _sparks(name: str, values: list[float] | list[int], width: int) -> Text:
    values = values[-max(1, width - len(name) - 14) :]
    most = max(values, default=0)
    bars = "".join(_SPARKS[min(7, int(8 * value / most))] if most else _SPARKS[0] for value in values)
    return Text(f"{name}{bars} ≤ {most:.4g}")


def _name(group_id: int, ids: dict[int, str], width: int) -> str:
    """The request's id, shortened in a narrow terminal; without an id, the engine's number."""
    name = ids.get(group_id, str(group_id))
    return name if width >= _WIDE or len(name) <= _SHORT else f"{name[:13]}…{name[-6:]}"


def _queues(view: EngineView, history: StepHistory, width: int) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim")
    shows_lives = width >= _LIFE_FROM
    for title in ("request", "state", *(["life"] if shows_lives else []), "prompt", "output", "computed", "age"):
        table.add_column(title, justify="left" if title in ("state", "life") else "right", no_wrap=title == "life")
    table.add_column("preempted")
    length = min(_LIFE, max(8, (width - 60) // 3))
    for row in view.groups[:_GROUPS]:
        name = _name(row.group_id, view.request_ids, width) + (f" x {row.num_seqs}" if row.num_seqs > 1 else "")
        state = (
            "fetching its prefix" if row.is_fetching else f"{row.status} {_OBSTACLES.get(row.waits_for, '')}".strip()
        )
        life = [_life(history.lives.get(row.group_id, ()), length)] if shows_lives else []
        counts = (str(count) for count in (row.prompt_tokens, row.output_tokens, row.computed_tokens))
        table.add_row(name, state, *life, *counts, f"{row.age:.1f} s", _preempted(row, view.request_ids, width))
    left = len(view.groups) - _GROUPS
    parts: list[RenderableType] = [table]
    if left > 0:
        parts.append(Text(f"and {left} more", style="dim"))
    if shows_lives and view.groups:
        parts.append(Text("life: " + ", ".join(f"{mark} {name}" for name, (mark, _) in _MARKS.items()), style="dim"))
    return Group(*parts)


def _life(life: Iterable[str], length: int) -> Text:
    """The last ``length`` events of a request."""
    text = Text()
    for does in [*life][-length:]:
        mark, style = _MARKS[does]
        text.append(mark, style=style)
    return text


def _adapters(view: EngineView) -> str:
    shown = view.adapters[:_ADAPTERS]
    words = [f"{' = '.join(one.names) or one.key[:12]} ({one.num_running} running)" for one in shown]
    all_ = view.state.adapters.in_slots if view.state.adapters is not None else len(view.adapters)
    more = f" and {all_ - len(shown)} more" if all_ > len(shown) else ""
    return f"adapters: {', '.join(words)}{more}"


def _tiers(view: EngineView) -> list[StoreTierStats]:
    return view.state.stores.tiers if view.state.stores is not None else []


def _store(tier: StoreTierStats) -> str:
    """What a tier of the KV stores holds, what was found in it, and how fast it is."""
    words = [f"{tier.found} of {tier.asked} blocks found", f"{tier.written} written"]
    bound = f" of {_bytes(tier.max_bytes)}" if tier.max_bytes else ""
    words.insert(0, f"{_bytes(tier.held_bytes)}{bound} held")
    if tier.read_seconds:
        words.append(f"reads {_bytes(tier.bytes_read / tier.read_seconds)}/s")
    counts = {"dropped": tier.dropped, "evicted": tier.evicted, "damaged": tier.damaged, "failed calls": tier.errors}
    words += [f"{count} {name}" for name, count in counts.items() if count]
    return f"{tier.tier}: {', '.join(words)}" + (f"; does not work: {tier.trouble}" if tier.trouble else "")


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"


def _preempted(row: GroupRow, ids: dict[int, str], width: int) -> str:
    parts = [f"{row.recomputes} recomputed ({row.recomputed_tokens} tokens)"] if row.recomputes else []
    parts += [f"{row.swaps} swapped ({row.swapped_blocks} blocks)"] if row.swaps else []
    if parts and row.preempted_for is not None:
        parts.append(f"for {_name(row.preempted_for, ids, width)}")
    return ", ".join(parts)


def _words(change: Change, ids: dict[int, str], width: int) -> str:
    group = "" if change.group_id < 0 else f" of request {_name(change.group_id, ids, width)}"
    cost = f", cost {change.cost}" if change.cost else ""
    kind = f"{change.kind} ({change.why})" if change.why else change.kind
    return f"step {change.step}: {kind}{group} {' '.join(map(str, change.blocks[:8]))}{cost}"
