"""Installs clients of other makers, each into an environment of its own, and drives them against a server.

    python scripts/try_clients.py                     # all
    python scripts/try_clients.py openai_python codex # some
    python scripts/try_clients.py --write             # all, and the rows of docs/serving.md

A client's file in ``scripts/clients`` is run with URL and MODEL in its environment, and says what works. Cleverness is
not judged, as the demo model has little: a client must come to its end without an error. Coding agents send prompts of
20,000 tokens, more than the demo model's context; for them it is stretched to 65,536 positions (YaRN), and ends where a
sentence does, as what it says so far from its home has no end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
CLIENTS = ROOT / "scripts" / "clients"
PAGE = ROOT / "docs" / "serving.md"
DEMO = "smollm2-135m"
#: Seconds that a client may take, on two cores with a prompt of 20,000 tokens.
TIMEOUT = 900

#: Begin of the table of clients in ``PAGE``.
HEAD = """\
| client | version | works | how to configure it |
| --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class Client:
    """A client, and how it is installed."""

    #: File in ``scripts/clients``; a line of it begins with CONFIGURE and says how a user points it at a server.
    file: str
    title: str
    #: Of PyPI or the npm registry; the first is the one whose version is shown.
    packages: tuple[str, ...]
    #: Whether its prompts exceed the demo model's context.
    is_agent: bool = False

    @property
    def name(self) -> str:
        """As the command line names it."""
        return self.file.partition(".")[0]

    @property
    def configuration(self) -> str:
        """How a user points it at a server."""
        [line] = [line for line in (CLIENTS / self.file).read_text().splitlines() if "CONFIGURE " in line]
        return line.partition("CONFIGURE ")[2]

    @property
    def is_node(self) -> bool:
        """Whether it comes from the npm registry."""
        return self.file.endswith(".mjs") or self.packages[0].startswith("@") or self.packages[0] == "opencode-ai"


ALL = (
    Client("claude_code.sh", "Claude Code", ("@anthropic-ai/claude-code",), is_agent=True),
    Client("codex.sh", "Codex CLI", ("@openai/codex",), is_agent=True),
    Client("opencode.sh", "opencode", ("opencode-ai",), is_agent=True),
    Client("aider.sh", "aider", ("aider-chat",)),
    Client("mini_swe_agent.py", "mini-swe-agent", ("mini-swe-agent", "mcp")),
    Client("openai_python.py", "openai (Python)", ("openai",)),
    Client("openai_node.mjs", "openai (Node)", ("openai",)),
    Client("ollama_node.mjs", "ollama (Node)", ("ollama",)),
    Client("anthropic_python.py", "anthropic (Python)", ("anthropic",)),
    Client("anthropic_node.mjs", "anthropic (Node)", ("@anthropic-ai/sdk",)),
    Client("ai_sdk_node.mjs", "AI SDK", ("ai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic")),
    Client("langchain_python.py", "LangChain", ("langchain-openai",)),
    Client("llama_index_python.py", "LlamaIndex", ("llama-index-llms-openai-like",)),
    Client("openai_agents_python.py", "openai-agents", ("openai-agents",)),
    Client("pydantic_ai_python.py", "pydantic-ai", ("pydantic-ai-slim[openai]",)),
    Client("litellm_python.py", "litellm", ("litellm",)),
    Client("dspy_python.py", "dspy", ("dspy",)),
    Client("instructor_python.py", "instructor", ("instructor",)),
)
#: Those that ``make test-all`` drives.
MOST_USED = (
    "claude_code", "codex", "opencode", "openai_python", "openai_node", "anthropic_python", "ai_sdk_node",
    "langchain_python", "ollama_node", "openai_agents_python", "litellm_python",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What came of a client. ``works`` is empty if it failed."""

    client: Client
    version: str
    works: str
    output: str


def cache_folder() -> Path:
    """Where clients are installed."""
    cache = os.environ.get("OCTAVO_CACHE")
    return (Path(cache) if cache else Path.home() / ".cache" / "octavo") / "tests" / "clients"


def install(client: Client) -> tuple[dict[str, str], str]:
    """Installs a client if it is not there; the variables for its commands, and its version.

    Raises:
        subprocess.CalledProcessError: its registry does not have it, or cannot be reached.
    """
    folder = cache_folder() / client.name
    plain = client.packages[0].partition("[")[0]
    if client.is_node:
        if not (folder / "node_modules").exists():
            folder.mkdir(parents=True, exist_ok=True)
            _run("npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", folder, *client.packages)
        version = json.loads((folder / "node_modules" / plain / "package.json").read_text())["version"]
        return {"PATH": f"{folder / 'node_modules' / '.bin'}{os.pathsep}{os.environ['PATH']}"}, version
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        _run(sys.executable, "-m", "venv", "--clear", folder)
        _run(python, "-m", "pip", "install", "--quiet", *client.packages)
        (folder / "installed").touch()
    find = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    version = subprocess.run([python, "-c", find, plain], capture_output=True, text=True, check=True).stdout.strip()
    return {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}, version


def drive(client: Client, url: str, model: str) -> Outcome:
    """Drives a client against a server."""
    variables, version = install(client)
    with tempfile.TemporaryDirectory() as home:
        # ES modules are found from their own place.
        place = cache_folder() / client.name if client.file.endswith(".mjs") else Path(home)
        file = shutil.copy(CLIENTS / client.file, place)
        program = {".sh": ["bash", "-eu"], ".py": ["python"], ".mjs": ["node"]}[Path(file).suffix]
        env = {**variables, "HOME": home, "URL": url, "MODEL": model, "LANG": "C.UTF-8"}
        env["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else litellm asks a site for it at each start
        how: dict[str, Any] = {"cwd": home, "env": env, "stdin": subprocess.DEVNULL, "timeout": TIMEOUT}
        try:
            done = subprocess.run([*program, file], capture_output=True, text=True, **how)
        except subprocess.TimeoutExpired as e:
            return Outcome(client, version, "", f"not done after {TIMEOUT} s: {e.stdout!r} {e.stderr!r}")
    lines = [line.removeprefix("WORKS ") for line in done.stdout.splitlines() if line.startswith("WORKS ")]
    works = lines[-1] if lines and done.returncode == 0 else ""
    return Outcome(client, version, works, done.stdout[-3000:] + done.stderr[-3000:])


@contextlib.contextmanager
def served(model: str, *flags: str, log: IO[bytes] | None = None) -> Iterator[str]:
    """The address of a server, for the time of a block; without a file its log goes to this process's."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    command = [sys.executable, "-m", "octavo", "serve", model, "--port", url.rpartition(":")[2], *flags]
    with subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log) as process:
        try:
            while True:
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health"):
                    break
                if process.poll() is not None:
                    raise SystemExit("the server did not start")
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()


def stretched(folder: Path) -> Path:
    """The demo model with a context of 65,536 tokens and answers of one sentence, in a new folder of links."""
    sys.path.insert(0, str(ROOT))
    from tests.hub_folders import hub_folder

    source = hub_folder(DEMO, "bfloat16")
    target = folder / DEMO
    target.mkdir()
    for file in source.iterdir():
        if file.name not in ("config.json", "generation_config.json"):
            (target / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text())
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    config |= {"max_position_embeddings": 65_536, "rope_parameters": {**config["rope_parameters"], **yarn}}
    (target / "config.json").write_text(json.dumps(config))
    vocabulary = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    ends = [config["eos_token_id"], *(vocabulary[text] for text in (".", "!", "?", "\u010a"))]
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return target


def try_all(names: list[str], flags: list[str]) -> list[Outcome]:
    """Drives the clients of these names, all without names."""
    chosen = [client for client in ALL if not names or client.name in names]
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as folder:
        for is_agent, model in ((False, DEMO), (True, str(stretched(Path(folder))))):
            clients = [client for client in chosen if client.is_agent == is_agent]
            if clients:
                with served(model, *flags) as url:
                    outcomes |= {client.name: _told(client, url) for client in clients}
    return [outcomes[client.name] for client in chosen]


def _told(client: Client, url: str) -> Outcome:
    print(f"== {client.title}", flush=True)
    try:
        outcome = drive(client, url, DEMO)
    except (OSError, subprocess.CalledProcessError) as e:
        outcome = Outcome(client, "-", "", f"not installed: {e} {getattr(e, 'stderr', '')}")
    print(f"   {outcome.version}: {outcome.works or 'FAILED: ' + outcome.output}", flush=True)
    return outcome


def write(outcomes: list[Outcome]) -> None:
    """Writes the table in the page; rows of clients that were not driven stay as they are."""
    before, head, rest = PAGE.read_text(encoding="utf-8").partition(HEAD)
    table, gap, after = rest.partition("\n\n")
    rows = {line.split("|")[1].strip(): line for line in table.splitlines()}
    for o in outcomes:
        cells = (o.client.title, o.version, o.works or "does not run", o.client.configuration)
        rows[o.client.title] = f"| {' | '.join(cells)} |"
    lines = "\n".join(rows[client.title] for client in ALL if client.title in rows)
    PAGE.write_text(f"{before}{head}{lines}{gap}{after}", encoding="utf-8")


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT)


def main() -> int:
    """Drives clients; 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("clients", nargs="*", help=", ".join(client.name for client in ALL))
    parser.add_argument("--write", action="store_true", help="write the table in docs/serving.md")
    parser.add_argument("--serve-flags", default="", help="further flags of octavo serve, in one text")
    arguments = parser.parse_args()
    outcomes = try_all(arguments.clients, arguments.serve_flags.split())
    if arguments.write:
        write(outcomes)
    return int(any(not outcome.works for outcome in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
