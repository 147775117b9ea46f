"""What a machine, a process or a checkpoint limits: engines that fit, or errors that say what does not."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.errors import ConfigError, InsufficientMemoryError, OctavoError, as_memory_error
from octavo.executor.worker import Worker

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
PROMPT = list(range(40))


def with_context(tiny_model: Path, folder: Path, positions: int, **others: Any) -> Path:
    """The model, with another context length in its config.json."""
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": positions, **others}))
    return folder


@pytest.mark.parametrize("positions", [10_000_000, 10**12])
def test_no_context_is_too_long_to_start(tiny_model: Path, tmp_path: Path, positions: int) -> None:
    """The rotary table has the rows that the KV cache can use, and they are those of the shorter context."""
    options: dict[str, Any] = {"device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 64}
    short = LLM(str(tiny_model), **options, num_gpu_blocks_override=20)
    long = LLM(str(with_context(tiny_model, tmp_path / "m", positions)), **options, kv_cache_memory_bytes="256KiB")
    runner = long.llm_engine.core.executor._worker.runner  # type: ignore[attr-defined]
    tokens = long.llm_engine.core.max_model_len
    assert len(runner.loaded.network.layers[0].attention.rotary.array) == tokens < 10_000
    answers = [llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0] for llm in (short, long)]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].logprobs == answers[1].logprobs


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kv_cache_dtype": "fp8"}, "no KV cache of type"),
        ({"kv_cache_dtype": "float16"}, "no KV cache of type float16; kv_cache_dtype may be auto, float32"),
        ({"dtype": "float16", "kv_cache_dtype": "int8", "quantization": "int8"}, "compute in float32 or bfloat16"),
        ({"kernels": "reference", "kv_cache_dtype": "fp8"}, "the reference backend has no KV cache of type fp8"),
    ],
)
def test_types_that_a_cpu_does_not_have_are_refused_before_anything_is_read(
    tiny_model: Path, tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    if "kernels" not in options:
        pytest.importorskip("octavo._cpu", reason="octavo._cpu is not built")
    folder = with_context(tiny_model, tmp_path / "m", 256)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=says):
        LLM(str(folder), device="cpu", **options)


_LOW_ADDRESSES = """\
import resource, sys
import psutil
from octavo import LLM
from octavo.core.errors import InsufficientMemoryError
from octavo.runner.memory import available_memory
import octavo.runner.model_runner
for room in (4, 700):
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    limit = psutil.Process().memory_info().vms + (room << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    assert available_memory() <= room << 20
    try:
        # With the larger room it is the swap space that does not fit: it was asked for without looking.
        llm = LLM(sys.argv[1], device="cpu", num_gpu_blocks_override=8, num_host_blocks_override=10**6)
    except InsufficientMemoryError as e:
        print("refused:", e)
"""


def test_memory_that_runs_out_before_the_weights_is_an_error_of_our_own(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError

    for step in (
        "engine.model_files.default_sampling",
        "engine.model_files.find_tokenizer",
        "loader.weights.read_model_config",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"octavo.{step}", fails)
            with pytest.raises(InsufficientMemoryError, match="memory ran out"):
                LLM(str(tiny_model), device="cpu")


def test_a_low_limit_of_addresses_is_an_error_of_our_own(tiny_model: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _LOW_ADDRESSES, str(tiny_model)], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("refused: ") == 2, run.stdout
    assert "refused: memory ran out (" in run.stdout


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (MemoryError, ["std::bad_alloc"]),
        (OSError, [errno.ENOMEM, "Cannot allocate memory"]),
        (RuntimeError, ["can't start new thread"]),
        (RuntimeError, ["Resource temporarily unavailable"]),
        (RuntimeError, ["[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried"]),
        (RuntimeError, ["unable to mmap 269 bytes from file <model.safetensors>: Cannot allocate memory (12)"]),
        (ImportError, ["importing failed\nOriginal error was: libx.so: failed to map segment from shared object\n"]),
    ],
)
def test_what_libraries_say_when_memory_runs_out(
    kind: type[Exception], words: list[Any], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise kind(*words)

    monkeypatch.setattr(Worker, "make_cache", fail)
    with pytest.raises(InsufficientMemoryError, match="memory ran out") as caught:
        LLM(str(tiny_model), device="cpu", num_gpu_blocks_override=8)
    assert type(caught.value.__cause__) is kind


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), OSError(2, "no such file"), OctavoError("memory")])
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    assert as_memory_error(error) is None
