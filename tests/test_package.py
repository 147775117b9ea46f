from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import octavo
import octavo.cli.flags
from octavo.core import errors
from octavo.core.foreign import FOREIGN
from octavo.core.sampling_params import SamplingParams, parameters
from tests.busy_machine import PATIENCE, once_in_three

ROOT = Path(__file__).resolve().parent.parent

HEAVY = ("torch", "pydantic", "transformers", "numpy", "yaml", "jinja2", "msgspec", "tokenizers")


def python(code: str) -> str:
    """Standard output of code run by a fresh interpreter that finds the package in this checkout."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_importing_the_package_is_quick() -> None:
    code = (
        f"import sys, time; sys.path.insert(0, {str(ROOT)!r}); from tests.busy_machine import held_up\n"
        "held, t = held_up(), time.perf_counter(); import octavo; print(time.perf_counter() - t - held_up() + held)"
    )

    def measure() -> dict[str, bool]:
        seconds = [float(python(code)) for _ in range(5)]
        return {f"one of {seconds} s is below 0.2 s": min(seconds) < 0.2}

    once_in_three(measure)


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert python(f"import sys, octavo; print([m for m in {HEAVY} if m in sys.modules])") == "[]"


def test_the_error_types_come_without_anything_heavy() -> None:
    code = f"import sys, octavo; octavo.OctavoError; print([m for m in {HEAVY} if m in sys.modules])"
    assert python(code) == "[]"


@pytest.mark.parametrize(
    ("modules", "others"),
    [
        (
            "octavo.engine.core_process, octavo.engine.core, octavo.runner.model_runner",
            ("torch", "gguf", "jinja2", "llguidance", "tokenizers", "yaml"),
        ),
        (
            "octavo.server.serve, octavo.engine.async_llm, octavo.server.app, octavo.server.openai.completions",
            (
                *("torch", "numpy", "gguf", "llguidance", "yaml", "psutil"),
                *(f"octavo.server.{name}" for name in ("anthropic", "audio", "cohere", "llamacpp", "pooling")),
                *("octavo.server.openai.responses", "octavo.server.http.openapi"),
            ),
        ),
    ],
    ids=["engine core", "server"],
)
def test_a_server_that_starts_imports_nothing_that_few_requests_need(modules: str, others: tuple[str, ...]) -> None:
    assert python(f"import sys, {modules}; print([m for m in {others} if m in sys.modules])") == "[]"


@pytest.mark.parametrize("name", octavo.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(octavo, name) is not None
    assert name in dir(octavo)


def test_every_error_type_is_public() -> None:
    ours = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, errors.OctavoError)}
    assert ours <= set(octavo.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'SamplingParam'"):
        octavo.SamplingParam  # noqa: B018


def test_the_installed_version_is_the_package_s_own() -> None:
    try:
        installed = importlib.metadata.version("octavo")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("run from a checkout that is not installed")
    assert installed == octavo.__version__


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "octavo" / "py.typed").exists()


def test_reference_pages_are_made_from_the_code() -> None:
    pages = {name: make() for name, make in script("reference_pages").PAGES.items()}
    assert "| `max_num_seqs` |" in pages["options.md"] and "| `port` |" in pages["options.md"]
    assert "## /v1/messages" in pages["request-fields.md"] and "| `max_tokens` | obeyed |" in pages["request-fields.md"]
    assert "| `octavo_preemptions_total` | counter |" in pages["metric-series.md"]
    assert "**`OctavoServerDown`** (critical" in pages["metric-series.md"]


def test_every_sampling_parameter_that_can_be_text_is_documented() -> None:
    former = {"use_beam_search", "length_penalty", "early_stopping", "guided_decoding"}
    in_python_only = {"logits_processors", "output_kind", *former, *FOREIGN["SamplingParams"]}
    assert set(parameters(SamplingParams)) == set(SamplingParams.__struct_fields__) - in_python_only


def test_the_requirement_of_torch_is_told_from_those_of_other_packages() -> None:
    find = script("install").torch_requirement
    assert find(["torchvision", "torch-geometric>=1", "numpy", "torch>=1,<2"]) == "torch>=1,<2"
    assert find(["torch"]) == "torch" and find(["torchvision"]) is None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert find(project["optional-dependencies"]["torch"]) is not None


CPU_INDEX = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]


@pytest.mark.parametrize(
    ("offered", "platform", "environ", "expected"),
    [
        ("2.13.0+cpu", "linux", {}, []),
        ("2.13.0", "linux", {}, CPU_INDEX),
        ("2.13.0", "darwin", {}, []),
        ("2.13.0", "linux", {"OCTAVO_TORCH": "cuda"}, []),
        ("2.13.0", "linux", {"OCTAVO_TORCH": "cpu"}, CPU_INDEX),
        (None, "linux", {}, CPU_INDEX),
        (None, "linux", {"OCTAVO_TORCH": "cuda"}, CPU_INDEX),
        ("2.13.0", "linux", {"TORCH_INDEX_URL": "https://mirror/cpu"}, ["--extra-index-url", "https://mirror/cpu"]),
    ],
)
def test_the_cpu_build_is_asked_for_only_where_it_is_not_offered(
    offered: str | None, platform: str, environ: dict[str, str], expected: list[str]
) -> None:
    assert script("install").torch_options(offered, platform, environ) == expected
