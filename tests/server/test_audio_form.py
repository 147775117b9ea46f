"""Forms with a recording: what is in them, and that no bytes make splitting them slow."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config.server_options import FORM_BYTES
from octavo.server import audio as audio_form
from octavo.server.audio import Part, split_form
from octavo.server.http.errors import ApiError
from tests.busy_machine import once_in_three

KIND = "multipart/form-data; boundary=bound"


def form(*parts: tuple[str, bytes], boundary: bytes = b"bound", begin: bytes = b"", end: bytes = b"\r\n") -> bytes:
    body = begin
    for names, content in parts:
        body += b"--" + boundary + b"\r\nContent-Disposition: form-data; " + names.encode() + b"\r\n\r\n"
        body += content + b"\r\n"
    return body + b"--" + boundary + b"--" + end


FILE = 'name="file"; filename="a.wav"'


def refusal(body: bytes, content_type: str = KIND) -> str:
    with pytest.raises(ApiError) as caught:
        split_form(body, content_type)
    assert (caught.value.status, caught.value.code) == (400, "invalid_form")
    return str(caught.value)


@given(st.lists(st.binary(max_size=60), max_size=5), st.binary(max_size=80))
def test_the_parts_of_a_form_are_its_contents(texts: list[bytes], content: bytes) -> None:
    texts = [text for text in texts if b"--bound" not in text]
    content = content.replace(b"--bound", b"")
    body = form(*[(f'name="t{i}"', text) for i, text in enumerate(texts)], (FILE, content))
    expected = [Part(f"t{i}", None, text) for i, text in enumerate(texts)]
    assert split_form(body, KIND) == [*expected, Part("file", "a.wav", content)]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\r\n",
        b"\r\n\r\n",
        b"--bound",
        b"\r\n--boun",
        b"\r\n--boundX",
        b"\r\n--bound-",
        b"\r\n--bound x\r\n",
        b"\r\n-",
    ],
)
def test_what_only_begins_as_a_boundary_is_content(content: bytes) -> None:
    assert split_form(form((FILE, b"a" + content)), KIND) == [Part("file", "a.wav", b"a" + content)]


def test_forms_are_read_as_clients_write_them() -> None:
    part = [Part("file", "a.wav", b"x")]
    assert split_form(form((FILE, b"x"), end=b""), KIND) == part
    assert split_form(form((FILE, b"x"), begin=b"a preamble\r\n", end=b"\r\nan epilogue"), KIND) == part
    assert split_form(form((FILE, b"x"), begin=b"\r\n"), KIND) == part
    assert split_form(form((FILE, b"x")).replace(b"--bound\r\n", b"--bound \t\r\n"), KIND) == part
    assert split_form(form((FILE, b"x"), boundary=b"a+(b)?"), 'Multipart/Form-Data; Boundary="a+(b)?"') == part
    typed = form((FILE + "\r\nContent-Type: audio/wav", b"x")).replace(b"Content-Disp", b"content-disp")
    assert split_form(typed, KIND) == part
    assert split_form(form(('name="file"; filename=""', b"x")), KIND) == [Part("file", "", b"x")]
    assert split_form(form(('name="prompt"', "é".encode())), KIND)[0].data.decode() == "é"
    assert split_form(form(), KIND) == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--boun",
        b"--bound\r\nnonsense",
        form((FILE, b"x"))[:-6],
        form((FILE, b"x")).replace(b"\r\n\r\n", b"\r\n"),
        form(("filename=a", b"x")),
        form((FILE, b"x")).replace(b"Content-Disposition", b"X"),
        form((FILE, b"x"), (FILE, b"y")),
        form(*[(f"name=t{i}", b"") for i in range(101)]),
        form(("name=a", bytes(FORM_BYTES // 2)), ("name=b", bytes(FORM_BYTES // 2))),
        form((FILE + "\r\nX: " + "y" * 20_000, b"x")),
    ],
)
def test_what_is_no_form_or_has_too_much_in_it_is_refused(body: bytes) -> None:
    assert refusal(body).startswith("the form cannot be read: ")


@pytest.mark.parametrize("kind", ["multipart/form-data", "multipart/form-data; boundary=", f"{KIND}{'x' * 70}", "a/b"])
def test_a_form_names_its_boundary(kind: str) -> None:
    refusal(form((FILE, b"x")), kind)


def test_boundaries_between_two_slices_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio_form, "_SLICE", 64)
    for size in range(200):
        assert split_form(form((FILE, bytes(size)), ("name=a", b"b")), KIND) == [
            Part("file", "a.wav", bytes(size)), Part("a", None, b"b"),
        ]  # fmt: skip


NEAR = [b"\r\n--boun", b"\r\n--bound-", b"\r\n--boundX", b"\r\n--bound   x", b"\r\n", b"\r", b"-"]


@pytest.mark.parametrize("near", NEAR)
def test_near_boundaries_take_no_longer_than_other_bytes(near: bytes) -> None:
    content = near * ((16 << 20) // len(near)) + b"x"
    body = form((FILE, content))

    def measure() -> dict[str, bool]:
        begun = time.process_time()
        assert split_form(body, KIND) == [Part("file", "a.wav", content)]
        return {"a sixteenth of a second for each MiB": time.process_time() - begun < 1}

    once_in_three(measure)
