"""Ten models behind one port, in memory for three: clients at random for some minutes, and what a swap takes.

The models are the built-in ones in several precisions. First each answers each of its requests alone, on a server of
its own start. Then clients ask at random, and every answer is compared: text, tokens and log probabilities of
generations, numbers of vectors, words of speech. The memory of all engines is read ten times a second and compared with
the bound. ``--filled`` compares each model's memory, with its cache in use, with what was reserved for it. ``--kill``
kills the process of an engine every so many seconds meanwhile.

With ``--swaps`` text models are asked in turn, so that each request needs a swap; with ``--llama-server PROGRAM`` the
same files behind llama.cpp's router, in turns.

    python scripts/research/measure_many_models.py --seconds 300 --clients 8
    python scripts/research/measure_many_models.py --seconds 120 --kill 5 --models smollm2 gemma3-file minilm
    python scripts/research/measure_many_models.py --seconds 0 --swaps 30 --llama-server llama-server
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import yaml

from octavo.config.engine_config import EngineConfig
from octavo.engine.memory_needs import size_model

MIB = 1 << 20
#: KV cache of each model that generates.
CACHE = 128 * MIB
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm2": ("smollm2-135m", {}),
    "smollm2-float32": ("smollm2-135m", {"dtype": "float32"}),
    "smollm2-int8": ("smollm2-135m", {"quantization": "int8"}),
    "smollm2-int4": ("smollm2-135m", {"quantization": "int4"}),
    "smollm2-file": ("smollm2-135m", {"quantization": "gguf"}),
    "gemma3": ("gemma3-270m", {}),
    "gemma3-int8": ("gemma3-270m", {"quantization": "int8"}),
    "gemma3-file": ("gemma3-270m", {"quantization": "gguf"}),
    "minilm": ("all-minilm-l6-v2", {}),
    "whisper": ("whisper-tiny.en", {}),
}
PROMPTS = (
    "Name three rivers of Europe.",
    "Write a line about the sea.",
    "What is 12 times 12?",
    "Explain what a cache is to a child.",
    "Translate 'good morning' into French.",
    "List the days of the week.",
)


def options_of(name: str) -> EngineConfig:
    source, options = MODELS[name]
    if source in ("smollm2-135m", "gemma3-270m"):
        options = {"kv_cache_memory_bytes": CACHE, "max_model_len": 2048, **options}
    return EngineConfig(model=source, engine_restarts=1000, **options)


def tone(frequency: int) -> bytes:
    """Two seconds of 16 kHz sound as a WAV file."""
    samples = 8000 * np.sin(np.arange(32000) * (2 * np.pi * frequency / 16000))
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        with wave.open(file.name, "wb") as sound:
            sound.setparams((1, 2, 16000, 0, "NONE", ""))
            sound.writeframes(samples.astype("<i2").tobytes())
        return Path(file.name).read_bytes()


def ask(client: httpx.Client, name: str, number: int) -> Any:
    """The answer of a model to its request of this number, in a form that equals only itself."""
    if name == "minilm":
        reply = client.post("/v1/embeddings", json={"model": name, "input": PROMPTS[number]})
        read = lambda body: body["data"][0]["embedding"]  # noqa: E731
    elif name == "whisper":
        files = {"file": ("tone.wav", tone(200 + 100 * number))}
        reply = client.post("/v1/audio/transcriptions", data={"model": name}, files=files)
        read = lambda body: body["text"]  # noqa: E731
    else:
        body = {
            "model": name,
            "prompt": PROMPTS[number],
            "max_tokens": 16 + 8 * number,
            "temperature": 0.8,
            "seed": number,
            "logprobs": 1,
        }
        reply = client.post("/v1/completions", json=body)
        read = lambda body: [body["choices"][0]["text"], body["choices"][0]["logprobs"]]  # noqa: E731
    if reply.status_code != 200:
        raise RuntimeError(f"{name}, request {number}: {reply.status_code} {reply.text[:300]}")
    return read(reply.json())


@contextlib.contextmanager
def running(words: list[str], port: int, log: Path, environment: dict[str, str] | None = None) -> Iterator[int]:
    """A server that has answered ``/health``; the number of its process."""
    with log.open("ab") as output:
        server = subprocess.Popen(words, stdout=output, stderr=output, env=os.environ | (environment or {}))
    try:
        end = time.monotonic() + 120
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            if server.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield server.pid
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def serve(folder: Path, names: list[str], port: int, *words: str) -> list[str]:
    file = folder / "models.yaml"
    file.write_text(
        yaml.safe_dump(
            [
                {"name": name, "source": MODELS[name][0], "options": options_of(name).model_dump(exclude_unset=True)}
                for name in names
            ]
        )
    )
    entries = yaml.safe_load(file.read_text())
    for entry in entries:
        entry["options"].pop("model", None)
    file.write_text(yaml.safe_dump(entries))
    octavo = str(Path(sys.executable).with_name("octavo"))
    return [octavo, "serve", "--models", str(file), "--port", str(port), *words]


class MemoryWatch(threading.Thread):
    """Reads the memory of a server's engines (proportional set size) while it runs."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.server, self.peak, self.samples = psutil.Process(pid), 0, 0
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.2):
            total = 0
            for process in self.server.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    total += process.memory_full_info().pss
            self.peak, self.samples = max(self.peak, total), self.samples + 1


class Killer(threading.Thread):
    """Kills the process of one of a server's engines every so many seconds."""

    def __init__(self, pid: int, seconds: float) -> None:
        super().__init__(daemon=True)
        self.server, self.seconds, self.killed = psutil.Process(pid), seconds, 0
        self.random, self.ended = random.Random(0), threading.Event()

    def run(self) -> None:
        while not self.ended.wait(self.seconds):
            engines = []
            for process in self.server.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    forks = "forks" in process.cmdline() and process.ppid() == self.server.pid
                    if "octavo.engine.core_process" in process.cmdline() and not forks:
                        engines.append(process)
            with contextlib.suppress(psutil.Error, IndexError):
                self.random.choice(engines).kill()
                self.killed += 1


def random_clients(
    folder: Path, models: list[str], seconds: float, clients: int, memory: int, kill: float | None
) -> None:
    port = free_port()
    words = serve(folder, models, port, "--memory", str(memory))
    base = f"http://127.0.0.1:{port}"
    alone: dict[tuple[str, int], Any] = {}
    with running(words, port, folder / "alone.log"), httpx.Client(base_url=base, timeout=300) as client:
        for name in models:
            for number in range(len(PROMPTS)):
                alone[name, number] = ask(client, name, number)
    print(f"{len(alone)} answers of {len(models)} models alone", flush=True)
    different: list[tuple[str, int]] = []
    failed: list[str] = []
    times: list[float] = []
    end = time.monotonic() + seconds

    def one(seed: int) -> None:
        rng = random.Random(seed)
        with httpx.Client(base_url=base, timeout=300) as client:
            while time.monotonic() < end:
                name, number = rng.choice(models), rng.randrange(len(PROMPTS))
                begin = time.monotonic()
                try:
                    got = ask(client, name, number)
                except (RuntimeError, httpx.HTTPError) as e:
                    failed.append(str(e))
                    continue
                times.append(time.monotonic() - begin)
                if got != alone[name, number]:
                    different.append((name, number))

    with running(words, port, folder / "random.log") as pid:
        watch = MemoryWatch(pid)
        watch.start()
        killer = Killer(pid, kill) if kill else None
        if killer is not None:
            killer.start()
        threads = [threading.Thread(target=one, args=(seed,)) for seed in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        watch.ended.set()
        watch.join()
        if killer is not None:
            killer.ended.set()
            killer.join()
            print(f"{killer.killed} engines were killed")
        metrics = httpx.get(f"{base}/metrics").text
    loads = sum(
        float(line.split()[-1])
        for line in metrics.splitlines()
        if line.startswith("octavo_model_loads_total") and 'result="ok"' in line
    )
    print(
        f"{len(times)} requests of {clients} clients in {seconds:.0f} s, {loads:.0f} loads: {len(failed)} failed, "
        f"{len(different)} differ from the answers alone; {statistics.median(times):.2f} s a request in the median, "
        f"{max(times):.1f} at worst"
    )
    print(
        f"memory of the engines {watch.peak / MIB:,.0f} MiB at most of a bound of {memory / MIB:,.0f} "
        f"({watch.peak / memory:.1%}), {watch.samples} readings"
    )
    for problem in failed[:5]:
        print("  failed:", problem)
    for pair in different[:5]:
        print("  differs:", *pair)


def filled_memory(folder: Path) -> None:
    """Each model's memory with its cache in use, beside what was reserved for it."""
    for name in MODELS:
        port = free_port()
        words = serve(folder, [name], port)
        need = size_model(options_of(name), 64 << 30).need
        base = f"http://127.0.0.1:{port}"
        with running(words, port, folder / "filled.log") as pid, httpx.Client(base_url=base, timeout=300) as client:
            ask(client, name, 0)
            for turn in range(CACHE // MIB // 8 if name.startswith(("smollm2", "gemma3")) else 0):
                body = {"model": name, "prompt": f"{turn} {'word ' * 1800}", "max_tokens": 2}
                client.post("/v1/completions", json=body).raise_for_status()
            got = sum(process.memory_full_info().pss for process in psutil.Process(pid).children(recursive=True))
        print(f"{name}: {got / MIB:,.0f} MiB, reserved {need.total / MIB:,.0f} ({got / need.total:.3f})", flush=True)


def swaps(folder: Path, turns: int, llama: str | None) -> None:
    """Requests to four text files in turn with one in memory: seconds until each has its first token."""
    from octavo.loader.resolve import gguf_source

    names = ["smollm2-file", "gemma3-file"]
    files = {name: gguf_source(MODELS[name][0], None) for name in names}
    models = folder / "models"
    models.mkdir()
    for name, file in files.items():
        assert file is not None
        for copy in "ab":
            (models / f"{name}-{copy}.gguf").symlink_to(file.resolve())
    asked = sorted(path.stem for path in models.iterdir())
    engines: dict[str, list[str]] = {}
    environments: dict[str, dict[str, str]] = {}
    for program in ("octavo", "octavo in the file's bits", *(("llama.cpp",) if llama else ())):
        port = free_port()
        if program == "llama.cpp":
            assert llama is not None
            engines[program] = [llama, "--models-dir", str(models), "--models-max", "1", "--port", str(port)]
            # Its repacked weights for AMX end the process (b11434); without them it loads faster, too.
            engines[program] += ["--ctx-size", "2048", "--threads", str(os.cpu_count()), "--no-repack"]
            environments[program] = {"LD_LIBRARY_PATH": str(Path(llama).parent)}
        else:
            octavo = str(Path(sys.executable).with_name("octavo"))
            engines[program] = [octavo, "serve", "--models-dir", str(models), "--max-loaded", "1", "--port", str(port)]
            engines[program] += ["--max-model-len", "2048", "--kv-cache-memory-bytes", str(CACHE)]
            engines[program] += ["--quantization", "gguf"] if "bits" in program else []
    with contextlib.ExitStack() as stack:
        clients = {}
        for program, words in engines.items():
            port = int(words[words.index("--port") + 1])
            stack.enter_context(running(words, port, folder / f"{program}.log", environments.get(program)))
            base = f"http://127.0.0.1:{port}"
            clients[program] = stack.enter_context(httpx.Client(base_url=base, timeout=300))
        times: dict[str, list[float]] = {program: [] for program in clients}
        for turn in range(turns):
            for program, client in clients.items():
                body = {"model": asked[turn % len(asked)], "prompt": "Once upon", "max_tokens": 1, "temperature": 0}
                begin = time.monotonic()
                reply = client.post("/v1/completions", json=body)
                if reply.status_code != 200:
                    raise RuntimeError(f"{program}, {body['model']}: {reply.status_code} {reply.text[:300]}")
                if turn >= len(asked):  # files are in the page cache
                    times[program].append(time.monotonic() - begin)
    for program, each in times.items():
        median = statistics.median(each)
        print(f"{program}: swap and first token {median:.2f} s in the median, {max(each):.2f} at worst")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--kill", type=float, metavar="SECONDS")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--swaps", type=int, default=0, metavar="TURNS")
    parser.add_argument("--llama-server", metavar="PROGRAM")
    parser.add_argument("--filled", action="store_true", help="each model's memory with its cache in use")
    arguments = parser.parse_args()
    needs = {name: size_model(options_of(name), 64 << 30).need.total for name in MODELS}
    for name, need in needs.items():
        print(f"  {name}: {need / MIB:,.0f} MiB reserved")
    memory = sum(sorted(needs.values())[-3:])
    with tempfile.TemporaryDirectory() as folder:
        if arguments.filled:
            filled_memory(Path(folder))
        if arguments.seconds:
            models, kill = arguments.models, arguments.kill
            random_clients(Path(folder), models, arguments.seconds, arguments.clients, memory, kill)
        if arguments.swaps:
            swaps(Path(folder), arguments.swaps, arguments.llama_server)


if __name__ == "__main__":
    main()
