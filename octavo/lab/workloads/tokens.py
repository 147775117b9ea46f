"""The content of a request: token ids or words, always the same for the same item.

The tokens of a name (see ``WorkItem``) are the output of SHAKE-128 for it, so any number of them begins with any
smaller number of them, on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import ConfigError
from octavo.lab.workloads.work_items import WorkItem

#: English words that, with the space before them, are one token for most tokenizers.
_COMMON = (
    "the of and to in is that for on with as are this be from or have an they which one you were all their there been "
    "many some so these would other into has more two like him see time could no make than first its who now people "
    "my made over did down only way find use may water long little very after words just where most know get through "
    "back much before go good new write our used me man too any day same right look think also around another came "
    "come work three word must because does part even place well such here take why things help put years different "
    "away again off went old number great tell men say small every found still between name should home big give air"
)
WORDS = _COMMON.split()
#: Smallest and largest token id, within nearly every vocabulary and above its special tokens.
ID_RANGE = (1000, 8000)


def token_ids(item: WorkItem, id_range: tuple[int, int] = ID_RANGE) -> list[int]:
    """The prompt's token ids, ``input_len`` of them, each within ``id_range`` (both included).

    Raises:
        ConfigError: the prompt is a text, which has no token ids without a tokenizer.
    """
    if isinstance(item.prompt, str):
        raise ConfigError("a prompt of the trace is a text, and token ids are needed: give input_len instead of it")
    if item.prompt is not None:
        return list(item.prompt)
    ids: list[int] = []
    for name, start, end in _pieces(item):
        ids += _stream(name, end, id_range)[start:].tolist()
    return ids


def output_ids(item: WorkItem, id_range: tuple[int, int] = ID_RANGE) -> list[int]:
    """Token ids that stand for the output, ``output_len`` of them: what the next turn's prompt has in this place."""
    start = _position(item) + item.input_len - sum(length for _, length in item.prefix)
    ids: list[int] = _stream(item.stream, start + item.output_len, id_range)[start:].tolist()
    return ids


def text(item: WorkItem) -> str:
    """The prompt as a text of ``input_len`` words, each about a token; of a trace with texts its own.

    Raises:
        ConfigError: the prompt is given as token ids.
    """
    if isinstance(item.prompt, str):
        return item.prompt
    if item.prompt is not None:
        raise ConfigError("the trace holds token ids, and a text is needed: give prompts as text, or input_len")
    words: list[str] = []
    for name, start, end in _pieces(item):
        # The first word is the name's number: short texts could be equal by chance and hit a prefix cache.
        number = name.rpartition("/")[2]
        chosen = [WORDS[i] for i in _stream(name, end, (0, len(WORDS) - 1))[1:].tolist()]
        words += [number, *chosen][start:]
    return " ".join(words)


def _position(item: WorkItem) -> int:
    """How many tokens of its stream the prefixes have."""
    return sum(length for name, length in item.prefix if name == item.stream)


def _pieces(item: WorkItem) -> Iterator[tuple[str, int, int]]:
    """(name, first, end) of the prompt's pieces that are not empty."""
    own, start = item.input_len, _position(item)
    for name, length in item.prefix:
        own -= length
        if length:
            yield name, 0, length
    if own:
        yield item.stream, start, start + own


def _stream(name: str, count: int, id_range: tuple[int, int]) -> NDArray[np.uint64]:
    """The first ``count`` tokens of a name: 32 bits each, scaled to the range."""
    low, high = id_range
    drawn = np.frombuffer(hashlib.shake_128(name.encode()).digest(4 * count), "<u4").astype(np.uint64)
    return (drawn * np.uint64(high - low + 1) >> np.uint64(32)) + np.uint64(low)
