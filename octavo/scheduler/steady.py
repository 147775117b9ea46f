"""Decodes that go on as in the step before, kept as columns, so that a step does little for each of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from octavo.scheduler.groups import Sequence, SequenceGroup

#: Steps are numbered modulo this, so that a byte holds the number.
_NUMBERS = 256


@dataclass(slots=True, eq=False)
class Columns:
    """What plans and results need of sequences that decode one token each, in the order in which they run."""

    seqs: list[Sequence] = field(default_factory=list)
    seq_ids: list[int] = field(default_factory=list)
    group_ids: list[int] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    #: The stop tokens of all of them, perhaps with those of some that have left.
    stop_token_ids: frozenset[int] = frozenset()

    def copy(self) -> Columns:
        """Columns of the same sequences."""
        columns = Columns(self.seqs.copy(), self.seq_ids.copy(), self.group_ids.copy(), self.indexes.copy())
        columns.token_ids, columns.stop_token_ids = self.token_ids.copy(), self.stop_token_ids
        return columns

    def extend(self, seqs: list[Sequence]) -> None:
        """Adds sequences behind the others."""
        self.seqs += seqs
        self.seq_ids += [seq.seq_id for seq in seqs]
        self.group_ids += [seq.group.group_id for seq in seqs]
        self.indexes += [seq.index for seq in seqs]
        self.token_ids += [seq.token_ids for seq in seqs]
        self.stop_token_ids = self.stop_token_ids.union(*{seq.stop_token_ids for seq in seqs})

    def remove(self, position: int) -> None:
        """Removes the sequence at a position; its stop tokens stay."""
        for column in (self.seqs, self.seq_ids, self.group_ids, self.indexes, self.token_ids):
            del column[position]


class SteadyDecodes:
    """Owns the columns of the first running groups, as far as each decodes one sequence and needs no result for it.

    In a step each of them computes a token, and nothing is to be done for one alone but in the step that uses the last
    of its slots: then its block is full, or its last token is in flight. So these steps are known before.

    Invariants: the columns are those of the first ``num_groups`` running groups, without the sequences whose last token
    is in flight. For each of them ``_last_steps`` has the number of the step that uses the last of its slots.
    Who changes the order of the running groups, or the tokens that one of them computes next, says so.
    """

    def __init__(self) -> None:
        self.columns = Columns()
        self.num_groups = 0
        #: Whether a step in flight has the columns, too, so that they must not change.
        self._shared = False
        #: Number of the last step that was scheduled.
        self._step = 0
        self._last_steps = bytearray()

    def restart(self) -> None:
        """Forgets all groups; the next ``extend`` finds those that decode."""
        if self.num_groups:
            self.columns, self._shared, self.num_groups = Columns(), False, 0
            self._last_steps.clear()

    def extend(self, running: SequenceOf[SequenceGroup]) -> None:
        """Adds the groups behind those that it has, up to one that does something else than these."""
        if self.num_groups == len(running):
            return
        groups = list(itertools.takewhile(_is_steady, itertools.islice(running, self.num_groups, None)))
        seqs = [group.seqs[0] for group in groups if not group.seqs[0].is_ending]
        self.num_groups += len(groups)
        if seqs:
            self._own_columns().extend(seqs)
            self._last_steps += bytes(map(self._last_step, seqs))

    def leave(self, position: int, group: SequenceGroup) -> None:
        """The group that was at a position of the running ones runs no more."""
        if position < self.num_groups:
            self.num_groups -= 1
            if group.seqs[0] in self.columns.seqs:  # else its last token is in flight
                self._remove(self.columns.seqs.index(group.seqs[0]))

    def without_slots(self) -> list[int]:
        """Positions of those that have used their last slot, and of others that had more slots than a byte can say."""
        return self._with_last_step(self._step)

    def schedule(self, without_slots: list[int]) -> tuple[Columns, list[int], list[int]]:
        """The next step computes a token of each, for which all have slots: those ``without_slots`` got new ones.

        Returns the columns for that step, which must not be changed, the positions of the sequences that use the last
        of their slots in it, and of those among them that sample their last token in it: these are in no later step.
        """
        columns = self.columns
        for position in without_slots:
            self._last_steps[position] = self._last_step(columns.seqs[position])
        self._step = (self._step + 1) % _NUMBERS
        self._shared = True
        last = self._with_last_step(self._step)
        ending = [p for p in last if columns.seqs[p].num_computed + 2 >= columns.seqs[p].max_length]
        for position in reversed(ending):
            self._remove(position)
        return columns, last, ending

    def _with_last_step(self, step: int) -> list[int]:
        """Positions of the sequences whose last slot is used by this step."""
        find, positions = self._last_steps.find, []
        position = find(step)
        while position >= 0:
            positions.append(position)
            position = find(step, position + 1)
        return positions

    def _last_step(self, seq: Sequence) -> int:
        slots = seq.slots_end - seq.num_computed
        if not 0 <= slots < _NUMBERS:
            slots = 0 if slots < 0 else _NUMBERS - 1
        return (self._step + slots) % _NUMBERS

    def _own_columns(self) -> Columns:
        if self._shared:
            self.columns, self._shared = self.columns.copy(), False
        return self.columns

    def _remove(self, position: int) -> None:
        columns = self._own_columns()
        stop_token_ids = columns.seqs[position].stop_token_ids
        columns.remove(position)
        del self._last_steps[position]
        if stop_token_ids != columns.stop_token_ids:
            columns.stop_token_ids = frozenset().union(*{seq.stop_token_ids for seq in columns.seqs})


def _is_steady(group: SequenceGroup) -> bool:
    """Whether it decodes one sequence, and what it computes next depends on no result."""
    if group.prefilling or len(group.seqs) != 1 or group.num_pending_forks or group.drafts or group.plans_on_results:
        return False
    seq = group.seqs[0]
    return group.beam is None and seq.num_computed + 1 >= len(seq.token_ids)
