"""``octavo rerank``: texts by how well they fit a query."""

from __future__ import annotations

import sys
import time
from typing import Any

from octavo.cli.embed import add_truncate_flag, make_source, read_truncate
from octavo.cli.flags import add_engine_flags, add_verbose_flag, take_engine_config
from octavo.cli.inputs import for_output
from octavo.cli.parsing import (
    EXIT_FAILED,
    Arguments,
    Parser,
    add_json_flag,
    check_range,
    errors_of_the_call,
    json_output,
    write_line,
)
from octavo.core.outputs import PoolingParams, ScoringOutput

EXAMPLE = """\
examples:
  octavo rerank all-minilm-l6-v2 --query "rivers of Europe" "The Rhine" "A loaf of bread" "The Danube"
  octavo rerank ./my-reranker --query "rivers of Europe" --documents passages.jsonl --top-n 10 --json best.json

A cross-encoder, or a language model with --task score, reads query and document together; vectors of other models are
compared. A file of documents is read as octavo embed reads texts. A document that cannot be scored fails alone, and
the exit code is 1.
"""


def make_parser() -> Parser:
    """The command's parser."""
    parser = Parser(
        prog="octavo rerank",
        usage="octavo rerank --query TEXT [options] [MODEL] [DOCUMENT ...]",
        description="Prints documents with their scores, the best first. Where --model, OCTAVO_MODEL or a\n"
        "configuration file names the model, every word is a document.",
        epilog=EXAMPLE,
    )
    parser.add_argument("--query", required=True, metavar="TEXT", help="what the documents are compared with")
    parser.add_argument("--documents", metavar="FILE", help="take documents from this file, or from standard input (-)")
    parser.add_argument("--column", metavar="NAME", help="key or column of the texts (default: text, prompt or input)")
    parser.add_argument("--top-n", type=int, metavar="N", help="show the best N (default: all)")
    add_truncate_flag(parser)
    add_json_flag(parser)
    add_verbose_flag(parser)
    add_engine_flags(parser)
    return parser


def run(arguments: Arguments) -> int:
    """Prints the documents; returns 1 if one failed."""
    check_range(arguments, "top_n")
    config = take_engine_config(arguments, more_words=True)
    params = PoolingParams(truncate_prompt_tokens=read_truncate(arguments))
    source = make_source(arguments.words, arguments.documents, arguments.column, "--documents")
    with json_output(arguments) as json_out:
        rows = list(source)
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
        results.sort(key=lambda result: -result["score"])  # those of equal scores stay in their order
        for index, error in sorted(errors.items()):
            print(f"octavo: error: document {index + 1}: {error}", file=sys.stderr)
        results = results[: arguments.top_n]
        if json_out is None:
            _print(results)
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


def _print(results: list[dict[str, Any]]) -> None:
    """A line for each: score, number, and the document as one line."""
    for result in results:
        print(for_output(f"{result['score']:.4f}  {result['index'] + 1}  {' '.join(result['document'].split())}"))
