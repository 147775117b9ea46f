"""``octavo chat``: a conversation in the terminal, with streamed answers."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.cli.engine_flags import (
    add_engine_flags,
    add_lora_flag,
    add_verbose_flag,
    apply_verbosity,
    read_engine_config,
    read_lora,
    take_model,
)
from octavo.cli.parsing import EXIT_FAILED, Arguments, Parser, errors_of_the_call
from octavo.cli.sampling_flags import add_sampling_flags, read_sampling_params
from octavo.core.adapters import LoRARequest
from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.near_names import did_you_mean
from octavo.core.prompts import TokensPrompt
from octavo.core.sampling_params import RequestOutputKind, SamplingParams
from octavo.loader.builtin import BUILTIN

if TYPE_CHECKING:
    from octavo.engine.llm_engine import LLMEngine
    from octavo.engine.model_files import ModelFiles

#: No limit but the context length; less random than the full distribution of a small model.
DEFAULTS = {"max_tokens": None, "temperature": 0.7, "top_p": 0.95}

#: Begins and ends a message of several lines.
BLOCK = '"""'

#: Tokens of the context kept free for an answer where ``max_tokens`` names no length; a quarter of it if that is less.
ANSWER_ROOM = 256

#: Parameters that have no meaning for one answer shown as text.
LEAVE_OUT = ("n", "best_of", "logprobs", "prompt_logprobs", "detokenize")

COMMANDS = ("/reset", "/system", "/image", "/exit", "/help")
HELP = """\
/reset         forget the conversation
/system TEXT   set the system message (empty: remove it) and forget the conversation
/image FILE    show the model an image with the next question; several: one after the other
/exit          leave (Ctrl-D too)
Ctrl-C stops an answer.
A line that ends with a backslash goes on in the next one; what stands between \"\"\" and \"\"\" is one message.
"""

EXAMPLE = """\
examples:
  octavo chat smollm2-135m
  octavo chat smollm2-135m --system "Answer in one sentence." --temperature 0
  echo "What is the capital of France?" | octavo chat smollm2-135m

In the conversation:
  """ + HELP.replace("\n", "\n  ").rstrip(" ")


def make_parser() -> Parser:
    """The command's parser."""
    parser = Parser(
        prog="octavo chat",
        usage="octavo chat [options] [MODEL]",
        description="A conversation in the terminal; where standard input is piped, each line is a question.\n"
        "Where the context is full, the oldest turns are dropped, which is said.",
        epilog=EXAMPLE,
    )
    add_verbose_flag(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message: how the model should answer")
    add_lora_flag(parser)
    add_engine_flags(parser, renamed={"seed": "--engine-seed"})
    add_sampling_flags(parser, defaults=DEFAULTS, leave_out=LEAVE_OUT)
    return parser


def run(arguments: Arguments) -> int:
    """Runs the conversation; returns 1 if a question could not be answered."""
    apply_verbosity(arguments)
    lora = read_lora(arguments)
    config = read_engine_config(arguments, take_model(arguments))
    with errors_of_the_call():
        params = read_sampling_params(arguments, DEFAULTS)
    _refuse_base_model(config)
    from octavo.engine.model_files import find_files

    files = find_files(config)
    _check(files, params)
    from octavo.engine.llm_engine import LLMEngine

    engine = LLMEngine(files)
    if lora is not None:
        engine.add_lora(lora)
    params = read_sampling_params(arguments, {**DEFAULTS, **engine.inputs.default_sampling})
    conversation = Conversation(engine, params, arguments.system, lora)
    if sys.stdin.isatty():
        print(f"{config.model}: type a question; /help shows commands", file=sys.stderr)
    for message in _messages():
        if message.startswith("/") and "\n" not in message:
            if not _run_command(conversation, message):
                break
        else:
            conversation.ask(message)
    return EXIT_FAILED if conversation.failures else 0


def _refuse_base_model(config: EngineConfig) -> None:
    """Refuses a built-in model that answers no questions, before it is fetched."""
    model = BUILTIN.get(config.model)
    if model is None:
        return
    chats = ", ".join(name for name, other in BUILTIN.items() if other.chats)
    if model.embeds:
        raise ConfigError(f"{model.name} makes vectors ('octavo embed {model.name} ...'); take a chat model: {chats}")
    if model.transcribes:
        raise ConfigError(
            f"{model.name} makes texts of recordings ('octavo transcribe FILE --model {model.name}'); take a chat "
            f"model: {chats}"
        )
    if model.is_base and config.chat_template is None:
        raise ConfigError(
            f"{model.name} is a base model: it continues texts ('octavo generate {model.name} ...') and answers no "
            f"questions; take a chat model, such as {chats}, or give a template of your own (--chat-template FILE)"
        )


def _check(files: ModelFiles, params: SamplingParams) -> None:
    """Refuses, before the model is loaded, one that has no chat template, and a form that no answer can have.

    Raises:
        ConfigError: see above.
    """
    from octavo.engine.chat_template import choose_template
    from octavo.engine.input_processor import InputProcessor

    try:
        choose_template(files.tokenizer.chat_templates, None, has_tools=False)
        if params.structured_outputs is not None:
            InputProcessor(files).grammars.compile(params.structured_outputs)
    except InvalidRequestError as e:
        raise ConfigError(f"{files.options.model}: {e}") from None


class Conversation:
    """Owns the messages exchanged so far. Invariant: after the system message, questions and answers alternate."""

    def __init__(
        self, engine: LLMEngine, params: SamplingParams, system: str | None, lora: LoRARequest | None = None
    ) -> None:
        self.engine = engine
        self.lora = lora
        self.params = params
        self.failures = 0
        self._turn = 0
        self.reset(system)

    def reset(self, system: str | None) -> None:
        """Starts a new conversation with this system message, or without one."""
        self.system = system
        #: Parts of the next question.
        self.images: list[dict[str, Any]] = []
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []

    def show(self, path: str) -> None:
        """Puts an image before the next question; one that cannot be read is reported."""
        from octavo.cli.image_files import read_images

        try:
            self.images += [{"type": "image", "image": image} for image in read_images(self.engine.inputs, [path])]
        except ConfigError as e:
            self._report(str(e))

    def ask(self, question: str) -> None:
        """Streams the answer to the terminal. A question that fails is reported and not kept.

        Where the context has no room for question and answer, the oldest turns are dropped.
        """
        self._turn += 1
        request_id = f"turn-{self._turn}"
        context = self.engine.inputs.max_model_len
        try:
            messages, prompt, dropped = self._fitted(question, context)
            room, limit = context - len(prompt["prompt_token_ids"]), self.params.max_tokens
            params = msgspec.structs.replace(self.params, output_kind=RequestOutputKind.DELTA)
            if limit is not None and limit > room > 0:
                params = msgspec.structs.replace(params, max_tokens=room)
            self.engine.add_request(request_id, prompt, params, lora_request=self.lora)
        except InvalidRequestError as e:
            self._report(f"{e} (/reset forgets the conversation)")
            return
        if dropped:
            turns = "1 turn at the beginning of the conversation was dropped"
            if dropped > 1:
                turns = f"{dropped} turns at the beginning of the conversation were dropped"
            print(f"octavo: the context of {context} tokens is full: {turns}", file=sys.stderr)
        answer, reason, error = self._stream(request_id)
        if error is not None:
            self._report(error)
            return
        self.messages, self.images = [*messages, {"role": "assistant", "content": answer}], []
        if reason == "length" and (limit is None or limit > room):
            print(f"octavo: the answer is cut: the context of {context} tokens is full", file=sys.stderr)

    def _fitted(self, question: str, context: int) -> tuple[list[dict[str, Any]], TokensPrompt, int]:
        """(messages with the question, their prompt, turns that had to be dropped so that an answer fits)."""
        from octavo.engine.chat_images import chat_prompt

        limit = self.params.max_tokens
        room = min(ANSWER_ROOM, context // 4) if limit is None else min(limit, context // 2)
        first = 1 if self.system else 0
        content = [*self.images, {"type": "text", "text": question}] if self.images else question
        kept = [*self.messages, {"role": "user", "content": content}]
        prompt = chat_prompt(self.engine.inputs, kept)
        dropped = 0
        while len(prompt["prompt_token_ids"]) + room > context and len(kept) > first + 1:
            del kept[first : first + 2]  # a question and its answer
            dropped += 1
            prompt = chat_prompt(self.engine.inputs, kept)
        return kept, prompt, dropped

    def _stream(self, request_id: str) -> tuple[str, str | None, str | None]:
        """Prints until the request ends or Ctrl-C is pressed; returns (answer so far, finish reason, error)."""
        shown = ""
        reason: str | None = None
        error: str | None = None
        try:
            with _interrupts() as interrupts:
                while self.engine.has_unfinished_requests():
                    outputs = self.engine.step()
                    if interrupts:
                        last = self.engine.abort_request(request_id)
                        outputs += [] if last is None else [last]
                    for output in outputs:
                        added = output.outputs[0]
                        reason, error = added.finish_reason, added.error
                        print(added.text, end="", flush=True)
                        shown += added.text
        finally:
            self.engine.abort_request(request_id)
        print(flush=True)
        return shown, reason, error

    def _report(self, message: str) -> None:
        self.failures += 1
        print(f"octavo: error: {message}", file=sys.stderr)


def _run_command(conversation: Conversation, line: str) -> bool:
    """Runs a command like ``/reset``; returns False for ``/exit``."""
    command, _, rest = line.partition(" ")
    if command == "/exit":
        return False
    if command == "/reset":
        conversation.reset(conversation.system)
    elif command == "/system":
        conversation.reset(rest.strip() or None)
    elif command == "/image":
        conversation.show(rest.strip())
    elif command == "/help":
        print(HELP, end="", file=sys.stderr)
    else:
        print(f"unknown command {command}; {did_you_mean(command, COMMANDS, written=str)}", file=sys.stderr)
    return True


def _messages() -> Iterator[str]:
    """What is typed or piped, a message at a time. Ctrl-C at the prompt drops the message."""
    if not sys.stdin.isatty():
        yield from read_messages(_piped_line)
        return
    with suppress(ImportError):
        import readline  # noqa: F401  gives input() line editing and history, where Python has it
    # A shell that starts the program in the background makes it ignore SIGINT; a terminal needs Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while True:
        try:
            yield from read_messages(input)
        except KeyboardInterrupt:
            print(file=sys.stderr)
        else:
            print(file=sys.stderr)
            return


def _piped_line(prompt: str) -> str:
    raw = sys.stdin.buffer.readline()
    if not raw:
        raise EOFError
    return raw.decode("utf-8", errors="replace")


def read_messages(read_line: Callable[[str], str]) -> Iterator[str]:
    """The messages, stripped, without empty ones; of one line, or several as ``HELP`` says.

    ``read_line(prompt)`` gives a line or raises EOFError, which ends a message that was begun.
    """
    while True:
        try:
            line = read_line("> ").strip()
        except EOFError:
            return
        message = _read_block(line[3:], read_line) if line.startswith(BLOCK) else _read_lines(line, read_line)
        if message:
            yield message


def _read_lines(line: str, read_line: Callable[[str], str]) -> str:
    """A line and those that follow it as long as each ends with a backslash."""
    lines = []
    with suppress(EOFError):
        while line.endswith("\\"):
            lines.append(line[:-1])
            line = ""
            line = read_line("... ").rstrip()
    return "\n".join([*lines, line]).strip()


def _read_block(line: str, read_line: Callable[[str], str]) -> str:
    """Lines up to the closing quotes, with their indentation."""
    lines = []
    with suppress(EOFError):
        while not line.endswith(BLOCK):
            lines.append(line)
            line = BLOCK
            line = read_line("... ").rstrip()
    return "\n".join([*lines, line.removesuffix(BLOCK)]).strip("\n")


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Records Ctrl-C instead of interrupting a step; a second one raises KeyboardInterrupt."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)
