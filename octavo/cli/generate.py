"""``octavo generate``: completes prompts, all of them as one batch."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.cli.fit import nearest_in_errors
from octavo.cli.flags import SAMPLING_PREFIX as PREFIX
from octavo.cli.flags import (
    add_beam_flags,
    add_engine_flags,
    add_lora_flag,
    add_sampling_flags,
    add_verbose_flag,
    number,
    read_lora,
    take_engine_config,
)
from octavo.cli.inputs import Job, check_image_files, for_output, read_images, read_jobs
from octavo.cli.parsing import (
    EXIT_FAILED,
    Arguments,
    Parser,
    add_json_flag,
    errors_of_the_call,
    json_output,
    write_line,
)
from octavo.core.errors import ConfigError, InvalidRequestError, WorkerError
from octavo.core.outputs import RequestOutput
from octavo.core.request import RequestOptions
from octavo.core.sampling_params import DefaultMaxTokens, RequestOutputKind, SamplingParams, defaults_beside

if TYPE_CHECKING:
    from octavo.engine.llm_engine import LLMEngine
    from octavo.engine.model_files import ModelFiles

#: The default of SamplingParams, 16 tokens, cuts most sentences short.
DEFAULTS = {"max_tokens": DefaultMaxTokens(128)}

EXAMPLE = """\
examples:
  octavo generate smollm2-135m "The capital of France is" "Two and two make" --temperature 0
  octavo generate smollm2-135m --chat "Name three rivers." --max-tokens 64
  octavo generate HuggingFaceTB/SmolVLM-256M-Instruct --chat --image photo.jpg "What is this?"
  octavo generate smollm2-135m "List all users" --lora sql=adapters/sql
  octavo generate smollm2-135m --input prompts.jsonl --json answers.jsonl
  octavo generate smollm2-135m "The capital of France is" --beam-width 4 --max-tokens 16
  octavo generate smollm2-135m "A person as JSON:" --json-schema person.json
  octavo generate smollm2-135m "Is 7 prime?" --choice yes --choice no
  echo "Once upon a time" | octavo generate smollm2-135m

A file of prompts holds one text a line, or one JSON object a line: "prompt", "prompt_token_ids" or "messages", and
"priority", "user", "ttft_target", "tpot_target", sampling and beam search parameters of its own; or it is a Parquet
file with a column "prompt". With --json, one line a request is written, in the order of the prompts, and a last line
{"summary": ...}. If a prompt cannot be served, the others are answered and the exit code is 1.
"""


def make_parser() -> Parser:
    parser = Parser(
        prog="octavo generate",
        usage="octavo generate [options] [MODEL] [PROMPT ...]",
        description="Completes prompts, all of them as one batch; on a terminal the text of a single one appears as\n"
        "it grows. Where --model, OCTAVO_MODEL or a configuration file names the model, every word is a prompt.",
        epilog=EXAMPLE,
    )
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt, as a word after MODEL")
    parser.add_argument("--input", metavar="FILE", help="take prompts from this file, or from standard input (-)")
    parser.add_argument("--chat", action="store_true", help="pass each prompt through the model's chat template")
    parser.add_argument("--system", metavar="TEXT", help="with --chat: system message, how the model should answer")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="an image for each prompt, for vision models; may be given several times. Images replace the "
        "placeholders in the prompt, or stand before it",
    )
    parser.add_argument(
        "--priority",
        type=number,
        default=0,
        metavar="X",
        help="priority of the prompts under --scheduling-policy static: lower goes first (default: 0)",
    )
    parser.add_argument("--user", metavar="NAME", help="user of the prompts, for --scheduling-policy fair and srpt")
    add_lora_flag(parser)
    add_json_flag(parser)
    add_verbose_flag(parser)
    add_engine_flags(parser, renamed={"seed": "--engine-seed"})
    add_sampling_flags(parser, defaults=DEFAULTS)
    add_beam_flags(parser)
    return parser


def run(arguments: Arguments) -> int:
    """Completes the prompts; returns 1 if any failed."""
    lora = read_lora(arguments)
    check_image_files(arguments.image)
    config = take_engine_config(arguments, more_words=True)
    with errors_of_the_call():
        sampling = {**DEFAULTS, **arguments.group(PREFIX)}
        options = RequestOptions(priority=arguments.priority, user=arguments.user or "", lora_request=lora)
        words = [*arguments.words, *arguments.prompt]
        if arguments.system is not None and not arguments.chat:
            raise ConfigError("--system is of a conversation: give --chat with it")
        jobs = read_jobs(words, arguments.input, sampling, as_chat=arguments.chat, options=options)
    for job in jobs:
        if arguments.system and job.messages and job.messages[0].get("role") != "system":
            job.messages = [{"role": "system", "content": arguments.system}, *job.messages]
    with json_output(arguments) as json_out:
        start = time.monotonic()
        from octavo.engine.llm_engine import LLMEngine
        from octavo.engine.model_files import find_files

        files = find_files(config)
        _check(files, jobs, arguments.group(PREFIX), arguments.image)
        engine = None
        if not all(job.error for job in jobs):
            with nearest_in_errors(config):
                engine = LLMEngine(files)
            if lora is not None:
                engine.add_lora(lora)
        figures = Figures(load_seconds=time.monotonic() - start)
        start = time.monotonic()
        params = jobs[0].params
        has_one_answer = len(jobs) == 1 and isinstance(params, SamplingParams) and params.num_sequences == 1
        grows = has_one_answer and json_out is None and sys.stdout.isatty()
        for job, output in complete(engine, jobs, grows=grows):
            figures.count(job, output)
            if json_out is not None:
                write_line(json_out, _as_json(job, output))
                continue
            if job.error is not None:
                print(f"octavo: error: prompt {job.index + 1}: {job.error}", file=sys.stderr)
            if output is not None and not grows:
                _print_text(job, output, alone=len(jobs) == 1)
        figures.seconds = time.monotonic() - start
        if json_out is not None:
            write_line(json_out, {"summary": figures.as_json()})
    print(figures.as_text(), file=sys.stderr)
    return EXIT_FAILED if figures.failed else 0


def _check(files: ModelFiles, jobs: list[Job], flags: Mapping[str, Any], images: list[str]) -> None:
    """Gives the jobs the images and the model's defaults, and checks them, before the model is loaded."""
    from octavo.engine.input_processor import InputProcessor

    inputs = InputProcessor(files)
    processed = read_images(inputs, images)
    defaults = defaults_beside(flags, files.default_sampling)
    for job in jobs:
        job.images = processed
        job.take_defaults(defaults)
        job.check(inputs)


def complete(engine: LLMEngine | None, jobs: list[Job], *, grows: bool) -> Iterator[tuple[Job, RequestOutput | None]]:
    """Runs all jobs as one batch; yields them in order, each as soon as it and all before it have ended.

    A refused job has an ``error`` and no output; without valid jobs no engine is needed. With ``grows``, the text of
    the only job is printed as it is generated.
    """
    for job in jobs:
        if engine is not None and job.error is None:
            try:
                params = job.params
                if grows and isinstance(params, SamplingParams):
                    params = msgspec.structs.replace(params, output_kind=RequestOutputKind.DELTA)
                engine.add_request(str(job.index), job.tokenized, params, job.options, streaming=grows)
            except InvalidRequestError as e:
                job.error = str(e)
    outputs: dict[str, RequestOutput] = {}
    for job in jobs:
        if engine is None or job.error is not None:
            yield job, None
            continue
        request_id = str(job.index)
        while request_id not in outputs or not outputs[request_id].finished:
            if not engine.has_unfinished_requests():
                raise WorkerError(f"the engine has no more work, but request {request_id} has not ended")
            for output in engine.step():
                if grows:
                    print(for_output(output.outputs[0].text), end="\n" if output.finished else "", flush=True)
                before = outputs.get(output.request_id)
                outputs[output.request_id] = output if before is None else before + output
        result = outputs.pop(request_id)
        job.error = next((o.error for o in result.outputs if o.finish_reason == "error"), None)
        yield job, result


@dataclass
class Figures:
    """Sums over all requests."""

    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    load_seconds: float = 0.0
    seconds: float = 0.0

    def count(self, job: Job, output: RequestOutput | None) -> None:
        self.requests += 1
        self.failed += job.error is not None
        if output is not None:
            self.prompt_tokens += output.num_prompt_tokens
            self.output_tokens += sum(len(o.token_ids) for o in output.outputs)

    def as_json(self) -> dict[str, float]:
        return {**asdict(self), "output_tokens_per_second": self.output_tokens / self.seconds if self.seconds else 0.0}

    def as_text(self) -> str:
        failed = f", {self.failed} failed" if self.failed else ""
        speed = self.as_json()["output_tokens_per_second"]
        return (
            f"octavo: {_count(self.requests, 'request')}{failed}, {_count(self.prompt_tokens, 'token')} in, "
            f"{self.output_tokens} out in {self.seconds:.2f} s: {speed:.1f} tokens/s "
            f"(loaded in {self.load_seconds:.2f} s)"
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _print_text(job: Job, output: RequestOutput, *, alone: bool) -> None:
    for completion in output.outputs:
        if not alone or len(output.outputs) > 1:
            number = f"{job.index + 1}" if len(output.outputs) == 1 else f"{job.index + 1}.{completion.index + 1}"
            prompt = job.messages[-1].get("content") if job.messages else job.prompt
            line = " ".join(str(prompt).split())
            print(f"=== {number}: {line if len(line) <= 80 else line[:79] + '…'}")
        print(for_output(completion.text), flush=True)


def _as_json(job: Job, output: RequestOutput | None) -> dict[str, Any]:
    line: dict[str, Any] = {"index": job.index}
    line |= {"prompt": job.prompt} if job.messages is None else {"messages": job.messages}
    if job.error is not None:
        line["error"] = job.error
    if output is not None:
        line["prompt_token_ids"] = output.prompt_token_ids
        if output.num_encoder_tokens:
            line["encoder_prompt_token_ids"] = output.encoder_prompt_token_ids
        if output.prompt_logprobs is not None:
            line["prompt_logprobs"] = output.prompt_logprobs
        line["outputs"] = output.outputs
        metrics = output.metrics
        moments = {
            "first_token_seconds": metrics.first_token_time,
            "last_token_seconds": metrics.last_token_time,
            "total_seconds": metrics.finished_time,
        }
        counts = ("num_cached_tokens", "num_preemptions", "num_draft_tokens", "num_accepted_draft_tokens")
        line["metrics"] = {
            "queue_seconds": metrics.time_in_queue,
            **{name: None if moment is None else moment - metrics.arrival_time for name, moment in moments.items()},
            **{name: getattr(metrics, name) for name in counts},
            "drafted_per_position": metrics.drafted_per_position,
            "accepted_per_position": metrics.accepted_per_position,
        }
    return line
