"""Predicted outputs: a request brings a text that its answer is likely to repeat, such as a file to be edited."""

from __future__ import annotations

from octavo.speculation.drafter import DraftedSequence, Drafter

#: Tokens that must agree where the prediction is found again, and most that are compared.
_LEAST, _MOST = 2, 8
#: Tokens of the prediction that are searched: bounds the time of a proposal.
_WINDOW = 1 << 14


class PredictionDrafter(Drafter):
    """Drafts what the prediction says next: from its beginning on, and after a difference from where it agrees again.

    That is behind the longest end of the output, of 2 to 8 tokens, that is in the prediction: of equal ones the next
    after the difference. Sequences without a prediction are not drafted.
    """

    def __init__(self) -> None:
        self._followed: dict[int, _Prediction] = {}

    def propose(self, sequence: DraftedSequence, num_tokens: int) -> list[int]:
        """See ``Drafter``."""
        if not sequence.prediction:
            return []
        followed = self._followed.get(sequence.seq_id)
        if followed is None:
            followed = _Prediction(sequence.prediction, sequence.num_prompt_tokens)
            self._followed[sequence.seq_id] = followed
        return followed.propose(sequence.token_ids, num_tokens)

    def on_end(self, sequence: DraftedSequence) -> None:
        """See ``Drafter``."""
        self._followed.pop(sequence.seq_id, None)


class _Prediction:
    """Where in its prediction one sequence is. Owns up to 4 bytes a token of it."""

    def __init__(self, token_ids: list[int], num_prompt_tokens: int) -> None:
        self._tokens = token_ids
        #: The tokens as code points: a search for some of them is one for a text.
        self._text = "".join(map(chr, token_ids))
        self._num_prompt_tokens = num_prompt_tokens
        #: Tokens of the sequence that were looked at, and the place of the next one in the prediction.
        self._known, self._place = num_prompt_tokens, 0
        #: Whether the last tokens agree with those before the place.
        self._agrees = True

    def propose(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """What follows in the prediction; nothing while the place is not known."""
        place, new = self._place, token_ids[self._known :]
        self._known = len(token_ids)
        if self._agrees and self._tokens[place : place + len(new)] == new:
            place += len(new)
        else:
            place = self._find(token_ids)
        self._agrees = place >= 0
        if not self._agrees:
            return []
        self._place = place
        return self._tokens[place : place + num_tokens]

    def _find(self, token_ids: list[int]) -> int:
        """The place behind the longest end of the output; -1 if there is none."""
        text, start, found = self._text, self._place, -1
        end = "".join(map(chr, token_ids[max(self._num_prompt_tokens, len(token_ids) - _MOST) :]))
        for length in range(_LEAST, len(end) + 1):
            wanted = end[-length:]
            at = text.find(wanted, start, start + _WINDOW)
            if at < 0:
                at = text.find(wanted, 0, _WINDOW)
            if at < 0:
                break
            found = at + length
        return found
