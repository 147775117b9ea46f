"""What ``octavo chat`` shows: answers as they grow."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, ClassVar, NamedTuple, Protocol, Self

from markdown_it import MarkdownIt
from markdown_it.token import Token
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.shortcuts import CompleteStyle
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.live import Live
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement, TableDataElement
from rich.segment import Segment
from rich.syntax import Syntax
from rich.text import Text

from octavo.cli.inputs import for_output, is_smart_terminal, notice, printable


class Display(Protocol):
    """A way to show answers."""

    def answer(self) -> AbstractContextManager[Callable[[str], None]]:
        """Within it an answer is shown: the function takes what is added to it."""


class PlainDisplay:
    """Shows text as it comes: as ``for_output`` says."""

    @contextmanager
    def answer(self) -> Iterator[Callable[[str], None]]:
        """See ``Display``."""

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
        """See ``Display``."""
        from rich.console import Console

        with GrowingMarkdown(Console(highlight=False)) as shown:
            yield shown.add


# The file of what was typed to ``octavo chat``: a text on a line, as JSON, oldest first.

#: Texts that are kept, and most characters of one; a longer one is not kept.
MAX_TEXTS, MAX_CHARACTERS = 1000, 20_000
#: Bytes of the file that are read, from its end.
_MAX_BYTES = 8 << 20


def default_path() -> Path:
    """A file in the user's folder for what programs remember: below ``XDG_STATE_HOME`` where it is set."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "octavo" / "chat_history.jsonl"
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "octavo" / "chat_history.jsonl"


class HistoryFile:
    """Owns the file, which only its user may read, and which several conversations may share.

    Invariant: it holds at most ``MAX_TEXTS`` when a conversation begins. Where it cannot be used, ``failure`` says why,
    and nothing more is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failure: str | None = None

    def load(self) -> list[str]:
        """The texts, oldest first; the oldest of too many leave the file, and lines that are none are skipped."""
        try:
            with self._opened() as file:
                lines = _last_lines(file)
        except OSError as e:
            self._fail(e)
            return []
        return [text for line in lines if (text := _text(line)) is not None]

    def append(self, text: str) -> None:
        """Adds a text, unless it is too long."""
        if self.failure is not None or len(text) > MAX_CHARACTERS:
            return
        try:
            with self._opened() as file:
                file.write(json.dumps(text).encode() + b"\n")
        except OSError as e:
            self._fail(e)

    @contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        """The file for this process alone; what is written is appended."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self.path, "a+b", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            os.fchmod(file.fileno(), 0o600)  # it may come from elsewhere
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file

    def _fail(self, error: OSError) -> None:
        self.failure = f"what is typed is not remembered: {self.path}: {error.strerror}"


def _last_lines(file: IO[bytes]) -> list[bytes]:
    """The last lines of the file, to which it is cut."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _MAX_BYTES))
    lines = file.read().splitlines(keepends=True)
    if len(lines) > MAX_TEXTS or size > _MAX_BYTES:
        lines = lines[-MAX_TEXTS:]
        file.truncate(0)
        file.write(b"".join(lines))
    return lines


def _text(line: bytes) -> str | None:
    try:
        text = json.loads(line)
    except ValueError:
        return None
    return text if isinstance(text, str) else None


# Messages of lines: of one, or of several, as they are typed.

#: Begins and ends a message of several lines.
BLOCK = '"""'

PROMPT, CONTINUED = "> ", "... "

#: What may stand where the word stands that is typed, after the words before it, each with what it is.
Completions = Callable[[str], list[tuple[str, str]]]


class Typed(NamedTuple):
    """A message, or a command such as ``/clear``."""

    text: str
    is_command: bool = False


def read_messages(read_line: Callable[[str], str]) -> Iterator[Typed]:
    """The messages of lines; see ``read_message``."""
    with suppress(EOFError):
        while True:
            yield read_message(read_line)


def read_message(read_line: Callable[[str], str]) -> Typed:
    """The next message that is not empty: a line, lines between triple quotes, or lines of which all but the last end
    with a backslash.

    ``read_line(prompt)`` gives a line or raises EOFError, which ends a message that was begun.

    Raises:
        EOFError: no message was begun.
    """
    while True:
        line = read_line(PROMPT).strip()
        lines = [line]
        with suppress(EOFError):
            if line.startswith(BLOCK):
                line = line[len(BLOCK) :]
                while not line.endswith(BLOCK):
                    lines.append(line := read_line(CONTINUED).rstrip())
            else:
                while line.endswith("\\"):
                    lines[-1] = line[:-1]
                    lines.append(line := read_line(CONTINUED).rstrip())
        typed = as_typed("\n".join(lines))
        if typed.text:
            return typed


def is_open(text: str) -> bool:
    """Whether triple quotes are open at the end of what was typed."""
    text = text.strip()
    return text.startswith(BLOCK) and not text[len(BLOCK) :].endswith(BLOCK)


def as_typed(text: str) -> Typed:
    """What was typed, without quotes around it, and with them never a command."""
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace").strip()  # bytes that are no UTF-8
    if text.startswith(BLOCK):
        return Typed(text[len(BLOCK) :].removesuffix(BLOCK).strip("\n"))
    return Typed(text, text.startswith("/") and "\n" not in text)


# What is typed or piped to ``octavo chat``, a message at a time.


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


# A message typed on a terminal: lines that can be edited, earlier ones, completion.


class Keyboard:
    """Reads messages from the terminal. What is pasted is one message, whatever lines it has."""

    def __init__(self, history: HistoryFile | None, completions: Completions) -> None:
        output = create_output()
        if isinstance(output, Vt100_Output):
            # Terminals would be asked where the cursor is, which only menus need: an answer that comes late, after
            # the message, would be taken for typed.
            output.enable_cpr = False
        self._history, self._warned = history, False
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation=CONTINUED,
            history=None if history is None else _History(history),
            key_bindings=_bindings(),
            completer=_Completer(completions),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            output=output,
        )

    def read(self) -> Typed:
        """The next message that is not empty.

        Raises:
            EOFError: Ctrl-D was pressed.
            KeyboardInterrupt: Ctrl-C was.
        """
        while True:
            typed = as_typed(self._session.prompt())
            if self._history is not None and self._history.failure and not self._warned:
                notice(f"octavo: {self._history.failure}")
                self._warned = True
            if typed.text:
                return typed


class _History(History):
    """A ``HistoryFile`` for prompt_toolkit."""

    def __init__(self, file: HistoryFile) -> None:
        super().__init__()
        self._file = file

    def load_history_strings(self) -> Iterable[str]:
        """The texts, newest first."""
        return reversed(self._file.load())

    def store_string(self, string: str) -> None:
        """Adds a text."""
        self._file.append(string)


class _Completer(Completer):
    """Completes the word before the cursor, in a message of one line."""

    def __init__(self, completions: Completions) -> None:
        self._completions = completions

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """What may stand there."""
        text = document.text_before_cursor
        if "\n" in document.text:
            return
        word = text.rpartition(" ")[2]
        for full, what in self._completions(text):
            yield Completion(full, start_position=-len(word), display_meta=what)


def _bindings() -> KeyBindings:
    """Enter ends a message where it is complete; Alt-Enter never does."""
    bindings = KeyBindings()

    @bindings.add("enter", filter=has_focus(DEFAULT_BUFFER))
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.insert_text("\n")
        elif buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter", filter=has_focus(DEFAULT_BUFFER))
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


# Markdown on a terminal while it is written.

#: Seconds between two drawings, and how many times longer than a drawing they are apart at least: tokens go first.
_PAUSE, _SHARE = 0.08, 9
#: Columns that a list or quote within another takes at most, and how deep they are drawn: at 20, the parser drops text.
_INDENT, _DEPTH = 4, 15
#: Without HTML and definitions of links, which a terminal does not show: both are text.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable("reference")


class Piece(NamedTuple):
    """A part of a text that can be shown for itself."""

    text: str
    #: Whether it goes on with what is before it, without an empty line between: a list, or code.
    goes_on: bool


class GrowingMarkdown:
    """A text that is shown while it grows. Within its context nothing else may write to the terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
        #: What is not printed for good yet, and when it is drawn again.
        self._rest = Piece("", True)
        self._next = 0.0

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._live.update(Text())
        self._live.stop()
        if self._rest.text.strip():
            self._print(self._rest)

    def add(self, text: str) -> None:
        """Appends to the text; it is drawn if the last drawing is long enough ago."""
        self._rest = self._rest._replace(text=self._rest.text + printable(text))
        begun = time.monotonic()
        if begun < self._next:
            return
        *finished, self._rest = split(self._rest, most_lines=max(4, self._console.height // 2))
        for piece in finished:
            self._print(piece)
        # A line is left for the cursor, one for the empty line before it.
        gap = "" if self._rest.goes_on else "\n"
        self._live.update(Shown(gap, self._rest.text, most_lines=max(1, self._console.height - 2)), refresh=True)
        ended = time.monotonic()
        self._next = ended + max(_PAUSE, _SHARE * (ended - begun))

    def _print(self, piece: Piece) -> None:
        self._console.print(Shown("" if piece.goes_on else "\n", piece.text))


class Shown:
    """A text as Markdown, or its last lines; text that a renderer fails on is shown as it is."""

    def __init__(self, before: str, text: str, most_lines: int | None = None) -> None:
        self.before, self.text, self.most_lines = before, text, most_lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lines, in which no text has a control character: what was an entity in Markdown could be one."""
        try:
            markdown = _Markdown(self.text)
            if markdown.depth > min(_DEPTH, (options.max_width - 10) // _INDENT):
                raise ValueError("nothing would be left of the width")
            lines = _without_margin(console.render_lines(markdown, options, pad=False), self.text)
        except Exception:  # a fault in how a text is drawn must not cost the answer
            lines = console.render_lines(Text(self.text), options, pad=False)
        if self.before:
            lines.insert(0, [])
        for line in lines[-self.most_lines :] if self.most_lines else lines:
            yield from (Segment(printable(segment.text), segment.style) for segment in line if not segment.control)
            yield Segment.line()


def _without_margin(lines: list[list[Segment]], text: str) -> list[list[Segment]]:
    """Lines without the empty ones that rich puts before and after lists, quotes and tables, but not code."""
    while lines and not text.startswith("```") and _is_empty(lines[0]):
        del lines[0]
    while lines and not text.endswith("```\n") and _is_empty(lines[-1]):
        del lines[-1]
    return lines


def _is_empty(line: list[Segment]) -> bool:
    return not any(segment.text.strip() for segment in line)


class _Code(CodeBlock):
    """Code without a frame, so that its lines can be printed in parts, and copied."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).removesuffix("\n")
        yield Syntax(code, self.lexer_name, theme="ansi_dark", background_color="default", word_wrap=True)


class _Heading(Heading):
    """A heading at the left, as the text below it."""

    LEVEL_ALIGN = {}  # noqa: RUF012  of rich's class


class _Cell(TableDataElement):
    """A cell whose long words are folded, not cut."""

    def __init__(self, justify: JustifyMethod) -> None:
        super().__init__(justify)
        self.content.overflow = "fold"


class _Markdown(Markdown):
    """Markdown that shows all of a text: line breaks, tags, addresses of links and images."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "fence": _Code,
        "code_block": _Code,
        "heading_open": _Heading,
        "td_open": _Cell,
        "th_open": _Cell,
    }

    def __init__(self, text: str) -> None:
        super().__init__("", hyperlinks=False)
        self.parsed = _PARSER.parse(text)
        #: Lists and quotes within each other.
        self.depth = max((token.level for token in self.parsed), default=0)
        for token in self.parsed:
            if token.type == "fence" and len(token.info.split()) > 1:  # more than a language
                token.content = f"{token.info.strip()}\n{token.content}"
            for child in token.children or ():
                if child.type == "softbreak":  # poems and addresses
                    child.type = "hardbreak"
                elif child.type == "image":
                    child.type, child.tag = "text", ""
                    child.content = f"![{child.content}]({child.attrs.get('src', '')})"
                    child.children = None


# ---- what can no more change ----------------------------------------------------------------------------------------


def split(text: Piece, most_lines: int) -> Iterator[Piece]:
    """Parts of a growing text: those that what follows cannot change, and the rest, which may be empty.

    ``most_lines``: of code in the rest. A line that is not complete belongs to the rest.
    """
    complete, newline, begun = text.text.rpartition("\n")
    goes_on = text.goes_on
    lines = [f"{line}\n" for line in complete.split("\n")] if newline else []
    blocks = _blocks(lines)
    if blocks:
        if len(blocks) > 1:
            yield Piece("".join(lines[: _start(blocks[-1])]), goes_on)
            goes_on = False
        lines = lines[_start(blocks[-1]) :]
    items = _items(lines)
    if len(items) > 1:
        yield Piece("".join(lines[: items[-1]]), goes_on)
        lines, goes_on = lines[items[-1] :], True
    elif blocks and blocks[-1].type == "fence" and len(lines) > most_lines + 2:
        fence, language = blocks[-1].markup, blocks[-1].info.split()[:1]
        yield Piece("".join([*lines[: most_lines + 1], f"{fence}\n"]), goes_on)
        lines, goes_on = ["".join([fence, *language, "\n"]), *lines[most_lines + 1 :]], True
    yield Piece("".join([*lines, begun]), goes_on)


def _blocks(lines: list[str]) -> list[Token]:
    """The first token of each block."""
    return [token for token in _PARSER.parse("".join(lines)) if token.level == 0 and token.nesting >= 0 and token.map]


def _items(lines: list[str]) -> list[int]:
    """Where the items of a list begin; none, if the lines are no list alone."""
    tokens = [token for token in _PARSER.parse("".join(lines)) if token.map]
    if not tokens or tokens[0].type not in ("bullet_list_open", "ordered_list_open"):
        return []
    return [_start(token) for token in tokens if token.type == "list_item_open" and token.level == 1]


def _start(token: Token) -> int:
    assert token.map is not None
    return token.map[0]


# How long an answer took.


@dataclass
class AnswerTimes:
    """Tokens of an answer and when they came; seconds, on the clock of ``time.monotonic()``.

    They are those of the person who waits: with the time that it takes to show the text.
    """

    asked: float
    first: float | None = None
    last: float | None = None
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    #: Of the prompt's, those whose KV entries were found instead of computed.
    num_cached_tokens: int = 0
    _num_first: int = 0

    def add(self, num_tokens: int, num_cached_tokens: int) -> None:
        """Counts tokens that have come now."""
        self.num_cached_tokens = num_cached_tokens
        if not num_tokens:
            return
        self.last = time.monotonic()
        if self.first is None:
            self.first, self._num_first = self.last, num_tokens
        self.num_tokens += num_tokens

    @property
    def time_to_first_token(self) -> float | None:
        """None without a token."""
        return None if self.first is None else self.first - self.asked

    @property
    def decoded(self) -> tuple[int, float]:
        """(tokens after those of the first step, seconds that they took)."""
        if self.first is None or self.last is None:
            return 0, 0.0
        return self.num_tokens - self._num_first, self.last - self.first

    def __str__(self) -> str:
        """As in ``42 tokens, 31.2 tokens/s; first after 0.21 s; prompt of 120 tokens, 96 of them cached``."""
        tokens, seconds = self.decoded
        rate = f", {tokens / seconds:.1f} tokens/s" if tokens and seconds > 0 else ""
        first = f"; first after {self.time_to_first_token:.2f} s" if self.time_to_first_token is not None else ""
        cached = f", {self.num_cached_tokens} of them cached" if self.num_cached_tokens else ""
        return f"{_tokens(self.num_tokens)}{rate}{first}; prompt of {_tokens(self.num_prompt_tokens)}{cached}"


def summary(answers: Sequence[AnswerTimes]) -> str:
    """All answers as one line."""
    tokens = sum(times.decoded[0] for times in answers)
    seconds = sum(times.decoded[1] for times in answers)
    rate = f", {tokens / seconds:.1f} tokens/s" if tokens and seconds > 0 else ""
    firsts = [first for times in answers if (first := times.time_to_first_token) is not None]
    average = f"; first after {sum(firsts) / len(firsts):.2f} s on average" if firsts else ""
    number = "1 answer" if len(answers) == 1 else f"{len(answers)} answers"
    return f"{number}, {_tokens(sum(times.num_tokens for times in answers))}{rate}{average}"


def _tokens(number: int) -> str:
    return "1 token" if number == 1 else f"{number} tokens"
