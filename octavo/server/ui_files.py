"""The files of the page at ``/``: what is in them, and the headers under which browsers run them."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "ui"
#: Addresses of the files begin with this.
PREFIX = "/ui/"
INDEX = "index.html"

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
#: Nothing is loaded from elsewhere, no script stands in the page, and no text becomes markup.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "media-src 'self' data: blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(self)",
    # Asked for again each time, and sent only if changed: another version of the server may answer.
    "cache-control": "no-cache",
    "vary": "accept, accept-encoding",
}


@dataclass(frozen=True)
class UiFile:
    """A file of the page."""

    body: bytes
    compressed: bytes
    media_type: str
    #: Of its content.
    etag: str


@cache
def ui_files() -> dict[str, UiFile]:
    """The files by their address; read once, when the page is first asked for."""
    files = {}
    for path in sorted(FOLDER.rglob("*")):
        if path.suffix in MEDIA_TYPES:
            address = PREFIX + path.relative_to(FOLDER).as_posix()
            files[address] = _make(path.read_bytes(), MEDIA_TYPES[path.suffix])
    return files


def _make(body: bytes, media_type: str) -> UiFile:
    etag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
    return UiFile(body, gzip.compress(body, mtime=0), media_type, etag)


def find_file(path: str, *, wants_html: bool) -> UiFile | None:
    """The file at an address of the server; at ``/`` the page, for clients that want HTML."""
    if path == "/" and wants_html:
        path = PREFIX + INDEX
    return ui_files().get(path) if path.startswith(PREFIX) else None


def for_recordings(file: UiFile) -> UiFile:
    """The file as it is where the page shows a recording, without a server's engine."""
    body = file.body.replace(b'name="octavo-mode" content="live"', b'name="octavo-mode" content="recording"')
    return file if body == file.body else _make(body, file.media_type)


def answer(file: UiFile, *, if_none_match: str, accept_encoding: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer to a request with these headers."""
    headers = {**HEADERS, "etag": file.etag, "content-type": file.media_type}
    if file.etag in if_none_match:
        return 304, headers, b""
    body = file.body
    if "gzip" in accept_encoding:
        headers["content-encoding"], body = "gzip", file.compressed
    headers["content-length"] = str(len(body))
    return 200, headers, body
