"""The rules of scripts/rules.py are kept, and notice what breaks them."""

from __future__ import annotations

import ast

import pytest

from tests.test_package import script

rules = script("rules")
PACKAGE, ORDER = rules.PACKAGE, rules.ORDER


@pytest.mark.parametrize("rule", ["upward_imports", "import_circles", "torch_on_the_way"])
def test_the_rule_is_kept(rule: str) -> None:
    assert len(rules.FILES) > 200
    assert list(getattr(rules, rule)()) == []


@pytest.mark.parametrize("room", ["scheduler", "memory"])
def test_the_scheduler_reads_no_clock_but_the_one_it_is_given(room: str) -> None:
    """So that a simulation, which gives a clock of its own, runs the same code."""
    reads = [
        (path.name, node.lineno)
        for path in (PACKAGE / room).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("time.", "datetime."))
    ]
    assert reads == []


def test_a_circle_is_noticed() -> None:
    sources = {
        "octavo.a.x": "from octavo.a import y",
        "octavo.a.y": "def f():\n    import octavo.b.z",
        "octavo.b.z": "if TYPE_CHECKING:\n    from octavo.a.x import X",
        "octavo.b.w": "if TYPE_CHECKING:\n    from octavo.b.v import V",
        "octavo.b.v": "from octavo.b.w import W",
    }
    assert rules.circles(rules.import_graph(sources)) == [["octavo.a.x", "octavo.a.y", "octavo.b.z"]]


def test_every_room_has_its_place() -> None:
    packages = [path for folder in (PACKAGE, PACKAGE / "lab") for path in folder.iterdir() if path.name != "lab"]
    rooms = {rules.room_of(rules.module_name(path)) for path in packages if (path / "__init__.py").exists()}
    assert rooms == set(ORDER)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("octavo.kernels.x", "from octavo.layers.linear import Linear"),
        ("octavo.core.x", "def f():\n    import octavo.engine.llm"),
        ("octavo.core.x", "from octavo import engine"),
        ("octavo.scheduler.x", "import torch.nn as nn"),
        ("octavo.scheduler.x", "from octavo.executor.executor import UniprocExecutor"),
        ("octavo.memory.x", "from ..scheduler import scheduler"),
        ("octavo.server.x", "from octavo.scheduler.scheduler import Scheduler"),
        ("octavo.kernels.x", "from octavo.sampling.sampler import Sampler"),
        ("octavo.sampling.x", "from octavo.models.registry import load"),
        ("octavo.server.x", "import torch"),
        ("octavo.layers.x", "def f():\n    from torch import Tensor"),
        ("octavo.runner.model_runner", "import torch"),
        ("octavo.engine.x", "def f():\n    from octavo.lab.workloads.workload import Workload"),
        ("octavo.cli.x", "from octavo.compat.vllm.engine_args import EngineArgs"),
        ("octavo.server.x", "import octavo.compat.vllm"),
        ("octavo.cli.x", "from octavo.lab.bench.offline import measure"),
        ("octavo.lab.workloads.x", "from octavo.engine.llm import LLM"),
        ("octavo.models.x", "if TYPE_CHECKING:\n    from octavo.engine.llm import LLM"),
    ],
)
def test_an_import_upwards_is_noticed(module: str, source: str) -> None:
    assert rules.violations(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("octavo.engine.x", "from octavo.scheduler.scheduler import Scheduler"),
        ("octavo.runner.cuda", "import torch"),
        ("octavo.scheduler.x", "from octavo.memory.block_manager import BlockManager"),
        ("octavo.memory.x", "from . import block_pool\nfrom octavo.core.request import Sequence"),
    ],
)
def test_an_import_downwards_is_allowed(module: str, source: str) -> None:
    assert rules.violations(module, source) == []
