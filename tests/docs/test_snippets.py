"""Blocks of Python, JSON and YAML in README and docs are valid, and a few print what the page says.

``test_documented_commands.py`` runs the programs, in the state that their page says.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from octavo.config.engine_config import EngineConfig
from octavo.config.model_list import list_models, read_entries
from octavo.config.sources import OPTIONS
from octavo.lab.bench.policies import scenario_files
from tests.docs.snippets import PAGES, Block, blocks
from tests.server.running_server import Running, running

EVERY = [block for page in PAGES for block in blocks(page)]
PYTHON = [block for block in EVERY if block.language == "python"]

#: (page, beginning of a line of the block) of those that are run in the default suite: they take a second or two.
QUICK = [("README.md", "llm = LLM("), ("installing.md", "llm = LLM(")]
#: Those that speak to a server with a built-in model.
OF_SERVERS = {
    ("serving.md", "first = client.responses"): "smollm2-135m",
    ("serving.md", "print(client.messages"): "smollm2-135m",
    ("serving.md", "vectors = client.embeddings"): "all-minilm-l6-v2",
    ("structured-output.md", "client = OpenAI("): "smollm2-135m",
}


def is_one(block: Block, keys: object) -> bool:
    """Whether one of these (page, beginning of a line) is the block's."""
    lines = [line.strip() for line in block.text.splitlines()]
    return any(block.page == page and any(line.startswith(begin) for line in lines) for page, begin in keys)  # type: ignore[attr-defined]


def name(block: Block) -> str:
    return f"{block.page}:{block.line}"


@pytest.mark.parametrize("block", PYTHON, ids=name)
def test_python_is_valid_and_what_it_imports_of_octavo_exists(block: Block) -> None:
    body = textwrap.dedent(block.text)
    wrapped = body if not body.rstrip().endswith(("),", "],")) else f"_ = {{\n{body}\n}}"
    for node in ast.walk(ast.parse(wrapped)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "octavo":
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.util.find_spec(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "octavo" and not alias.name.startswith("octavo.data"):
                    importlib.import_module(alias.name)


@pytest.mark.parametrize("block", [block for block in PYTHON if is_one(block, QUICK)], ids=name)
def test_what_is_quick_prints_what_the_page_says(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block.text, name(block), "exec"), {"__name__": "snippet"})
    assert printed.getvalue().strip()
    of_page = [each for each in EVERY if each.page == block.page]
    after = of_page[of_page.index(block) + 1 :][:1]
    if after and after[0].language == "text":
        assert printed.getvalue() == after[0].text


def test_quick_blocks_are_found() -> None:
    assert sum(is_one(block, QUICK) for block in PYTHON) == len(QUICK)
    for page, begin in OF_SERVERS:
        assert any(is_one(block, [(page, begin)]) for block in PYTHON), (page, begin)


@pytest.fixture(scope="module", params=sorted(set(OF_SERVERS.values())))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Running]]:
    with running(request.param, tmp_path_factory.mktemp("server") / "log") as server:
        yield request.param, server


@pytest.mark.slow
def test_clients_are_answered(server: tuple[str, Running]) -> None:
    model, started = server
    for block in PYTHON:
        if is_one(block, [key for key, needed in OF_SERVERS.items() if needed == model]):
            text = block.text.replace("http://127.0.0.1:8000", started.url)
            exec(compile(text, name(block), "exec"), {"__name__": "snippet"})


@pytest.mark.parametrize("block", [block for block in EVERY if block.language == "json"], ids=name)
def test_json_is_valid(block: Block) -> None:
    if "…" in block.text or "..." in block.text:
        return
    try:
        json.loads(block.text)
    except json.JSONDecodeError:
        for line in block.text.splitlines():
            json.loads(line)


@pytest.mark.parametrize("block", [block for block in EVERY if block.language in ("yaml", "yml")], ids=name)
def test_yaml_names_options_that_exist(block: Block, tmp_path: Path) -> None:
    content = yaml.safe_load(block.text)
    if isinstance(content, list):
        (tmp_path / "models.yaml").write_text(block.text, encoding="utf-8")
        assert list_models(read_entries(tmp_path / "models.yaml"), EngineConfig.model_validate)
        return
    if "traffic" in content:
        (tmp_path / "scenario.yaml").write_text(block.text, encoding="utf-8")
        [scenario] = scenario_files.load(str(tmp_path / "scenario.yaml"))
        assert next(iter(scenario.make(1.0, 0))).output_len and scenario.name == content["name"]
        return
    for key in content:
        assert key.replace("-", "_") in OPTIONS, f"{name(block)}: there is no option {key}"
