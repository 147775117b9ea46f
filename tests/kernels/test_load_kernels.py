"""Which backend serves, and what is said where none can."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from octavo import kernels
from octavo.core.errors import ConfigError


@pytest.fixture
def lacks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes packages look as if they were not installed."""
    real = importlib.util.find_spec

    def hide(*names: str) -> None:
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *more: None if name in names else real(name, *more)
        )

    return hide


def test_without_compiled_kernels_and_without_torch_it_is_said_what_to_install(lacks: Any) -> None:
    lacks("torch", "octavo._cpu")
    with pytest.raises(
        ConfigError, match=r"octavo\._cpu was not built; install octavo again with a C\+\+17 compiler"
    ) as e:
        kernels.load_kernels("auto", "cpu")
    assert "octavo[torch]" in str(e.value)


def test_without_compiled_kernels_the_reference_serves_with_a_warning(
    lacks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lacks("octavo._cpu")
    assert kernels.load_kernels("auto", "cpu").name == "reference"
    assert "many times slower" in caplog.text


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_backends_of_torch_need_it(name: str, lacks: Any) -> None:
    lacks("torch")
    with pytest.raises(ConfigError, match=rf"the {name} kernels cannot serve: .*octavo\[torch\]"):
        kernels.load_kernels(name, "cpu")


def test_a_gpu_needs_torch_and_none_is_looked_for_where_there_is_no_driver(
    lacks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacks("torch")
    monkeypatch.setattr(kernels, "_GPU_FILES", ("/",))  # a driver, as it were
    assert kernels.resolve_device("auto") == "cpu"
    with pytest.raises(ConfigError, match=r"device='cuda': GPUs need torch.*octavo\[torch\]"):
        kernels.resolve_device("cuda")
    monkeypatch.setattr(kernels, "_GPU_FILES", ())
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"{name} is imported"))
    assert kernels.resolve_device("auto") == "cpu"


def test_missing_packages_are_found_without_a_model(lacks: Any) -> None:
    lacks("torch")
    kernels.check_kernel_packages("auto", "auto")
    kernels.check_kernel_packages("cpu", "cpu")
    for names in (("auto", "cuda"), ("reference", "auto"), ("triton", "cpu")):
        with pytest.raises(ConfigError, match=r"octavo\[torch\]"):
            kernels.check_kernel_packages(*names)
    lacks("torch", "octavo._cpu")
    with pytest.raises(ConfigError, match=r"octavo\[torch\]"):
        kernels.check_kernel_packages("auto", "auto")
