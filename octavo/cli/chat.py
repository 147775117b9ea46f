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
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal
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
from octavo.cli.inputs import for_output, is_smart_terminal, notice, read_images
from octavo.cli.parsing import EXIT_FAILED, Arguments, Parser, errors_of_the_call
from octavo.config.engine_config import EngineConfig
from octavo.core.errors import ConfigError, InvalidRequestError, OctavoError, did_you_mean
from octavo.core.files import JSON_ERRORS, read_bounded
from octavo.core.request import LoRARequest, TokensPrompt
from octavo.core.sampling_params import DefaultMaxTokens, RequestOutputKind, SamplingParams, parameters
from octavo.loader.builtin import BUILTIN

if TYPE_CHECKING:
    from octavo.engine.input_processor import InputProcessor
    from octavo.engine.llm_engine import LLMEngine
    from octavo.engine.model_files import ModelFiles


# ---- conversations as files: JSON with ``messages`` as in the OpenAI API; images are file:// URLs

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
    #: Informative: a conversation may continue with any model.
    model: str = ""


def save(path: Path, model: str, messages: list[dict[str, Any]]) -> None:
    """Writes a conversation with mode 0600; replaces an earlier saved conversation, and no other file."""
    if path.exists():
        try:
            _read(path)
        except ConfigError:
            raise ConfigError(f"{path} exists and is no saved conversation; choose another name") from None
    saved = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            content = [
                _Text(part["text"]) if part["type"] == "text" else _Image(_Address(Path(part["path"]).as_uri()))
                for part in content
            ]
        saved.append(_Message(message["role"], content))
    data = msgspec.json.format(msgspec.json.encode(_Saved(saved, model)))
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
    """Reads a conversation and processes its images.

    The first message may be a system message; then questions and answers alternate, and the last is an answer.
    """
    messages = _read(path).messages
    if len(messages) > MAX_MESSAGES:
        raise ConfigError(f"{path} has {len(messages)} messages; at most {MAX_MESSAGES} are loaded")
    first = int(bool(messages) and messages[0].role == "system")
    for i, message in enumerate(messages[first:]):
        role = ("user", "assistant")[i % 2]
        if message.role != role:
            raise ConfigError(f"{path}: message {first + i + 1} must be of the {role}, not of the {message.role}")
    if (len(messages) - first) % 2:
        raise ConfigError(f"{path}: the last question has no answer")
    return [_loaded(message, f"{path}: message {i}", inputs) for i, message in enumerate(messages, 1)]


def _read(path: Path) -> _Saved:
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ConfigError(f"{path} is no file")
    data = read_bounded(path, MAX_BYTES)
    try:
        return msgspec.json.decode(data, type=_Saved)
    except JSON_ERRORS as e:
        raise ConfigError(f"{path} is no saved conversation: {e}") from None


def _loaded(message: _Message, where: str, inputs: InputProcessor) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": message.role, "content": message.content}
    if message.role != "user":
        raise ConfigError(f"{where}: only a question has parts")
    images: list[dict[str, Any]] = []
    texts = []
    for part in message.content:
        if isinstance(part, _Text):
            texts.append(part.text)
            continue
        url = urlsplit(part.image_url.url)
        if url.scheme != "file" or url.netloc:
            raise ConfigError(f"{where}: the URL of an image must begin with file:///, not {part.image_url.url!r:.80}")
        images += image_parts(unquote(url.path), inputs)
    return {"role": "user", "content": [*images, {"type": "text", "text": "\n".join(texts)}]}


def image_parts(name: str, inputs: InputProcessor) -> list[dict[str, Any]]:
    """The content parts of an image file."""
    path = Path(name).expanduser().absolute()
    if path.exists() and not path.is_file():
        raise ConfigError(f"the image {name} is no file")
    return [{"type": "image", "image": image, "path": str(path)} for image in read_images(inputs, [name])]


# ---- the conversation

#: Tokens of the context to keep free for an answer without ``max_tokens``; at most a quarter of the context.
ANSWER_ROOM = 256

Message = dict[str, Any]


class Conversation:
    """The messages so far. Invariant: after the system message, questions and answers alternate."""

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
        self.display = display or plain_display
        self.show_times = show_times
        #: Parameters of the next answer, and the defaults of ``/set``.
        self.params = self.first_params = params
        self.failures = 0
        #: Whether ``/exit`` was typed.
        self.over = False
        self.times: list[AnswerTimes] = []
        #: Image parts of the next question.
        self.images: list[dict[str, Any]] = []
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self._turn = 0

    @property
    def _first(self) -> int:
        """The index of the first question."""
        return int(bool(self.messages) and self.messages[0]["role"] == "system")

    @property
    def system(self) -> str | None:
        return self.messages[0]["content"] if self._first else None

    @property
    def turns(self) -> list[Message]:
        return self.messages[self._first :]

    def set_system(self, system: str | None) -> None:
        """Sets or removes the system message; keeps the turns."""
        self.messages = [*([{"role": "system", "content": system}] if system else []), *self.turns]

    def clear(self) -> None:
        """Begins a new conversation under the same system message."""
        self.messages, self.images = self.messages[: self._first], []

    def undo(self) -> str:
        """Removes the last question and its answer; returns the question's text."""
        content = self._last_question()["content"]
        self.messages = self.messages[:-2]
        return content if isinstance(content, str) else content[-1]["text"]

    def retry(self) -> None:
        """Asks the last question again; the new answer replaces the old one, unless it fails."""
        self._answer(self.messages[:-2], self._last_question()["content"])

    def ask(self, question: str) -> None:
        """Shows the answer while it is generated. A question that fails is reported and not kept.

        If the context is full, the oldest turns are dropped.
        """
        content = [*self.images, {"type": "text", "text": question}] if self.images else question
        if self._answer(self.messages, content):
            self.images = []

    def report(self, message: str) -> None:
        """Prints an error and counts it, for the exit code."""
        self.failures += 1
        notice(f"octavo: error: {message}")

    def _last_question(self) -> Message:
        if not self.turns:
            raise InvalidRequestError("nothing has been asked yet")
        return self.messages[-2]

    def _answer(self, before: list[Message], content: str | list[dict[str, Any]]) -> bool:
        """Answers a question after these messages; returns whether ``messages`` now end with the answer."""
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
        """Drops the oldest turns until an answer fits; returns the messages, their prompt and the dropped turns."""
        from octavo.engine.image_prompts import chat_prompt

        limit = self.params.max_tokens
        is_named = limit is not None and not isinstance(limit, DefaultMaxTokens)
        room = min(limit or 0, context // 2) if is_named else min(ANSWER_ROOM, context // 4)
        prompt = chat_prompt(self.engine.inputs, kept)
        dropped = 0
        while len(prompt["prompt_token_ids"]) + room > context and len(kept) > self._first + 1:
            del kept[self._first : self._first + 2]
            dropped += 1
            prompt = chat_prompt(self.engine.inputs, kept)
        return kept, prompt, dropped

    def _stream(self, request_id: str) -> tuple[str, str | None, str | None, AnswerTimes]:
        """Shows text until the request ends or Ctrl-C; returns (text, finish reason, error, times)."""
        shown: list[str] = []
        reason: str | None = None
        error: str | None = None
        times = AnswerTimes(time.monotonic())
        try:
            with record_interrupts() as interrupts, self.display() as show:
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


@contextmanager
def record_interrupts() -> Iterator[list[int]]:
    """Records the first Ctrl-C, so that it does not interrupt a step; the second raises KeyboardInterrupt."""
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


# ---- commands such as ``/clear``

#: Sampling parameters without meaning in a conversation.
LEAVE_OUT = ("n", "best_of", "logprobs", "logprob_token_ids", "prompt_logprobs", "detokenize")
#: Sampling parameters of ``/set``.
SETTINGS = {name: each.description for name, each in parameters(SamplingParams).items() if name not in LEAVE_OUT}


@dataclass(frozen=True)
class Command:
    name: str
    #: Placeholder of the argument, in brackets if it is optional; empty: no argument.
    takes: str
    help: str
    #: Runs the command with its argument; raises an OctavoError if it fails.
    run: Callable[[Conversation, str], None]
    #: The same command's names in other programs.
    also: tuple[str, ...] = ()


def run_command(conversation: Conversation, line: str) -> None:
    """Runs a command line; a command that fails is reported and changes nothing."""
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
    """Completions of a line's last word (commands, settings, files), each with its description."""
    words = text.split(" ")
    if not text.startswith("/"):
        return []
    if len(words) == 1:
        return [(command.name, command.help) for command in COMMANDS if command.name.startswith(text)]
    if len(words) == 2 and words[0] == "/set":
        return [(name, meaning) for name, meaning in SETTINGS.items() if name.startswith(words[1])]
    if len(words) == 2 and any(command.name == words[0] and command.takes == "FILE" for command in COMMANDS):
        paths = sorted(glob.glob(glob.escape(os.path.expanduser(words[1])) + "*"))
        return [(f"{path}/" if os.path.isdir(path) else path, "") for path in paths]
    return []


def help_text() -> str:
    """The commands, and how to type messages of several lines."""
    left = [f"{command.name} {command.takes}".strip() for command in COMMANDS]
    width = max(map(len, left)) + 2
    lines = (f"{usage:<{width}}{command.help}" for usage, command in zip(left, COMMANDS, strict=True))
    return "\n".join(lines) + HINTS


HINTS = """
Ctrl-C stops an answer; its text so far is kept. Ctrl-D leaves.
A line that ends with a backslash continues on the next one; lines between \"\"\" and \"\"\" are one message.
"""


def _clear(conversation: Conversation, rest: str) -> None:
    conversation.clear()
    notice("a new conversation" + (" under the same system message" if conversation.system else ""))


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
    notice(f"{name} = {_value_text(getattr(conversation.params, name))}")


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
    """Temperature, max_tokens, and the parameters that differ from the defaults of ``SamplingParams``."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
    values = {name: getattr(params, name) for name in SETTINGS}
    shown = [name for name in SETTINGS if values[name] != defaults[name] or name in ("temperature", "max_tokens")]
    return ", ".join(f"{name} {_value_text(values[name])}" for name in shown)


def _value_text(value: Any) -> str:
    if isinstance(value, DefaultMaxTokens):
        return str(value)
    return "none" if value is None else msgspec.json.encode(value).decode()


def _undo(conversation: Conversation, rest: str) -> None:
    first, *more = conversation.undo().splitlines() or [""]
    notice(f"taken back: {first[:70]}{' ...' if more or len(first) > 70 else ''}")


def _save(conversation: Conversation, rest: str) -> None:
    path = Path(_file_name(rest)).expanduser()
    save(path, conversation.model, conversation.messages)
    notice(f"saved as {path}")


def _load(conversation: Conversation, rest: str) -> None:
    messages = load(Path(_file_name(rest)).expanduser(), conversation.engine.inputs)
    conversation.messages, conversation.images = messages, []
    turns = len(conversation.turns) // 2
    notice(f"loaded {'1 turn' if turns == 1 else f'{turns} turns'}")


def _attach_image(conversation: Conversation, rest: str) -> None:
    conversation.images += image_parts(_file_name(rest), conversation.engine.inputs)


def _exit(conversation: Conversation, rest: str) -> None:
    conversation.over = True


def _file_name(text: str) -> str:
    """A file name, plain or quoted as by a terminal on which a file was dropped."""
    try:
        words = shlex.split(text)
    except ValueError:
        return text
    return words[0] if len(words) == 1 else text


COMMANDS = (
    Command("/help", "", "show this", lambda *_: notice(help_text().rstrip()), also=("/?",)),
    Command("/clear", "", "begin a new conversation, under the same system message", _clear, also=("/reset",)),
    Command(
        "/system",
        "[TEXT]",
        "set the system message, from the next answer on (empty: remove it)",
        lambda conversation, text: conversation.set_system(text or None),
    ),
    Command("/set", "[NAME VALUE]", "change a setting, as in /set temperature 0.2; alone: list them", _set),
    Command("/show", "", "show the settings, and how fast answers came", _show),
    Command("/retry", "", "answer the last question anew", lambda conversation, _: conversation.retry()),
    Command("/undo", "", "take the last question and its answer back", _undo),
    Command("/save", "FILE", "write the conversation to a file, as JSON", _save),
    Command("/load", "FILE", "go on with a conversation that was saved", _load),
    Command(
        "/image", "FILE", "show the model an image with the next question; several: one after the other", _attach_image
    ),
    Command("/exit", "", "leave (Ctrl-D too)", _exit, also=("/bye", "/quit")),
)


# ---- the terminal


#: Shows one answer: the context's function takes each piece of its text.
Display = Callable[[], AbstractContextManager[Callable[[str], None]]]


@contextmanager
def plain_display() -> Iterator[Callable[[str], None]]:
    try:
        yield lambda text: print(for_output(text), end="", flush=True)
    finally:
        print(flush=True)


@contextmanager
def markdown_display() -> Iterator[Callable[[str], None]]:
    from rich.console import Console

    from octavo.cli.chat_terminal import GrowingMarkdown

    with GrowingMarkdown(Console(highlight=False)) as shown:
        yield shown.add


def choose_display(*, plain: bool) -> Display:
    """Markdown on a terminal that can draw it, unless ``plain`` or ``NO_COLOR`` (https://no-color.org) is set."""
    return plain_display if plain or os.environ.get("NO_COLOR") or not is_smart_terminal() else markdown_display


def typed_messages(history: HistoryFile | None, completions: Completions) -> Iterator[Typed]:
    """Non-empty messages and commands from the keyboard or a pipe. Ctrl-C drops the message being typed."""
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
    """Turns the terminal's echo off: text typed during an answer appears with the next message."""
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
    """A function that reads a message from the keyboard."""
    if is_smart_terminal():
        from octavo.cli.chat_terminal import Keyboard

        return Keyboard(history, completions).read
    with suppress(ImportError):
        import readline  # noqa: F401  gives input() line editing, where Python has it
    return lambda: read_message(_typed_line)


def _typed_line(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)  # standard output holds the answers alone
    return input()


def _piped_line(prompt: str) -> str:
    if raw := sys.stdin.buffer.readline():
        return raw.decode("utf-8", errors="replace")
    raise EOFError


# ---- the command

#: Defaults of models without defaults of their own. The limit ends answers that repeat themselves.
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
        description="A conversation in the terminal; if standard input is piped, each line is a question.\n"
        "If the context is full, the oldest turns are dropped, with a notice.",
        epilog=EXAMPLE,
    )
    add_verbose_flag(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message: how the model should answer")
    parser.add_argument(
        "--plain", dest="as_written", action="store_true", help="show answers as the model writes them, not as Markdown"
    )
    parser.add_argument("--stats", action="store_true", help="show tokens/s and the time to the first token of answers")
    parser.add_argument("--no-history", action="store_true", help="do not save messages for the arrow keys")
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
    params = read_sampling_params(arguments, with_own_defaults(engine.inputs.default_sampling))
    conversation = Conversation(
        engine, params, arguments.system, lora, model=config.model, display=display, show_times=arguments.stats
    )
    talk(conversation, None if arguments.no_history else HistoryFile(default_path()))
    return EXIT_FAILED if conversation.failures else 0


def with_own_defaults(model: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of a conversation: ``DEFAULTS``, without their sampling if the model has one of its own."""
    is_sampled = any(name in model for name in ("temperature", "top_p", "top_k", "min_p"))
    own = {name: value for name, value in DEFAULTS.items() if name == "max_tokens"} if is_sampled else DEFAULTS
    return {**own, **model}


def _import_beside(module: str, after: float = 0.0) -> None:
    """Imports a module on a thread, ``after`` seconds from now: the import takes some tenths of a second."""
    timer = threading.Timer(after, importlib.import_module, [module])
    timer.daemon = True
    timer.start()


def talk(conversation: Conversation, history: HistoryFile | None) -> None:
    """Answers the messages from the keyboard or a pipe, up to their end or ``/exit``."""
    if sys.stdin.isatty():
        notice(f"{conversation.model}: type a question and press Enter; /help shows commands, Ctrl-D leaves")
        if conversation.display is markdown_display:
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
    """Refuses a built-in model that cannot chat, before it is downloaded."""
    model = BUILTIN.get(config.model)
    if model is None:
        return
    chats = ", ".join(name for name, other in BUILTIN.items() if other.chats)
    if model.embeds or model.transcribes:
        use = f"makes vectors ('octavo embed {model.name} ...')"
        if model.transcribes:
            use = f"makes texts of recordings ('octavo transcribe FILE --model {model.name}')"
        raise ConfigError(f"{model.name} {use}; take a chat model: {chats}")
    if model.is_base and config.chat_template is None:
        raise ConfigError(
            f"{model.name} is a base model: it continues texts ('octavo generate {model.name} ...') and answers no "
            f"questions; take a chat model, such as {chats}, or give a template of your own (--chat-template FILE)"
        )


def _check(files: ModelFiles, params: SamplingParams) -> None:
    """Refuses a model without a chat template, and invalid ``structured_outputs``, before the model is loaded."""
    from octavo.engine.chat_template import choose_template
    from octavo.engine.input_processor import InputProcessor

    try:
        choose_template(files.tokenizer.chat_templates, None, has_tools=False)
        if params.structured_outputs is not None:
            InputProcessor(files).grammars.compile(params.structured_outputs)
    except InvalidRequestError as e:
        raise ConfigError(f"{files.options.model}: {e}") from None
