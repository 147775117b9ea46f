"""``octavo chat``: a conversation in the terminal, with streamed answers."""

from __future__ import annotations

import difflib
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from octavo.cli.engine_flags import add_engine_flags, add_verbose_flag, apply_verbosity, read_engine_config
from octavo.cli.parsing import EXIT_FAILED, Arguments, Parser, refuse_words, take_model
from octavo.cli.sampling_flags import add_sampling_flags, read_sampling_params
from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.engine.llm_engine import LLMEngine

#: No limit but the context length; less random than the full distribution of a small model.
DEFAULTS = {"max_tokens": None, "temperature": 0.7, "top_p": 0.95}

#: Parameters that have no meaning for one answer shown as text.
LEAVE_OUT = ("n", "best_of", "logprobs", "prompt_logprobs", "detokenize")

COMMANDS = ("/reset", "/system", "/exit", "/help")
HELP = """\
/reset         forget the conversation
/system TEXT   set the system message (empty: remove it) and forget the conversation
/exit          leave (Ctrl-D too)
Ctrl-C stops an answer.
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
        usage="octavo chat [options] MODEL",
        description="A conversation in the terminal; where standard input is piped, each line is a question.",
        epilog=EXAMPLE,
    )
    add_verbose_flag(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message: how the model should answer")
    add_engine_flags(parser, renamed={"seed": "--engine-seed"})
    add_sampling_flags(parser, defaults=DEFAULTS, leave_out=LEAVE_OUT)
    return parser


def run(arguments: Arguments) -> int:
    """Runs the conversation; returns 1 if a question could not be answered."""
    apply_verbosity(arguments)
    config = read_engine_config(arguments, take_model(arguments))
    refuse_words(arguments)
    try:
        params = read_sampling_params(arguments, DEFAULTS)
    except InvalidRequestError as e:
        raise ConfigError(str(e)) from None
    from octavo.engine.llm_engine import LLMEngine

    conversation = Conversation(LLMEngine.from_config(config), params, arguments.system)
    if sys.stdin.isatty():
        print(f"{config.model}: type a question; /help shows commands", file=sys.stderr)
    for line in _lines():
        if line.startswith("/"):
            if not _run_command(conversation, line):
                break
        elif line:
            conversation.ask(line)
    return EXIT_FAILED if conversation.failures else 0


class Conversation:
    """Owns the messages exchanged so far. Invariant: after the system message, questions and answers alternate."""

    def __init__(self, engine: LLMEngine, params: SamplingParams, system: str | None) -> None:
        self.engine = engine
        self.params = params
        self.failures = 0
        self._turn = 0
        self.reset(system)

    def reset(self, system: str | None) -> None:
        """Starts a new conversation with this system message, or without one."""
        self.system = system
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []

    def ask(self, question: str) -> None:
        """Streams the answer to the terminal. A question that fails is reported and not kept."""
        messages = [*self.messages, {"role": "user", "content": question}]
        self._turn += 1
        request_id = f"turn-{self._turn}"
        try:
            self.engine.add_request(request_id, self.engine.tokenizer.encode_chat(messages), self.params)
        except InvalidRequestError as e:
            self._report(f"{e} (/reset forgets the conversation)")
            return
        answer, error = self._stream(request_id)
        if error is not None:
            self._report(error)
        else:
            self.messages = [*messages, {"role": "assistant", "content": answer}]

    def _stream(self, request_id: str) -> tuple[str, str | None]:
        """Prints until the request ends or Ctrl-C is pressed; returns (answer so far, error)."""
        shown = ""
        error = None
        try:
            with _interrupts() as interrupts:
                while self.engine.has_unfinished_requests():
                    outputs = self.engine.step()
                    if interrupts:
                        last = self.engine.abort_request(request_id)
                        outputs += [] if last is None else [last]
                    for output in outputs:
                        added, error = output.outputs[0].text, output.outputs[0].error
                        print(added, end="", flush=True)
                        shown += added
        finally:
            self.engine.abort_request(request_id)
        print(flush=True)
        return shown, error

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
    elif command == "/help":
        print(HELP, end="", file=sys.stderr)
    else:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(COMMANDS)}"
        print(f"unknown command {command}; {hint}", file=sys.stderr)
    return True


def _lines() -> Iterator[str]:
    """The input lines, stripped. Ctrl-C at the prompt drops the line."""
    if not sys.stdin.isatty():
        for raw in sys.stdin.buffer:
            yield raw.decode("utf-8", errors="replace").strip()
        return
    with suppress(ImportError):
        import readline  # noqa: F401  gives input() line editing and history, where Python has it
    # A shell that starts the program in the background makes it ignore SIGINT; a terminal needs Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while True:
        try:
            yield input("> ").strip()
        except KeyboardInterrupt:
            print(file=sys.stderr)
        except EOFError:
            print(file=sys.stderr)
            return


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
