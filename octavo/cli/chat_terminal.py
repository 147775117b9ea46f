"""The terminal of ``octavo chat``: a line editor (prompt_toolkit), and Markdown drawn while it streams (rich)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import ClassVar, NamedTuple, Self

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

from octavo.cli.chat_lines import CONTINUED, PROMPT, Completions, HistoryFile, Typed, as_typed, is_open
from octavo.cli.inputs import notice, printable


class Keyboard:
    """Reads messages from the terminal. A pasted text is one message, also with several lines."""

    def __init__(self, history: HistoryFile | None, completions: Completions) -> None:
        output = create_output()
        if isinstance(output, Vt100_Output):
            # No cursor position requests: a late reply would be read as typed text.
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
        """The next message that is not empty."""
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
        return reversed(self._file.load())

    def store_string(self, string: str) -> None:
        self._file.append(string)


class _Completer(Completer):
    """Completes the word before the cursor, in a message of one line."""

    def __init__(self, completions: Completions) -> None:
        self._completions = completions

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if "\n" in document.text:
            return
        word = text.rpartition(" ")[2]
        for full, description in self._completions(text):
            yield Completion(full, start_position=-len(word), display_meta=description)


def _bindings() -> KeyBindings:
    """Enter ends a complete message; Alt-Enter begins a new line."""
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


# ---- streamed Markdown

#: Least seconds between two drawings, and that time as a multiple of a drawing's.
_PAUSE, _SHARE = 0.08, 9
#: Most columns of a nested list's or quote's indent, and their greatest depth: at 20, the parser drops text.
_INDENT, _DEPTH = 4, 15
#: HTML and definitions of links are text, as a terminal does not show them.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable("reference")


class Piece(NamedTuple):
    """A piece of a text that is drawn on its own."""

    text: str
    #: Whether it continues the list or code before it, without an empty line between.
    goes_on: bool


class GrowingMarkdown:
    """Draws a growing text. Within its context nothing else may write to the terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
        #: The text that may still change, and the time of its next drawing.
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
        """Appends to the text; draws it unless the last drawing is too recent."""
        self._rest = self._rest._replace(text=self._rest.text + printable(text))
        begun = time.monotonic()
        if begun < self._next:
            return
        *finished, self._rest = split(self._rest, most_lines=max(4, self._console.height // 2))
        for piece in finished:
            self._print(piece)
        # Two lines remain: the cursor's, and the empty line before the text.
        gap = "" if self._rest.goes_on else "\n"
        self._live.update(Shown(gap, self._rest.text, most_lines=max(1, self._console.height - 2)), refresh=True)
        ended = time.monotonic()
        self._next = ended + max(_PAUSE, _SHARE * (ended - begun))

    def _print(self, piece: Piece) -> None:
        self._console.print(Shown("" if piece.goes_on else "\n", piece.text))


class Shown:
    """A text (or its last lines) as Markdown; if rendering fails, as plain text."""

    def __init__(self, before: str, text: str, most_lines: int | None = None) -> None:
        self.before, self.text, self.most_lines = before, text, most_lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lines without control characters, which entities in Markdown could produce."""
        try:
            markdown = _Markdown(self.text)
            if markdown.depth > min(_DEPTH, (options.max_width - 10) // _INDENT):
                raise ValueError("nothing would be left of the width")
            lines = _without_margin(console.render_lines(markdown, options, pad=False), self.text)
        except Exception:  # an error in the renderer must not lose the answer
            lines = console.render_lines(Text(self.text), options, pad=False)
        if self.before:
            lines.insert(0, [])
        for line in lines[-self.most_lines :] if self.most_lines else lines:
            yield from (Segment(printable(segment.text), segment.style) for segment in line if not segment.control)
            yield Segment.line()


def _without_margin(lines: list[list[Segment]], text: str) -> list[list[Segment]]:
    """Removes the empty lines that rich puts around lists, quotes and tables; those of code stay."""

    def is_empty(line: list[Segment]) -> bool:
        return not any(segment.text.strip() for segment in line)

    while lines and not text.startswith("```") and is_empty(lines[0]):
        del lines[0]
    while lines and not text.endswith("```\n") and is_empty(lines[-1]):
        del lines[-1]
    return lines


class _Code(CodeBlock):
    """Code without a frame, so that its lines can be printed piece by piece, and copied."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).removesuffix("\n")
        yield Syntax(code, self.lexer_name, theme="ansi_dark", background_color="default", word_wrap=True)


class _Heading(Heading):
    LEVEL_ALIGN = {}  # noqa: RUF012  of rich's class


class _Cell(TableDataElement):
    """A table cell that folds long words."""

    def __init__(self, justify: JustifyMethod) -> None:
        super().__init__(justify)
        self.content.overflow = "fold"


class _Markdown(Markdown):
    """Markdown that shows the whole text: line breaks, tags, URLs of links and images."""

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
        #: Nesting of lists and quotes.
        self.depth = max((token.level for token in self.parsed), default=0)
        for token in self.parsed:
            if token.type == "fence" and len(token.info.split()) > 1:  # more than a language
                token.content = f"{token.info.strip()}\n{token.content}"
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"
                elif child.type == "image":
                    child.type, child.tag = "text", ""
                    child.content = f"![{child.content}]({child.attrs.get('src', '')})"
                    child.children = None


def split(text: Piece, most_lines: int) -> Iterator[Piece]:
    """Splits a growing text into pieces that later text cannot change, and the rest, which may be empty.

    ``most_lines``: limit of code lines in the rest. An incomplete line belongs to the rest.
    """
    complete, newline, begun = text.text.rpartition("\n")
    goes_on = text.goes_on
    lines = [f"{line}\n" for line in complete.split("\n")] if newline else []
    tokens = _PARSER.parse("".join(lines))
    blocks = [token for token in tokens if token.level == 0 and token.nesting >= 0 and token.map]
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


def _items(lines: list[str]) -> list[int]:
    tokens = [token for token in _PARSER.parse("".join(lines)) if token.map]
    if not tokens or tokens[0].type not in ("bullet_list_open", "ordered_list_open"):
        return []
    return [_start(token) for token in tokens if token.type == "list_item_open" and token.level == 1]


def _start(token: Token) -> int:
    assert token.map is not None
    return token.map[0]
