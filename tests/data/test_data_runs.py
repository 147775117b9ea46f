"""``octavo.data``: prompts of a data set, completed by actors on Ray; runs over files that go on after a stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

import octavo.data
from octavo import LLM, ConfigError, PoolingParams, SamplingParams
from octavo.data.runs import JsonLines, find_files
from octavo.data.stage import Columns, Generator, RowAnswer, Vectors
from tests.busy_machine import PATIENCE, eventually
from tests.embedding_models import make_encoder
from tests.engine.test_recovery import Killer

ENGINE: dict[str, Any] = {"device": "cpu", "num_threads": 1, "num_gpu_blocks_override": 400, "max_num_seqs": 8}
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


class Echo(Generator):
    """Answers a text with itself, twice."""

    def __init__(self) -> None:
        self.columns = Columns("prompt", "out")

    def answer(self, prompts: Sequence[Any]) -> list[RowAnswer]:
        return [RowAnswer(p * 2) if isinstance(p, str) else RowAnswer(None, "no text") for p in prompts]


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_lines_are_cut_into_parts_that_hold_every_row_once(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    lines = [json.dumps({"prompt": "é" * i, "id": i}) for i in range(7)]
    path.write_text("\n" + "\n\n".join(lines))
    parts = list(JsonLines().cut(path, 3))
    assert [rows for _, rows in parts] == [3, 3, 1]
    found = []
    for start, rows in parts:
        assert JsonLines().answer(path, start, rows, Echo(), tmp_path / "part") == 0
        found += json_lines(tmp_path / "part")
    assert found == [{"prompt": "é" * i, "id": i, "out": "é" * 2 * i, "out_error": None} for i in range(7)]


def test_a_line_that_is_no_row_fails_alone(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\nno JSON\n{"text": "b"}\n[1]\n{"prompt": "c"}\n')
    assert JsonLines().answer(path, 0, 5, Echo(), tmp_path / "part") == 3
    found = json_lines(tmp_path / "part")
    assert [row["out"] for row in found] == ["aa", None, None, None, "cc"]
    assert "JSON is malformed" in found[1]["out_error"]
    assert found[2]["out_error"] == "no text"
    assert "Expected `object`" in found[3]["out_error"]


def test_a_column_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a", "out": 1}\n')
    with pytest.raises(ConfigError, match="a column 'out' already"):
        JsonLines().answer(path, 0, 1, Echo(), tmp_path / "part")


def test_prompts_are_texts_token_ids_or_conversations_and_others_fail_alone(tiny_model: Path) -> None:
    generator = Generator({"model": str(tiny_model), **ENGINE}, PARAMS, Columns("prompt", "generated"))
    chat = [{"role": "user", "content": "hi"}]
    found = generator.answer(["Hello", [5, 6, 7], chat, 3, None, [10**6], [], "there"])
    llm = LLM(str(tiny_model), **ENGINE)
    prompts: list[Any] = ["Hello", [5, 6, 7], "there"]
    texts = [output.outputs[0].text for output in llm.generate(prompts, PARAMS, use_tqdm=False)]
    assert [found[0].output, found[1].output, found[7].output] == texts
    assert found[2].output == llm.chat(chat, PARAMS, use_tqdm=False)[0].outputs[0].text
    assert [answer.output for answer in found[3:7]] == [None] * 4
    assert "not 3" in str(found[3].error) and "not None" in str(found[4].error)
    assert found[5].error and found[6].error


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


def embeddings(model: Path, texts: list[Any], **options: Any) -> list[list[float]]:
    outputs = LLM(model, num_threads=1).embed(texts, use_tqdm=False, **options)
    return [output.outputs.embedding for output in outputs]


def test_vectors_are_made_of_texts_and_token_ids_and_others_fail_alone(encoder: Path, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    vectors = Vectors(PoolingParams(dimensions=8), "query")
    generator = Generator({"model": str(encoder), "num_threads": 1}, vectors, Columns("text", "embedding"))
    chat = [{"role": "user", "content": "hi"}]
    found = generator.answer(["a river", chat, None, "x " * 200])
    expected = embeddings(encoder, ["query: a river"], pooling_params=PoolingParams(dimensions=8))
    assert found[0] == RowAnswer(expected[0])
    assert [answer.output for answer in found[1:]] == [None] * 3
    assert "text or token ids" in str(found[1].error) and "not None" in str(found[2].error)
    assert "at most 64" in str(found[3].error)
    assert generator.answer([None])[0].output is None
    generator = Generator({"model": str(encoder), "num_threads": 1}, Vectors(PoolingParams()), generator.columns)
    table = generator(pa.table({"text": ["a river", None]}))
    assert table.schema.field("embedding").type == pa.list_(pa.float32())
    assert table.column("embedding").to_pylist() == [*embeddings(encoder, ["a river"]), None]
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a river", "id": 1}\n{"text": [5, 6]}\n')
    assert JsonLines().answer(path, 0, 2, generator, tmp_path / "part") == 0
    assert [row["embedding"] for row in json_lines(tmp_path / "part")] == embeddings(encoder, ["a river", [5, 6]])


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.data", None)
    with pytest.raises(ConfigError, match=r"pip install .*'ray\[data\]"):
        octavo.data.generate(None, model="smollm2-135m")
    with pytest.raises(ConfigError, match=r"pip install .*'ray\[data\]"):
        octavo.data.embed(None, model="smollm2-135m")
    with pytest.raises(ConfigError, match=r"pip install .*'ray\[data\]"):
        octavo.data.run(tmp_path, tmp_path / "out", model="smollm2-135m")


def test_input_of_several_formats_is_refused(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "_notes.jsonl", "readme.txt"):
        (tmp_path / name).touch()
    assert [path.name for path in find_files([tmp_path])[0]] == ["a.jsonl", "b.jsonl"]
    (tmp_path / "c.parquet").touch()
    for paths, said in (
        ([tmp_path], "one format"),
        ([tmp_path / "readme.txt"], "one format"),
        ([tmp_path / "x"], "no file"),
    ):
        with pytest.raises(ConfigError, match=said):
            find_files(paths)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a Ray cluster of this machine."""
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.data")
    context = ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield context.address_info["gcs_address"]
    ray.shutdown()


@pytest.fixture(scope="module")
def texts(tiny_model: Path) -> list[str]:
    """The completions of the prompts "0" to "59"."""
    outputs = LLM(str(tiny_model), **ENGINE).generate([str(i) for i in range(60)], PARAMS, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


@pytest.mark.slow
def test_a_part_is_the_same_when_a_worker_is_killed(tiny_model: Path, tmp_path: Path, texts: list[str]) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"prompt": str(i)}) + "\n" for i in range(60)))
    options = {"model": str(tiny_model), **ENGINE, "tensor_parallel_size": 2}
    generator = Generator(options, PARAMS, Columns("prompt", "generated"))
    killer = Killer(10)
    killer.llm = generator._llm
    generator._llm._stat_loggers.append(killer)
    assert JsonLines().answer(path, 0, 60, generator, tmp_path / "part") == 0
    assert killer.lost
    assert [row["generated"] for row in json_lines(tmp_path / "part")] == texts


@pytest.mark.slow
def test_a_run_goes_on_by_itself_when_an_actor_is_killed(
    cluster: str, tiny_model: Path, texts: list[str], tmp_path: Path
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text("".join(json.dumps({"prompt": str(i)}) + "\n" for i in range(60)))
    killed: list[int] = []

    def kill_an_actor() -> None:
        eventually(lambda: len(list(out.glob("part-*"))) >= 3)
        raylets = [child for child in psutil.Process().children() if "raylet" in child.name()]
        actors = [child for raylet in raylets for child in raylet.children() if "_Parts" in "".join(child.cmdline())]
        for actor in actors[:1]:
            os.kill(actor.pid, signal.SIGKILL)
            killed.append(actor.pid)

    with ThreadPoolExecutor(1) as threads:
        killing = threads.submit(kill_an_actor)
        counts = octavo.data.run(
            source, out, model=str(tiny_model), sampling_params=PARAMS, batch_size=2, concurrency=2, **ENGINE
        )
        killing.result()
    assert killed, "an actor was to be killed"
    assert (counts.rows, counts.skipped) == (60, 0)
    files = sorted(out.glob("part-*"))
    assert [row["generated"] for file in files for row in json_lines(file)] == texts
    assert {file.name for file in out.iterdir()} == {file.name for file in files} | {"_octavo_run"}


@pytest.mark.slow
def test_a_stage_of_ray_data_adds_the_completions(cluster: str, tiny_model: Path, texts: list[str]) -> None:
    import ray.data

    rows: list[dict[str, Any]] = [{"id": i, "question": str(i)} for i in range(60)]
    rows.append({"id": 60, "question": "x" * 1000})
    dataset = ray.data.from_items(rows, override_num_blocks=5)
    answered = octavo.data.generate(
        dataset,
        model=str(tiny_model),
        sampling_params=PARAMS,
        prompt_column="question",
        output_column="answer",
        concurrency=2,
        batch_size=16,
        **ENGINE,
    )
    found = sorted(answered.take_all(), key=lambda row: row["id"])
    assert [row["answer"] for row in found] == [*texts, None]
    assert [row["answer_error"] for row in found[:-1]] == [None] * 60
    assert "1000" in found[-1]["answer_error"]


@pytest.mark.slow
def test_vectors_are_added_by_a_stage_and_by_a_run(cluster: str, encoder: Path, tmp_path: Path) -> None:
    import ray.data

    texts = [f"text {i}" for i in range(20)]
    dataset = ray.data.from_items([{"id": i, "text": text} for i, text in enumerate(texts)], override_num_blocks=3)
    embedded = octavo.data.embed(dataset, model=str(encoder), concurrency=2, batch_size=8, num_threads=1)
    found = sorted(embedded.take_all(), key=lambda row: row["id"])
    expected = embeddings(encoder, texts)
    assert [list(row["embedding"]) for row in found] == expected
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, 3]))
    options: dict[str, Any] = {"model": str(encoder), "prompt_column": "text", "batch_size": 8, "num_threads": 1}
    counts = octavo.data.run(source, out, pooling_params=PoolingParams(), **options)
    assert (counts.rows, counts.failed) == (21, 1)
    rows = [row for file in sorted(out.glob("part-*")) for row in json_lines(file)]
    assert [row["embedding"] for row in rows] == [*expected, None]
    with pytest.raises(ConfigError, match="give one of them"):
        octavo.data.run(source, out, pooling_params=PoolingParams(), sampling_params=PARAMS, **options)
    with pytest.raises(ConfigError, match="give pooling_params"):
        octavo.data.run(source, out, prompt_name="query", **options)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_run_that_was_killed_goes_on_and_answers_every_row_once(
    suffix: str, cluster: str, tiny_model: Path, texts: list[str], tmp_path: Path
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    source, out = tmp_path / f"in{suffix}", tmp_path / "out"
    rows = [{"id": i, "prompt": str(i)} for i in range(60)]
    if suffix == ".jsonl":
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), source, row_group_size=7)

    def call(folder: Path, **options: Any) -> Any:
        return octavo.data.run(source, folder, model=str(tiny_model), sampling_params=PARAMS, **(ENGINE | options))

    program = (
        "import octavo.data; from octavo import SamplingParams\n"
        f"octavo.data.run({str(source)!r}, {str(out)!r}, model={str(tiny_model)!r}, batch_size=4, "
        f"sampling_params=SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), **{ENGINE!r})"
    )
    process = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "RAY_ADDRESS": cluster})
    eventually(lambda: process.poll() is not None or len(list(out.glob("part-*"))) >= 3)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(PATIENCE) == -signal.SIGKILL

    counts = call(out, batch_size=4)
    assert (counts.rows, counts.failed) == (60, 0)
    assert 12 <= counts.skipped < 60, "it was to be killed half way"
    files = sorted(out.glob("part-*"))
    assert [file.name for file in files[:2]] == [
        f"part-000000000000-000000000003{suffix}",
        f"part-000000000004-000000000007{suffix}",
    ]
    found = [
        row for file in files for row in (json_lines(file) if suffix == ".jsonl" else pq.read_table(file).to_pylist())
    ]
    assert found == [{**row, "generated": text, "generated_error": None} for row, text in zip(rows, texts, strict=True)]
    assert {file.name for file in out.iterdir()} == {file.name for file in files} | {"_octavo_run"}

    written = {file: file.stat().st_mtime_ns for file in files}
    assert call(out, batch_size=4).skipped == 60
    assert {file: file.stat().st_mtime_ns for file in files} == written
    with pytest.raises(ConfigError, match="other batch_size"):
        call(out, batch_size=5)
