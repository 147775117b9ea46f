"""Models that tests of several rooms share."""

from __future__ import annotations

import gc
import logging
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.server.running_server import Running

# Helpers are imported as ``tests.busy_machine``, however pytest was started.
ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:
    sys.path.append(ROOT)  # after the installed package, if it is not this one

if "PYTEST_XDIST_WORKER" in os.environ:  # threads that spin while they wait take processors from the process beside
    os.environ.setdefault("OCTAVO_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says nothing of what is tested.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

if "TRITON_INTERPRET" not in os.environ:
    import torch

    if not torch.cuda.is_available():  # Triton reads it when it is first imported
        os.environ["TRITON_INTERPRET"] = "1"

#: One turn a line; an assistant's turn ends with the end-of-sequence token.
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(autouse=True)
def restored_loggers() -> Iterator[None]:
    """What a command or a server that a test begins in its own process does to logging ends with the test."""
    names = ("octavo", "octavo.startup", "octavo.server", "uvicorn", "uvicorn.error", "uvicorn.access", "asyncio")
    before = {}
    for name in names:
        logger = logging.getLogger(name)
        before[name] = (list(logger.handlers), logger.level, logger.propagate, logger.disabled)
    yield
    for name, (handlers, level, propagate, disabled) in before.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate, logger.disabled = handlers, propagate, disabled
        logger.setLevel(level)


def pytest_collection_finish() -> None:
    """Garbage collections, some of which engines ask for, pass over what was imported and collected."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def quick_collections() -> None:
    """Collections that tests and sleeping engines ask for pass over what earlier tests have left."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """At the end all is collected, or the compiled kernels would report what is left of them."""
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says loudly that nothing was tried in a browser, where there is none."""
    reasons = {report.longrepr[2] for report in terminalreporter.stats.get("skipped", []) if report.longrepr}
    for reason in sorted(reason for reason in reasons if "NO TEST OF THE PAGE" in reason):
        terminalreporter.section(reason.removeprefix("Skipped: "), sep="!", red=True, bold=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test for a GPU, which is left out by default, is skipped where all are asked for and there is none."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU (make gpu-test)")


@pytest.fixture(params=[pytest.param("behaviour"), pytest.param("times", marks=pytest.mark.slow)])
def tries(request: pytest.FixtureRequest) -> Callable[[Callable[[], dict[str, bool]]], None]:
    """Tries a measurement: by default for what does not depend on time, and in a slow test for its claims of time."""
    from tests.busy_machine import once, once_in_three

    return once if request.param == "behaviour" else once_in_three


@pytest.fixture(scope="module")
def quick_interpreter() -> Iterator[None]:
    """Halves the time of Triton's interpreter: it replaces the language once a launch, not at each call in a kernel.

    With a Triton that is built otherwise, it takes its time.
    """
    pytest.importorskip("triton")
    import triton.language as tl
    from triton.runtime import interpreter

    replace = getattr(interpreter, "_patch_lang", None)
    rewrites = hasattr(getattr(interpreter, "InterpretedFunction", None), "rewrite")
    if os.environ.get("TRITON_INTERPRET") != "1" or replace is None or not rewrites:
        yield
        return
    everything = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", lambda _: replace(everything))
        patch.setattr(
            interpreter.InterpretedFunction, "__call__", lambda self, *args, **options: self.rewrite()(*args, **options)
        )
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of a few thousand random weights that speaks bytes, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.small_llama import make_llama

    folder = tmp_path_factory.mktemp("tiny")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<bos>", "<eos>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", chat_template=CHAT_TEMPLATE
    ).save_pretrained(folder)
    model = make_llama(0, vocab_size=len(vocab), max_position_embeddings=256, tie_word_embeddings=True)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of the tiny model, for all tests that leave it as it was."""
    from tests.server.running_server import TINY, running

    log = tmp_path_factory.mktemp("tiny-server") / "log"
    with running(tiny_model, log, *TINY, "--served-model-name", "tiny,alias") as server:
        yield server


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model as a Hugging Face folder in float32; fetched once into the user's cache."""
    from tests.hub_folders import hub_folder

    return hub_folder("smollm2-135m", "float32")
