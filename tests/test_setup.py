"""Set-up from a checkout: what is installed and compiled, how often, and what ``make test-all`` says at its end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.busy_machine import PATIENCE
from tests.test_package import ROOT, script

#: Programs in place of the real ones: each writes down that it was called.
FAKES = {
    "cmake": 'sets="${8#*=} ${9#*=}"; echo "cmake ${sets% }" >> "$CALLS"; mkdir -p "$4"',
    "ninja": 'module=$2/_cpu.so; [ ! -e "$module" ] || exit 0; '
    '[ "${3:-}" = -n ] && echo "[1/1] module" || { echo ninja >> "$CALLS"; echo built > "$module"; }',
    "python": 'case "$2" in *include*) echo "${0%/*}" ;; *) echo cpython-0 ;; esac',
}
#: A compiler; the program that it makes says what the processor's best instruction sets are.
COMPILER = """[ "$3" = -o ] || exit 0
echo "#!$BASH" > "$4"; echo "echo avx512 avx512_vnni" >> "$4"; chmod +x "$4\""""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with nothing but the script that builds the kernels, and a PATH with no compiler: its ``bin``."""
    for folder in ("scripts", "octavo", "bin"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "scripts" / "build_cpu.sh", tmp_path / "scripts")
    for name in ("bash", "basename", "cat", "chmod", "cmp", "dirname", "env", "grep", "install", "mkdir", "rm"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    for name, body in FAKES.items():
        add_program(tmp_path, name, body)
    (tmp_path / "bin" / "Python.h").touch()
    return tmp_path


def add_program(checkout: Path, name: str, body: str) -> None:
    file = checkout / "bin" / name
    file.write_text(f"#!{shutil.which('bash')}\n{body}\n")
    file.chmod(0o755)


def build(checkout: Path, **environ: str) -> tuple[str, list[str]]:
    """What the script says, and which programs it called."""
    calls = checkout / "calls"
    calls.write_text("")
    environ = {
        "PATH": str(checkout / "bin"),
        "PYTHON": str(checkout / "bin" / "python"),
        "CALLS": str(calls),
        **environ,
    }
    command = ["bash", str(checkout / "scripts" / "build_cpu.sh")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr, calls.read_text().splitlines()


def test_the_kernels_are_compiled_once_and_as_soon_as_there_is_a_compiler(checkout: Path) -> None:
    for _ in range(2):
        said, calls = build(checkout)
        assert "no C++17 compiler was found" in said and "apt install g++" in said
        assert calls == []
    add_program(checkout, "c++", "exit 1")
    assert "no C++17 compiler was found" in build(checkout)[0], "one that cannot compile is none"
    add_program(checkout, "g++", "exit 0")
    assert "no C++17 compiler was found" in build(checkout, CXX="none")[0], "unless another is asked for"
    (checkout / "bin" / "Python.h").unlink()
    said, calls = build(checkout)
    assert "Python.h; after 'apt install python3-dev'" in said and calls == []
    (checkout / "bin" / "Python.h").touch()
    said, calls = build(checkout)
    assert "compiling the CPU kernels for all instruction sets with g++" in said and "1 steps" in said
    assert calls == ["cmake ", "ninja"]
    assert (checkout / "octavo" / "_cpu.so").read_text() == "built\n"
    said, calls = build(checkout)
    assert (said, calls) == ("", ["cmake "])


def test_the_kernels_are_compiled_for_the_instruction_sets_of_this_processor(checkout: Path) -> None:
    add_program(checkout, "c++", COMPILER)
    said, calls = build(checkout)
    assert calls == ["cmake avx512 avx512_vnni", "ninja"]
    assert "for avx512 (floats), avx512_vnni (integers) and generic" in said
    assert build(checkout)[1] == ["cmake avx512 avx512_vnni"]
    assert build(checkout, OCTAVO_ALL_ISAS="1")[1] == ["cmake "]
    add_program(checkout, "c++", COMPILER.replace("#!$BASH", "#!/no/such/processor"))
    assert build(checkout)[1] == ["cmake "], "all, as a compiler for other machines says nothing of this one"


def test_a_build_folder_that_was_copied_with_its_checkout_is_made_anew(checkout: Path) -> None:
    add_program(checkout, "c++", COMPILER)
    build(checkout)
    [module] = checkout.glob("build/*/_cpu.so")
    cache = module.with_name("CMakeCache.txt")
    cache.write_text(f"CMAKE_HOME_DIRECTORY:INTERNAL={checkout}\n")
    assert "ninja" not in build(checkout)[1]
    cache.write_text("CMAKE_HOME_DIRECTORY:INTERNAL=/elsewhere\n")
    assert "ninja" in build(checkout)[1]


def test_a_build_that_fails_says_why_and_is_no_success(checkout: Path) -> None:
    add_program(checkout, "c++", "exit 0")
    add_program(checkout, "cmake", "echo no nanobind; exit 1")
    with pytest.raises(AssertionError, match="no nanobind"):
        build(checkout)


def test_extras_are_installed_by_name_without_the_package() -> None:
    requirements = script("install").requirements
    names = [requirement.split(">")[0] for requirement in requirements(["dev", "tracing", "ray"])]
    assert {"cmake", "nanobind", "pytest", "ruff", "opentelemetry-sdk", "ray[data]"} <= set(names)
    assert not any(name.startswith("octavo") for name in names)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_all_set_up_steps_together_install_the_package_once_and_leave_the_kernels_to_one_build(tmp_path: Path) -> None:
    command = ["make", "--dry-run", "demo", "test", "test-all", "lint", f"VENV={tmp_path}/venv"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=True)
    lines = done.stdout.splitlines()
    assert sum("scripts/build_cpu.sh" in line for line in lines) == 1
    installs = [line.split("install.py ")[1] for line in lines if "scripts/install.py" in line]
    assert sorted(installs) == [
        "--editable build",
        "dev",
        "llama-index",
        "ray",
        "release",
        "site",
        "test",
        "torch",
        "tracing",
    ]


@pytest.fixture
def installer(tmp_path: Path) -> Callable[..., list[str]]:
    """Runs scripts/install.py with fakes of pip and uv; returns what they were called with."""
    bin_folder, package = tmp_path / "bin", tmp_path / "packages" / "pip"
    for folder in (bin_folder, package):
        folder.mkdir(parents=True)
    calls = tmp_path / "calls"
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import os, sys\n"
        "if sys.argv[1:] == ['config', 'list']: print(os.environ['SETTINGS'])\n"
        'elif \'--report\' in sys.argv: print(\'{"install": [{"metadata": {"version": "2.13.0+cpu"}}]}\')\n'
        "else: print('pip', *sys.argv[1:], file=open(os.environ['CALLS'], 'a'))\n"
    )

    def run(*arguments: str, settings: str = "", uv: int | None = None) -> list[str]:
        calls.write_text("")
        if uv is not None:
            program = bin_folder / "uv"
            program.write_text(f'#!/bin/sh\necho "uv $SSL_CERT_FILE" "$@" >> "$CALLS"\nexit {uv}\n')
            program.chmod(0o755)
        environ = {
            "PATH": str(bin_folder),
            "PYTHONPATH": str(package.parent),
            "CALLS": str(calls),
            "SETTINGS": settings,
        }
        # Under a name beside which there is no uv.
        python = tmp_path / "python"
        if not python.exists():
            python.symlink_to(sys.executable)
        # -S: nor any package.
        command = [str(python), "-S", str(ROOT / "scripts" / "install.py"), *arguments]
        subprocess.run(command, env=environ, check=True, timeout=PATIENCE)
        return calls.read_text().splitlines()

    return run


def test_uv_installs_by_the_settings_of_pip(installer: Callable[..., list[str]]) -> None:
    [call] = installer(
        "plot",
        uv=0,
        settings="global.index-url='https://a'\n:env:.index-url='https://b'\n"
        "global.find-links='c d'\nglobal.cert='/e.pem'\nglobal.timeout='9'",
    )
    python = call.split("--python ")[1].split()[0]
    assert call == (
        f"uv /e.pem pip install --python {python} --index-strategy unsafe-best-match --default-index https://b "
        "--find-links c --find-links d matplotlib>=3.8,<4"
    )


def test_pip_installs_where_uv_cannot_be_had_or_fails(installer: Callable[..., list[str]]) -> None:
    assert installer("plot") == ["pip install --quiet --only-binary=uv uv>=0.8,<1", "pip install matplotlib>=3.8,<4"]
    assert installer("plot", uv=1)[-1] == "pip install matplotlib>=3.8,<4"


def test_pip_installs_where_it_has_a_setting_that_uv_lacks(installer: Callable[..., list[str]]) -> None:
    assert installer("plot", uv=0, settings="global.proxy='http://a:1'") == ["pip install matplotlib>=3.8,<4"]


def test_torch_is_installed_before_what_needs_it(installer: Callable[..., list[str]]) -> None:
    [of_torch] = installer("torch", uv=0)
    assert " torch>=" in of_torch
    first, second = installer("plot", "torch", uv=0)
    assert first == of_torch and "matplotlib" in second and " torch>=" not in second


def test_octavo_is_installed_in_place_without_its_kernels(installer: Callable[..., list[str]]) -> None:
    call = installer("--editable", "build", uv=0)[-1]
    assert "--editable . --config-settings=wheel.cmake=false cmake" in call and "nanobind" in call


def test_what_failed_and_what_was_skipped_is_listed_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "@pytest.mark.parametrize('i', [1, 2])\n"
        "def test_late(i): pytest.skip('needs a GPU')\n"
    )
    (tmp_path / "test_module.py").write_text("import pytest\npytest.importorskip('no_such_module')\n")
    report = tmp_path / "report.xml"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-c", os.devnull, f"--rootdir={tmp_path}", f"--junitxml={report}", tmp_path],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""},
        stdout=subprocess.DEVNULL,
        timeout=PATIENCE,
    )
    text, failed = script("test_all").summary([report])
    assert failed
    assert text.splitlines() == [
        "== 1 passed, 1 failed, 3 skipped",
        "failed: test_some::test_bad",
        "skipped 2: needs a GPU (test_some)",
        "skipped 1: could not import 'no_such_module': No module named 'no_such_module' (test_module)",
    ]


@pytest.mark.parametrize(
    ("code", "written", "text"),
    [
        (0, True, ""),
        (1, True, ""),
        (5, True, ""),
        (-9, False, "the slow tests did not come to their end: exit code -9"),
        (2, True, "the slow tests did not come to their end: exit code 2"),
    ],
)
def test_a_part_that_was_killed_is_named(tmp_path: Path, code: int, written: bool, text: str) -> None:
    report = tmp_path / "report.xml"
    if written:
        report.touch()
    assert script("test_all").problem("slow tests", code, report) == text
