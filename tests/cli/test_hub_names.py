"""A model of the hub by its name in every command and option that takes a model, and in the cache's commands."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Q

from octavo import LLM, SamplingParams
from tests.cli.helpers import Capture, Run
from tests.fake_hub import FakeHub, hub_environment, serving_hub
from tests.loader.conftest import tiny_llama  # noqa: F401  a fixture
from tests.server.running_server import TINY, running

TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
KEYS = {"general.sampling.temp": 0.25, "tokenizer.chat_template": TEMPLATE}
SMALL = ("--num-gpu-blocks-override", "16", "--num-threads", "1")


@pytest.fixture
def hub(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny_llama: Callable[..., Path],  # noqa: F811
) -> Iterator[FakeHub]:
    """A hub with one repository, ``owner/m-GGUF``, in two quantisations."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "octavo"))
    kinds = {"m-Q4_K_M.gguf": Q.Q4_K, "m-Q8_0.gguf": Q.Q8_0}
    files = {name: tiny_llama(tmp_path / name, kind, keys=KEYS).read_bytes() for name, kind in kinds.items()}
    with serving_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.add("owner/m-GGUF", files)
        yield hub


def test_the_quick_start_of_llama_cpp_works_as_typed(hub: FakeHub, tmp_path: Path) -> None:
    """Without torch and transformers, as on a machine that has what the README's commands install."""
    words = ("-hf", "owner/m-GGUF:q8_0")
    log = tmp_path / "log"
    with running(words, log, "--jinja", *TINY, env=hub_environment(hub, tmp_path / "home")) as server:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "logprobs": True}
        answer = server.post("/v1/chat/completions", **body, seed=1)
        with server.http() as http:
            [model] = http.get("/v1/models").json()["data"]
            assert http.get("/props").json()["default_generation_settings"]["params"]["temperature"] == 0.25
        assert model["id"] == "owner/m-GGUF:q8_0" and model["default_sampling_params"]["temperature"] == 0.25
        assert answer["usage"]["completion_tokens"] == 3
        own = server.post("/v1/responses", input="hello", max_output_tokens=1, temperature=0.5)
        assert own["temperature"] == 0.5
    assert hub.received("m-Q4_K_M.gguf") == [] and len(hub.received("m-Q8_0.gguf")) == 1
    assert "downloading owner/m-GGUF:Q8_0" in log.read_text()


@pytest.mark.parametrize(
    ("command", "stdin"),
    [
        (("generate", "-hf", "owner/m-GGUF", "--hf-file", "m-Q8_0.gguf", "hello", "--max-tokens", "2"), ""),
        (("generate", "hf.co/owner/m-GGUF:Q8_0", "hello", "--max-tokens", "2"), ""),
        (("chat", "owner/m-GGUF:Q8_0", "--max-tokens", "2", "--no-history"), "hello\n"),
        (("run", "owner/m-GGUF:Q8_0", "hello", "--max-tokens", "2"), ""),
        (("embed", "owner/m-GGUF/m-Q8_0.gguf", "hello"), ""),
        (("bench", "offline", "owner/m-GGUF:Q8_0", "--batches", "1", "--input-len", "4", "--output-len", "2"), ""),
        (("info", "owner/m-GGUF:Q8_0", "--check"), ""),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else "",
)
def test_commands_take_models_of_the_hub(
    octavo: Run, capsys: Capture, hub: FakeHub, command: tuple[str, ...], stdin: str
) -> None:
    assert octavo(*command, *SMALL, stdin=stdin) == 0, capsys.readouterr().err
    assert hub.received("m-Q4_K_M.gguf") == []
    assert sum(wanted == "bytes=0-" for wanted in hub.received("m-Q8_0.gguf")) == 1


def test_a_batch_takes_a_model_of_the_hub(octavo: Run, hub: FakeHub, tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    files = ("-i", tmp_path / "rows.jsonl", "-o", tmp_path / "answers.jsonl")
    assert octavo("batch", "run", "owner/m-GGUF:Q8_0", *files, *SMALL) == 0
    assert json.loads((tmp_path / "answers.jsonl").read_text())["response"]["status_code"] == 200


def test_programs_take_models_tokenizers_and_draft_models_of_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_gpu_blocks_override": 32, "num_threads": 1, "device": "cpu"}
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True)

    def answer(model: str, **more: Any) -> Any:
        return LLM(model, **options, **more).generate("hello world", params, use_tqdm=False)[0].outputs[0].logprobs

    expected = answer(str(tmp_path / "m-Q8_0.gguf"))
    draft = {"method": "draft_model", "model": "owner/m-GGUF:Q4_K_M", "num_speculative_tokens": 2}
    assert answer("owner/m-GGUF:Q8_0", speculative_config=draft) == expected
    assert answer("owner/m-GGUF:Q8_0", revision="main", tokenizer="owner/m-GGUF:Q4_K_M") == expected


def test_of_another_revision_the_files_of_that_revision_are_read(
    hub: FakeHub,
    tmp_path: Path,
    tiny_llama: Callable[..., Path],  # noqa: F811
) -> None:
    from octavo.loader.resolve import gguf_source, resolve_model

    first = resolve_model("owner/m-GGUF:Q8_0", progress=False)
    newer = tiny_llama(tmp_path / "new.gguf", Q.Q8_0, seed=5, keys=KEYS).read_bytes()
    old, commit = hub.repositories["owner/m-GGUF"].commit, "f" * 40
    hub.add("owner/m-GGUF", {"m-Q8_0.gguf": newer}, commit=commit)
    assert resolve_model("owner/m-GGUF:Q8_0", progress=False) != first
    file, before = gguf_source("owner/m-GGUF:Q8_0"), gguf_source("owner/m-GGUF:Q8_0", old)
    assert file is not None and before is not None and file.read_bytes() == newer != before.read_bytes()
    assert gguf_source("owner/m-GGUF:Q8_0", commit) == file


def listed(octavo: Run, capsys: Capture) -> dict[str, tuple[str, int]]:
    assert octavo("list", "--json", "-") == 0
    models = json.loads(capsys.readouterr().out)["models"]
    return {model["name"]: (model["kind"], model["size_bytes"]) for model in models}


def test_pulled_models_are_listed_and_removed(octavo: Run, capsys: Capture, hub: FakeHub, tmp_path: Path) -> None:
    files = hub.repositories["owner/m-GGUF"].files
    weights = b"\\2\\0\\0\\0\\0\\0\\0\\0{}"
    hub.add("owner/plain", {"config.json": b"{}", "model.safetensors": weights, "README.md": b"x"})
    for name in ("owner/m-GGUF", "owner/m-GGUF:Q8_0", "owner/plain"):
        assert octavo("pull", name) == 0
        path = Path(capsys.readouterr().out.strip())
        assert path.exists() and path.is_relative_to(tmp_path / "hf")
    hub_models = {name: facts for name, facts in listed(octavo, capsys).items() if facts[0] == "hub"}
    assert hub_models == {
        "owner/m-GGUF:Q4_K_M": ("hub", len(files["m-Q4_K_M.gguf"])),
        "owner/m-GGUF:Q8_0": ("hub", len(files["m-Q8_0.gguf"])),
        "owner/plain": ("hub", 2 + len(weights)),
    }
    assert octavo("list") == 0
    assert str(tmp_path / "hf") in capsys.readouterr().out
    assert octavo("rm", "owner/m-GGUF:q8_0") == 0
    assert "removed owner/m-GGUF:Q8_0 from " in capsys.readouterr().out
    assert sorted(listed(octavo, capsys)) == ["m-Q4_K_M", "owner/m-GGUF:Q4_K_M", "owner/plain"]
    assert [path.name for path in (tmp_path / "hf").rglob("*.gguf")] == ["m-Q4_K_M.gguf"]
    blobs = [path.stat().st_size for path in (tmp_path / "hf").rglob("models--owner--m-GGUF/blobs/*")]
    assert blobs == [len(files["m-Q4_K_M.gguf"])]
    assert octavo("rm", "owner/m-GGUF", "owner/plain", "--json", "-") == 0
    assert len(json.loads(capsys.readouterr().out)["removed"]) == 3, "what was made of the GGUF file, too"
    assert listed(octavo, capsys) == {}
    assert not list((tmp_path / "hf" / "hub").glob("models--*"))
    assert octavo("rm", "owner/m-GGUF") == 2
    assert "no model 'owner/m-GGUF' is in the cache" in capsys.readouterr().err
