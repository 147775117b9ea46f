"""Files of clients are decoded and processed in the sandbox; what goes wrong there is an error about the image."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import numpy as np
import psutil
import pytest
from PIL import Image

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.images import image_reader
from octavo.images.image_files import ImageLimits
from octavo.images.image_reader import ImageReader
from octavo.images.processors import Gemma3Processor, Qwen2_5_VLProcessor
from octavo.process.children import Failure
from octavo.process.sandbox import Sandbox
from octavo.process.sandbox_process import SandboxAnswer
from tests.images.image_cases import bomb, file_of, noise, scene

PROCESSOR = Qwen2_5_VLProcessor("<|image_pad|>", 28, 3136, 100_000, 3)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    yield Sandbox()


@pytest.fixture
def reader(sandbox: Sandbox) -> ImageReader:
    return ImageReader(sandbox)


def test_a_file_becomes_what_the_processor_makes_of_its_pixels(reader: ImageReader) -> None:
    image = scene(100, 150)
    processed = reader.process(file_of(image), PROCESSOR).result()
    assert processed == PROCESSOR.process(image)
    other = Gemma3Processor("<b>", "<i>", "<e>", 56, 56, 2, 4)
    assert reader.process(file_of(image), other).result() == other.process(image)


def test_decoding_takes_place_in_another_process(reader: ImageReader) -> None:
    reader.process(file_of(scene(9, 9)), PROCESSOR).result()
    children = psutil.Process(os.getpid()).children()
    assert any("octavo.process.sandbox_process" in child.cmdline() for child in children)


def test_errors_name_the_image(reader: ImageReader) -> None:
    with pytest.raises(InvalidRequestError, match=r"^photo 3 has 100000 x 100000 pixels"):
        reader.process(bomb(), PROCESSOR, name="photo 3").result()
    with pytest.raises(InvalidRequestError, match=r"^photo 3 is no image"):
        reader.process(b"not one", PROCESSOR, name="photo 3").result()
    with pytest.raises(InvalidRequestError, match="too long"):
        reader.process(file_of(scene(1, 300)), PROCESSOR).result()


def test_a_file_over_the_limit_is_not_sent_to_the_sandbox(sandbox: Sandbox) -> None:
    reader = ImageReader(sandbox, ImageLimits(max_bytes=1000))
    with pytest.raises(InvalidRequestError, match="has 1001 bytes; at most 1000 are taken"):
        reader.process(bytes(1001), PROCESSOR)


@pytest.mark.parametrize(
    ("failure", "message"),
    [("time", "takes more than 20 seconds"), ("memory", "too much memory"), ("depth", "its decoder failed")],
)
def test_what_the_sandbox_stops_is_an_error_about_the_image(failure: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^photo .*{message}.*; send it smaller, or as png or jpeg"):
        image_reader._read("photo", SandboxAnswer(failure=failure))  # type: ignore[arg-type]


def test_what_the_server_lacks_is_not_the_image_s_fault() -> None:
    answer = msgspec.msgpack.encode((None, Failure("ConfigError", "pip install 'octavo[images]'")))
    with pytest.raises(ConfigError, match="pip install"):
        image_reader._read("photo", SandboxAnswer(answer))


@pytest.mark.slow
def test_after_a_file_that_fills_the_memory_others_are_read(reader: ImageReader) -> None:
    """A webp as large as allowed needs more than the sandbox gives: its decoder keeps two canvases."""
    flat = Image.fromarray(np.zeros((8192, 8192, 3), np.uint8))
    content = file_of(flat, "WEBP", lossless=True, method=0, quality=0)
    try:
        assert reader.process(content, PROCESSOR).result().num_features
    except InvalidRequestError as e:
        assert "send it smaller, or as png or jpeg" in str(e)
    assert reader.process(file_of(noise(20, 20)), PROCESSOR).result().num_features


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "kind"), [("RGB", "JPEG"), ("CMYK", "JPEG"), ("RGB", "PNG"), ("RGBA", "PNG")])
def test_images_as_large_as_allowed_fit_the_sandbox(mode: str, kind: str, reader: ImageReader) -> None:
    options = {"compress_level": 9} if kind == "PNG" else {"quality": 30}
    content = file_of(Image.new(mode, (8192, 8192), 77), kind, **options)
    assert reader.process(content, PROCESSOR).result().num_features
