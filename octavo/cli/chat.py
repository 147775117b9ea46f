"""``octavo chat``: a conversation in the terminal, with streamed answers."""

from __future__ import annotations

import glob
import importlib
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, Protocol
from urllib.parse import unquote, urlsplit

import msgspec

from octavo.cli.chat_lines import (
    AnswerTimes,
    Completions,
    HistoryFile,
    Typed,
    default_path,
    read_message,
    read_messages,
    summary,
)
from octavo.cli.flags import HELP as MEANINGS
from octavo.cli.flags import (
    add_engine_flags,
    add_lora_flag,
    add_sampling_flags,
    add_verbose_flag,
    apply_verbosity,
    read_engine_config,
    read_lora,
    read_sampling_params,
    read_value,
    take_model,
)
from octavo.cli.inputs import for_output, is_smart_terminal, notice
from octavo.cli.parsing import EXIT_FAILED, Arguments, Parser, errors_of_the_call
from octavo.config.engine_config import EngineConfig
from octavo.core.errors import ConfigError, InvalidRequestError, OctavoError, did_you_mean
from octavo.core.files import read_bounded
from octavo.core.request import LoRARequest, TokensPrompt
from octavo.core.sampling_params import DefaultMaxTokens, RequestOutputKind, SamplingParams
from octavo.loader.builtin import BUILTIN

if TYPE_CHECKING:
    from octavo.engine.input_processor import InputProcessor
    from octavo.engine.llm_engine import LLMEngine
    from octavo.engine.model_files import ModelFiles


# Conversations as files: JSON with ``messages`` as the OpenAI API has them; images are named by their address.

MAX_BYTES, MAX_MESSAGES = 16 << 20, 10_000


class _Address(msgspec.Struct):
    url: str


class _Image(msgspec.Struct, tag_field="type", tag="image_url"):
    image_url: _Address


class _Text(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class _Message(msgspec.Struct):
    role: Literal["system", "user", "assistant"]
    content: str | list[_Text | _Image]


class _Saved(msgspec.Struct):
    messages: list[_Message]
    #: For the reader; any model may go on.
    model: str = ""


def save(path: Path, model: str, messages: list[dict[str, Any]]) -> None:
    """Writes a conversation, which its user alone may read; one that was saved there before is replaced."""
    if path.exists():
        try:
            _read(path)
        except ConfigError:
            raise ConfigError(f"{path} is there and is no saved conversation; choose another name") from None
    data = msgspec.json.format(msgspec.json.encode(_Saved([_saved(message) for message in messages], model)))
    if len(data) > MAX_BYTES:
        raise ConfigError(f"the conversation has {len(data)} bytes as a file; at most {MAX_BYTES} can be loaded")
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(data + b"\n")
        partial.replace(path)
    except OSError as e:
        raise ConfigError(f"cannot write {path}: {e.strerror}") from None


def load(path: Path, inputs: InputProcessor) -> list[dict[str, Any]]:
    """The messages of a conversation, with its images as the model takes them: a system message may come first, then
    questions and answers alternate, and an answer is last.
    """
    messages = _read(path).messages
    if len(messages) > MAX_MESSAGES:
        raise ConfigError(f"{path} has {len(messages)} messages; at most {MAX_MESSAGES} are loaded")
    first = int(bool(messages) and messages[0].role == "system")
    for i, message in enumerate(messages[first:]):
        wanted = ("user", "assistant")[i % 2]
        if message.role != wanted:
            raise ConfigError(f"{path}: message {first + i + 1} must be of the {wanted}, not of the {message.role}")
    if (len(messages) - first) % 2:
        raise ConfigError(f"{path}: the last question has no answer")
    return [_loaded(message, f"{path}: message {i}", inputs) for i, message in enumerate(messages, 1)]


def _read(path: Path) -> _Saved:
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ConfigError(f"{path} is no file")
    data = read_bounded(path, MAX_BYTES)
    try:
        return msgspec.json.decode(data, type=_Saved)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ConfigError(f"{path} is no saved conversation: {e}") from None


def _saved(message: dict[str, Any]) -> _Message:
    content = message["content"]
    if not isinstance(content, str):
        content = [
            _Text(part["text"]) if part["type"] == "text" else _Image(_Address(Path(part["path"]).as_uri()))
            for part in content
        ]
    return _Message(message["role"], content)


def _loaded(message: _Message, where: str, inputs: InputProcessor) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": message.role, "content": message.content}
    if message.role != "user":
        raise ConfigError(f"{where}: only a question has parts")
    parts = [part for image in message.content if isinstance(image, _Image) for part in _image(image, where, inputs)]
    texts = [part.text for part in message.content if isinstance(part, _Text)]
    return {"role": "user", "content": [*parts, {"type": "text", "text": "\n".join(texts)}]}


def _image(image: _Image, where: str, inputs: InputProcessor) -> list[dict[str, Any]]:
    url = urlsplit(image.image_url.url)
    if url.scheme != "file" or url.netloc:
        raise ConfigError(f"{where}: the address of an image must begin with file:///, not {image.image_url.url!r:.80}")
    return image_parts(unquote(url.path), inputs)


def image_parts(name: str, inputs: InputProcessor) -> list[dict[str, Any]]:
    """The part of a message that is the image in this file, as a list."""
    from octavo.cli.inputs import read_images

    path = Path(name).expanduser().absolute()
    if path.exists() and not path.is_file():
        raise ConfigError(f"the image {name} is no file")
    return [{"type": "image", "image": image, "path": str(path)} for image in read_images(inputs, [name])]


# The conversation of ``octavo chat``: its messages, and how a question gets its answer.

#: Tokens of the context kept free for an answer where nobody has named ``max_tokens``; a quarter of it if that is less.
ANSWER_ROOM = 256

Message = dict[str, Any]


class Conversation:
    """Owns the messages exchanged so far. Invariant: after the system message, questions and answers alternate."""

    def __init__(
        self,
        engine: LLMEngine,
        params: SamplingParams,
        system: str | None,
        lora: LoRARequest | None = None,
        *,
        model: str = "",
        display: Display | None = None,
        show_times: bool = False,
    ) -> None:
        self.engine = engine
        self.lora = lora
        self.model = model
        self.display = display or PlainDisplay()
        self.show_times = show_times
        #: What the next answer is sampled with, and what the first one was.
        self.params = self.first_params = params
        self.failures = 0
        #: Whether no further question will come.
        self.over = False
        #: The answers since the program began.
        self.times: list[AnswerTimes] = []
        #: Parts of the next question.
        self.images: list[dict[str, Any]] = []
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self._turn = 0

    @property
    def system(self) -> str | None:
        return self.messages[0]["content"] if self._first else None

    @property
    def turns(self) -> list[Message]:
        return self.messages[self._first :]

    @property
    def _first(self) -> int:
        return int(bool(self.messages) and self.messages[0]["role"] == "system")

    def set_system(self, system: str | None) -> None:
        """Sets or removes the system message; the turns stay."""
        self.messages = [*([{"role": "system", "content": system}] if system else []), *self.turns]

    def clear(self) -> None:
        """Begins a new conversation under the same system message."""
        self.messages, self.images = self.messages[: self._first], []

    def replace(self, messages: list[Message]) -> None:
        """Goes on with another conversation, in which a system message may come first and turns alternate."""
        self.messages, self.images = messages, []

    def undo(self) -> str:
        """Takes the last question back, with its answer: its text."""
        question = self._last_question()
        self.messages = self.messages[:-2]
        return question_text(question)

    def retry(self) -> None:
        """Asks the last question again; its answer takes the place of the one before, unless it fails."""
        question = self._last_question()
        self._answer(self.messages[:-2], question["content"])

    def ask(self, question: str) -> None:
        """Shows the answer as it grows. A question that fails is reported and not kept.

        Where the context has no room for question and answer, the oldest turns are dropped.
        """
        content = [*self.images, {"type": "text", "text": question}] if self.images else question
        if self._answer(self.messages, content):
            self.images = []

    def report(self, message: str) -> None:
        """Says that something failed, which the exit code will say too."""
        self.failures += 1
        notice(f"octavo: error: {message}")

    def _last_question(self) -> Message:
        if not self.turns:
            raise InvalidRequestError("nothing has been asked yet")
        return self.messages[-2]

    def _answer(self, before: list[Message], content: str | list[dict[str, Any]]) -> bool:
        """Answers a question after these messages; whether it did, and the messages are those with the answer."""
        self._turn += 1
        request_id = f"turn-{self._turn}"
        context = self.engine.inputs.max_model_len
        try:
            messages, prompt, dropped = self._fitted([*before, {"role": "user", "content": content}], context)
            room, limit = context - len(prompt["prompt_token_ids"]), self.params.max_tokens
            params = msgspec.structs.replace(self.params, output_kind=RequestOutputKind.DELTA)
            if limit is not None and limit > room > 0:
                params = msgspec.structs.replace(params, max_tokens=room)
            self.engine.add_request(request_id, prompt, params, lora_request=self.lora)
        except InvalidRequestError as e:
            self.report(f"{e} (/clear forgets the conversation)")
            return False
        if dropped:
            turns = "1 turn at the beginning of the conversation was dropped"
            if dropped > 1:
                turns = f"{dropped} turns at the beginning of the conversation were dropped"
            notice(f"octavo: the context of {context} tokens is full: {turns}")
        answer, reason, error, times = self._stream(request_id)
        if error is not None:
            self.report(error)
            return False
        times.num_prompt_tokens = len(prompt["prompt_token_ids"])
        self.times.append(times)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        if reason == "length" and (limit is None or limit > room):
            notice(f"octavo: the answer is cut: the context of {context} tokens is full")
        elif reason == "length" and isinstance(limit, DefaultMaxTokens):
            notice(f"octavo: the answer is cut at {limit} tokens (/set max_tokens none lifts this limit)")
        if self.show_times:
            notice(f"[{times}]")
        return True

    def _fitted(self, kept: list[Message], context: int) -> tuple[list[Message], TokensPrompt, int]:
        """(the messages, their prompt, turns that had to be dropped so that an answer fits)."""
        from octavo.engine.image_prompts import chat_prompt

        limit = self.params.max_tokens
        is_named = limit is not None and not isinstance(limit, DefaultMaxTokens)
        room = min(limit or 0, context // 2) if is_named else min(ANSWER_ROOM, context // 4)
        first = self._first
        prompt = chat_prompt(self.engine.inputs, kept)
        dropped = 0
        while len(prompt["prompt_token_ids"]) + room > context and len(kept) > first + 1:
            del kept[first : first + 2]  # a question and its answer
            dropped += 1
            prompt = chat_prompt(self.engine.inputs, kept)
        return kept, prompt, dropped

    def _stream(self, request_id: str) -> tuple[str, str | None, str | None, AnswerTimes]:
        """Shows text until the request ends or Ctrl-C is pressed; (text, finish reason, error, times)."""
        shown: list[str] = []
        reason: str | None = None
        error: str | None = None
        times = AnswerTimes(time.monotonic())
        try:
            with interrupts_recorded() as interrupts, self.display.answer() as show:
                while self.engine.has_unfinished_requests():
                    outputs = self.engine.step()
                    if interrupts:
                        last = self.engine.abort_request(request_id)
                        outputs += [] if last is None else [last]
                    for output in outputs:
                        added = output.outputs[0]
                        reason, error = added.finish_reason, added.error
                        times.add(len(added.token_ids), output.num_cached_tokens)
                        shown.append(added.text)
                        show(added.text)
        finally:
            self.engine.abort_request(request_id)
        return "".join(shown), reason, error, times


def question_text(message: Message) -> str:
    content = message["content"]
    return content if isinstance(content, str) else content[-1]["text"]


@contextmanager
def interrupts_recorded() -> Iterator[list[int]]:
    """Records Ctrl-C instead of interrupting a step; a second one raises KeyboardInterrupt."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    before: Callable[[int, FrameType | None], Any] | int | None = signal.signal(signal.SIGINT, handle)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)


# The commands of a conversation, as ``/help`` lists them.

#: Parameters that have no meaning for one answer shown as text.
LEAVE_OUT = ("n", "best_of", "logprobs", "logprob_token_ids", "prompt_logprobs", "detokenize")
#: Those that ``/set`` takes.
SETTINGS = {name: meaning for name, meaning in MEANINGS.items() if name not in LEAVE_OUT}


@dataclass(frozen=True)
class Command:
    name: str
    #: What follows the name; in brackets: what may.
    takes: str
    help: str
    #: Does it, with what follows the name; raises an OctavoError if it cannot.
    run: Callable[[Conversation, str], None]
    #: Other names, which other programs have taught.
    also: tuple[str, ...] = ()


def run_command(conversation: Conversation, line: str) -> None:
    """Runs a command like ``/clear``; what fails is reported, and changes nothing."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    command = next((command for command in COMMANDS if name in (command.name, *command.also)), None)
    if command is None:
        hint = did_you_mean(name, [command.name for command in COMMANDS], "/help lists the commands", written=str)
        conversation.report(f'unknown command {name}; {hint} (a message that begins with /: """{name} ...""")')
    elif rest and not command.takes:
        conversation.report(f"{command.name} takes nothing more, not {rest!r}")
    elif not rest and command.takes and not command.takes.startswith("["):
        conversation.report(f"{command.name} needs {command.takes}")
    else:
        try:
            command.run(conversation, rest)
        except OctavoError as e:
            conversation.report(str(e))


def completions(text: str) -> list[tuple[str, str]]:
    """What may stand where the last word of a line stands, each with what it is: commands, settings, files."""
    words = text.split(" ")
    if not text.startswith("/"):
        return []
    if len(words) == 1:
        return [(command.name, command.help) for command in COMMANDS if command.name.startswith(text)]
    if len(words) == 2 and words[0] == "/set":
        return [(name, meaning) for name, meaning in SETTINGS.items() if name.startswith(words[1])]
    if len(words) == 2 and any(command.name == words[0] and command.takes == "FILE" for command in COMMANDS):
        return [(path, "") for path in _files(words[1])]
    return []


def help_text() -> str:
    """The commands, and how to type messages of several lines."""
    left = {command: f"{command.name} {command.takes}".strip() for command in COMMANDS}
    width = max(map(len, left.values())) + 2
    lines = [f"{left[command]:<{width}}{command.help}" for command in COMMANDS]
    return "\n".join(lines) + HINTS


HINTS = """
Ctrl-C stops an answer; what was said stays. Ctrl-D leaves.
A line that ends with a backslash goes on in the next one; what stands between \"\"\" and \"\"\" is one message.
"""


def _help(conversation: Conversation, rest: str) -> None:
    notice(help_text().rstrip())


def _clear(conversation: Conversation, rest: str) -> None:
    conversation.clear()
    notice("a new conversation" + (" under the same system message" if conversation.system else ""))


def _system(conversation: Conversation, rest: str) -> None:
    conversation.set_system(rest or None)


def _set(conversation: Conversation, rest: str) -> None:
    name, _, text = rest.partition(" ")
    name, text = name.lstrip("-").replace("-", "_"), text.strip()
    if not name:
        width = max(map(len, SETTINGS)) + 2
        notice("\n".join(f"{each:<{width}}{meaning}" for each, meaning in SETTINGS.items()))
        return
    if name not in SETTINGS:
        raise InvalidRequestError(f"unknown setting {name!r}; {did_you_mean(name, SETTINGS, '/set lists them')}")
    if text:
        value = getattr(conversation.first_params, name) if text == "default" else read_value(name, text)
        params = msgspec.structs.replace(conversation.params, **{name: value})
        params.validate()
        if name == "structured_outputs" and params.structured_outputs is not None:
            conversation.engine.inputs.grammars.compile(params.structured_outputs)
        conversation.params = params
    notice(f"{name} = {_written(getattr(conversation.params, name))}")


def _show(conversation: Conversation, rest: str) -> None:
    inputs, turns = conversation.engine.inputs, len(conversation.turns) // 2
    last = conversation.times[-1] if conversation.times else None
    rows = {
        "context": f"{inputs.max_model_len} tokens"
        + (f", {last.num_prompt_tokens + last.num_tokens} of them at the last answer" if last else ""),
        "system": conversation.system or "none",
        "turns": f"{turns}"
        + (f"; images for the next question: {len(conversation.images)}" if conversation.images else ""),
        "settings": settings_text(conversation.params),
        "last answer": str(last) if last else "none",
        "in all": summary(conversation.times),
    }
    notice("\n".join(f"{name:<13}{value}" for name, value in rows.items()))


def settings_text(params: SamplingParams) -> str:
    return ", ".join(f"{name} {_written(value)}" for name, value in _changed(params))


def _changed(params: SamplingParams) -> list[tuple[str, Any]]:
    """What is sampled with, where it is not what all are without a word."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
    values = [(name, getattr(params, name)) for name in SETTINGS]
    return [(name, value) for name, value in values if value != defaults[name] or name in ("temperature", "max_tokens")]


def _written(value: Any) -> str:
    if isinstance(value, DefaultMaxTokens):
        return str(value)
    return "none" if value is None else msgspec.json.encode(value).decode()


def _retry(conversation: Conversation, rest: str) -> None:
    conversation.retry()


def _undo(conversation: Conversation, rest: str) -> None:
    question = conversation.undo()
    first, *more = question.splitlines() or [""]
    notice(f"taken back: {first[:70]}{' ...' if more or len(first) > 70 else ''}")


def _save(conversation: Conversation, rest: str) -> None:
    path = _path(rest)
    save(path, conversation.model, conversation.messages)
    notice(f"saved as {path}")


def _load(conversation: Conversation, rest: str) -> None:
    conversation.replace(load(_path(rest), conversation.engine.inputs))
    turns = len(conversation.turns) // 2
    notice(f"loaded {'1 turn' if turns == 1 else f'{turns} turns'}")


def _attach_image(conversation: Conversation, rest: str) -> None:
    conversation.images += image_parts(_file_name(rest), conversation.engine.inputs)


def _exit(conversation: Conversation, rest: str) -> None:
    conversation.over = True


def _path(text: str) -> Path:
    return Path(_file_name(text)).expanduser()


def _file_name(text: str) -> str:
    """A name as it is typed, or as terminals write a file that is dropped on them: quoted, or with backslashes."""
    try:
        words = shlex.split(text)
    except ValueError:
        return text
    return words[0] if len(words) == 1 else text


def _files(begin: str) -> list[str]:
    """Paths that begin so; folders end with a slash."""
    found = sorted(glob.glob(glob.escape(os.path.expanduser(begin)) + "*"))
    return [f"{path}/" if os.path.isdir(path) else path for path in found]


COMMANDS = (
    Command("/help", "", "show this", _help, also=("/?",)),
    Command("/clear", "", "begin a new conversation, under the same system message", _clear, also=("/reset",)),
    Command("/system", "[TEXT]", "set the system message, from the next answer on (empty: remove it)", _system),
    Command("/set", "[NAME VALUE]", "change a setting, as in /set temperature 0.2; alone: list them", _set),
    Command("/show", "", "show the settings, and how fast answers came", _show),
    Command("/retry", "", "answer the last question anew", _retry),
    Command("/undo", "", "take the last question and its answer back", _undo),
    Command("/save", "FILE", "write the conversation to a file, as JSON", _save),
    Command("/load", "FILE", "go on with a conversation that was saved", _load),
    Command(
        "/image", "FILE", "show the model an image with the next question; several: one after the other", _attach_image
    ),
    Command("/exit", "", "leave (Ctrl-D too)", _exit, also=("/bye", "/quit")),
)


# ---- the terminal


class Display(Protocol):
    """A way to show answers."""

    def answer(self) -> AbstractContextManager[Callable[[str], None]]:
        """Within it an answer is shown: the function takes what is added to it."""


class PlainDisplay:
    """Shows text as it comes: as ``for_output`` says."""

    @contextmanager
    def answer(self) -> Iterator[Callable[[str], None]]:
        def show(text: str) -> None:
            print(for_output(text), end="", flush=True)

        try:
            yield show
        finally:
            print(flush=True)


def choose_display(*, plain: bool) -> Display:
    """Markdown for a terminal, unless it should be plain or ``NO_COLOR`` is set (https://no-color.org); else text."""
    if plain or os.environ.get("NO_COLOR") or not is_smart_terminal():
        return PlainDisplay()
    return MarkdownDisplay()


class MarkdownDisplay:
    """Shows answers as Markdown on a terminal."""

    @contextmanager
    def answer(self) -> Iterator[Callable[[str], None]]:
        from rich.console import Console

        from octavo.cli.chat_terminal import GrowingMarkdown

        with GrowingMarkdown(Console(highlight=False)) as shown:
            yield shown.add


def typed_messages(history: HistoryFile | None, completions: Completions) -> Iterator[Typed]:
    """Messages and commands, stripped, without empty ones. Ctrl-C while one is typed drops it.

    Args:
        history: what was typed in earlier conversations; None: nothing is remembered.
        completions: what Tab offers.
    """
    if not sys.stdin.isatty():
        yield from read_messages(_piped_line)
        return
    read = _keyboard(history, completions)
    # A shell that starts the program in the background makes it ignore SIGINT; a terminal needs Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while True:
        try:
            typed = read()
        except KeyboardInterrupt:
            print("(Ctrl-D or /exit leaves)", file=sys.stderr)
        except EOFError:
            print(file=sys.stderr)
            return
        else:
            yield typed


@contextmanager
def keys_unseen() -> Iterator[None]:
    """What is typed within it does not appear between the lines of an answer, but where the next message is typed."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    silent = list(before)
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def _keyboard(history: HistoryFile | None, completions: Completions) -> Callable[[], Typed]:
    """Reads a message of a person."""
    if is_smart_terminal():
        from octavo.cli.chat_terminal import Keyboard

        return Keyboard(history, completions).read
    with suppress(ImportError):
        import readline  # noqa: F401  gives input() line editing, where Python has it
    return lambda: read_message(_typed_line)


def _typed_line(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)  # what goes into a file is the answers
    return input()


def _piped_line(prompt: str) -> str:
    raw = sys.stdin.buffer.readline()
    if not raw:
        raise EOFError
    return raw.decode("utf-8", errors="replace")


# ---- the command

#: Where the model has no defaults of its own: less random than the full distribution of a small model, and an end to
#: answers that would repeat themselves up to the end of the context, with room for some reasoning.
DEFAULTS = {"max_tokens": DefaultMaxTokens(2048), "temperature": 0.7, "top_p": 0.95}

EXAMPLE = """\
examples:
  octavo chat smollm2-135m
  octavo chat smollm2-135m --system "Answer in one sentence." --temperature 0
  echo "What is the capital of France?" | octavo chat smollm2-135m

In the conversation:
  """ + help_text().replace("\n", "\n  ").rstrip(" ")


def make_parser() -> Parser:
    parser = Parser(
        prog="octavo chat",
        usage="octavo chat [options] [MODEL]",
        description="A conversation in the terminal; where standard input is piped, each line is a question.\n"
        "Where the context is full, the oldest turns are dropped, which is said.",
        epilog=EXAMPLE,
    )
    add_verbose_flag(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message: how the model should answer")
    parser.add_argument(
        "--plain", dest="as_written", action="store_true", help="show answers as the model writes them, not as Markdown"
    )
    parser.add_argument("--stats", action="store_true", help="show tokens/s and the time to the first token of answers")
    parser.add_argument("--no-history", action="store_true", help="do not remember what is typed for the arrow keys")
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

    display = choose_display(plain=arguments.as_written)
    if sys.stdin.isatty() and is_smart_terminal():
        _import_beside("octavo.cli.chat_terminal")  # while weights are read
    engine = LLMEngine(files)
    if lora is not None:
        engine.add_lora(lora)
    params = read_sampling_params(arguments, {**DEFAULTS, **engine.inputs.default_sampling})
    conversation = Conversation(
        engine, params, arguments.system, lora, model=config.model, display=display, show_times=arguments.stats
    )
    talk(conversation, None if arguments.no_history else HistoryFile(default_path()))
    return EXIT_FAILED if conversation.failures else 0


def _import_beside(module: str, after: float = 0.0) -> None:
    """Imports a module on a thread, after so many seconds: it takes some tenths of a second."""
    timer = threading.Timer(after, importlib.import_module, [module])
    timer.daemon = True
    timer.start()


def talk(conversation: Conversation, history: HistoryFile | None) -> None:
    """Answers what is typed or piped, up to its end or ``/exit``."""
    if sys.stdin.isatty():
        notice(f"{conversation.model}: {settings_text(conversation.params)}")
        notice("type a question; /help shows commands")
        if isinstance(conversation.display, MarkdownDisplay):
            _import_beside("octavo.cli.chat_terminal", after=0.3)  # while the first question is typed
    for typed in typed_messages(history, completions):
        with keys_unseen():
            if typed.is_command:
                run_command(conversation, typed.text)
            else:
                conversation.ask(typed.text)
        if conversation.over:
            break


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
    """Refuses, before the model is loaded, one that has no chat template, and a form that no answer can have."""
    from octavo.engine.chat_template import choose_template
    from octavo.engine.input_processor import InputProcessor

    try:
        choose_template(files.tokenizer.chat_templates, None, has_tools=False)
        if params.structured_outputs is not None:
            InputProcessor(files).grammars.compile(params.structured_outputs)
    except InvalidRequestError as e:
        raise ConfigError(f"{files.options.model}: {e}") from None
