"""Runs an image as deploy/docker-compose.yml does and tries what docs/deploying.md promises of it.

    docker build -f deploy/Dockerfile -t octavo . && scripts/try_container.py octavo

Needs Docker, or what takes its commands (CONTAINER_ENGINE=podman), and the network once, for the model. Prints what was
measured, and fails at the first promise that is not kept. Its volume and its containers are removed in the end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial

ENGINE = os.environ.get("CONTAINER_ENGINE", "docker")
NAME = f"octavo-try-{os.getpid()}"
OPTIONS = ("--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges:true")
#: Seconds after which the engine kills, which are more than those of --shutdown-timeout.
GRACE = 45
PATIENCE = 900
#: Within the container: kills the process of the engine.
KILL_CORE = """
import os, pathlib
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    if b"octavo.engine.core_process" in path.read_bytes().split(b"\\0"):
        os.kill(int(path.parent.name), 9)
"""
#: Within the container: its user, processes that nobody has waited for, and whether its own files can be written to.
LOOK = """
import os, pathlib
states = [path.read_text().rpartition(")")[2].split()[0] for path in pathlib.Path("/proc").glob("[0-9]*/stat")]
print(os.getuid(), states.count("Z"), *(int(os.access(path, os.W_OK)) for path in ("/", "/opt/octavo", "/models")))
"""


def engine(*words: str) -> str:
    """Runs a command of the container engine; what it prints."""
    done = subprocess.run([ENGINE, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{ENGINE} {' '.join(words)}: {done.stdout}"
    return done.stdout.strip()


def start(image: str) -> str:
    """Starts a server in a container; its URL."""
    volume = ("-v", f"{NAME}:/models", "-p", "127.0.0.1::8000")
    engine("run", "-d", "--name", NAME, *OPTIONS, *volume, image, "smollm2-135m", "--shutdown-timeout=30")
    return f"http://{engine('port', NAME, '8000').splitlines()[0]}"


def stop() -> tuple[float, int]:
    """Stops the server and removes its container; the seconds that it took, and the exit code."""
    begin = time.monotonic()
    engine("stop", "-t", str(GRACE), NAME)
    seconds, code = time.monotonic() - begin, int(engine("inspect", "-f", "{{.State.ExitCode}}", NAME))
    engine("rm", NAME)
    return seconds, code


def until(condition: Callable[[], bool]) -> float:
    """Waits; the seconds that it took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < PATIENCE, engine("logs", "--tail", "20", NAME)
        time.sleep(0.1)
    return time.monotonic() - begin


def status(url: str) -> int:
    """The status of /health; 0: nobody listens."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as e:
        return e.code
    except OSError:
        return 0


class Stream(threading.Thread):
    """The stream of an answer, read beside other things."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        fields = {"stream": True, "temperature": 0, "max_tokens": 100, "ignore_eos": True}
        body = json.dumps({"messages": [{"role": "user", "content": "Name rivers."}], **fields}).encode()
        headers = {"Content-Type": "application/json"}
        self._request = urllib.request.Request(f"{url}/v1/chat/completions", body, headers=headers)
        self.text, self.finish_reason = "", None
        self.start()

    def run(self) -> None:
        with urllib.request.urlopen(self._request, timeout=PATIENCE) as lines:
            for line in lines:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        self.text += choice["delta"].get("content") or ""
                        self.finish_reason = choice["finish_reason"]

    def whole(self) -> str:
        """The whole text."""
        self.join(PATIENCE)
        assert self.finish_reason == "length", f"the stream broke off after {self.text!r}"
        return self.text


def main(image: str) -> None:
    """Tries everything, in order."""
    url = start(image)
    until(lambda: status(url) == 503)
    seconds, code = stop()
    assert code == 0 and seconds < GRACE / 2, f"exit code {code} after {seconds:.1f} s"
    print(f"told to stop while it loads, it ends after {seconds:.1f} s", flush=True)

    url = start(image)
    health = partial(engine, "inspect", "-f", "{{.State.Health.Status}}", NAME)
    first = health()
    print(f"first start: answers after {until(lambda: status(url) == 200):.1f} s", flush=True)
    until(lambda: health() != first)
    assert (first, health()) == ("starting", "healthy"), (first, health())
    expected = Stream(url).whole()
    stream = Stream(url)
    until(lambda: bool(stream.text))
    engine("exec", NAME, "python", "-c", KILL_CORE)
    assert stream.whole() == expected, "another text after the engine was killed"
    seen = engine("exec", NAME, "python", "-c", LOOK)
    assert seen == "1000 0 0 0 1", f"user, zombies, writable: {seen}"
    print("the engine is killed: the open answer goes on with the same text", flush=True)

    stream = Stream(url)
    until(lambda: bool(stream.text))
    seconds, code = stop()
    assert code == 0 and stream.whole() == expected, f"exit code {code}"
    print(f"told to stop with an answer open, it ends after {seconds:.1f} s, and the answer is whole", flush=True)

    url = start(image)
    print(f"second start, with the model in the volume: answers after {until(lambda: status(url) == 200):.1f} s")
    assert "downloading" not in engine("logs", NAME)
    assert stop()[1] == 0


if __name__ == "__main__":
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(__doc__)
        sys.exit()
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        main(sys.argv[1])
    finally:
        subprocess.run([ENGINE, "rm", "-f", NAME], capture_output=True)
        subprocess.run([ENGINE, "volume", "rm", NAME], capture_output=True)
