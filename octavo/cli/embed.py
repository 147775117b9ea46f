"""``octavo embed``: vectors of texts, of a file of any size. ``octavo rerank``: documents by relevance to a query."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.cli.flags import add_engine_flags, add_verbose_flag, take_engine_config
from octavo.cli.inputs import TEXT_KEYS, Rows, TextRow, for_output, open_rows
from octavo.cli.parsing import (
    EXIT_FAILED,
    Arguments,
    Command,
    Parser,
    add_json_flag,
    check_folder,
    check_range,
    errors_of_the_call,
    json_output,
    write_line,
)
from octavo.core.errors import ConfigError, InvalidRequestError, WorkerError
from octavo.core.files import require_pyarrow
from octavo.core.outputs import Pooled, PoolingOutput, PoolingParams, ScoringOutput

if TYPE_CHECKING:
    from octavo.engine.llm_engine import LLMEngine
    from octavo.engine.model_files import ModelFiles


# ---- files of vectors

#: Rows of a row group of a Parquet file, held until it is full.
_GROUP = 4096


class VectorFile(ABC):
    """A file of vectors in the order of their texts, complete when it is closed."""

    @abstractmethod
    def write(self, row: TextRow, vector: NDArray[np.float32], error: str | None) -> None:
        """Adds a text's vector, float32 [D], or its error."""

    def close(self) -> None:  # noqa: B027
        """Writes the rest."""


class JsonLines(VectorFile):
    """One object a line: ``index``, ``id`` if the text has one, and ``embedding`` or ``error``."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def write(self, row: TextRow, vector: NDArray[np.float32], error: str | None) -> None:
        line: dict[str, Any] = {"index": row.index}
        if row.id is not None:
            line["id"] = row.id
        line |= {"embedding": vector.tolist()} if error is None else {"error": error}
        self._stream.write(msgspec.json.encode(line) + b"\n")
        self._stream.flush()  # a pipe's reader gets each line at once


class Npy(VectorFile):
    """A float32 array [texts, D] in NumPy's format: row i is text i, NaN where it failed."""

    def __init__(self, stream: IO[bytes], dimensions: int) -> None:
        self._stream, self._dimensions, self._rows = stream, dimensions, 0
        self._write_header()

    def write(self, row: TextRow, vector: NDArray[np.float32], error: str | None) -> None:
        if error is not None:
            vector = np.full(self._dimensions, np.nan, np.float32)
        self._stream.write(vector.astype("<f4").tobytes())
        self._rows += 1

    def close(self) -> None:
        self._stream.seek(0)
        self._write_header()

    def _write_header(self) -> None:
        """NumPy leaves room for any number of rows, so that the header can be written again."""
        header = {"descr": "<f4", "fortran_order": False, "shape": (self._rows, self._dimensions)}
        np.lib.format.write_array_header_1_0(self._stream, header)


class Parquet(VectorFile):
    """Columns ``index``, ``id`` as text (null: none), ``embedding`` (a list of D float32; null: failed), ``error``."""

    def __init__(self, path: Path, dimensions: int) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        vectors = pa.list_(pa.float32(), dimensions)
        names = {"index": pa.int64(), "id": pa.string(), "embedding": vectors, "error": pa.string()}
        self._schema = pa.schema(list(names.items()))
        self._writer = pq.ParquetWriter(path, self._schema)
        self._rows: list[tuple[int, str | None, NDArray[np.float32] | None, str | None]] = []

    def write(self, row: TextRow, vector: NDArray[np.float32], error: str | None) -> None:
        name = None if row.id is None else row.id if isinstance(row.id, str) else msgspec.json.encode(row.id).decode()
        self._rows.append((row.index, name, vector if error is None else None, error))
        if len(self._rows) == _GROUP:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        import pyarrow as pa

        if self._rows:
            columns = zip(*self._rows, strict=True)
            arrays = [pa.array(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
            self._writer.write_table(pa.table(arrays, schema=self._schema))
            self._rows.clear()


def check_output(path: Path | None, read: str | None) -> None:
    """Refuses an output that cannot be written, before a model is loaded; ``read``: the file of the texts."""
    if path is None:
        return
    if read not in (None, "-") and path.exists() and path.samefile(read):
        raise ConfigError(f"--output {path} is the file of the texts, which it would replace while it is read")
    if path.suffix not in (".npy", ".jsonl", ".ndjson", ".parquet"):
        raise ConfigError(f"--output {path}: the name must end in .npy, .jsonl or .parquet")
    check_folder(path, "--output")
    if path.suffix == ".parquet":
        require_pyarrow(str(path))


def open_output(path: Path | None, dimensions: int, stack: ExitStack) -> VectorFile:
    """Opens the file for vectors of ``dimensions`` numbers; without a path, JSON lines go to standard output."""
    if path is None:
        return JsonLines(sys.stdout.buffer)
    try:
        if path.suffix == ".parquet":
            return stack.enter_context(closing(Parquet(path, dimensions)))
        stream = stack.enter_context(path.open("wb"))
    except OSError as e:
        raise ConfigError(f"cannot write --output {path}: {e.strerror or e}") from None
    file = Npy(stream, dimensions) if path.suffix == ".npy" else JsonLines(stream)
    return stack.enter_context(closing(file))


# ---- ``octavo embed``

#: Most texts, and most characters of them, that are in the engine or wait to be written.
WINDOW_TEXTS = 1024
WINDOW_CHARACTERS = 1 << 22
#: Errors to print; JSON lines and Parquet files have all of them.
_SHOWN_ERRORS = 20

EXAMPLE = """\
examples:
  octavo embed all-minilm-l6-v2 "a sentence" "another one"
  octavo embed all-minilm-l6-v2 --input texts.jsonl --output vectors.npy
  octavo embed all-minilm-l6-v2 --input texts.parquet --output vectors.parquet --json -
  octavo embed all-minilm-l6-v2 --input corpus.jsonl --column passage --truncate max --output vectors.jsonl
  cat texts.txt | octavo embed all-minilm-l6-v2 --input -

A file has one text a line, or one JSON object a line with "text", "prompt" or "input" (a text or token ids), or is one
of Parquet with a column of such a name; "id" is kept, other keys are passed over. Without --output the vectors are JSON
lines on standard output. They are written in the order of the texts, while the file is read: row i of a .npy file is
text i. If a text cannot be served (an "error" in its line, NaN in a .npy file), the exit code is 1.
"""


def make_parser() -> Parser:
    parser = Parser(
        prog="octavo embed",
        usage="octavo embed [options] [MODEL] [TEXT ...]",
        description="Writes the vectors of texts. Where --model, OCTAVO_MODEL or a configuration file names the\n"
        "model, every word is a text.",
        epilog=EXAMPLE,
    )
    parser.add_argument("--input", metavar="FILE", help="take texts from this file, or from standard input (-)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write to this file: .npy, .jsonl or .parquet")
    parser.add_argument("--column", metavar="NAME", help="key or column of the texts (default: text, prompt or input)")
    parser.add_argument(
        "--prompt-name",
        metavar="NAME",
        help="put the model's prompt of this name, such as query, before each text",
    )
    parser.add_argument(
        "--dimensions", type=int, metavar="N", help="numbers of a vector, of a model that was trained for fewer"
    )
    add_truncate_flag(parser)
    add_json_flag(parser)
    add_verbose_flag(parser)
    add_engine_flags(parser)
    return parser


def add_truncate_flag(parser: Parser) -> None:
    parser.add_argument(
        "--truncate", metavar="N|max", help="cut texts after N tokens, or after as many as the model takes (max)"
    )


def read_truncate(arguments: Arguments) -> int | None:
    """``--truncate`` as ``truncate_prompt_tokens``."""
    limit: str | None = arguments.truncate
    if limit is None or limit == "max":
        return None if limit is None else -1
    if not limit.isdecimal() or not int(limit):
        raise ConfigError(f"--truncate must be a number of tokens above 0, or max, not {limit!r}")
    return int(limit)


def run(arguments: Arguments) -> int:
    config = take_engine_config(arguments, more_words=True)
    source = _open_texts(arguments, arguments.input, "--input")
    check_output(arguments.output, source.file)
    with errors_of_the_call():
        params = PoolingParams(
            task="embed", dimensions=arguments.dimensions, truncate_prompt_tokens=read_truncate(arguments)
        )
    with ExitStack() as stack:
        json_out = stack.enter_context(json_output(arguments))
        total, start = source.count(), time.monotonic()
        from octavo.engine.llm import Progress
        from octavo.engine.llm_engine import LLMEngine
        from octavo.engine.model_files import find_files

        files = find_files(config)
        figures = Figures(dimensions=_check(files, params, arguments.prompt_name))
        output = open_output(arguments.output, figures.dimensions, stack)
        engine = LLMEngine(files)
        figures.load_seconds, start = time.monotonic() - start, time.monotonic()
        shows_bar = sys.stderr.isatty() and not (arguments.output is None and sys.stdout.isatty())
        with Progress(shows_bar, total, 0) as progress:
            for row, result in embed(engine, source.texts(), params, arguments.prompt_name):
                assert isinstance(result.outputs, PoolingOutput)
                error = result.outputs.error
                output.write(row, result.outputs.data, error)
                figures.count(row, len(result.prompt_token_ids), error)
                progress.add(result)
        figures.seconds = time.monotonic() - start
        if json_out is not None:
            write_line(json_out, figures.as_json())
    print(figures.as_text(), file=sys.stderr)
    return EXIT_FAILED if figures.failed else 0


def _open_texts(arguments: Arguments, file: str | None, flag: str) -> Rows:
    keys = TEXT_KEYS if arguments.column is None else (arguments.column,)
    return open_rows(arguments.words, file, keys, what="text", flag=flag)


def _check(files: ModelFiles, params: PoolingParams, prompt_name: str | None) -> int:
    """The numbers of a vector; refuses what no text could be served with, before the model is loaded."""
    from octavo.engine.input_processor import InputProcessor, PoolingInputs

    pooling = PoolingInputs(files, InputProcessor(files))
    with errors_of_the_call():
        pooling.require("embed")
        pooling.embedding_prompt("text", prompt_name)
        pooling.process("check", [0], params)
    return params.dimensions or pooling.vector_size


def embed(
    engine: LLMEngine, rows: Iterable[TextRow], params: PoolingParams, prompt_name: str | None = None
) -> Iterator[tuple[TextRow, Pooled]]:
    """The output of each row in order, as soon as it and all before it have ended; holds a bounded number of rows."""
    from octavo.engine.llm import refused

    waiting: deque[TextRow] = deque()
    outputs: dict[str, Any] = {}
    characters = 0
    for row in rows:
        request_id = str(row.index)
        waiting.append(row)
        characters += len(row.text)
        try:
            if row.error is not None:
                raise InvalidRequestError(row.error)
            prompt = engine.front_end.pooling.embedding_prompt(row.text, prompt_name)
            engine.add_request(request_id, prompt, params, streaming=False)
        except InvalidRequestError as e:
            outputs[request_id] = refused(request_id, row.text, params, e)
        while len(waiting) >= WINDOW_TEXTS or characters >= WINDOW_CHARACTERS:
            for done, output in _ended(engine, waiting, outputs):
                characters -= len(done.text)
                yield done, output
    while waiting:
        yield from _ended(engine, waiting, outputs)


def _ended(engine: LLMEngine, waiting: deque[TextRow], outputs: dict[str, Any]) -> Iterator[tuple[TextRow, Pooled]]:
    """Steps until the first waiting row has ended; yields it and the ended rows after it."""
    while (first := str(waiting[0].index)) not in outputs:
        if not engine.has_unfinished_requests():
            raise WorkerError(f"the engine has no more work, but request {first} has not ended")
        for output in engine.step():
            outputs[output.request_id] = output
    while waiting and str(waiting[0].index) in outputs:
        row = waiting.popleft()
        yield row, outputs.pop(str(row.index))


@dataclass
class Figures:
    """Sums over all texts."""

    dimensions: int
    texts: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    load_seconds: float = 0.0
    seconds: float = 0.0

    def count(self, row: TextRow, tokens: int, error: str | None) -> None:
        self.texts += 1
        if error is None:
            self.prompt_tokens += tokens
            return
        self.failed += 1
        if self.failed <= _SHOWN_ERRORS:
            print(f"octavo: error: text {row.index + 1}: {error}", file=sys.stderr)
        elif self.failed == _SHOWN_ERRORS + 1:
            print("octavo: error: more texts failed; further errors are only counted", file=sys.stderr)

    def as_json(self) -> dict[str, float]:
        seconds = self.seconds or 1.0
        return {
            **asdict(self),
            "texts_per_second": (self.texts - self.failed) / seconds,
            "tokens_per_second": self.prompt_tokens / seconds,
        }

    def as_text(self) -> str:
        speeds, failed = self.as_json(), f", {self.failed} failed" if self.failed else ""
        return (
            f"octavo: {self.texts} text{'' if self.texts == 1 else 's'}{failed}, {self.prompt_tokens} tokens in "
            f"{self.seconds:.2f} s: {speeds['texts_per_second']:.1f} texts/s, "
            f"{speeds['tokens_per_second']:.0f} tokens/s (loaded in {self.load_seconds:.2f} s)"
        )


# ---- ``octavo rerank``

_RERANK_EXAMPLE = """\
examples:
  octavo rerank all-minilm-l6-v2 --query "rivers of Europe" "The Rhine" "A loaf of bread" "The Danube"
  octavo rerank ./my-reranker --query "rivers of Europe" --documents passages.jsonl --top-n 10 --json best.json

A cross-encoder, or a language model with --task score, reads query and document together; vectors of other models are
compared. A file of documents is read as octavo embed reads texts. If a document cannot be scored, the exit code is 1.
"""


def _rerank_parser() -> Parser:
    parser = Parser(
        prog="octavo rerank",
        usage="octavo rerank --query TEXT [options] [MODEL] [DOCUMENT ...]",
        description="Prints documents with their scores, the best first. Where --model, OCTAVO_MODEL or a\n"
        "configuration file names the model, every word is a document.",
        epilog=_RERANK_EXAMPLE,
    )
    parser.add_argument("--query", required=True, metavar="TEXT", help="text to compare the documents with")
    parser.add_argument("--documents", metavar="FILE", help="take documents from this file, or from standard input (-)")
    parser.add_argument("--column", metavar="NAME", help="key or column of the texts (default: text, prompt or input)")
    parser.add_argument("--top-n", type=int, metavar="N", help="show the best N (default: all)")
    add_truncate_flag(parser)
    add_json_flag(parser)
    add_verbose_flag(parser)
    add_engine_flags(parser)
    return parser


def rerank(arguments: Arguments) -> int:
    check_range(arguments, "top_n")
    config = take_engine_config(arguments, more_words=True)
    params = PoolingParams(truncate_prompt_tokens=read_truncate(arguments))
    source = _open_texts(arguments, arguments.documents, "--documents")
    with json_output(arguments) as json_out:
        rows = list(source.texts())
        errors = {row.index: row.error for row in rows if row.error is not None}
        errors |= {row.index: "a document must be a text" for row in rows if isinstance(row.text, list)}
        good = [row for row in rows if row.index not in errors]
        start = time.monotonic()
        from octavo.engine.llm import LLM

        llm = LLM(**config.model_dump(exclude_unset=True))
        with errors_of_the_call():
            llm.front_end.pooling.require("score")
        load_seconds, start = time.monotonic() - start, time.monotonic()
        texts, results = [row.text for row in good if isinstance(row.text, str)], []
        outputs = (
            llm.score(arguments.query, texts, pooling_params=params, use_tqdm=sys.stderr.isatty()) if texts else []
        )
        for row, output in zip(good, outputs, strict=True):
            assert isinstance(output.outputs, ScoringOutput)
            if output.outputs.error is not None:
                errors[row.index] = output.outputs.error
                continue
            name = {} if row.id is None else {"id": row.id}
            results.append({"index": row.index, **name, "score": output.outputs.score, "document": row.text})
        seconds = time.monotonic() - start
        results.sort(key=lambda result: -result["score"])  # stable: equal scores keep their order
        for index, error in sorted(errors.items()):
            print(f"octavo: error: document {index + 1}: {error}", file=sys.stderr)
        results = results[: arguments.top_n]
        if json_out is None:
            for result in results:
                text = " ".join(result["document"].split())
                print(for_output(f"{result['score']:.4f}  {result['index'] + 1}  {text}"))
        else:
            content = {
                "query": arguments.query,
                "results": results,
                "errors": [{"index": index, "error": error} for index, error in sorted(errors.items())],
                "summary": {
                    "documents": len(rows),
                    "failed": len(errors),
                    "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
                    "load_seconds": load_seconds,
                    "seconds": seconds,
                },
            }
            write_line(json_out, content)
    return EXIT_FAILED if errors else 0


COMMANDS = {"rerank": Command(_rerank_parser, rerank)}
