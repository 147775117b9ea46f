"""Records docs/recordings/a_busy_half_minute.jsonl: prefix hits, forks, both kinds of preemption, and a killed core.

    python scripts/docs_recording.py [FILE]       # needs the demo model and some 30 seconds

A server with too few blocks for its requests is followed as its page follows it (``/engine/events``). Chats that begin
alike arrive; some have two answers. When requests of both kinds have been preempted and swapped ones come back, the
engine core is killed: the server starts another, and all answers go on. The script fails if the recording lacks any of
this.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil

TARGET = Path(__file__).resolve().parent.parent / "docs" / "recordings" / "a_busy_half_minute.jsonl"
TITLE = "smollm2-135m with too few blocks: prefix hits, forks, preemption by recompute and by swap, a killed core"
MODEL = "smollm2-135m"
#: Blocks for some eight of the requests. Those with several answers are swapped out, the others computed again.
FLAGS = ["--num-gpu-blocks-override", "110", "--preemption-mode", "by_sequences", "--num-host-blocks-override", "60"]
FLAGS += ["--max-model-len", "1024", "--max-num-batched-tokens", "128"]
SYSTEM = (
    "You are a guide who knows a small town by a river, its bridges, its market and the people who live there. You "
    "answer in plain sentences and name places, times of the day and what they cost. "
)
QUESTIONS = (
    "What is worth seeing in the morning?", "Who should I ask about the old mill?", "Where does the bread come from?",
    "How do I get to the other side?", "What do people do on a rainy day?", "Which bridge is the oldest one?",
)  # fmt: skip
NUM_REQUESTS, TOKENS = 16, 150
PATIENCE = 240


@contextlib.contextmanager
def server() -> Iterator[tuple[str, psutil.Process]]:
    """The address of a server, and its process."""
    with tempfile.NamedTemporaryFile("w+") as log:
        command = [sys.executable, "-m", "octavo", "serve", MODEL, "--port", "0", *FLAGS]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while not (found := re.search(r"serving .* on (http://\S+)", Path(log.name).read_text())):
                if process.poll() is not None:
                    sys.exit(Path(log.name).read_text())
                time.sleep(0.1)
            yield found.group(1), psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait()


class Follower:
    """Owns the events of a server's engine so far, as it sends them."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.events: list[dict[str, Any]] = []
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.stream("GET", f"{self._url}/engine/events", timeout=PATIENCE) as stream,
        ):
            for line in stream.iter_lines():
                if line.startswith("data: "):
                    self.events.append({**json.loads(line.removeprefix("data: ")), "latencies": [], "whole": False})

    def kinds(self) -> set[str]:
        """What has happened: kinds of changes, "hit" and "killed"."""
        views = [view for event in self.events for view in event["views"]]
        kinds = {change[0] for view in views for change in view["changes"]}
        kinds |= {"hit"} if any(view["state"]["prefix_hit_tokens"] for view in views) else set()
        rows = [row for event in self.events for row in event["replicas"]]
        return kinds | ({"killed"} if any(row["restarts"] for row in rows) else set())

    def wait_for(self, kinds: set[str]) -> None:
        """Waits until all of these have happened."""
        end = time.monotonic() + PATIENCE
        while not kinds <= self.kinds():
            if time.monotonic() > end:
                sys.exit(f"the recording lacks {', '.join(sorted(kinds - self.kinds()))}: take fewer blocks")
            time.sleep(0.1)


def main(path: Path) -> int:
    """Writes the recording."""
    with server() as (url, process):
        follower = Follower(url)

        def ask(i: int) -> int:
            time.sleep(0.25 * i)
            body = {
                "model": MODEL,
                "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTIONS[i % 6]}],
                "max_tokens": TOKENS - 5 * (i % 4),
                "ignore_eos": True,
                "temperature": 0.8,
                "seed": i,
                "n": 2 if i % 4 == 1 else 1,
            }
            return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE).status_code

        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            answers = [pool.submit(ask, i) for i in range(NUM_REQUESTS)]
            follower.wait_for({"hit", "fork", "recompute", "swap", "swap_in"})
            time.sleep(1.0)
            [core] = [child for child in process.children() if "core_process" in " ".join(child.cmdline())]
            os.kill(core.pid, signal.SIGKILL)
            if (codes := {answer.result() for answer in answers}) != {200}:
                sys.exit(f"requests were answered with {codes}")
        follower.wait_for({"killed"})
        time.sleep(1.0)
    header = {"format": "octavo-recording", "version": 1, "title": TITLE}
    lines = [header, *follower.events]
    path.write_text("".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines))
    print(f"== wrote {path}: {len(follower.events)} events, {path.stat().st_size / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=TARGET, help=f"where the recording goes ({TARGET})")
    sys.exit(main(parser.parse_args().file))
