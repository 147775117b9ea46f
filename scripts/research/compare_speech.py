"""Transcribes the same speech here and with faster-whisper: word error rates side by side, and seconds.

    scripts/research/compare_speech.py --python /path/to/venv/bin/python     # a Python that has faster-whisper

Speech is synthesised by espeak-ng from a text that is built in, or from --text FILE. Both read the same folder of
CTranslate2, greedily and with one type of numbers, on the same number of threads, in turns; each run is a process of
its own, whose loading does not count. Figures of one call can be compared with each other only.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

TEXT = """\
The old lighthouse stood at the end of the harbour, and every evening the keeper climbed its narrow stairs to light the
lamp. Ships came from far countries with tea, coffee and silk, and the children of the town ran down to the water to see
them. One winter a storm broke the windows of the tower, and the keeper worked for three days without sleep. The mayor
promised him a medal, but the keeper asked only for new glass and a warm coat. In the spring a young engineer arrived by
train. She had studied in the capital and carried a leather bag full of drawings. Her plan was simple: the lamp should
turn by electricity, and nobody would need to climb the stairs at night. The keeper listened, drank his soup, and said
nothing. Later he showed her the sea from the top of the tower, and she understood why he did not want to leave. They
agreed to build a small museum on the ground floor. Visitors could buy postcards, apples and honey. The lamp turned by
itself, but the keeper still climbed up every evening, because somebody has to look at the sea. Years later a reporter
from the city wrote an article about the two friends. He asked which of them had been right. The engineer laughed and
said that a machine can give light, but it cannot worry about a ship. The keeper only pointed to the horizon, where a
small white sail was coming home before the rain. On Monday the market opened at seven in the morning. Farmers sold
bread, cheese, onions and fresh fish, and an old woman played the violin near the fountain. A boy counted his coins
twice before he bought a map of the world. He wanted to know how far it was to the nearest island, and whether anybody
lived there. His sister told him that the best way to learn the answer was to build a boat. So they spent the summer
with hammers, nails and rope, and when the leaves turned yellow the little boat was ready. It was painted blue, it had
one sail, and its name was Patience. The first journey lasted only ten minutes, because the wind changed and the water
came over the side. The second journey lasted a whole afternoon, and they came back with shells, wet shoes and a story.
"""

HERE = """
import json, resource, sys, time
from octavo import LLM
from octavo.speech.transcription import TranscriptionParams
job = json.load(sys.stdin)
llm = LLM(job["model"], dtype=job["dtype"], num_threads=job["threads"], max_num_seqs=job["seqs"])
params = TranscriptionParams(temperature=job["temperature"], language="en")
llm.transcribe(job["warm"], params, use_tqdm=False)
begun, used = time.perf_counter(), time.process_time()
made = llm.transcribe(job["files"], params, use_tqdm=False)
print(json.dumps({"seconds": time.perf_counter() - begun, "processor": time.process_time() - used,
                  "texts": [m.text for m in made]}))
"""
THERE = """
import json, sys, time
from faster_whisper import WhisperModel
job = json.load(sys.stdin)
model = WhisperModel(job["folder"], device="cpu", compute_type=job["dtype"], cpu_threads=job["threads"])
options = {"language": "en", "beam_size": job["beam"]}
if job["temperature"] is not None:
    options["temperature"] = job["temperature"]
def text(file):
    return "".join(s.text for s in model.transcribe(file, **options)[0]).strip()
text(job["warm"])
begun, used = time.perf_counter(), time.process_time()
texts = [text(file) for file in job["files"]]
print(json.dumps({"seconds": time.perf_counter() - begun, "processor": time.process_time() - used, "texts": texts}))
"""


def speak(text: str, path: Path, voice: str = "en-us", speed: int = 145) -> None:
    subprocess.run(["espeak-ng", "-v", voice, "-s", str(speed), "-w", path, text], check=True)


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+|\d+", text.lower().replace("harbor", "harbour"))


def errors(said: list[str], heard: list[str]) -> int:
    """Substitutions, insertions and deletions (Levenshtein 1966)."""
    row = np.arange(len(heard) + 1)
    for i, word in enumerate(said, 1):
        cost = np.array([word != other for other in heard], int)
        new = np.empty_like(row)
        new[0] = i
        best = np.minimum(row[:-1] + cost, row[1:] + 1)
        for j, value in enumerate(best, 1):
            new[j] = min(value, new[j - 1] + 1)
        row = new
    return int(row[-1])


def measure(python: str, program: str, job: dict[str, object]) -> dict[str, object]:
    run = subprocess.run([python, "-c", program], input=json.dumps(job), capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(run.stderr[-3000:])
    found: dict[str, object] = json.loads(run.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="a Python that has faster-whisper")
    parser.add_argument("--model", default="whisper-tiny.en", help="built-in name, or a folder of CTranslate2")
    parser.add_argument("--folder", type=Path, help="the same model for faster-whisper (default: where it is cached)")
    parser.add_argument("--text", type=Path, help="text to speak")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--beam", type=int, default=1, help="beams of faster-whisper")
    parser.add_argument("--repeat", type=int, default=2, help="runs of each, in turns; the fastest counts")
    parser.add_argument("--temperature", type=float, default=0.0, help="one alone; -1: with fallback")
    parser.add_argument("--only", choices=["30s", "10min", "16files"], help="one of the three workloads")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    said = " ".join((arguments.text.read_text() if arguments.text else TEXT).split())
    sentences = re.split(r"(?<=[.!?]) ", said)
    folder = arguments.folder or weights_folder(arguments.model)
    report: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as scratch:
        base: dict[str, object] = {
            "model": arguments.model,
            "folder": str(folder),
            "dtype": arguments.dtype,
            "threads": arguments.threads,
            "beam": arguments.beam,
            "seqs": 32,
            "temperature": None if arguments.temperature < 0 else arguments.temperature,
        }
        warm = Path(scratch) / "warm.wav"
        speak("Good morning.", warm)
        for name, texts in workloads(said, sentences).items():
            if arguments.only not in (None, name):
                continue
            files = []
            for i, text in enumerate(texts):
                files.append(Path(scratch) / f"{name}-{i}.wav")
                speak(text, files[-1], speed=135 + 5 * (i % 6))
            job = {**base, "warm": str(warm), "files": [str(file) for file in files]}
            report[name] = compare(name, texts, job, arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2))


def compare(name: str, texts: list[str], job: dict[str, object], arguments: argparse.Namespace) -> dict[str, object]:
    runs: dict[str, list[dict[str, object]]] = {"octavo": [], "faster-whisper": []}
    for _ in range(arguments.repeat):
        runs["octavo"].append(measure(sys.executable, HERE, job))
        runs["faster-whisper"].append(measure(arguments.python, THERE, job))
    said = [words(text) for text in texts]
    found: dict[str, object] = {}
    for who, each in runs.items():
        heard = [words(text) for text in each[0]["texts"]]  # type: ignore[attr-defined]
        rate = sum(map(errors, said, heard)) / sum(map(len, said))
        seconds = min(float(run["seconds"]) for run in each)  # type: ignore[arg-type]
        processor = min(float(run["processor"]) for run in each)  # type: ignore[arg-type]
        middle = statistics.median(float(run["seconds"]) for run in each)  # type: ignore[arg-type]
        found[who] = {"word_error_rate": rate, "seconds": seconds, "median": middle, "processor_seconds": processor}
        print(f"{name:>8} {who:>15}: {rate:7.2%} words wrong, {seconds:7.2f} s, {processor:7.2f} s of processors")
    ours, theirs = (min(float(run["seconds"]) for run in each) for each in runs.values())  # type: ignore[arg-type]
    print(f"{name:>8} {'ratio':>15}: {theirs / ours:.2f} times as fast\n", flush=True)
    return found


def workloads(said: str, sentences: list[str]) -> dict[str, list[str]]:
    """Texts to speak: of some 30 s, of 10 minutes, and 16 of 10 to 40 s."""
    parts = ["".join(sentence + " " for sentence in sentences[i % 17 : i % 17 + 2 + i % 4]) for i in range(16)]
    long = " ".join(sentences[(7 * i) % len(sentences)] for i in range(105))
    return {"30s": [" ".join(sentences[:4])], "10min": [long], "16files": parts}


def weights_folder(model: str) -> Path:
    from octavo.loader.resolve import resolve_model

    return (resolve_model(model) / "model.bin").resolve().parent


if __name__ == "__main__":
    main()
