"""The clients that are used most, as their makers ship them, against a server with the demo model."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).resolve().parents[2] / "scripts" / "try_clients.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2000)]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("try_clients", FILE)
    assert spec is not None and spec.loader is not None
    module = sys.modules["try_clients"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


clients = load()
BY_NAME = {client.name: client for client in clients.ALL}


@pytest.fixture(scope="module", params=["refuse", "ignore"])
def unknown_fields(request: pytest.FixtureRequest) -> str:
    policy: str = request.param
    return policy


@pytest.fixture(scope="module")
def servers(unknown_fields: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[bool, tuple[str, Path]]]:
    """Address and log of a server with the demo model (False), and of one for agents (True)."""
    folder = tmp_path_factory.mktemp("clients")
    models = {False: clients.DEMO, True: str(clients.stretched(folder))}
    flags = ("--unknown-fields", unknown_fields)
    with ExitStack() as stack:
        found = {}
        for is_agent, model in models.items():
            log = folder / f"log-{is_agent}"
            url = stack.enter_context(clients.served(model, *flags, log=stack.enter_context(log.open("wb"))))
            found[is_agent] = (url, log)
        yield found


@pytest.mark.parametrize("name", clients.MOST_USED)
def test_a_client_comes_to_its_end(servers: dict[bool, tuple[str, Path]], unknown_fields: str, name: str) -> None:
    client = BY_NAME[name]
    if unknown_fields == "ignore" and not client.is_agent:
        pytest.skip("only coding agents are driven again where unknown fields are ignored")
    if client.is_node and shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    try:
        clients.install(client)
    except subprocess.CalledProcessError as e:
        pytest.skip(f"the registry does not give it: {(e.stderr or '')[-200:]}")
    url, log = servers[client.is_agent]
    begin = log.stat().st_size
    outcome = clients.drive(client, url, clients.DEMO)
    assert outcome.works, outcome.output
    lines = log.read_bytes()[begin:].decode()
    # Ollama's asks for a model that there is not.
    assert [line for line in re.findall(r"status=[45]\d\d.*", lines) if name != "ollama_node"] == []
    assert "POST /v1/" in lines or "POST /api/" in lines
