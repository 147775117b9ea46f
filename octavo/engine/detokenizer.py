"""The text of a request's output while it grows: whole characters only, ended by stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.sampling_params import SamplingParams
from octavo.engine.text_stream import TextStream
from octavo.engine.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Owns the text of one output sequence.

    The cost of an output is linear in its tokens and characters, whatever the text and the stop strings are.
    Invariant: what ``take_text`` returns, call after call, is the text of the output. A stop string and what follows it
    in its token are not part of it, so what may be the beginning of one is held back.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        visible_tokens: frozenset[int] = frozenset(),
    ) -> None:
        """An output of no tokens after ``prompt_token_ids``, which tell whether it begins a text or continues one.

        ``visible_tokens``: special tokens that stay in the text, even if the parameters say that others do not.
        """
        self._stream = TextStream(
            tokenizer,
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            visible_tokens=visible_tokens,
        )
        self._searches = [_StopSearch(text) for text in params.stop or ()]
        self._keep_stop = params.include_stop_str_in_output
        #: A stop string that is complete before so many tokens is ordinary text.
        self._min_tokens = params.min_tokens
        #: Text that was not taken yet.
        self._pieces: list[str] = []
        self._finished = False
        #: Output tokens seen, without those after a stop string.
        self.num_tokens = 0

    def append(self, token_ids: Sequence[int]) -> str | None:
        """Takes further output tokens, up to the one that completes a stop string; returns that stop string."""
        for token_id in token_ids:
            if self._finished:
                break
            self.num_tokens += 1
            if match := self._add(self._stream.push(token_id)):
                return match
        return None

    def finish(self) -> str | None:
        """Ends the output: an incomplete character becomes U+FFFD, and nothing is held back any more."""
        match = None if self._finished else self._add(self._stream.flush())
        self._finished = True
        return match

    def take_text(self) -> str:
        """The text since the last call that no later token can take back; once the output has ended, all of it."""
        held = 0 if self._finished or self._keep_stop else max((s.matched for s in self._searches), default=0)
        text = "".join(self._pieces)
        end = len(text) - held
        self._pieces = [text[end:]]
        return text[:end]

    def _add(self, piece: str) -> str | None:
        if not piece:
            return None
        match = self._search(piece) if self._searches else None
        if match is None:
            self._pieces.append(piece)
            return None
        stop, end = match
        self._pieces.append(piece[:end])
        if not self._keep_stop:  # its characters were held back, so that none of them was taken
            self._pieces = ["".join(self._pieces)[: -len(stop)]]
        self._finished = True
        return stop

    def _search(self, piece: str) -> tuple[str, int] | None:
        """The stop string that ends first in the piece, the longest of several, and where in the piece it ends."""
        counts = self.num_tokens >= self._min_tokens
        best: tuple[str, int] | None = None
        for search in self._searches:
            end = search.feed(piece, counts)
            if end and (best is None or (end, -len(search.text)) < (best[1], -len(best[0]))):
                best = search.text, end
        return best


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
