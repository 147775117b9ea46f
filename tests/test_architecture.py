"""Imports go down the picture of ARCHITECTURE.md, never up."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "octavo"

#: Rooms from the bottom to the top: each may import those before it.
ORDER = (
    "core",
    "config",
    "process",
    "grammar",
    "speech",
    "images",
    "kernels",
    "layers",
    "models",
    "loader",
    "sampling",
    "runner",
    "executor",
    "memory",
    "speculation",
    "scheduler",
    "engine",
    "server",
    "batch",
    "data",
    "cli",
    # Interfaces of other engines: no room of the engine knows them.
    "compat",
    # The wing that measures is above all others: no room of the engine knows it.
    "lab.workloads",
    "lab.plots",
    "lab.simulate",
    "lab.bench",
    "lab.commands",
)
#: Rooms that may import less than what lies below them.
ONLY = {
    "config": {"core"},
    "process": {"core", "config"},
    "grammar": {"core", "config", "process"},
    "speech": {"core", "config", "process"},
    "images": {"core", "config", "process"},
    "sampling": {"core", "config", "grammar", "kernels"},
    "memory": {"core", "config"},
    "speculation": {"core", "config"},
    "scheduler": {"core", "config", "memory", "speculation"},
    "server": {"core", "config", "process", "engine", "grammar", "speech", "images"},
    "batch": {"core", "config", "engine", "server"},
    "data": {"core", "config", "engine"},
    "compat": {"core", "config", "process", "kernels", "loader", "engine"},
    "lab.workloads": {"core", "config"},
    "lab.plots": {"core"},
}
#: The modules that may import torch, lazily or not: two backends of kernels, what a GPU needs of a worker, connections
#: between machines, and what compares or profiles with torch.
WITH_TORCH = re.compile(
    r"octavo\.(kernels\.(reference|torch_\w+|triton\.\w+)|runner\.cuda"
    r"|executor\.(external|torch_connections)|lab\.bench\.gpu\w*|compat\.vllm\.(engines|helpers))"
)

FILES = sorted(PACKAGE.rglob("*.py"))

Import = ast.Import | ast.ImportFrom


@functools.cache
def imports_in(source: str) -> list[Import]:
    """All imports of a source, wherever they stand; every rule reads the same."""
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, Import)]


@functools.cache
def imports_for_types(source: str) -> list[Import]:
    """The imports that only a type checker runs."""
    blocks = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return [node for block in blocks for node in ast.walk(block) if isinstance(node, Import)]


def imported_modules(imports: Iterable[Import], module: str) -> set[str]:
    """Absolute names of all modules that these imports of a module import."""
    found = set()
    for node in imports:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            base = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level]
                base = ".".join([*package, base] if base else package)
            found.add(base)
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def room_of(module: str) -> str:
    """``room`` of ``octavo.room.name``; ``lab.room`` in the lab."""
    parts = module.split(".")[1:]
    return ".".join(parts[:2]) if parts[0] == "lab" else parts[0]


def violations(module: str, source: str) -> list[str]:
    """What this module (``octavo.room.name``) imports and must not."""
    room = room_of(module)
    allowed = {room} | ONLY.get(room, set(ORDER[: ORDER.index(room)]))
    problems = []
    for name in imported_modules(imports_in(source), module):
        parts = name.split(".")
        if parts[0] == "octavo" and len(parts) > 1 and room_of(name) in ORDER and room_of(name) not in allowed:
            problems.append(f"{module} imports {name}")
        if parts[0] == "torch" and not WITH_TORCH.fullmatch(module):
            problems.append(f"{module} imports torch")
    return problems


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts)


def test_imports_go_down_the_picture() -> None:
    """But those of the package's own files, its surface above all rooms, and of the lab, which has a docstring only."""
    rooms = [path for path in FILES if path.parent not in (PACKAGE, PACKAGE / "lab")]
    assert len(rooms) > 200
    found = [problem for path in rooms for problem in violations(module_name(path), path.read_text(encoding="utf-8"))]
    assert found == []


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


def import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """The modules among these that each imports, at its head or in a function.

    Of the same room, imports under TYPE_CHECKING do not count: two modules may need each other's types.
    """
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        modules = graph[module] = set()
        types = {ast.unparse(node) for node in imports_for_types(source)}
        for node in imports_in(source):
            same_room = isinstance(node, ast.ImportFrom) and room_of(f"{node.module}.") == room_of(f"{module}.")
            if same_room and ast.unparse(node) in types:
                continue
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            else:
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                # Of "from package import module" the module counts, not what else is in the package.
                modules |= names & sources.keys() if names <= sources.keys() else {*names, str(node.module)}
        modules &= sources.keys() - {module}
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The modules of each circle of the graph, which import each other by whatever way (Tarjan 1972)."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    result = []

    def visit(module: str) -> None:
        numbers[module] = lowest[module] = len(numbers)
        path.append(module)
        for other in sorted(graph[module]):
            if other not in numbers:
                visit(other)
            if other in path:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == numbers[module]:
            members = path[path.index(module) :]
            del path[path.index(module) :]
            if len(members) > 1:
                result.append(sorted(members))

    for module in sorted(graph):
        if module not in numbers:
            visit(module)
    return result


def test_no_modules_import_each_other() -> None:
    """However late: an import within a function hides a circle, and does not open it."""
    names = {path: module_name(path).removesuffix(".__init__") for path in FILES}
    graph = import_graph({name: path.read_text(encoding="utf-8") for path, name in names.items()})
    del graph["octavo"]  # the public names, which nothing within imports
    found = circles({module: imports - {"octavo"} for module, imports in graph.items()})
    assert found == []


@functools.cache
def modules_imported_at_once(source: str) -> set[str]:
    """What importing a module imports with it: not in functions, nor for a type checker alone."""
    kept = [
        node
        for node in ast.parse(source).body
        if not isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    imports = [node for statement in kept for node in ast.walk(statement) if isinstance(node, Import)]
    return imported_modules(imports, "octavo")


def test_what_computes_on_a_cpu_imports_torch_with_nothing() -> None:
    """A module that has it comes only where one of its kind asks for it, or in a function."""
    for path in FILES:
        module = module_name(path)
        if WITH_TORCH.fullmatch(module):
            continue
        imported = modules_imported_at_once(path.read_text(encoding="utf-8"))
        brought = [name for name in imported if WITH_TORCH.fullmatch(name) and _imports_torch(name)]
        assert brought == [], module


def _imports_torch(module: str) -> bool:
    path = PACKAGE.parent / f"{module.replace('.', '/')}.py"
    return path.exists() and any(name.split(".")[0] == "torch" for name in modules_imported_at_once(path.read_text()))


def test_a_circle_is_noticed() -> None:
    sources = {
        "octavo.a.x": "from octavo.a import y",
        "octavo.a.y": "def f():\n    import octavo.b.z",
        "octavo.b.z": "if TYPE_CHECKING:\n    from octavo.a.x import X",
        "octavo.b.w": "if TYPE_CHECKING:\n    from octavo.b.v import V",
        "octavo.b.v": "from octavo.b.w import W",
    }
    assert circles(import_graph(sources)) == [["octavo.a.x", "octavo.a.y", "octavo.b.z"]]


def test_every_room_has_its_place() -> None:
    packages = [path for folder in (PACKAGE, PACKAGE / "lab") for path in folder.iterdir() if path.name != "lab"]
    rooms = {room_of(module_name(path)) for path in packages if (path / "__init__.py").exists()}
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
    assert violations(module, source)


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
    assert violations(module, source) == []
