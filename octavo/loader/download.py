"""Requests to the Hugging Face hub: what a repository holds, files in huggingface_hub's cache, and parts of files.

``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HUB_OFFLINE``, ``HF_HUB_CACHE`` and ``HF_HOME`` have their meaning in
huggingface_hub. Its layout of the cache is used (``blobs/ETAG``, ``snapshots/COMMIT/PATH``, ``refs/REVISION``), so that
files of other programs are found. Large files are fetched here, because huggingface_hub 1 and later begin an
interrupted file anew: the partial file is ``blobs/ETAG.incomplete``, and the next call continues it.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import shutil
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from octavo.core.errors import DownloadError, ModelNotFoundError, OctavoError

if TYPE_CHECKING:
    import httpx

_CHUNK = 1 << 20
#: Files that are fetched at once.
_CONNECTIONS = 4
#: Attempts without a byte received, before a download fails.
_ATTEMPTS = 5
#: Seconds to wait for a connection, and for bytes of one.
_TIMEOUT = 10.0
#: The hub sends larger files only by the protocol of the package hf_xet.
_MOST_BY_HTTP = 50_000_000_000
#: Bytes fetched at once of a header whose length is unknown.
_HEADER_STEP = 1 << 20
_SHA256, _COMMIT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-zA-Z]+")
_TRUE = ("1", "on", "yes", "true")


class UnknownRevisionError(ModelNotFoundError):
    """A repository of the hub has no such branch, tag or commit."""


@dataclass(frozen=True)
class HubFile:
    """A file of a repository; ``sha256`` is None for small files, which git keeps itself."""

    size: int
    sha256: str | None = None


def endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def is_offline() -> bool:
    return any(os.environ.get(name, "").lower() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def hub_cache() -> Path:
    """The folder of huggingface_hub's cache."""
    if named := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(os.path.expandvars(named)).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.path.expandvars(home)).expanduser() / "hub"


def repository_folder(repo: str) -> Path:
    """The folder of a repository in the cache."""
    return hub_cache() / f"models--{repo.replace('/', '--')}"


def read_repository(repo: str, revision: str | None) -> tuple[str, dict[str, HubFile]]:
    """The commit of a revision (default: main), and the files of a repository by path.

    Raises:
        UnknownRevisionError, ModelNotFoundError: the hub has no such revision, or no such repository.
        DownloadError: the hub cannot be reached, or refuses access.
    """
    if is_offline():
        raise DownloadError("HF_HUB_OFFLINE is set: the hub is not asked")
    with hub_errors(repo, revision):
        from huggingface_hub import HfApi

        info = HfApi(endpoint=endpoint()).model_info(repo, revision=revision, files_metadata=True, timeout=_TIMEOUT)
    files = {}
    for each in info.siblings or ():
        lfs: Any = each.lfs
        sha256 = None if lfs is None else lfs["sha256"] if isinstance(lfs, Mapping) else lfs.sha256
        # Both become parts of paths here.
        if _SHA256.fullmatch(str(sha256)) is None:
            sha256 = None
        if not {"", ".."} & {*each.rfilename.split("/")}:
            files[each.rfilename] = HubFile(each.size or 0, sha256)
    if _COMMIT.fullmatch(str(info.sha)) is None:
        raise DownloadError(f"the hub at {endpoint()} names no commit of {repo!r}, but {info.sha!r:.80}")
    return str(info.sha), files


@contextmanager
def hub_errors(repo: str, revision: str | None = None) -> Iterator[None]:
    """Turns errors of huggingface_hub and of its HTTP library into ours, with what to do; no token is in a message."""
    from huggingface_hub import errors, get_token

    page = f"{endpoint()}/{repo}"
    login = "log in with 'hf auth login', or set HF_TOKEN"
    try:
        yield
    except (DownloadError, ModelNotFoundError):
        raise
    except errors.GatedRepoError as e:
        todo = "with the account of the token in use" if get_token() else f"then {login}"
        raise DownloadError(f"the hub model {repo!r} is gated: accept its licence at {page}, {todo}") from e
    except errors.DisabledRepoError as e:
        raise DownloadError(f"the hub has disabled the model {repo!r}: see {page}") from e
    except errors.RevisionNotFoundError as e:
        raise UnknownRevisionError(f"the hub model {repo!r} has no revision {revision!r}: see {page}/tree/main") from e
    except errors.RepositoryNotFoundError as e:
        raise ModelNotFoundError(
            f"the hub has no model {repo!r}, or it is private: check the name at {page}; for a private one, {login} "
            "to a token that may read it (nor is there a folder of this name)"
        ) from e
    except errors.HFValidationError as e:
        raise ModelNotFoundError(f"{repo!r} is no valid hub id: {e}") from e
    except errors.EntryNotFoundError as e:
        reason = str(e).strip().splitlines() or [""]
        raise DownloadError(f"a file of the hub model {repo!r} could not be fetched: {reason[-1]}") from e
    except Exception as e:  # the HTTP library differs between versions of huggingface_hub
        status = getattr(getattr(e, "response", None), "status_code", None)
        if status is None and isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES):
            raise
        raise _status_error(repo, status, f"{type(e).__name__}: {(str(e).strip().splitlines() or [''])[0]}") from e


def _status_error(repo: str, status: int | None, reason: str) -> DownloadError:
    page = f"{endpoint()}/{repo}"
    if status == 401:
        return DownloadError(
            f"the hub does not accept the token for {repo!r}: renew it with 'hf auth login', or set or unset HF_TOKEN"
        )
    if status == 403:
        return DownloadError(
            f"the hub forbids access to {repo!r}: accept its licence at {page} with the account of the token in use, "
            "or use another token ('hf auth login', HF_TOKEN)"
        )
    if status is not None:
        return DownloadError(f"the hub answers {status} for {repo!r}: try again later")
    return DownloadError(f"the hub cannot be reached at {endpoint()} ({reason})")


def fetch_files(
    repo: str,
    commit: str,
    files: Mapping[str, HubFile],
    *,
    label: str,
    progress: bool,
    revision: str | None,
    are_all: bool = True,
) -> Path:
    """Fetches files of a commit into the cache, unless they are there; returns the snapshot's folder.

    Offline, ``revision`` then means this commit; unless the files ``are_all`` of a model, only if it meant none before.
    ``label`` is shown with the progress.

    Raises:
        DownloadError: a file cannot be fetched, is damaged, or does not fit on the disk. What was received is kept.
    """
    root = repository_folder(repo)
    snapshot = root / "snapshots" / commit
    missing = {path: file for path, file in files.items() if not (snapshot / path).exists()}
    large = {path: file for path, file in missing.items() if file.sha256 and file.size <= _MOST_BY_HTTP}
    try:
        (root / "blobs").mkdir(parents=True, exist_ok=True)
        _check_space(root / "blobs", large.values())
        if large:
            _fetch_blobs(repo, commit, root / "blobs", large, label, progress)
        for path, file in missing.items():
            _link(repo, commit, path, progress and file.size > _MOST_BY_HTTP)
        ref = root / "refs" / (revision or "main")
        if revision != commit and (are_all or not ref.exists()):
            _point(ref, commit)
    except OctavoError:
        raise
    except OSError as e:
        if missing:
            raise DownloadError(
                f"cannot write to the hub's cache {root} ({e.strerror or e}); set HF_HOME to a folder that can hold "
                "the model"
            ) from e
    return snapshot


def _point(ref: Path, commit: str) -> None:
    """Writes a reference; other processes read the old one or the new one."""
    if ref.is_file() and ref.read_text() == commit:
        return
    ref.parent.mkdir(parents=True, exist_ok=True)
    partial = ref.with_name(f"{ref.name}.{os.getpid()}.partial")
    partial.write_text(commit)
    os.replace(partial, ref)


def _check_space(folder: Path, files: Iterable[HubFile]) -> None:
    """Raises OSError if the rest of the files does not fit on the disk."""
    needed = 0
    for file in files:
        partial = folder / f"{file.sha256}.incomplete"
        done = partial.stat().st_size if partial.exists() else 0
        needed += 0 if (folder / str(file.sha256)).exists() else max(0, file.size - done)
    if shutil.disk_usage(folder).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _link(repo: str, commit: str, path: str, progress: bool) -> None:
    """Adds a file to the snapshot; downloads it if its blob is not there."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown_before = not are_progress_bars_disabled()
    if not progress:
        disable_progress_bars()
    try:
        with hub_errors(repo):
            hf_hub_download(repo, path, revision=commit, cache_dir=hub_cache(), endpoint=endpoint())
    finally:
        if not progress and shown_before:
            enable_progress_bars()


def _fetch_blobs(repo: str, commit: str, blobs: Path, files: Mapping[str, HubFile], label: str, progress: bool) -> None:
    """Fetches large files, several at once; after an error or an interrupt, partial files stay."""
    from tqdm import tqdm

    stop, lock = threading.Event(), threading.Lock()
    options: dict[str, Any] = {"unit": "B", "unit_scale": True, "disable": not progress}
    options["mininterval"] = 0.2 if sys.stderr.isatty() else 5.0
    total = sum(file.size for file in files.values())
    with tqdm(total=total, desc=f"downloading {label}", **options) as bar, http_client() as client:

        def advance(count: int) -> None:
            with lock:
                bar.update(count)

        def fetch(path: str, file: HubFile) -> None:
            _BlobDownload(client, repo, commit, path, file, blobs, advance, stop).run()

        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            tasks = [pool.submit(fetch, path, file) for path, file in files.items()]
            try:
                for task in as_completed(tasks):  # the first error ends the others
                    task.result()
            except BaseException:
                stop.set()
                pool.shutdown(cancel_futures=True)
                raise


def http_client() -> httpx.Client:
    """Follows redirects to other hosts without the token."""
    import httpx
    from huggingface_hub.utils import build_hf_headers

    headers = {**build_hf_headers(library_name="octavo"), "Accept-Encoding": "identity"}
    return httpx.Client(headers=headers, follow_redirects=True, timeout=_TIMEOUT)


def _file_url(repo: str, commit: str, path: str) -> str:
    from huggingface_hub import hf_hub_url

    return hf_hub_url(repo, path, revision=commit, endpoint=endpoint())


@dataclass
class _BlobDownload:
    """One file on its way into ``blobs``."""

    client: httpx.Client
    repo: str
    commit: str
    path: str
    file: HubFile
    blobs: Path
    advance: Callable[[int], None]
    stop: threading.Event

    def run(self) -> None:
        """Continues the partial file, checks the hash, and names the file by it."""
        from filelock import FileLock

        blob = self.blobs / str(self.file.sha256)
        lock = self.blobs.parent.parent / ".locks" / self.blobs.parent.name / f"{blob.name}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):
            if blob.exists():
                self.advance(self.file.size)
                return
            partial = blob.with_name(f"{blob.name}.incomplete")
            partial.touch()
            with partial.open("r+b") as out:
                digest = self._receive(out)
            if digest != self.file.sha256:
                partial.unlink()
                raise DownloadError(
                    f"{self.path} of the hub model {self.repo!r} arrived damaged: its SHA-256 is {digest}, expected "
                    f"{self.file.sha256}; run the command again"
                )
            os.replace(partial, blob)

    def _receive(self, out: BinaryIO) -> str:
        """Writes the rest of the file; the hash of all of it."""
        import httpx

        digest, done = hashlib.sha256(), 0
        while chunk := out.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
        if done > self.file.size:
            digest, done = self._begin_again(out, 0)
        self.advance(done)
        failures = 0
        while done < self.file.size:
            if self.stop.wait(0 if not failures else min(0.25 * 2**failures, 5.0)):
                raise DownloadError("another file of the model failed")
            before, reason = done, ""
            try:
                url = _file_url(self.repo, self.commit, self.path)
                with self.client.stream("GET", url, headers={"Range": f"bytes={done}-"}) as response:
                    if response.status_code not in (200, 206):
                        self._refuse(response)
                        reason = f"the hub answers {response.status_code}"
                    elif response.status_code == 200 and done:  # the server sends the whole file
                        digest, done = self._begin_again(out, done)
                        before = 0
                    for chunk in () if reason else response.iter_bytes():  # as they come: none is lost
                        if self.stop.is_set():
                            raise DownloadError("another file of the model failed")
                        out.write(chunk)
                        digest.update(chunk)
                        done += len(chunk)
                        self.advance(len(chunk))
            except httpx.TransportError as e:
                reason = f"{type(e).__name__}: {e}"
            failures = 1 if done > before else failures + 1
            if failures > _ATTEMPTS:
                raise DownloadError(
                    f"the download of {self.path} of the hub model {self.repo!r} was interrupted at {done} of "
                    f"{self.file.size} bytes ({reason or 'no more bytes came'}); the same command continues it"
                )
        return digest.hexdigest()

    def _begin_again(self, out: BinaryIO, done: int) -> tuple[Any, int]:
        out.seek(0)
        out.truncate()
        self.advance(-done)
        return hashlib.sha256(), 0

    def _refuse(self, response: httpx.Response) -> None:
        """Raises for an answer that another attempt will not change."""
        if response.status_code == 429 or response.status_code >= 500:
            return
        raise_for_status(self.repo, response)


def raise_for_status(repo: str, response: httpx.Response) -> None:
    """Raises the error of an answer that is none of 2xx."""
    if response.is_success:
        return
    if response.headers.get("X-Error-Code") == "GatedRepo":
        from huggingface_hub import get_token

        todo = "with the account of the token in use"
        if not get_token():
            todo = "then log in with 'hf auth login', or set HF_TOKEN"
        raise DownloadError(f"the hub model {repo!r} is gated: accept its licence at {endpoint()}/{repo}, {todo}")
    raise _status_error(repo, response.status_code, "")


# ---- headers of files that are not fetched


def write_headers(
    repo: str,
    commit: str,
    files: Mapping[str, HubFile],
    folder: Path,
    read_gguf: Callable[[BinaryIO, int, Path], object],
) -> None:
    """Writes files of weights to ``folder`` with their sizes and headers; the rest of each is a hole.

    Args:
        files: safetensors and GGUF files by path.
        read_gguf: reads the header of a GGUF file (stream, size of the file, path).
    """
    with http_client() as client, ThreadPoolExecutor(_CONNECTIONS) as pool:

        def write(path: str) -> None:
            target, size = folder / path, files[path].size
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("w+b") as out:
                out.truncate(size)
                ranges = _RangeReader(client, repo, _file_url(repo, commit, path), size, out)
                if path.endswith(".gguf"):
                    read_gguf(io.BufferedReader(ranges, _HEADER_STEP), size, target)
                else:
                    start = ranges.fetch(0, min(size, _HEADER_STEP // 8))
                    length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else 0
                    if len(start) < 8 + length <= size:
                        ranges.fetch(len(start), 8 + length)

        list(pool.map(write, files))


class _RangeReader(io.RawIOBase):
    """A file of the hub, whose bytes are fetched as they are read, and written to ``out`` at their places."""

    def __init__(self, client: httpx.Client, repo: str, url: str, size: int, out: BinaryIO) -> None:
        self._client, self._repo, self._url, self._size, self._out = client, repo, url, size, out
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.fetch(self._position, min(self._position + len(buffer), self._size))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def fetch(self, start: int, stop: int) -> bytes:
        """The bytes from ``start`` up to ``stop``."""
        if start >= stop:
            return b""
        headers, data = {"Range": f"bytes={start}-{stop - 1}"}, b""
        with hub_errors(self._repo), self._client.stream("GET", self._url, headers=headers) as response:
            raise_for_status(self._repo, response)
            skipped = start if response.status_code == 200 else 0  # the server sends the whole file
            for chunk in response.iter_bytes():
                data += chunk
                if len(data) >= skipped + stop - start:
                    break
        data = data[skipped : skipped + stop - start]
        self._out.seek(start)
        self._out.write(data)
        return data
