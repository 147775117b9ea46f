"""The commands of a conversation, as ``/help`` lists them."""

from __future__ import annotations

import glob
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from octavo.cli import chat_files
from octavo.cli.chat_conversation import Conversation
from octavo.cli.chat_times import summary
from octavo.cli.sampling_flags import HELP as MEANINGS
from octavo.cli.sampling_flags import read_value
from octavo.cli.terminal_text import notice
from octavo.core.errors import InvalidRequestError, OctavoError
from octavo.core.near_names import did_you_mean
from octavo.core.sampling_params import DefaultMaxTokens, SamplingParams

#: Parameters that have no meaning for one answer shown as text.
LEAVE_OUT = ("n", "best_of", "logprobs", "logprob_token_ids", "prompt_logprobs", "detokenize")
#: Those that ``/set`` takes.
SETTINGS = {name: meaning for name, meaning in MEANINGS.items() if name not in LEAVE_OUT}


@dataclass(frozen=True)
class Command:
    """A command of a conversation."""

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
    """The settings in effect, as in ``temperature 0.7, max_tokens 2048``; neutral ones are left out."""
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
    chat_files.save(path, conversation.model, conversation.messages)
    notice(f"saved as {path}")


def _load(conversation: Conversation, rest: str) -> None:
    conversation.replace(chat_files.load(_path(rest), conversation.engine.inputs))
    turns = len(conversation.turns) // 2
    notice(f"loaded {'1 turn' if turns == 1 else f'{turns} turns'}")


def _image(conversation: Conversation, rest: str) -> None:
    conversation.images += chat_files.image_parts(_file_name(rest), conversation.engine.inputs)


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
    Command("/image", "FILE", "show the model an image with the next question; several: one after the other", _image),
    Command("/exit", "", "leave (Ctrl-D too)", _exit, also=("/bye", "/quit")),
)
