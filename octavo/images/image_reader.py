"""Files become processed images in the sandbox: a decoder may crash, fill the memory or never end there."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial

import msgspec

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.images.image_files import DEFAULT_LIMITS, ImageLimits, check_size, decode_image, pillow
from octavo.images.processors import AnyProcessor, ProcessedImage
from octavo.process.sandbox import Sandbox
from octavo.process.sandbox_process import SandboxAnswer, SandboxCall

#: Of processor time for one image; jpegs of 8192 x 8192 pixels take 2 to 3, decoded and processed.
SECONDS = 20.0


class _Request(msgspec.Struct):
    content: bytes
    processor: AnyProcessor
    limits: ImageLimits
    name: str


class _Answer(msgspec.Struct):
    image: ProcessedImage | None = None
    error: str = ""
    #: It is the server's fault.
    is_config: bool = False


class ImageReader:
    """Decodes files and processes their images, in the sandbox; from any thread."""

    def __init__(self, sandbox: Sandbox, limits: ImageLimits = DEFAULT_LIMITS) -> None:
        self._sandbox = sandbox
        self.limits = limits

    def process(
        self, content: bytes, processor: AnyProcessor, *, client: str = "", name: str = "the image"
    ) -> Future[ProcessedImage]:
        """What a model makes of a file; to cancel the future drops the call. ``name``: what errors call the image.

        Raises (those after the second in the future only):
            InvalidRequestError: it is too large.
            ClientLimitError: the client has taken its seconds (``Sandbox``).
            InvalidRequestError: see ``decode_image`` and ``ImageProcessor.process``; or it took too long, or too much
                memory.
            ConfigError: Pillow is not installed.
        """
        check_size(len(content), self.limits, name)
        request = msgspec.msgpack.encode(_Request(content, processor, self.limits, name))
        call = SandboxCall(f"{__name__}:process_call", request, SECONDS)
        return self._sandbox.submit(call, partial(_read, name), client=client)


def process_call(content: bytes) -> bytes:
    """``decode_image`` and ``ImageProcessor.process`` for the sandbox, from a ``_Request`` to an ``_Answer``."""
    request = msgspec.msgpack.decode(content, type=_Request)
    try:
        pillow().MAX_IMAGE_PIXELS = None  # in this process the limit is the request's
        pixels = decode_image(request.content, request.limits, request.name)
        answer = _Answer(request.processor.process(pixels))
    except (InvalidRequestError, ConfigError) as e:
        answer = _Answer(error=str(e), is_config=isinstance(e, ConfigError))
    return msgspec.msgpack.encode(answer)


def _read(name: str, answer: SandboxAnswer) -> ProcessedImage:
    if answer.failure:
        why = {
            "time": f"takes more than {SECONDS:g} seconds to be decoded",
            "memory": "needs too much memory to be decoded",
            "depth": "cannot be decoded: its decoder failed",
            "error": f"cannot be decoded: {answer.details}",
        }[answer.failure]
        raise InvalidRequestError(f"{name} {why}; send it smaller, or as png or jpeg")
    result = msgspec.msgpack.decode(answer.content, type=_Answer)
    if result.image is None:
        raise ConfigError(result.error) if result.is_config else InvalidRequestError(result.error)
    return result.image
