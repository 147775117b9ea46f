"""A hub on loopback: the routes that huggingface_hub asks, with ranges, gates, and connections that break."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_secretsecretsecret"


@dataclass
class Repository:
    files: dict[str, bytes]
    commit: str = "0123456789abcdef0123456789abcdef01234567"
    #: Files only for those who send ``TOKEN``; ``private``: so is the list of them.
    gated: bool = False
    private: bool = False
    #: Another server, to which requests for large files are sent.
    redirect: str | None = None


@dataclass
class FakeHub:
    """Repositories by name, and what was asked of them."""

    url: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    #: (method, path, value of Range, whether the token came with it).
    requests: list[tuple[str, str, str | None, bool]] = field(default_factory=list)
    #: Bytes after which the next answers of files break off, each for one answer.
    cuts: list[int] = field(default_factory=list)
    #: The status of all answers, if it is set.
    status: int | None = None
    ignores_ranges: bool = False

    def add(self, name: str, files: dict[str, bytes], **options: Any) -> Repository:
        self.repositories[name] = Repository(files, **options)
        return self.repositories[name]

    def received(self, path: str) -> list[str | None]:
        """The ranges of GET requests for a file."""
        return [wanted for method, asked, wanted, _ in self.requests if method == "GET" and asked.endswith(path)]

    @property
    def num_listings(self) -> int:
        return sum("/api/" in path for _, path, _, _ in self.requests)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_GET(self) -> None:
        url = unquote(urlsplit(self.path).path)
        is_known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        self.hub.requests.append((self.command, url, self.headers.get("Range"), is_known))
        if self.hub.status is not None:
            return self._answer(self.hub.status, b"busy")
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", url):
            return self._list(match[1], match[2], is_known)
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", url):
            return self._file(match[1], match[2], match[3], is_known)
        return self._answer(404, b"no such page")

    do_HEAD = do_GET

    def _repository(self, name: str, revision: str | None, is_known: bool) -> Repository | None:
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and not is_known):
            self._answer(401, b"Invalid username or password.", {"X-Error-Code": "RepoNotFound"})
            return None
        if revision not in (None, "main", repository.commit):
            self._answer(404, b"Invalid rev id", {"X-Error-Code": "RevisionNotFound"})
            return None
        return repository

    def _list(self, name: str, revision: str | None, is_known: bool) -> None:
        if (repository := self._repository(name, revision, is_known)) is None:
            return
        siblings: list[dict[str, Any]] = []
        for path, content in repository.files.items():
            entry: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": "0" * 40}
            if _is_large(path):
                digest = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"size": len(content), "sha256": digest, "pointerSize": 134}
            siblings.append(entry)
        answer = {"_id": "1", "id": name, "sha": repository.commit, "siblings": siblings, "private": False}
        self._answer(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _file(self, name: str, revision: str, path: str, is_known: bool) -> None:
        if (repository := self._repository(name, revision, is_known)) is None:
            return
        headers = {"X-Repo-Commit": repository.commit}
        if repository.gated and not is_known:
            return self._answer(401, b"gated", {**headers, "X-Error-Code": "GatedRepo"})
        if (content := repository.files.get(path)) is None:
            return self._answer(404, b"no such file", {**headers, "X-Error-Code": "EntryNotFound"})
        digest = (hashlib.sha256 if _is_large(path) else hashlib.sha1)(content).hexdigest()
        headers |= {"ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
        if _is_large(path):
            headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
        if repository.redirect and _is_large(path):
            return self._answer(302, b"", {**headers, "Location": repository.redirect + self.path})
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is None or self.hub.ignores_ranges:
            return self._answer(200, content, headers, breaks=True)
        start, stop = int(wanted[1]), min(int(wanted[2] or len(content) - 1) + 1, len(content))
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        self._answer(206, content[start:stop], headers, breaks=True)

    def _answer(
        self, status: int, content: bytes, headers: dict[str, str] | None = None, *, breaks: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if breaks and self.hub.cuts and len(content) > self.hub.cuts[0]:
            self.wfile.write(content[: self.hub.cuts.pop(0)])
            self.close_connection = True
            return
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        pass


def _is_large(path: str) -> bool:
    return path.endswith((".gguf", ".safetensors", ".bin"))


@contextmanager
def serving_hub() -> Iterator[FakeHub]:
    """Serves an empty hub until the end of the block."""

    class Handler(_Handler):
        pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Handler.hub = hub = FakeHub(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield hub
        server.shutdown()
        thread.join()


def hub_environment(hub: FakeHub, home: Path, **variables: str) -> dict[str, str]:
    """The environment of a program with its own caches, in which torch and transformers cannot be imported."""
    (home / "none").mkdir(parents=True, exist_ok=True)
    (home / "none" / "sitecustomize.py").write_text(
        "import sys\nfor name in ('torch', 'triton', 'transformers'):\n    sys.modules[name] = None\n"
    )
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "OCTAVO_"))}
    return {
        **inherited,
        "PYTHONPATH": str(home / "none"),
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home / "hf"),
        "OCTAVO_CACHE": str(home / "octavo"),
        "OCTAVO_NUM_THREADS": "1",
        **variables,
    }


def octavo_command(*words: object) -> list[str]:
    """The program as an installation's script starts it."""
    return [sys.executable, "-c", "from octavo.cli.main import main; raise SystemExit(main())", *map(str, words)]
