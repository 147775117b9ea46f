"""Grammars that the workers compile: which are ready, which groups wait for one, and which are forgotten."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from octavo.core.plan import StepPlan, StepResult
from octavo.core.structured_outputs import Grammar
from octavo.scheduler.groups import SequenceGroup

#: Most compiled grammars in no use that the workers keep, for requests that come again with the same.
MAX_IDLE = 128


@dataclass(slots=True)
class _Entry:
    grammar: Grammar
    ready: bool = False
    #: Whether the workers were told that no group waits for it.
    cancelled: bool = False
    #: Unfinished groups with it.
    num_groups: int = 0
    #: Those of them that wait until it is compiled, by group id, in order of arrival.
    waiting: dict[int, SequenceGroup] = field(default_factory=dict)


class Grammars:
    """The grammars of unfinished groups, and of the last ones that have ended.

    Invariants: a grammar with unfinished groups is not dropped; of the others at most ``max_idle`` are kept, the least
    recently used goes first. All methods take constant time for a group.
    """

    def __init__(self, max_idle: int = MAX_IDLE) -> None:
        self._max_idle = max_idle
        self._entries: dict[str, _Entry] = {}
        #: Compiled ones without groups, the least recently used first.
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._compile: list[Grammar] = []
        self._drop: list[str] = []
        self._cancel: list[str] = []
        self.num_waiting = self.num_compiling = 0

    def acquire(self, group: SequenceGroup, grammar: Grammar) -> bool:
        """A group with this grammar begins; whether it is compiled. If not, the group waits, and ``update`` says when
        it may go on.
        """
        entry = self._entries.get(grammar.key)
        if entry is None:
            entry = self._entries[grammar.key] = _Entry(grammar)
            self._compile.append(grammar)
            self.num_compiling += 1
        entry.num_groups += 1
        self._idle.pop(grammar.key, None)
        if not entry.ready:
            entry.waiting[group.group_id] = group
            self.num_waiting += 1
        return entry.ready

    def release(self, group: SequenceGroup, grammar: Grammar) -> None:
        """A group with this grammar has ended, in whatever state."""
        entry = self._entries.get(grammar.key)
        if entry is None:  # it could not be compiled
            return
        entry.num_groups -= 1
        if entry.waiting.pop(group.group_id, None) is not None:
            self.num_waiting -= 1
        if entry.num_groups:
            return
        if entry.ready:
            self._keep_idle(grammar.key)
        elif grammar in self._compile:
            self._compile.remove(grammar)
            self._forget(entry)
        else:
            entry.cancelled = True
            self._cancel.append(grammar.key)

    def _forget(self, entry: _Entry) -> list[SequenceGroup]:
        """One that is not compiled; the groups that have waited for it."""
        del self._entries[entry.grammar.key]
        return self._end_wait(entry)

    def _keep_idle(self, key: str) -> None:
        self._idle[key] = None
        if len(self._idle) > self._max_idle:
            oldest, _ = self._idle.popitem(last=False)
            del self._entries[oldest]
            self._drop.append(oldest)

    def add_to(self, plan: StepPlan) -> None:
        """Moves what the workers are to be told into a plan."""
        if self._drop:
            plan.grammars_to_drop, self._drop = self._drop, []
        if self._compile:
            plan.grammars_to_compile, self._compile = self._compile, []
        if self._cancel:
            plan.grammars_to_cancel, self._cancel = self._cancel, []

    def repeat(self, plan: StepPlan) -> None:
        """Tells the workers again what a plan that failed told them, as far as it still holds (see ``Adapters``)."""
        self._drop += [key for key in plan.grammars_to_drop if key not in self._entries and key not in self._drop]
        self._compile = [entry.grammar for entry in self._entries.values() if not entry.ready]

    def update(self, result: StepResult) -> tuple[list[SequenceGroup], list[tuple[SequenceGroup, str]]]:
        """Takes what a result says of grammars: the groups that waited and may go on, and those that fail, and why."""
        ready: list[SequenceGroup] = []
        failed: list[tuple[SequenceGroup, str]] = []
        for key in result.compiled_grammars:
            entry = self._entries.get(key)
            if entry is None or entry.ready:
                continue
            entry.ready = True
            ready += self._end_wait(entry)
            if not entry.num_groups:
                self._keep_idle(key)
        for key, message in result.grammar_errors.items():
            entry = self._entries.get(key)
            if entry is None or entry.ready:
                continue
            self._drop.append(key)  # of several workers, some may have compiled it
            if entry.cancelled and entry.waiting:  # groups that came after it was cancelled
                entry.cancelled = False
                self._compile.append(entry.grammar)
            else:
                failed += [(group, message) for group in self._forget(entry)]
        return ready, failed

    def _end_wait(self, entry: _Entry) -> list[SequenceGroup]:
        groups, entry.waiting = list(entry.waiting.values()), {}
        self.num_waiting -= len(groups)
        self.num_compiling -= 1
        return groups
