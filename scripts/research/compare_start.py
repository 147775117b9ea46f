"""Seconds from a server's start to its first answer, of Octavo and of llama.cpp's server, in turn on the same machine.

    python scripts/research/compare_start.py smollm2-135m --llama-server PATH --gguf smollm2-BF16.gguf --runs 5

Each round starts each server once and asks for one token as soon as its socket answers; the first round only warms the
file caches. Then it prints medians, the processor time that each start took, and the ratio. Both models should hold
the same weights in the same type. Without ``--llama-server`` it measures Octavo alone.

With ``--memory`` it also prints what Octavo's processes hold when they are idle after that answer: resident and
proportional (pages that processes share are divided among them), in MB.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REQUEST = json.dumps(
    {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 1, "temperature": 0}
)
#: Seconds between two tries to get an answer, and after which a server is given up.
PAUSE, PATIENCE = 0.005, 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="of Octavo: a name, a folder, a GGUF file")
    parser.add_argument("--llama-server", type=Path, metavar="PROGRAM")
    parser.add_argument("--gguf", type=Path, help="the same model for llama-server")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    commands: dict[str, Callable[[int], list[str]]] = {
        "octavo": lambda port: [sys.executable, "-m", "octavo", "serve", arguments.model, "--port", str(port)]
    }
    if arguments.llama_server is not None:
        os.environ["LD_LIBRARY_PATH"] = str(arguments.llama_server.parent)
        llama = [str(arguments.llama_server), "-m", str(arguments.gguf), "-t", str(arguments.threads)]
        commands["llama-server"] = lambda port: [*llama, "--port", str(port)]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    for number in range(arguments.runs + 1):
        for name, command in commands.items():
            run = start_once(command, arguments.memory and name == "octavo" and number == 1)
            if number:
                runs[name].append(run)
    result: dict[str, Any] = {
        name: {
            "seconds": round(statistics.median(run["seconds"] for run in of_server), 3),
            "cpu_seconds": round(statistics.median(run["cpu_seconds"] for run in of_server), 3),
            "runs": [round(run["seconds"], 3) for run in of_server],
        }
        for name, of_server in runs.items()
    }
    if arguments.memory:
        result["memory"] = runs["octavo"][0]["memory"]
    if len(result) > 1 and "llama-server" in result:
        result["ratio"] = round(result["octavo"]["seconds"] / result["llama-server"]["seconds"], 2)
    print(json.dumps(result) if arguments.json else readable(result))


def start_once(make_command: Callable[[int], list[str]], with_memory: bool) -> dict[str, Any]:
    """Starts a server, waits for its first answer and ends it; its seconds and those of its processors."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    before, begin = os.times(), time.perf_counter()
    with subprocess.Popen(make_command(port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while not has_answered(port):
                if process.poll() is not None or time.perf_counter() - begin > PATIENCE:
                    sys.exit(f"no answer from {' '.join(make_command(port))}")
                time.sleep(PAUSE)
            run: dict[str, Any] = {"seconds": time.perf_counter() - begin}
            if with_memory:
                time.sleep(1)
                run["memory"] = memory_of(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE)
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return run | {"cpu_seconds": cpu}


def has_answered(port: int) -> bool:
    """Whether the server has answered a request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("POST", "/v1/chat/completions", REQUEST, {"Content-Type": "application/json"})
        return connection.getresponse().status == http.client.OK
    except OSError:
        return False
    finally:
        connection.close()


def memory_of(pid: int) -> list[dict[str, Any]]:
    """MB of a process and those that it has started: resident, proportional, and in files and anonymous memory."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = []
    for each in (pid, *map(int, children)):
        rollup = dict(re.findall(r"^(\w+): +(\d+) kB", Path(f"/proc/{each}/smaps_rollup").read_text(), re.MULTILINE))
        name = Path(f"/proc/{each}/cmdline").read_bytes().split(b"\0")
        found.append(
            {"process": "engine core" if b"octavo.engine.core_process" in name else "server"}
            | {field: int(rollup[field]) // 1024 for field in ("Rss", "Pss", "Anonymous", "AnonHugePages")}
        )
    return found


def readable(result: dict[str, Any]) -> str:
    lines = [
        f"{name:<13}{figures['seconds']:7.3f} s to the first answer, {figures['cpu_seconds']:.3f} s of processor time; "
        f"runs {figures['runs']}"
        for name, figures in result.items()
        if isinstance(figures, dict)
    ]
    lines += [
        f"{memory['process']:<13}{memory['Rss']:5d} MB resident, {memory['Pss']} MB proportional, "
        f"{memory['Anonymous']} MB anonymous ({memory['AnonHugePages']} MB in huge pages)"
        for memory in result.get("memory", [])
    ]
    if "ratio" in result:
        lines.append(f"octavo takes {result['ratio']} times as long as llama-server")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
