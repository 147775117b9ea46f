"""Follows one streamed chat through a real server, from the socket to the first token, and lists what it passes.

    .venv/bin/python scripts/request_path.py [MODEL] [--markdown] [options of octavo serve]

Every process of ``octavo serve`` (the server and the engine's core) runs under ``sys.setprofile``. A first chat warms
up, the second one is followed: each function of octavo that is called until the client has its first token, in the
order of the first call. Comprehensions and lambdas belong to their function. "Types" are octavo's classes whose
instances are arguments or results on the way (``self`` left out); "stays" are the files through which the parsed body
of the request is handed, in order, a file left and entered again counting twice.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

_IDLE, _FOLLOW, _WRITE = 0, 1, 2
_VARIABLE = "REQUEST_PATH_FOLDER"


def _install_hook(folder: Path) -> None:
    """Profiles all threads of this process; called by ``sitecustomize``."""
    import threading

    import octavo

    root = os.path.dirname(octavo.__file__) + os.sep
    with open(folder / "flag", "r+b") as file:
        flag = mmap.mmap(file.fileno(), 1)
    calls: list[tuple[float, str, str, bool]] = []
    types: dict[str, float] = {}
    is_written = [False]
    now = time.monotonic

    def note_type(value: object) -> None:
        kind = type(value)
        if kind.__module__.startswith("octavo."):
            types.setdefault(f"{kind.__module__}.{kind.__qualname__}", now())

    def hook(frame: Any, event: str, value: Any) -> None:
        state = flag[0]
        if state != _FOLLOW:
            if state == _WRITE and calls and not is_written[0]:
                is_written[0] = True
                out = {"calls": calls, "types": types, "argv": sys.argv}
                (folder / f"{os.getpid()}.json").write_text(json.dumps(out))
            return
        code = frame.f_code
        if not code.co_filename.startswith(root) or event not in ("call", "return"):
            return
        if event == "return":
            note_type(value)
            return
        if code.co_name.startswith("<"):
            return
        has_body = False
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        for name in names:
            if name == "self" or name not in frame.f_locals:
                continue
            argument = frame.f_locals[name]
            note_type(argument)
            has_body = has_body or type(argument).__name__ == "ChatCompletionRequest"
        calls.append((now(), code.co_filename[len(root) :], code.co_qualname, has_body))

    threading.setprofile(hook)
    sys.setprofile(hook)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _chat(url: str, text: str, max_tokens: int) -> float:
    """Streams one chat; returns the time of its first text."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "stream": True, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    first = 0.0
    with urllib.request.urlopen(request, timeout=60) as response:
        for line in response:
            if not first and line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                if choices and choices[0]["delta"].get("content"):
                    first = time.monotonic()
    return first


def follow(model: str, options: list[str]) -> list[dict[str, Any]]:
    """By process: the calls and types up to the client's first token."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "flag").write_bytes(bytes([_IDLE]))
        here = str(Path(__file__).resolve().parent)
        (folder / "sitecustomize.py").write_text(
            f"import os, sys\nif {_VARIABLE!r} in os.environ:\n    sys.path.append({here!r})\n"
            f"    import request_path, pathlib\n"
            f"    request_path._install_hook(pathlib.Path(os.environ[{_VARIABLE!r}]))\n"
        )
        port = _free_port()
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        server = subprocess.Popen(
            [sys.executable, "-m", "octavo", "serve", model, "--port", str(port), *options],
            env={**os.environ, "PYTHONPATH": path, _VARIABLE: str(folder)},
            stdout=subprocess.DEVNULL,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(1200):
                try:
                    urllib.request.urlopen(f"{url}/health", timeout=5).read()
                    break
                except OSError:
                    if server.poll() is not None:
                        raise SystemExit("the server ended") from None
                    time.sleep(0.05)
            _chat(url, "Hello", 4)
            time.sleep(1)
            with open(folder / "flag", "r+b") as file:
                flag = mmap.mmap(file.fileno(), 1)
            flag[0] = _FOLLOW
            first = _chat(url, "Name three colours.", 8)
            flag[0] = _WRITE
            _chat(url, "Hello again", 4)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(30)
        traces = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    for trace in traces:
        trace["calls"] = [call for call in trace["calls"] if call[0] <= first]
        trace["types"] = [kind for kind, when in trace["types"].items() if when <= first]
    return sorted((trace for trace in traces if trace["calls"]), key=lambda trace: trace["calls"][0][0])


def count(trace: dict[str, Any]) -> dict[str, Any]:
    """What one process passes: functions by file, types, and the files that the body goes through."""
    functions: dict[str, list[str]] = {}
    stays: list[str] = []
    for _, file, name, has_body in trace["calls"]:
        functions.setdefault(file, [])
        if name not in functions[file]:
            functions[file].append(name)
        if has_body and stays[-1:] != [file]:
            stays.append(file)
    return {"functions": functions, "types": [kind.rpartition(".")[2] for kind in trace["types"]], "stays": stays}


def listing(process: str, counts: dict[str, Any]) -> str:
    """Markdown: files in the order in which the request comes to them, with the first function and their number."""
    functions = counts["functions"]
    total = sum(map(len, functions.values()))
    lines = [f"{process}: {total} functions in {len(functions)} files, {len(counts['types'])} types.\n"]
    for folder, files in itertools.groupby(functions, key=lambda file: file.rpartition("/")[0]):
        entries = (f"`{file.rpartition('/')[2]}` {functions[file][0]} ({len(functions[file])})" for file in files)
        lines.append(f"- `{folder}/`: {', '.join(entries)}")
    return "\n".join(lines)


def report(process: str, counts: dict[str, Any]) -> str:
    """Every function, type and stay of the body."""
    functions, stays = counts["functions"], counts["stays"]
    total = sum(map(len, functions.values()))
    lines = [f"{process}: {total} functions in {len(functions)} files, {len(counts['types'])} types"]
    lines += [f"  {file}: {', '.join(names)}" for file, names in functions.items()]
    lines += [f"  types: {', '.join(counts['types'])}"]
    if stays:
        again = len(stays) - len(set(stays))
        stations = f"{len(stays)} stays in {len(set(stays))} files, {again} of them again"
        lines += [f"  the body makes {stations}: {' > '.join(stays)}"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], epilog="Further options are the server's."
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="what octavo serve takes")
    parser.add_argument("--markdown", action="store_true", help="the lists of ARCHITECTURE.md")
    arguments, options = parser.parse_known_args()
    traces = follow(arguments.model, options)
    show = listing if arguments.markdown else report
    print("\n\n".join(show(process, count(trace)) for process, trace in zip(("Server", "Core"), traces, strict=True)))


if __name__ == "__main__":
    main()
