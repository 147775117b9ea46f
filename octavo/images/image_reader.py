"""Decodes and processes clients' images in the sandbox, where a decoder may crash, fill the memory or hang."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial

import msgspec

from octavo.core.errors import InvalidRequestError
from octavo.images.image_files import DEFAULT_LIMITS, ImageLimits, check_size, decode_image, pillow
from octavo.images.processors import AnyProcessor, ProcessedImage
from octavo.process.sandbox import Sandbox, encode_result, read_result
from octavo.process.sandbox_process import SandboxAnswer, SandboxCall

#: Processor seconds of one image; decoding and processing a jpeg of 8192 x 8192 pixels takes 2 to 3.
SECONDS = 20.0


class _Request(msgspec.Struct):
    content: bytes
    processor: AnyProcessor
    limits: ImageLimits
    name: str


class ImageReader:
    def __init__(self, sandbox: Sandbox, limits: ImageLimits = DEFAULT_LIMITS) -> None:
        self._sandbox = sandbox
        self.limits = limits

    def process(
        self, content: bytes, processor: AnyProcessor, *, client: str = "", name: str = "the image"
    ) -> Future[ProcessedImage]:
        """Decodes a file and runs the model's image processor; cancelling the future drops the call.

        Raises InvalidRequestError (for its size at once), ClientLimitError at once, and ConfigError without Pillow.
        """
        check_size(len(content), self.limits, name)
        request = msgspec.msgpack.encode(_Request(content, processor, self.limits, name))
        call = SandboxCall(f"{__name__}:process_call", request, SECONDS)
        return self._sandbox.submit(call, partial(_read, name), client=client)


def _read(name: str, answer: SandboxAnswer) -> ProcessedImage:
    advice = "send it smaller, or as png or jpeg"
    return read_result(answer, ProcessedImage, InvalidRequestError, name, SECONDS, advice)


def process_call(content: bytes) -> bytes:
    """Runs in the sandbox: a ``_Request`` to the result for ``read_result``."""
    request = msgspec.msgpack.decode(content, type=_Request)

    def process() -> ProcessedImage:
        pillow().MAX_IMAGE_PIXELS = None  # the request's limit counts here
        return request.processor.process(decode_image(request.content, request.limits, request.name))

    return encode_result(process)
