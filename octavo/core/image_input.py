"""Images in prompts: what a model says of them, and what is sent of one to the workers."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    import numpy as np

#: Bytes of features that workers keep, where no option says otherwise.
DEFAULT_IMAGE_CACHE = 512 << 20


@dataclass(frozen=True)
class ImageFacts:
    """What a model that sees images says of them."""

    #: Which ``ImageProcessor`` (``octavo/images/``) makes pixels and placeholders.
    family: Literal["llava", "idefics3", "gemma3", "qwen2_5_vl"]
    #: The token that stands for each feature in a prompt.
    token_id: int
    #: Tokens of an image that see each other in both directions, so that one step computes all of them; 0: a chunk of
    #: the prompt may end anywhere.
    whole: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether one step computes all tokens of an image."""
        return self.whole > 0


class PromptImage(msgspec.Struct, frozen=True, array_like=True):
    """One image of a request."""

    #: Digest of its content.
    key: str
    #: An encoded ``ImageInput``.
    payload: bytes
    #: Bytes that its features take on the workers.
    size: int


class ImageInput(msgspec.Struct, frozen=True, array_like=True):
    """One image after resizing, cutting and cropping: pieces of equal size, each of which the tower sees alone."""

    #: uint8 [pieces, height, width, 3] (red, green, blue), contiguous.
    pixels: bytes
    pieces: int
    height: int
    width: int

    @classmethod
    def of(cls, pixels: np.ndarray) -> ImageInput:
        """Of pieces uint8 [n, height, width, 3]."""
        count, height, width, _ = pixels.shape
        return cls(pixels.tobytes(), count, height, width)

    def array(self) -> np.ndarray:
        """The pieces, uint8 [n, height, width, 3], read-only."""
        import numpy as np

        return np.frombuffer(self.pixels, np.uint8).reshape(self.pieces, self.height, self.width, 3)

    def for_prompt(self, num_features: int, width: int) -> PromptImage:
        """Named by its content, as a request has it; it becomes so many features of ``width`` numbers, float32."""
        payload = msgspec.msgpack.encode(self)
        return PromptImage(f"image:{blake2b(payload, digest_size=16).hexdigest()}", payload, 4 * num_features * width)

    @classmethod
    def decode(cls, payload: bytes) -> ImageInput:
        """That of ``PromptImage.payload``."""
        return msgspec.msgpack.decode(payload, type=cls)
