"""Checks the rules that ruff and mypy do not know; ``make lint`` runs it.

Imports go down the picture of ARCHITECTURE.md, modules never import each other in a circle, torch stays where it
belongs, no code is unused, and no link of a page is dead.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "octavo"
ROUTES = PACKAGE / "server" / "app.py"

#: Rooms from the bottom to the top: each may import those before it.
ORDER = (
    "core",
    "config",
    "process",
    "kvstore",
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
    "kvstore": {"core", "config"},
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
    r"octavo\.(kernels\.(reference\w*|torch_\w+|triton\.\w+)|runner\.cuda|models\.transformers_model"
    r"|executor\.(uniproc|torch_connections)|lab\.bench\.gpu\w*|compat\.vllm\.(engines|helpers))"
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


def _imports_torch(module: str) -> bool:
    path = PACKAGE.parent / f"{module.replace('.', '/')}.py"
    return path.exists() and any(name.split(".")[0] == "torch" for name in modules_imported_at_once(path.read_text()))


def upward_imports() -> Iterator[str]:
    """Imports that the picture forbids. The package's own files, its surface above all rooms, are left out."""
    for path in FILES:
        if path.parent not in (PACKAGE, PACKAGE / "lab"):
            yield from violations(module_name(path), path.read_text(encoding="utf-8"))


def import_circles() -> Iterator[str]:
    """Modules that import each other, however late: an import within a function hides a circle and does not open it."""
    names = {path: module_name(path).removesuffix(".__init__") for path in FILES}
    graph = import_graph({name: path.read_text(encoding="utf-8") for path, name in names.items()})
    del graph["octavo"]  # the public names, which nothing within imports
    for circle in circles({module: imports - {"octavo"} for module, imports in graph.items()}):
        yield f"import each other: {', '.join(circle)}"


def torch_on_the_way() -> Iterator[str]:
    """Modules that import at their head a module that needs torch, which a CPU does without."""
    for path in FILES:
        module = module_name(path)
        if not WITH_TORCH.fullmatch(module):
            imported = modules_imported_at_once(path.read_text(encoding="utf-8"))
            brought = [name for name in imported if WITH_TORCH.fullmatch(name) and _imports_torch(name)]
            if brought:
                yield f"{module} imports {', '.join(brought)}, and so torch"


#: Code that nothing in the repository names: what libraries call, and classes that are found by their names.
_CALLED_BY_NAME = re.compile(
    r"__getattr__|__dir__|_|do_GET|log_message|readinto|load_history_strings|store_string|get_completions|create_module|pre_tokenize"
    r"|\w+(ForCausalLM|ForConditionalGeneration|Model|MTModel)|\w*Preparer|PromptAdapters|process_call|decode_call|read_variables"
    r"|startup_profile|capture_signals|ImageProcessor|batch_decode|all_special_tokens|pad_token_id"
)
_KINDS = ("function", "class", "method", "property", "import")


def unused_code() -> Iterator[str]:
    """Functions, classes, methods and imports that nothing uses (vulture)."""
    from vulture import Vulture

    finder = Vulture(ignore_decorators=["@model_validator*", "@field_*", "@pytest.*", "@bindings*"])
    finder.scavenge([str(ROOT / name) for name in ("octavo", "tests", "scripts")])
    # The table of routes names functions and types in strings, as their modules are imported at the first request.
    constants = (node.value for node in ast.walk(ast.parse(ROUTES.read_text())) if isinstance(node, ast.Constant))
    finder.used_names |= {name for text in constants if isinstance(text, str) for name in re.findall(r"\w+", text)}
    for item in finder.get_unused_code(min_confidence=60):
        path = Path(item.filename).relative_to(ROOT)
        ours = path.parts[0] == "octavo" and path.parts[1] != "compat"  # whose users are scripts for vLLM
        if ours and item.typ in _KINDS and not _CALLED_BY_NAME.fullmatch(item.name):
            yield f"{path}:{item.first_lineno}: {item.typ} {item.name} is not used"


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def dead_links(page: Path) -> Iterator[str]:
    """Links of a page to files and headings that do not exist."""
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" in link or link.startswith("mailto:") or target.name == "api.md":
            continue
        if not target.exists():
            yield f"{page.name}: {link} does not exist"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{page.name}: {link} has no such heading"


def pages() -> list[Path]:
    """All pages kept by hand."""
    return [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *ROOT.glob("scripts/**/*.md"),
        *ROOT.glob("csrc/**/*.md"),
    ]


def main() -> int:
    """Prints what breaks a rule; 1 if something does."""
    problems = [*upward_imports(), *import_circles(), *torch_on_the_way(), *unused_code()]
    problems += [problem for page in pages() for problem in dead_links(page)]
    print("\n".join(problems) or "All rules are kept.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
