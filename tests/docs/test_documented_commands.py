"""What README and docs show to be typed works in the state that the page says: after ``make demo``, or with an extra.

Every block of commands and of Python is pasted, page by page, into a folder like a checkout, in an environment that has
what ``make demo`` installs and nothing else: no torch, no package of the tests. The exceptions are listed below, each
with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.docs.pasted import Terminal, make_environment
from tests.docs.snippets import PAGES, ROOT, Block, blocks, typed_lines
from tests.test_package import script

#: Pages that are pasted in the default suite, but for what is in ``SLOW``.
QUICK = ("README.md", "installing.md", "serving.md", "chat.md")

#: What takes long: (page, pattern of the command or of a line of the program).
SLOW = (
    ("README.md", r"octavo bench offline"),
    ("README.md", r"octavo chat"),  # chat.md begins with it
    ("installing.md", r"octavo (chat|serve)"),
    ("installing.md", r"octavo generate .*What is the capital"),  # as in README.md
)

#: Extras that a block needs beside ``make demo``; "openai" and the like: a client of another package.
NEEDS = {
    ("batch.md", r"octavo\.data"): ("ray",),
    ("embeddings.md", r"\.parquet|octavo\.data"): ("ray",),
    ("serving.md", r"from (openai|anthropic) import"): ("test",),
    ("lab.md", r"--report"): ("plot",),
    ("speech.md", r"import openai"): ("test",),
    ("speech.md", r""): ("audio",),
    ("structured-output.md", r"from openai import"): ("test",),
}

_READERS = "files or a model of the reader's"
_FIGURES = "prints the figures of the page: minutes to hours of a quiet machine"
#: What is not pasted, and why: (page, pattern of a command or of a line of a program; empty: the whole page).
NOT_PASTED = {
    ("README.md", r"^make (demo|test)"): "makes the environment of all others; .ci/run, ten_minutes.py run it",
    ("index.md", r""): "as in README.md",
    ("installing.md", r"^make |^pip install|scripts/install\.py|try_arm64"): "tests/test_setup.py, make wheel try it",
    ("adapters.md", r"PromptAdapterRequest"): _READERS,
    ("adapters.md", r"python scripts/research/bench_adapters.py"): f"{_FIGURES}, with torch",
    ("adding-a-model.md", r""): "parts of files, and tests of them, which tests/models runs whole",
    ("batch.md", r"^import ray"): "a bucket of the reader's; tests/data runs the same calls",
    ("coming-from.md", r"EngineArgs\("): "vllm.install, which changes the program; tests/compat runs it",
    ("extending.md", r"Annotated\[|class (Scan|OnlyDigits)"): "a part of a file of the package",
    ("gpu.md", r""): "a GPU",
    ("images.md", r""): "a model of the hub, and a photo of the reader's",

    ("metrics.md", r"docker|curl|octavo top|^8 running"): "containers, a server that runs; a line of a log",
    ("models.md", r""): _READERS,
    ("parallelism.md", r"path/to/model|^ray |my_module"): _READERS,
    ("deploying.md", r"--host 0\.0\.0\.0"): "a certificate; tests/server/test_access.py serves with one",
    ("failures.md", r"octavo bench chaos"): _FIGURES,
    ("serving.md", r"client\.embeddings"): "another model; tests/server/test_embedding_clients.py drives it",
    ("speculation.md", r"models/"): _READERS,
    ("structured-output.md", r"octavo bench grammar|^response_format\.json"): f"{_FIGURES}; a message",
}  # fmt: skip

#: Written by pages as commands and no commands: lines of output below a prompt are told apart by it.
_LANGUAGES = ("", "bash", "console", "sh", "python")


class Pasted:
    """A command or a program of a page."""

    def __init__(self, block: Block, offset: int, line: str | None) -> None:
        self.block, self.line = block, line
        self.where = f"{block.page}:{block.line + offset}"

    def matches(self, pattern: str) -> bool:
        """Whether the command, or a line of the program, has this pattern."""
        return any(re.search(pattern, line.strip()) for line in (self.line or self.block.text).splitlines())

    def is_one_of(self, keys: Iterator[tuple[str, str]] | tuple[tuple[str, str], ...]) -> bool:
        """Whether one of these (page, pattern) is it."""
        return any(self.block.page == page and self.matches(pattern) for page, pattern in keys)

    @property
    def needs(self) -> tuple[str, ...]:
        """The extras that it needs."""
        for (page, pattern), extras in NEEDS.items():
            if self.block.page == page and self.matches(pattern):
                return extras
        return ()

    def paste(self, terminal: Terminal) -> None:
        """Pastes it."""
        if self.line is None:
            terminal.run_program(self.block)
        else:
            terminal.type(self.line, self.where)


def pasted(page: Path) -> Iterator[Pasted]:
    """All of a page, in order."""
    for block in blocks(page):
        if block.language == "python":
            yield Pasted(block, 0, None)
        elif block.language in _LANGUAGES:
            for offset, line in typed_lines(block.text):
                if line.strip() and not line.startswith("#"):
                    yield Pasted(block, offset, line)


WHOLE = {page.name: [each for each in pasted(page) if not each.is_one_of(tuple(NOT_PASTED))] for page in PAGES}


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes environments, each once: with what ``make demo`` installs, and the extras that are named."""
    made: dict[tuple[str, ...], Path] = {}

    def make(*extras: str) -> Path:
        if extras not in made:
            made[extras] = make_environment(tmp_path_factory.mktemp("environment") / "venv", *extras)
        return made[extras]

    return make


@pytest.fixture
def terminal(tmp_path: Path, environment: Callable[..., Path]) -> Iterator[Terminal]:
    """A folder in which a page is pasted."""
    terminal = Terminal(tmp_path / "checkout", environment())
    yield terminal
    terminal.close()


def paste(terminal: Terminal, environment: Callable[..., Path], page: str, *, quick: bool) -> None:
    """Pastes a page; a ``quick`` run leaves out what is slow, and what needs more than ``make demo``."""
    for each in WHOLE[page]:
        if quick and (each.is_one_of(SLOW) or each.needs):
            continue
        terminal.use(environment(*each.needs))
        each.paste(terminal)
    terminal.stop()


@pytest.mark.parametrize("page", QUICK)
def test_a_much_read_page_can_be_pasted_after_make_demo(
    page: str, terminal: Terminal, environment: Callable[..., Path]
) -> None:
    paste(terminal, environment, page, quick=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", [name for name, each in WHOLE.items() if each])
def test_a_page_can_be_pasted(page: str, terminal: Terminal, environment: Callable[..., Path]) -> None:
    paste(terminal, environment, page, quick=False)


def test_the_environment_has_nothing_but_what_make_demo_installs(terminal: Terminal) -> None:
    command = "python -c 'import sys, importlib.util as u; print([n for n in sys.argv[1:] if u.find_spec(n)])' "
    absent = ("torch", "transformers", "scipy", "matplotlib", "soundfile", "PIL", "openai", "pytest", "ray")
    assert terminal.type(command + " ".join(absent), "here") == "[]\n"
    assert str(ROOT) in terminal.type("python -c 'import octavo; print(octavo.__file__)'", "here")


def test_each_exception_is_one() -> None:
    every = [each for page in PAGES for each in pasted(page)]
    for page, pattern in [*SLOW, *NEEDS, *NOT_PASTED]:
        assert any(each.is_one_of(((page, pattern),)) for each in every), f"{page} has nothing like {pattern!r}"
    assert all(name in WHOLE for name in QUICK)
    assert sum(map(len, WHOLE.values())) > 60


def test_every_module_can_be_imported_without_extras_but_those_of_torch(terminal: Terminal) -> None:
    """Modules that need an extra import it where they use it; ``scripts/rules.py`` lists those of torch."""
    program = (
        "import importlib, pkgutil, octavo\n"
        "for module in pkgutil.walk_packages(octavo.__path__, 'octavo.'):\n"
        "    if not module.name.endswith('__main__') and '.triton.' not in module.name:\n"
        "        try:\n"
        "            importlib.import_module(module.name)\n"
        "        except ImportError as e:\n"
        "            print(module.name, e.name)\n"
    )
    lacking = [line.split() for line in terminal.run_program(Block("modules", 1, "python", program)).splitlines()]
    assert [
        name for name, missing in lacking if missing != "torch" or not script("rules").WITH_TORCH.fullmatch(name)
    ] == []


LACKING = {
    "transcribe tests/data/speech.ogg --model no/where": "audio",
    "generate no/where --chat --image docs/images/engine.png x": "images",
    "simulate --num-requests 10 --request-rate 2 --report out.html": "plot",
    "simulate --num-requests 10 --request-rate 2 --plots drawn": "plot",
    "bench calibrate no/where": "lab",
    "generate no/where x --device cuda": "torch",
    "generate no/where x --kernels reference": "torch",
    "serve no/where --distributed-executor-backend ray": "ray",
    "serve no/where --otlp-traces-endpoint http://127.0.0.1:1": "tracing",
}


@pytest.mark.parametrize("words", LACKING)
def test_a_command_that_lacks_an_extra_says_which_before_it_looks_for_a_model(words: str, terminal: Terminal) -> None:
    said = terminal.type(f"command octavo {words} 2>&1 && exit 9 || true", "here")
    assert f"octavo[{LACKING[words]}]" in said and f"{terminal.environment}/bin/python -m pip install" in said
    assert "no/where" not in said and "Traceback" not in said


@pytest.mark.parametrize(
    "words",
    [
        "bench offline smollm2-135m --batches 1,2 --input-len 8 --output-len 8",
        "bench scheduler --running 4",
        "bench executor --running 1",
        "info smollm2-135m --limits",
        pytest.param("bench memory smollm2-135m", marks=pytest.mark.slow),
        pytest.param("bench kernels smollm2-135m --rows 1", marks=pytest.mark.slow),
        pytest.param("bench grammar smollm2-135m --batches 1 --rounds 1 --output-len 8", marks=pytest.mark.slow),
        pytest.param("bench offline smollm2-135m --speculative ngram --batches 1 --rounds 1", marks=pytest.mark.slow),
        pytest.param("simulate preemption", marks=pytest.mark.slow),
    ],
)
def test_commands_of_the_lab_run_after_make_demo(words: str, terminal: Terminal) -> None:
    """Smaller than the pages show them: what they import is the same."""
    assert terminal.type(f"octavo {words}", "here").strip()
