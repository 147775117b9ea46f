from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from gguf import GGMLQuantizationType as Q

from octavo import LLM, SamplingParams
from octavo.core.errors import DownloadError, ModelNotFoundError, WeightError
from octavo.loader.files import cache_dir, publish
from octavo.loader.resolve import gguf_folder, resolve_model
from octavo.models.config_files import read_model_config
from tests.busy_machine import PATIENCE
from tests.hub_folders import hub_folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_folder_with_config_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_folder_without_config_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").write_text("")
    with pytest.raises(ModelNotFoundError, match=r"no config\.json.*weights\.gguf"):
        resolve_model(str(tmp_path))


def test_of_a_gguf_file_nothing_but_configuration_and_tokenizer_is_written(
    cache: Path, tmp_path: Path, tiny_llama: Any
) -> None:
    path = tiny_llama(tmp_path / "m.gguf")
    folder = resolve_model(str(path))
    LLM(str(path), device="cpu", num_gpu_blocks_override=16, num_threads=1).generate("hello", use_tqdm=False)
    names = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(p.name for p in cache.rglob("*") if p.is_file()) == names
    assert {p.parent for p in cache.rglob("*") if p.is_file()} == {folder}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_are_those_of_the_values_as_a_checkpoint(
    cache: Path, tmp_path: Path, tiny_llama: Any, dtype: str
) -> None:
    """Every bit of the logprobs is."""
    path = tiny_llama(tmp_path / "m.gguf", Q.Q4_K)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
    options: dict[str, Any] = {"device": "cpu", "num_gpu_blocks_override": 16, "num_threads": 1, "dtype": dtype}

    def answer(model: str, **more: Any) -> Any:
        return LLM(model, **options, **more).generate("hello world", params, use_tqdm=False)[0].outputs[0].logprobs

    assert answer(str(path), quantization="none") == answer(str(hub_folder(str(path), dtype)))


def test_the_second_time_nothing_is_written_or_imported(cache: Path, tmp_path: Path, tiny_llama: Any) -> None:
    path = tiny_llama(tmp_path / "m.gguf")
    folder = resolve_model(str(path))
    code = (
        "import sys; from octavo.loader.resolve import resolve_model\n"
        f"print(resolve_model({str(path)!r}))\n"
        "print([m for m in ('torch', 'numpy', 'gguf', 'tokenizers', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [str(folder), "[]"]


def test_a_moved_file_is_recognised_and_a_changed_one_is_not(cache: Path, tmp_path: Path, tiny_llama: Any) -> None:
    path = tiny_llama(tmp_path / "m.gguf", seed=1)
    first = gguf_folder(path)
    moved = tmp_path / "sub" / "m.gguf"
    moved.parent.mkdir()
    shutil.move(path, moved)
    assert gguf_folder(moved) == first
    other = gguf_folder(tiny_llama(path, seed=2))
    assert other != first
    stat = path.stat()
    tiny_llama(path, seed=3)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert gguf_folder(path) not in (first, other), "the same size and time, but other content"


def test_a_file_that_is_refused_leaves_nothing(cache: Path, tmp_path: Path, tiny_llama: Any) -> None:
    path = tiny_llama(tmp_path / "m.gguf", keys={"llama.block_count": 99})
    with pytest.raises(WeightError):
        resolve_model(str(path))
    assert [p for p in cache.rglob("*") if p.parent != cache] == []


def test_a_file_that_is_not_gguf_is_refused(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"\x80\x02pickle")
    with pytest.raises(ModelNotFoundError, match=r"model\.bin.*not a GGUF"):
        resolve_model(str(tmp_path / "model.bin"))


def test_models_without_weights_are_not_suggested_and_listed_apart() -> None:
    for name in ("llama3", "llama-3.1-8b", "qwen3-30b-a3b"):
        with pytest.raises(ModelNotFoundError) as e:
            resolve_model(name)
        assert "did you mean" not in str(e.value)
        assert "built in: smollm2-135m, gemma3-270m, all-minilm-l6-v2, whisper-tiny.en; shapes without" in str(e.value)


@pytest.mark.parametrize("name", ["smolm2-135m", "SmolLM2-135M"])
def test_a_misspelt_name_gets_the_nearest_one(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="did you mean 'smollm2-135m'"):
        resolve_model(name)


@pytest.mark.parametrize(
    "name",
    ["/nowhere/at/all", "./missing.gguf", "a/b/c", "missing/model.gguf", "~nobody/x/y", "missing.safetensors", "dir/"],
)
def test_a_path_where_nothing_is_is_no_such_file(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=f"no such file.*{re.escape(name)}"):
        resolve_model(name)


def test_a_misspelt_path_gets_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "model-q4.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=f"did you mean {re.escape(str(tmp_path / 'model-q4.gguf'))}"):
        resolve_model(str(tmp_path / "model-q5.gguf"))


@pytest.mark.parametrize("name", ["", "qwertyuiop", "a" * 9000, "a\0b"])
def test_the_error_for_an_unknown_name_lists_what_is_accepted(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"config\.json.*\.gguf.*hub id.*smollm2-135m"):
        resolve_model(name)


def test_the_demo_model_is_the_one_that_transformers_reads_from_the_file() -> None:
    folder = resolve_model("smollm2-135m")
    config = transformers.AutoConfig.from_pretrained(folder)
    assert (config.num_hidden_layers, config.hidden_size, config.rope_parameters["rope_theta"]) == (30, 576, 100000.0)


@pytest.mark.slow
def test_the_demo_model_knows_the_capital_of_france() -> None:
    folder = hub_folder("smollm2-135m", "bfloat16")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    output = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, ids.shape[1] :])


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("OCTAVO_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "octavo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "octavo"


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_llama: Any
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match=r"cannot write to the cache.*OCTAVO_CACHE"):
        resolve_model(str(tiny_llama(tmp_path / "m.gguf")))


def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise OSError(28, "No space left on device")

    with pytest.raises(DownloadError, match="No space left on device"):
        publish(tmp_path / "models" / "m", fill)
    assert list((tmp_path / "models").iterdir()) == []


def test_files_that_the_disk_cannot_hold_say_so_and_leaves_nothing(
    cache: Path, tmp_path: Path, tiny_llama: Any
) -> None:
    path = tiny_llama(tmp_path / "m.gguf")
    script = (
        "import resource\n"
        "from octavo.loader.resolve import resolve_model\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        f"resolve_model({str(path)!r})\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE)
    assert "DownloadError: cannot write to the cache folder" in result.stderr.splitlines()[-1]
    assert [p for p in cache.rglob("*") if p.is_file()] == []


def test_processes_that_write_at_once_agree(cache: Path, tmp_path: Path, tiny_llama: Any) -> None:
    path = tiny_llama(tmp_path / "m.gguf")
    code = f"from octavo.loader.resolve import resolve_model; print(resolve_model({str(path)!r}))"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = {process.communicate(timeout=PATIENCE)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(outputs) == 1
    assert [p.suffix for p in (cache / "models").iterdir()] == [""], "no lock is left"
    assert read_model_config(Path(outputs.pop())).num_layers == 1
