"""A message typed on a terminal: lines that can be edited, earlier ones, completion.

prompt_toolkit does it, and not Python's ``readline``: that edits one line at a time, ends a message at each line break
that is pasted where it is libedit (macOS), and keeps no entry of several lines in its history.
"""

from __future__ import annotations

from collections.abc import Iterable

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

from octavo.cli.chat_history import HistoryFile
from octavo.cli.chat_lines import CONTINUED, PROMPT, Completions, Typed, as_typed, is_open
from octavo.cli.terminal_text import notice


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
