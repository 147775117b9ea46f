"""A server on a machine without torch answers as one where it is installed, with everything that a CPU serves."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.adapters import write_adapter
from tests.busy_machine import PATIENCE
from tests.models.eagle_heads import eagle1
from tests.server.running_server import Running, running

pytest.importorskip("octavo._cpu")

PROMPT = {"prompt": "hello hello", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 1}


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    """The environment of processes in which torch, and what a GPU needs, cannot be imported."""
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "sitecustomize.py").write_text(
        "import sys\nsys.modules['torch'] = sys.modules['triton'] = None\n"
    )
    places = [str(tmp_path / "none"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(places)}


def answer(server: Running, **fields: Any) -> tuple[str, list[float]]:
    """Text and logprobs."""
    choice = server.complete(**{**PROMPT, **fields})
    return choice["text"], choice["logprobs"]["token_logprobs"]


def drafts(method: str, **options: Any) -> tuple[str, str]:
    return "--speculative-config", json.dumps({"method": method, "num_speculative_tokens": 3, **options})


#: Flags by the model and the head's folder; of quantised weights the bits are others.
CASES: dict[str, Callable[[Path, Path], tuple[str, ...]]] = {
    "int8 and n-grams": lambda model, head: ("--quantization", "int8", *drafts("ngram")),
    "int4 and two ranks": lambda model, head: ("--quantization", "int4", "--tensor-parallel-size", "2"),
    "two ranks and n-grams": lambda model, head: ("--tensor-parallel-size", "2", *drafts("ngram")),
    "two stages": lambda model, head: ("--pipeline-parallel-size", "2"),
    "a draft model": lambda model, head: drafts("draft_model", model=str(model)),
    "a head": lambda model, head: drafts("eagle", model=str(head)),
}


#: By default one case; that nothing that computes imports torch says test_architecture.py.
QUICK = ("two ranks and n-grams",)


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_a_server_without_torch_gives_the_bits_of_one_with_it(
    case: str,
    serve: Callable[..., Running],
    tiny_server: Running,
    tiny_model: Path,
    tmp_path: Path,
    without_torch: dict[str, str],
) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    sizes = {name: config[name] for name in ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads")}
    head = eagle1(**sizes).save(tmp_path / "head")
    adapter = write_adapter(tmp_path / "adapter", tiny_model)
    flags = ("--enable-lora", "--lora-modules", f"own={adapter}", *CASES[case](tiny_model, head))
    server = serve(*flags, env=without_torch)
    asked: list[dict[str, Any]] = [{}, {"structured_outputs": {"regex": "[a-c]{4}x?[0-9]{3}"}}]
    answers = [answer(server, **fields) for fields in asked]
    if "--quantization" not in flags:
        assert answers == [answer(tiny_server, **fields) for fields in asked]
    assert set(answers[1][0][:4]) <= set("abc")
    assert answer(server, model="own") != answers[0], "the adapter changes nothing"


@pytest.mark.slow
def test_a_gguf_model_is_served_without_torch(tmp_path: Path, without_torch: dict[str, str]) -> None:
    flags = ("--num-gpu-blocks-override", "200", "--max-model-len", "512", "--quantization", "gguf")
    with running("smollm2-135m", tmp_path / "log", *flags, env=without_torch) as server:
        text, _ = answer(server, prompt="The capital of France is", max_tokens=4)
    assert "Paris" in text


def test_what_needs_torch_is_refused_with_what_to_install(without_torch: dict[str, str]) -> None:
    import subprocess
    import sys

    # Before the model is looked for, which would take a network.
    command = [sys.executable, "-m", "octavo", "serve", "no/where", "--port", "0"]
    started = [
        subprocess.Popen([*command, *flags], env={**os.environ, **without_torch}, stderr=subprocess.PIPE, text=True)
        for flags in (("--device", "cuda"), ("--kernels", "reference"))
    ]
    for process in started:
        said = process.communicate(timeout=PATIENCE)[1]
        assert process.returncode != 0
        assert "octavo[torch]" in said, said
        assert "Traceback" not in said
