"""What the encoder of an encoder-decoder network reads, and what a model says of it."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import numpy as np

#: Kinds of inputs: token ids (int32, little-endian), and sound (float32, little-endian; mono, at the model's rate).
TOKENS, AUDIO = "tokens", "audio"


class EncoderInput(msgspec.Struct, frozen=True, array_like=True):
    """The input of one request: it is prepared beside the steps, then computed once for all sequences of the group."""

    #: ``TOKENS``, ``AUDIO``, or another kind that the network's ``prepare_input`` knows.
    kind: str
    #: Digest of kind and payload.
    key: str
    #: Positions of the encoder's output, which the decoder attends to.
    num_tokens: int
    payload: bytes

    @classmethod
    def of(cls, kind: str, payload: bytes, num_tokens: int) -> EncoderInput:
        """Named by its content."""
        digest = blake2b(f"{kind}:{num_tokens}:".encode() + payload, digest_size=16)
        return cls(kind, f"encoder:{digest.hexdigest()}", num_tokens, payload)

    @classmethod
    def of_tokens(cls, token_ids: list[int]) -> EncoderInput:
        """A text, as ids from 0 to 2**31 - 1."""
        import numpy as np

        return cls.of(TOKENS, np.array(token_ids, "<i4").tobytes(), len(token_ids))

    @property
    def token_ids(self) -> list[int] | None:
        """Those of a text."""
        import numpy as np

        return np.frombuffer(self.payload, "<i4").tolist() if self.kind == TOKENS else None

    @classmethod
    def of_audio(cls, samples: np.ndarray, num_tokens: int) -> EncoderInput:
        """Sound, float32 [samples], at the model's rate; ``num_tokens`` positions are what the network makes of it."""
        import numpy as np

        return cls.of(AUDIO, np.ascontiguousarray(samples, "<f4").tobytes(), num_tokens)


@dataclass(frozen=True)
class EncoderFacts:
    """What an encoder-decoder model says of its encoder's input, and of how its decoder begins."""

    #: Positions of the longest input; None: its encoder sets no limit.
    max_tokens: int | None
    #: First tokens of the decoder: every prompt of it begins with the first of them.
    decoder_start_ids: tuple[int, ...]
    #: Tokens that the answer begins with in any case; they count as generated where a beam search scores lengths.
    forced_ids: tuple[int, ...] = ()
    #: Numbers of each row of the prepared input, float32; None: the rows are token ids.
    feature_width: int | None = None
    #: Of sound: samples a second, those of the longest input, and the positions of every input; 0: none is taken.
    audio_rate: int = 0
    audio_samples: int = 0
    audio_tokens: int = 0

    @property
    def takes_audio(self) -> bool:
        """Whether its input is sound, and not text."""
        return self.audio_rate > 0
