"""The modules of vLLM that the package serves, under both names, and what it says of those that it does not."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import octavo.compat.vllm as compat
from octavo.compat.vllm.importer import ABSENT_MODULES, ABSENT_NAMES, SERVED, NoCounterpartError


@pytest.fixture
def installed() -> Iterator[None]:
    before, finders = set(sys.modules), list(sys.meta_path)
    compat.install()
    yield
    sys.meta_path[:] = finders
    for name in set(sys.modules) - before:
        if name == "vllm" or name.startswith("vllm."):
            del sys.modules[name]


@pytest.mark.parametrize("name", SERVED)
def test_every_name_is_there_under_both_names(name: str, installed: None) -> None:
    module = importlib.import_module(f"octavo.compat.vllm.{name}".rstrip("."))
    assert importlib.import_module(f"vllm.{name}".rstrip(".")) is module
    for attribute in SERVED[name]:
        assert getattr(module, attribute) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018
    assert not hasattr(module, "no_such_name")


def test_parents_have_their_modules(installed: None) -> None:
    import vllm  # type: ignore[import-not-found]

    assert vllm is compat
    assert vllm.v1.metrics.reader.Counter is importlib.import_module("vllm.v1.metrics.reader").Counter
    assert all("." not in name or name.rpartition(".")[0] in SERVED for name in SERVED)


@pytest.mark.parametrize("name", ABSENT_MODULES)
def test_what_has_no_counterpart_is_refused_with_what_there_is(name: str, installed: None) -> None:
    inner = f"{name}.more" if name in SERVED else name
    for package in ("vllm", "octavo.compat.vllm"):
        with pytest.raises(NoCounterpartError) as error:
            importlib.import_module(f"{package}.{inner}")
        assert str(error.value).endswith(ABSENT_MODULES[name])
    if "." not in name and name not in SERVED:
        with pytest.raises(ImportError):
            getattr(compat, name)


@pytest.mark.parametrize("name", ABSENT_NAMES)
def test_a_name_without_a_counterpart_is_refused_too(name: str) -> None:
    with pytest.raises(ImportError) as error:
        exec(f"from octavo.compat.vllm import {name}")
    assert str(error.value).endswith(ABSENT_NAMES[name])


def test_a_name_that_octavo_lacks_is_told_with_its_module() -> None:
    import octavo

    for name in sorted(SERVED[""].keys() - {*octavo.__all__}):
        with pytest.raises(ImportError, match=f"from octavo.compat.vllm import {name}"):
            exec(f"from octavo import {name}")
    assert not hasattr(octavo, "NoSuchName")


def test_vllm_itself_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    with pytest.raises(RuntimeError, match="imported already"):
        compat.install()


def test_a_script_runs_as_it_is(tmp_path: Path, tiny_model: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        from beside import greet
        from vllm import LLM, SamplingParams
        from vllm.platforms import current_platform
        from vllm.utils import get_open_port, random_uuid
        from vllm.distributed import cleanup_dist_env_and_memory

        if __name__ == "__main__":
            llm = LLM(model=sys.argv[1], num_gpu_blocks_override=64, trust_remote_code=True)
            outputs = llm.generate(["a", "b"], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
            del llm
            cleanup_dist_env_and_memory()
            assert 0 < get_open_port() < 65536 and len(random_uuid()) == 32
            assert current_platform.is_cpu() != current_platform.is_cuda() and not current_platform.is_rocm()
            print(greet, [len(output.outputs[0].token_ids) for output in outputs])
        """)
    )
    (tmp_path / "beside.py").write_text("greet = 'hello'\n")
    run = subprocess.run(
        [sys.executable, "-m", "octavo.compat.vllm", str(script), str(tiny_model)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stdout) == (0, "hello [3, 3]\n"), run.stderr


def test_the_package_costs_no_heavy_import() -> None:
    code = "import octavo.compat.vllm as vllm, sys; vllm.SamplingParams; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_the_page_lists_the_modules_and_its_program_runs(installed: None) -> None:
    page = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text(encoding="utf-8")
    section = page.split("## Scripts as they are")[1].split("\n### ")[0]
    rows = [row.split("|")[1:3] for row in section.split("| --- | --- |")[1].split("\n\n")[0].strip().splitlines()]
    listed = {
        name.removeprefix("vllm").lstrip(".") for modules, _ in rows for name in re.findall(r"`([\w.]+)`", modules)
    }
    everything = {name for names in SERVED.values() for name in names}
    # Packages without names, and other names of modules that are listed.
    others = {name for name, names in SERVED.items() if name not in listed and names}
    assert listed <= SERVED.keys()
    assert all(any(SERVED[name].items() <= SERVED[known].items() for known in listed) for name in others), others
    for modules, text in rows:
        if modules.strip() == "`vllm`":
            assert set(re.findall(r"`(\w+)`", text)) == SERVED[""].keys() - {"__version__"}
        named = set(re.findall(r"`([A-Z]\w+)`", text))
        assert named <= everything | {"LLM"}, named - everything
    [program] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    exec(program.replace("max_num_seqs=8", "max_num_seqs=8, num_gpu_blocks_override=600, load_format='dummy'"), {})
