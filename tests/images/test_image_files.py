"""Files, PIL images and arrays become pixels; what is no image, or too large a one, is refused by name."""

from __future__ import annotations

import builtins
import io
import struct
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.images.image_files import ImageLimits, decode_image, image_array
from tests.images.image_cases import bomb, file_of, noise, scene, webp_bomb

PICTURE = scene(40, 56)


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("BMP", {}), ("WEBP", {"lossless": True})])
def test_files_without_loss_are_read_to_the_level(kind: str, options: dict[str, Any]) -> None:
    assert np.array_equal(decode_image(file_of(PICTURE, kind, **options)), PICTURE)


def test_a_jpeg_is_decoded_as_pillow_does() -> None:
    content = file_of(PICTURE, "JPEG", quality=95)
    assert np.array_equal(decode_image(content), np.asarray(Image.open(io.BytesIO(content)).convert("RGB")))


def test_a_gif_of_one_frame_is_read() -> None:
    palette = Image.fromarray(PICTURE).quantize(64)
    assert np.array_equal(decode_image(file_of(palette, "GIF")), np.asarray(palette.convert("RGB")))


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_animated_files_are_refused(kind: str) -> None:
    frames = [Image.fromarray(noise(8, 8, seed=i)) for i in range(3)]
    content = file_of(frames[0], kind, save_all=True, append_images=frames[1:])
    with pytest.raises(InvalidRequestError, match=r"^the image is animated; send the frame that is meant"):
        decode_image(content)


def test_a_photo_that_carries_another_is_no_animation() -> None:
    """Phones add previews and second views to a jpeg (MPO); the first one is the photo."""
    photo = Image.fromarray(PICTURE)
    content = file_of(photo, "MPO", save_all=True, append_images=[Image.fromarray(noise(40, 56))], quality=95)
    assert Image.open(io.BytesIO(content)).n_frames == 2  # type: ignore[attr-defined]
    assert np.array_equal(decode_image(content), decode_image(file_of(photo, "JPEG", quality=95)))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_images_are_turned_as_exif_says(orientation: int, kind: str) -> None:
    turned = {
        1: PICTURE,
        2: PICTURE[:, ::-1],
        3: PICTURE[::-1, ::-1],
        4: PICTURE[::-1],
        5: PICTURE.swapaxes(0, 1),
        6: np.rot90(PICTURE, -1),
        7: PICTURE[::-1, ::-1].swapaxes(0, 1),
        8: np.rot90(PICTURE),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    kinds: dict[str, dict[str, Any]] = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}}
    options = kinds.get(kind, {})
    pixels = decode_image(file_of(PICTURE, kind, exif=exif, **options))
    assert pixels.shape == turned.shape
    assert np.abs(pixels.astype(int) - turned).max() <= (12 if kind == "JPEG" else 0)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_damaged_exif_data_does_not_matter() -> None:
    content = file_of(PICTURE, "JPEG", quality=95, exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert decode_image(content).shape == PICTURE.shape


def test_cmyk_is_converted() -> None:
    inks = noise(16, 16, 4).astype(int)
    pixels = decode_image(file_of(Image.fromarray(inks.astype(np.uint8), "CMYK"), "JPEG", quality=100, subsampling=0))
    assert np.abs(pixels - (255 - inks[:, :, :3]) * (255 - inks[:, :, 3:]) / 255).max() < 12


def test_sixteen_bits_of_grey_keep_their_levels() -> None:
    """Pillow's conversion makes all above 255 white."""
    deep = np.linspace(0, 65535, 64 * 64).round().astype(np.uint16).reshape(64, 64)
    pixels = decode_image(file_of(Image.fromarray(deep)))
    assert np.array_equal(pixels, np.repeat((deep / 257).round().astype(np.uint8)[:, :, None], 3, axis=2))


def test_palettes_and_two_levels_are_converted() -> None:
    palette = Image.fromarray(PICTURE).quantize(16)
    assert np.array_equal(decode_image(file_of(palette)), np.asarray(palette.convert("RGB")))
    bits = Image.fromarray(PICTURE).convert("1")
    assert np.array_equal(decode_image(file_of(bits))[:, :, 0], np.asarray(bits) * 255)


def test_what_is_transparent_is_seen_on_white() -> None:
    pixels = noise(8, 8, 4)
    alpha = pixels[:, :, 3:] / 255
    expected = pixels[:, :, :3] * alpha + 255 * (1 - alpha)
    decoded = decode_image(file_of(pixels))
    assert np.abs(decoded - expected).max() <= 0.5 + 1e-9
    for image in (pixels, Image.fromarray(pixels)):
        assert np.array_equal(image_array(image), decoded)
    grey = Image.fromarray(pixels[:, :, 2:], "LA")
    assert np.array_equal(decode_image(file_of(grey)), np.asarray(image_array(grey)))
    palette = Image.fromarray(PICTURE).quantize(4)
    seen = np.asarray(palette)
    content = file_of(palette, transparency=int(seen[0, 0]))
    assert (decode_image(content)[seen == seen[0, 0]] == 255).all()


def test_a_bomb_is_refused_from_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    content = bomb()
    assert len(content) < 2100
    monkeypatch.setattr(ImageFile.ImageFile, "load", None)  # it is not called
    with pytest.raises(InvalidRequestError, match=r"the image has too many pixels: .*10000000000 pixels"):
        decode_image(content)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # as in the sandbox
    with pytest.raises(InvalidRequestError, match=r"has 100000 x 100000 pixels; at most 67108864 in all are taken"):
        decode_image(content)


def test_a_canvas_of_webp_is_refused_from_its_header() -> None:
    with pytest.raises(InvalidRequestError, match=r"16777216 x 16777216 pixels"):
        decode_image(webp_bomb())
    for options in ({"lossless": True}, {"lossless": False}):
        with pytest.raises(InvalidRequestError, match=r"has 56 x 40 pixels; at most 2239 "):
            decode_image(file_of(PICTURE, "WEBP", **options), ImageLimits(max_pixels=2239))


def test_a_frame_that_leaves_its_screen_does_not_leave_the_limit() -> None:
    content = bytearray(file_of(Image.fromarray(noise(8, 8)).quantize(4), "GIF"))
    at = content.index(b"\x2c")
    content[at : at + 9] = b"\x2c" + struct.pack("<HHHH", 0, 0, 60000, 60000)
    with pytest.raises(InvalidRequestError, match=r"too many pixels: .*3600000000 pixels"):
        decode_image(bytes(content))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_truncated_files_are_refused(kind: str, share: float) -> None:
    image: Any = Image.fromarray(noise(64, 64))
    content = file_of(image.quantize(256) if kind == "GIF" else image, kind)
    with pytest.raises(InvalidRequestError, match=r"^photo (is damaged or cut off|is no image)"):
        decode_image(content[: int(len(content) * share)], name="photo")


@pytest.mark.parametrize("content", [b"%PDF-1.7 " + bytes(100), b"<svg xmlns='x'/>", b"MZ", b"RIFF\0\0\0\0WEBPVP8X"])
def test_what_is_no_image_is_refused_with_its_beginning(content: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="png, jpeg, webp, bmp and gif are read") as raised:
        decode_image(content)
    assert repr(content[:8]) in str(raised.value)


def test_formats_that_are_not_named_are_not_decoded() -> None:
    for kind in ("TIFF", "PPM", "TGA", "ICO"):
        with pytest.raises(InvalidRequestError, match="is no image that can be decoded"):
            decode_image(file_of(PICTURE, kind))


def test_files_have_a_size() -> None:
    with pytest.raises(InvalidRequestError, match="is empty: 0 bytes"):
        decode_image(b"")
    with pytest.raises(InvalidRequestError, match="has 101 bytes; at most 100 are taken"):
        decode_image(bytes(101), ImageLimits(max_bytes=100))


@pytest.mark.parametrize(
    ("array", "what"),
    [
        (np.zeros((4, 4, 3), np.float32), r"float32 \[4, 4, 3\]"),
        (np.zeros((3, 4, 4), np.uint8)[None], r"uint8 \[1, 3, 4, 4\]"),
        (np.zeros((3, 40, 40), np.uint8), r"uint8 \[3, 40, 40\]"),
        (np.zeros((0, 4, 3), np.uint8), r"4 x 0 pixels; it needs at least one"),
        ("photo.png", "not str"),
        (None, "not NoneType"),
        (Image.new("F", (4, 4)), "mode 'F'"),
        (Image.new("RGB", (0, 4)), "0 x 4 pixels"),
    ],
)
def test_arrays_that_are_no_images_are_refused(array: Any, what: str) -> None:
    with pytest.raises(InvalidRequestError, match=what):
        image_array(array)


def test_arrays_and_pil_images_are_taken_as_they_are() -> None:
    grey = PICTURE[:, :, 0]
    for image in (PICTURE, PICTURE[::-1][::-1], Image.fromarray(PICTURE)):
        assert np.array_equal(image_array(image), PICTURE)
    for image in (grey, Image.fromarray(grey)):
        assert np.array_equal(image_array(image), np.repeat(grey[:, :, None], 3, axis=2))
    with pytest.raises(InvalidRequestError, match="56 x 40 pixels"):
        image_array(PICTURE, ImageLimits(max_pixels=100))


def test_an_image_of_many_rows_is_converted_in_parts() -> None:
    pixels = noise(3000, 700, 4)
    assert np.array_equal(image_array(pixels)[-100:], image_array(pixels[-100:]))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["PNG", "JPEG", "WEBP", "BMP", "GIF"]),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=6),
    st.integers(0, 2500),
)
def test_any_damage_is_an_error_of_ours_or_an_image(kind: str, changes: list[tuple[int, int]], cut: int) -> None:
    image: Any = Image.fromarray(noise(20, 20))
    content = bytearray(file_of(image.quantize(64) if kind == "GIF" else image, kind))
    for at, value in changes:
        content[at % len(content)] = value
    try:
        pixels = decode_image(bytes(content[: max(cut, 1)]))
    except InvalidRequestError:
        return
    assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3


def test_without_pillow_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("PIL"):
            raise ImportError("No module named 'PIL'")
        return original(name, *args, **kwargs)

    for module in [name for name in sys.modules if name.startswith("PIL")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"octavo\[images\]: .* install 'pillow"):
        decode_image(b"\x89PNG")
    assert image_array(PICTURE) is PICTURE
