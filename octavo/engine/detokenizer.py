"""The text of a request's output while it grows: whole characters only, ended by stop strings."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.engine.text_stream import TextStream
from octavo.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that ended an output."""

    stop: str
    #: Output tokens up to the one that completed the stop string, this one included.
    num_tokens: int


class IncrementalDetokenizer:
    """Owns the text of one output sequence.

    The cost of an output is linear in its tokens and characters, whatever the text and the stop strings are.
    ``text`` only ever grows, except that a stop string found in it is cut off (and what follows it in its token); such
    a beginning of a stop string is never handed out by ``new_text``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """An output of no tokens after ``prompt_token_ids``.

        Args:
            tokenizer: the model's.
            prompt_token_ids: they tell whether the output begins a text or continues one.
            skip_special_tokens: leaves special tokens out of the text.
            stop: texts that end the output.
            include_stop_str_in_output: keeps the stop string at the end of the text.
            min_tokens: a stop string that is complete before so many tokens is ordinary text.
        """
        self._stream = TextStream(tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens)
        self._searches = [_StopSearch(text) for text in stop]
        self._keep_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._pieces: list[str] = []
        self._length = 0
        self._unsent: deque[str] = deque()
        self._sent = 0
        self._finished = False
        #: Output tokens seen, without those after a stop string.
        self.num_tokens = 0

    @property
    def text(self) -> str:
        """All text that is certain: no part of a character, nothing after a stop string."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def stable_text_len(self) -> int:
        """Characters of ``text`` that no later token can take back: those before what may begin a stop string."""
        if self._finished or self._keep_stop:
            return self._length
        return self._length - max((search.matched for search in self._searches), default=0)

    @property
    def stable_text(self) -> str:
        """The part of ``text`` that may be shown already; see ``stable_text_len``."""
        return self.text[: self.stable_text_len]

    def append(self, token_ids: Sequence[int]) -> StopMatch | None:
        """Takes further output tokens, up to the one that completes a stop string; returns that stop string."""
        for token_id in token_ids:
            if self._finished:
                break
            self.num_tokens += 1
            if match := self._add(self._stream.push(token_id)):
                return match
        return None

    def finish(self) -> StopMatch | None:
        """Ends the output: an incomplete character becomes U+FFFD, and nothing is held back any more."""
        match = None if self._finished else self._add(self._stream.flush())
        self._finished = True
        return match

    def new_text(self, finished: bool) -> str:
        """The text since the last call that is stable, or all of it if ``finished``."""
        limit = self._length if finished else self.stable_text_len
        ready = []
        while self._sent < limit:
            piece = self._unsent.popleft()
            room = limit - self._sent
            if len(piece) > room:
                self._unsent.appendleft(piece[room:])
                piece = piece[:room]
            ready.append(piece)
            self._sent += len(piece)
        return "".join(ready)

    def _add(self, piece: str) -> StopMatch | None:
        if not piece:
            return None
        found = self._search(piece) if self._searches else None
        if found is None:
            self._keep(piece)
            return None
        stop, end = found
        self._keep(piece[:end])
        if not self._keep_stop:
            self._cut(len(stop))
        self._finished = True
        return StopMatch(stop, self.num_tokens)

    def _search(self, piece: str) -> tuple[str, int] | None:
        """The stop string that ends first in the piece, the longest of several, and where in the piece it ends."""
        counts = self.num_tokens >= self._min_tokens
        best: tuple[str, int] | None = None
        for search in self._searches:
            end = search.feed(piece, counts)
            if end and (best is None or (end, -len(search.text)) < (best[1], -len(best[0]))):
                best = search.text, end
        return best

    def _keep(self, piece: str) -> None:
        self._pieces.append(piece)
        self._unsent.append(piece)
        self._length += len(piece)

    def _cut(self, characters: int) -> None:
        """Takes the last characters back; they were held back, so none of them was handed out."""
        self._length -= characters
        self._pieces = [self.text[: self._length]]
        self._unsent = deque(["".join(self._unsent)[: self._length - self._sent]])


class _StopSearch:
    """Finds one text in a stream of characters (Knuth, Morris & Pratt 1977): amortised constant time a character."""

    __slots__ = ("_fallback", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        #: Length of the longest beginning of ``text`` that the stream ends with.
        self.matched = 0
        # _fallback[n]: length of the longest proper beginning of text[:n] that is also its end.
        self._fallback = [0, 0]
        length = 0
        for character in text[1:]:
            while length and text[length] != character:
                length = self._fallback[length]
            length += text[length] == character
            self._fallback.append(length)

    def feed(self, piece: str, counts: bool) -> int:
        """Number of characters of the piece up to the end of the first match; 0 if there is none.

        If not ``counts``, matches are passed over.
        """
        text, fallback, matched = self.text, self._fallback, self.matched
        if not matched and text[0] not in piece:  # the usual case, at the speed of C
            return 0
        for position, character in enumerate(piece, 1):
            while matched and text[matched] != character:
                matched = fallback[matched]
            matched += text[matched] == character
            if matched == len(text):
                if counts:
                    self.matched = matched
                    return position
                matched = fallback[matched]
        self.matched = matched
        return 0
