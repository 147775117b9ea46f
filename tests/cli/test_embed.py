"""``octavo embed`` and ``octavo rerank``."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import LLM, PoolingParams
from octavo.cli import embed as embed_command
from octavo.cli.embed import embed
from octavo.cli.inputs import Rows, TextRow
from octavo.cli.main import load_command
from octavo.core.errors import ConfigError
from tests.cli.helpers import Capture, Run, json_lines
from tests.embedding_models import HIDDEN_SIZE, MAX_TOKENS, make_encoder

TEXTS = ["a river", "the sea", "bread and butter"]
#: More tokens than the model takes.
LONG = "x " * 150


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes vectors."""
    return make_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scores pairs."""
    return make_encoder(tmp_path_factory.mktemp("cross-encoder"), labels=1)


@pytest.fixture(scope="module")
def llm(encoder: Path) -> LLM:
    return LLM(encoder, num_threads=1)


def vectors(llm: LLM, texts: list[Any], **options: Any) -> np.ndarray:
    outputs = llm.embed(texts, use_tqdm=False, **options)
    return np.array([output.outputs.embedding for output in outputs], np.float32)


def test_vectors_of_words_are_lines_on_standard_output(octavo: Run, capsys: Capture, encoder: Path, llm: LLM) -> None:
    assert octavo("embed", encoder, *TEXTS, "--num-threads", 1) == 0
    captured = capsys.readouterr()
    lines = json_lines(captured.out)
    assert [line["index"] for line in lines] == [0, 1, 2]
    assert np.array_equal(np.array([line["embedding"] for line in lines], np.float32), vectors(llm, TEXTS))
    assert captured.err.startswith("octavo: 3 texts, ")


def test_a_file_of_lines_fails_line_by_line_and_keeps_ids(
    octavo: Run, capsys: Capture, encoder: Path, llm: LLM, tmp_path: Path
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        json.dumps({"id": "a", "text": TEXTS[0], "more": 1}), json.dumps({"_id": 7, "prompt": TEXTS[1]}), "",
        json.dumps(TEXTS[2]), json.dumps({"input": [5, 6]}), "no JSON", json.dumps({"id": "b", "title": "x"}), "[1]",
        json.dumps({"text": "a", "prompt": "b"}), json.dumps({"text": 3}), json.dumps({"text": LONG}),
        json.dumps({"text": [10**6]}), json.dumps({"text": "end"}),
    ]  # fmt: skip
    source.write_text("\n".join(lines))
    assert octavo("embed", encoder, "--input", source, "--output", out, "--json", "-", "--num-threads", 1) == 1
    captured = capsys.readouterr()
    found = json_lines(out.read_text())
    assert [line["index"] for line in found] == list(range(12))
    assert [line.get("id") for line in found] == ["a", 7, None, None, None, "b", *[None] * 6]
    good = [0, 1, 2, 3, 11]
    assert [i for i, line in enumerate(found) if "embedding" in line] == good
    expected = vectors(llm, [*TEXTS, [5, 6], "end"])
    assert np.array_equal(np.array([found[i]["embedding"] for i in good], np.float32), expected)
    for index, words in {4: "valid JSON", 5: "title", 6: "object or a text", 7: "one of text", 8: "not 3"}.items():
        assert words in found[index]["error"]
        assert f"text {index + 1}: {found[index]['error']}" in captured.err
    assert f"at most {MAX_TOKENS}" in found[9]["error"] and "1000000" in found[10]["error"]
    [figures] = json_lines(captured.out)
    assert (figures["texts"], figures["failed"], figures["dimensions"]) == (12, 7, HIDDEN_SIZE)
    assert figures["prompt_tokens"] > 20 and figures["texts_per_second"] > 0


def test_a_numpy_file_has_a_row_for_each_text(octavo: Run, encoder: Path, llm: LLM, tmp_path: Path) -> None:
    source, out = tmp_path / "in.txt", tmp_path / "out.npy"
    source.write_text(f'{TEXTS[0]}\n\n{{"text": 1}}\r\n{LONG}\n{TEXTS[1]}')
    assert octavo("embed", encoder, "--input", source, "--output", out, "--num-threads", 1) == 1
    found = np.load(out)
    assert found.shape == (4, HIDDEN_SIZE) and found.dtype == np.float32
    assert np.isnan(found[2]).all()
    assert np.array_equal(found[[0, 1, 3]], vectors(llm, [TEXTS[0], '{"text": 1}', TEXTS[1]]))


def test_flags_are_parameters(octavo: Run, encoder: Path, llm: LLM, tmp_path: Path) -> None:
    out = tmp_path / "out.npy"
    for flags, text, expected in (
        (["--prompt-name", "query"], "a river", vectors(llm, ["query: a river"])),
        (["--dimensions", 8], "a river", vectors(llm, ["a river"], pooling_params=PoolingParams(dimensions=8))),
        (["--truncate", 5], LONG, vectors(llm, [llm.get_tokenizer().encode_cut(LONG, 5)])),
        (["--truncate", "max"], LONG, vectors(llm, [llm.get_tokenizer().encode_cut(LONG, MAX_TOKENS)])),
    ):
        assert octavo("embed", encoder, text, "--output", out, "--num-threads", 1, *flags) == 0
        assert np.array_equal(np.load(out), expected), flags


def test_texts_come_from_a_pipe(octavo: Run, capsys: Capture, encoder: Path) -> None:
    plain, objects = "a river\nthe sea\n", '{"text": "a river"}\n{"text": "the sea"}\n'
    outs = []
    for stdin, flags in ((plain, []), (objects, ["--input", "-"])):
        assert octavo("embed", encoder, "--num-threads", 1, *flags, stdin=stdin) == 0
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1] and outs[0].count("\n") == 2
    assert octavo("embed", encoder, "--num-threads", 1, stdin=b"\xef\xbb\xbf" + objects.encode()) == 0
    assert capsys.readouterr().out == outs[0]
    assert octavo("embed", encoder, "--num-threads", 1, stdin="") == 0
    assert capsys.readouterr().out == ""


def test_parquet_is_read_and_written(octavo: Run, encoder: Path, llm: LLM, tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    source, out = tmp_path / "in.parquet", tmp_path / "out.parquet"
    pq.write_table(pa.table({"id": [3, 4, 5], "passage": [TEXTS[0], None, TEXTS[1]]}), source)
    flags = ("--input", source, "--output", out, "--num-threads", 1)
    assert octavo("embed", encoder, *flags) == 2
    assert octavo("embed", encoder, *flags, "--column", "passage") == 1
    table = pq.read_table(out)
    assert table.column("index").to_pylist() == [0, 1, 2] and table.column("id").to_pylist() == ["3", "4", "5"]
    found = table.column("embedding").to_pylist()
    assert np.array_equal(np.array([found[0], found[2]], np.float32), vectors(llm, TEXTS[:2]))
    assert found[1] is None and "not None" in table.column("error").to_pylist()[1]


def test_parquet_says_what_to_install(
    octavo: Run, capsys: Capture, encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert octavo("embed", encoder, "a", "--output", "x.parquet") == 2
    assert "pip install pyarrow" in capsys.readouterr().err


def test_a_wrong_call_is_refused_before_the_model_is_loaded(
    octavo: Run, capsys: Capture, encoder: Path, cross_encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = tmp_path / "in.jsonl"
    texts.write_text('"a"\n')
    monkeypatch.setattr("octavo.engine.llm_engine.LLMEngine.__init__", lambda *_: pytest.fail("it was loaded"))
    for words, said in (
        ((encoder, "a", "--dimensions", HIDDEN_SIZE + 1), f"not {HIDDEN_SIZE + 1}"),
        ((encoder, "a", "--dimensions", 0), "dimensions"),
        ((encoder, "a", "--prompt-name", "title"), "'query', 'document'"),
        ((encoder, "a", "--truncate", "x"), "--truncate"),
        ((encoder, "a", "--output", "x.csv"), ".npy"),
        ((encoder, "a", "--output", tmp_path / "none" / "x.npy"), "no folder"),
        ((encoder, "--input", tmp_path / "none.txt"), "no such file"),
        ((cross_encoder, "a"), "cannot embed"),
        ((encoder, "--input", texts, "--output", tmp_path / ".." / tmp_path.name / "in.jsonl"), "is the file of the"),
    ):
        assert octavo("embed", *words) == 2
        assert said in capsys.readouterr().err


def test_rows_are_taken_as_others_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed_command, "WINDOW_TEXTS", 4)
    taken = 0

    def rows() -> Iterator[TextRow]:
        nonlocal taken
        for taken in range(1, 41):
            yield TextRow(taken - 1, "text " * (taken % 7 + 1), error="no text" if taken == 9 else None)

    done = 0
    for row, output in embed(llm, rows(), PoolingParams(task="embed")):
        assert row.index == done and (output.outputs.error == "no text") == (done == 8)
        done += 1
        assert taken - done <= 4
    assert done == taken == 40
    monkeypatch.setattr(embed_command, "WINDOW_CHARACTERS", 10)
    ahead = [taken - row.index for row, _ in embed(llm, rows(), PoolingParams(task="embed"))]
    assert max(ahead) <= 2


def test_sources_are_counted_as_they_are_read(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    lines, table = tmp_path / "in.jsonl", tmp_path / "in.parquet"
    lines.write_text('"a"\n\n"b"\n')
    pq.write_table(pa.table({"text": ["a"] * 2500}), table)
    for source in (Rows(["w"], str(lines)), Rows(["w"], str(table)), Rows(["w", "v"])):
        rows = list(source)
        assert len(rows) == source.count() and [row.index for row in rows] == list(range(len(rows)))
    assert Rows([], "-").count() is None
    lines.rename(tmp_path / "no.parquet")
    with pytest.raises(ConfigError, match="no Parquet file"):
        list(Rows([], str(tmp_path / "no.parquet")))


@pytest.mark.parametrize("kind", ["encoder", "cross_encoder"])
def test_documents_are_printed_best_first(
    octavo: Run, capsys: Capture, kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model = request.getfixturevalue(kind)
    llm = LLM(model, num_threads=1)
    ranked = llm.rerank("a river", TEXTS, use_tqdm=False)
    flags = ("--query", "a river", "--num-threads", 1)
    assert octavo("rerank", model, *TEXTS, *flags, "--top-n", 2) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{score:.4f}  {index + 1}  {TEXTS[index]}" for index, score in ranked[:2]]
    source = tmp_path / "documents.jsonl"
    rows = [{"id": f"d{i}", "text": text} for i, text in enumerate(TEXTS)]
    source.write_text("\n".join(map(json.dumps, [*rows, {"text": LONG}, {"title": 1}, {"text": [5]}])))
    assert octavo("rerank", model, *flags, "--documents", source, "--json", "-") == 1
    captured = capsys.readouterr()
    [content] = json_lines(captured.out)
    assert content["results"] == [
        {"index": index, "id": f"d{index}", "score": score, "document": TEXTS[index]} for index, score in ranked
    ]
    assert [error["index"] for error in content["errors"]] == [3, 4, 5]
    assert captured.err.count("octavo: error: document ") == 3
    assert content["summary"]["documents"] == 6 and content["summary"]["prompt_tokens"] > 10


def test_rerank_refuses_what_cannot_be_ranked(octavo: Run, capsys: Capture, tiny_model: Path, encoder: Path) -> None:
    assert octavo("rerank", tiny_model, "a", "--query", "b", "--num-threads", 1) == 2
    assert "cannot score" in capsys.readouterr().err
    assert octavo("rerank", encoder, LONG, "--query", "b", "--num-threads", 1) == 1
    assert "document 1" in capsys.readouterr().err
    assert octavo("rerank", encoder, LONG, "--query", "b", "--num-threads", 1, "--truncate", "max") == 0
    assert octavo("rerank", encoder, "a", "--query", "b", "--top-n", 0) == 2


def test_info_says_what_a_model_can_do(octavo: Run, capsys: Capture, encoder: Path, tmp_path: Path) -> None:
    assert octavo("info", encoder, "--json", "-") == 0
    facts = json.loads(capsys.readouterr().out)["model"]
    assert facts["tasks"] == ["embed", "token_embed", "score"]
    names = ("pooling", "normalize", "vector_size", "dimensions", "prompts", "max_text_length")
    assert [facts[name] for name in names] == ["mean", True, HIDDEN_SIZE, [8, 16], ["query", "document"], MAX_TOKENS]
    assert octavo("info", encoder) == 0
    assert re.search(r"dimensions: +8 16\n +prompts: +query, document\n", capsys.readouterr().out)
    assert octavo("info", make_encoder(tmp_path / "classifier", labels=2)) == 0
    assert re.search(r"tasks: +classify\n +labels: +label 0, label 1\n", capsys.readouterr().out)


@pytest.mark.parametrize(("task", "tasks"), [("auto", "generate embed token_embed"), ("score", "score")])
def test_info_of_a_language_model_depends_on_the_task(
    octavo: Run, capsys: Capture, tiny_model: Path, task: str, tasks: str
) -> None:
    assert octavo("info", tiny_model, "--task", task) == 0
    assert re.search(rf"tasks: +{tasks}\n", capsys.readouterr().out)


def test_the_pages_program_and_commands_are_right(encoder: Path, capsys: Capture) -> None:
    page = (Path(__file__).parents[2] / "docs" / "embeddings.md").read_text(encoding="utf-8")
    program = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    exec(program.replace("all-minilm-l6-v2", str(encoder)), {})
    assert capsys.readouterr().out.count("\n") == 5
    text = page + embed_command.EXAMPLE + str(load_command("rerank").make_parser().epilog)
    commands = [shlex.split(line) for line in text.splitlines() if re.match(r"\s*octavo (embed|rerank)", line)]
    assert len(commands) == 10
    for _, name, *words in commands:
        arguments = load_command(name).make_parser().read(words)
        assert arguments.words[0] in ("all-minilm-l6-v2", "./my-reranker")
