"""Outputs of a step as they travel: columns of tokens of which nothing else is said, in parts, and as messages."""

from __future__ import annotations

import msgspec
import pytest

from octavo.core.failures import SequenceFailure
from octavo.core.plan import EngineCoreOutputs, GroupOutput, SequenceOutput
from octavo.core.request import AdmissionStats


def outputs() -> EngineCoreOutputs:
    ended = SequenceOutput(9, 0, [4, 5], None, "length")
    columns = [1, 1, 2, 3, 4], [0, 1, 0, 0, 0], [10, 11, 12, 13, 14]
    return EngineCoreOutputs(
        [AdmissionStats(1)], *columns, [ended], groups=[GroupOutput(7, "error", SequenceFailure("no", "adapter"))]
    )


def test_each_sequence_has_its_tokens() -> None:
    found = [(s.group_id, s.index, s.token_ids, s.finish_reason) for s in outputs().each_sequence()]
    expected = [(1, 0, [10], None), (1, 1, [11], None), (2, 0, [12], None), (3, 0, [13], None), (4, 0, [14], None)]
    assert found == [*expected, (9, 0, [4, 5], "length")]


@pytest.mark.parametrize("size", [1, 2, 4, 5, 6, 100])
def test_parts_are_the_whole_in_its_order(size: int) -> None:
    whole = outputs()
    parts = list(whole.parts(size))
    assert [s for part in parts for s in part.each_sequence()] == list(whole.each_sequence())
    assert all(len(list(part.each_sequence())) <= size for part in parts)
    assert [a for part in parts for a in part.admissions] == whole.admissions
    assert [g for part in parts for g in part.groups] == whole.groups
    assert parts[0].admissions and parts[-1].groups


def test_a_message_is_the_same() -> None:
    encoded = msgspec.msgpack.encode(outputs())
    assert msgspec.msgpack.decode(encoded, type=EngineCoreOutputs) == outputs()
