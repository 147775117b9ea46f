"""Chat messages to the text a model was trained on, by the template that comes with the model."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.core.errors import InvalidRequestError, TokenizerError
from octavo.core.files import read_text
from octavo.core.model_config import ReasoningMarks
from octavo.engine.chat_messages import (
    IMAGE,
    CallFormat,
    Images,
    fit_messages,
    fit_tools,
    flat_text,
    render_template,
    template_variables,
    to_parts,
)
from octavo.engine.harmony import ANALYSIS, END, HARMONY_TEMPLATE, is_harmony
from octavo.process.sandbox import Sandbox
from octavo.process.sandbox_process import SandboxAnswer, SandboxCall

#: Appended to the continued message, to find its end in the rendered text.
_END = "END_OF_CONTINUED_MESSAGE "
#: Fields of a message's reasoning; most templates read the first.
_REASONING = ("reasoning_content", "thinking", "reasoning")


def load_chat_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Returns a model's templates by name; the usual one is ``default``.

    Read from ``chat_template.jinja`` and ``additional_chat_templates/NAME.jinja``, else from tokenizer_config.json,
    where ``chat_template`` is a text or a list of ``{"name": ..., "template": ...}``. Octavo's own replaces that of
    gpt-oss.
    """
    templates = _read_templates(folder, tokenizer_config)
    return {name: HARMONY_TEMPLATE if is_harmony(text) else text for name, text in templates.items()}


def _read_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    try:
        if contents := {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}:
            return contents
    except (OSError, UnicodeDecodeError) as e:
        raise TokenizerError(f"a chat template in {folder} cannot be read: {e}") from e
    entries = tokenizer_config.get("chat_template")
    if entries is None:
        return {}
    if isinstance(entries, str):
        return {"default": entries}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in entries}
    except (TypeError, KeyError):
        raise TokenizerError(
            f"chat_template in {folder / 'tokenizer_config.json'} must be a text or a list of named templates"
        ) from None


def read_chat_template(path: str | None) -> str | None:
    if path is None:
        return None
    template = read_text(path, "chat_template")
    template_variables(template)
    return template


def choose_template(templates: Mapping[str, str], name_or_text: str | None, *, has_tools: bool) -> str:
    """Returns the template of a request: its own, else ``tool_use`` with tools, else ``default``."""
    if name_or_text is not None:
        return templates.get(name_or_text, name_or_text)
    if has_tools and "tool_use" in templates:
        return templates["tool_use"]
    if "default" in templates:
        return templates["default"]
    if templates:
        raise InvalidRequestError(
            f"the model has several; name one: {', '.join(sorted(templates))}", path="chat_template"
        )
    raise InvalidRequestError(
        "the model has no chat template (it may be a base model): send a plain prompt, or start with the file of a "
        "template (option chat_template, --chat-template FILE)"
    )


def render_chat(template: str, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
    """Renders a conversation.

    The template gets the messages as sent, null included, as in transformers. If it would drop or garble them, they are
    converted to the nearest form that it takes (``octavo.engine.chat_messages``), such as parts to a text. With a
    ``call_format``, tools, calls and results become text of messages if the template cannot take them.

    Args:
        messages: each with ``role`` and ``content``: a text, or a list of parts ``{"type": "text", "text": ...}`` and
            ``{"type": "image"}``.
        options: ``add_generation_prompt`` (default True) ends the prompt with the start of the assistant's answer.
            ``continue_final_message`` (False) ends it with the last message's text, or with the text of the field that
            it names. ``tools``: JSON schemas. ``call_format``: how the model writes calls. ``image_placeholder``:
            stands for an image where the template takes text only. Other options are variables of the template.

    Raises:
        InvalidRequestError: a message is malformed, options contradict each other, the template refuses the
            conversation, or it drops a user message in every form.
        TokenizerError: the template is invalid, or was stopped by the sandbox.
    """
    return _render(template, list(_checked(messages, options)), **options)


def _checked(messages: object, options: Mapping[str, Any]) -> list[_Message]:
    sees = options.get("image_placeholder") is not None
    checked = [_message(i, message, sees) for i, message in enumerate(_check_list("messages", messages))]
    if not checked:
        raise InvalidRequestError("must not be empty", path="messages")
    return checked


def _render(
    template: str,
    checked: list[dict[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool | str = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    call_format: CallFormat | None = None,
    image_placeholder: str | None = None,
    **variables: Any,
) -> str:
    if continue_final_message and add_generation_prompt:
        raise InvalidRequestError(
            "continues the last message where add_generation_prompt begins a new one: set "
            "add_generation_prompt=False with it",
            path="continue_final_message",
        )
    plain_tools = None if tools is None else [_plain(tool, "tools") for tool in _check_list("tools", tools)]
    if call_format is not None:
        plain_tools = fit_tools(checked, plain_tools, call_format, template, template_variables(template))
    for message in checked if image_placeholder is not None else ():
        content = dict.get(message, "content")
        # With images, adjacent texts become one part, so that any template puts a line break between them.
        if IMAGE in (text := flat_text(content)) or (isinstance(content, list) and len(content) > 1):
            message["content"] = to_parts(text)
    values: dict[str, Any] = {"tools": plain_tools, "documents": None}
    values |= {"add_generation_prompt": bool(add_generation_prompt)}
    values |= {name: _plain(value, name) for name, value in variables.items()}
    images = Images.of(template, image_placeholder)
    continues = bool(continue_final_message)
    fit_messages(template, values, checked, images, adapts=call_format is not None, continues=continues)
    if continues:
        _mark_end(checked[-1], "content" if continue_final_message is True else str(continue_final_message))
    text = render_template(template, {**values, "messages": checked})
    if not continues:
        return text
    end = text.rfind(_END.strip())
    if end < 0:
        raise InvalidRequestError(
            "the chat template does not write the last message as it is", path="continue_final_message"
        )
    # If the template trims messages, the mark's trailing space is gone: trim the message too.
    return text[:end] if text.startswith(_END, end) else text[:end].rstrip()


def _mark_end(message: dict[str, Any], name: str) -> None:
    """Appends the end mark to a field's text, under each alias of the field."""
    value = message.get(name)
    texts = [part for part in value if part.get("type") == "text"] if isinstance(value, list) else []
    if texts:
        texts[-1]["text"] += _END
    elif isinstance(value, str):
        for alias in _REASONING if name in _REASONING else (name,):
            if message.get(alias) == value:
                message[alias] = value + _END
    else:
        raise InvalidRequestError(f"the last message has no {name[:100]} to continue", path="continue_final_message")


def render_and_read(
    template: str, messages: Sequence[Mapping[str, Any]], fields: Sequence[tuple[int, str]], options: Mapping[str, Any]
) -> tuple[str, list[bool]]:
    """Renders a conversation; also tells which of ``fields``, pairs (message index, name), the template read."""
    checked = _checked(messages, options)
    text = _render(template, list(checked), **options)
    return text, [name in checked[index]._read for index, name in fields]


class _Message(dict[str, Any]):
    """A message that records which of its fields a template reads."""

    # Templates read attributes as fields, except those with an underscore.
    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._read = set[str]()

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return super().__getitem__(name)

    def __repr__(self) -> str:
        return repr(self._all())

    def get(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        return super().get(name, default)

    def _all(self) -> dict[str, Any]:
        self._read |= set(super().keys())
        return dict(super().items())

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def keys(self) -> Any:
        return self._all().keys()

    def values(self) -> Any:
        return self._all().values()

    def items(self) -> Any:
        return self._all().items()

    def copy(self) -> dict[str, Any]:
        return self._all()


def _check_list(name: str, value: object) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise InvalidRequestError(f"must be a list, not {type(value).__name__}", path=name)
    return value


def _message(index: int, message: object, sees: bool) -> _Message:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"must be a mapping with role and content, not {type(message).__name__}", path=where)
    plain: dict[str, Any] = _plain(message, where)
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"must have a role, such as 'user'; its role is {role!r}", path=where)
    calls = plain.get("tool_calls")
    if plain.get("content") is not None:
        _check_content(where, plain["content"], sees)
    elif role != "assistant" and calls is None:
        raise InvalidRequestError(f"has no content, which a message of the role {role!r:.100} needs", path=where)
    for k, call in enumerate([] if calls is None else _check_list(f"{where}.tool_calls", calls)):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequestError("must have a function with a name and arguments", path=f"{where}.tool_calls[{k}]")
        if not isinstance(arguments := function.get("arguments", ""), (str, dict)):
            kind = type(arguments).__name__
            raise InvalidRequestError(
                f"must be JSON text, not {kind}", path=f"{where}.tool_calls[{k}].function.arguments"
            )
    reasoning = next((plain[name] for name in _REASONING if plain.get(name) is not None), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return _Message(plain)


def _check_content(where: str, content: object, sees: bool) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise InvalidRequestError("must be a text or a list of parts", path=f"{where}.content", got=content)
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if not (sees and kind == "image") and not (kind == "text" and isinstance(part.get("text"), str)):
            raise InvalidRequestError("only content parts of type 'text' are supported", path=where, got=kind or part)


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """Copies JSON values; other types are refused, as the sandbox does not know their methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth > 64:
        raise InvalidRequestError("is nested too deeply", path=where)
    if isinstance(value, Mapping):
        return {str(k): _plain(v, where, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, where, depth + 1) for v in value]
    raise InvalidRequestError(f"may hold only JSON values, not {type(value).__name__}", path=where)


# Chat templates of clients, rendered in the sandbox, as they may take any time and memory.

#: Seconds of processor time that rendering a conversation may take.
SECONDS = 2.0


async def variables_in_sandbox(sandbox: Sandbox, client: str, template: str) -> frozenset[str]:
    """Runs ``template_variables`` in the sandbox, on the client's time."""
    return frozenset(await _call(sandbox, client, "read_variables", {"template": template}))


async def render_in_sandbox(
    sandbox: Sandbox,
    client: str,
    template: str,
    messages: Sequence[Mapping[str, Any]],
    fields: Sequence[tuple[int, str]],
    options: Mapping[str, Any],
) -> tuple[str, list[bool]]:
    """Runs ``render_and_read`` in the sandbox, on the client's time."""
    arguments = {"template": template, "messages": messages, "fields": fields, "options": options}
    text, read = await _call(sandbox, client, "render", arguments)
    return text, read


async def _call(sandbox: Sandbox, client: str, name: str, arguments: Mapping[str, Any]) -> Any:
    try:
        content = json.dumps(arguments, default=dataclasses.asdict).encode()
    except RecursionError:
        raise InvalidRequestError("must not be nested so deeply", path="messages") from None
    call = SandboxCall(f"{__name__}:{name}", content, SECONDS)
    return await asyncio.wrap_future(sandbox.submit(call, _read, client=client))


def _read(answer: SandboxAnswer) -> Any:
    if answer.failure:
        reasons = {
            "time": f"takes more than {SECONDS:g} seconds of processor time",
            "memory": "takes too much memory",
            "depth": "is nested too deeply",
        }
        raise InvalidRequestError(reasons.get(answer.failure, f"failed: {answer.details}"), path="chat_template")
    result = json.loads(answer.content)
    if "error" in result:
        raise InvalidRequestError(**result["error"])
    return result["result"]


# --- within the sandbox ----------------------------------------------------------------------------------------------


def read_variables(content: bytes) -> bytes:
    return _answer(lambda arguments: sorted(template_variables(arguments["template"])), content)


def render(content: bytes) -> bytes:
    def rendered(arguments: dict[str, Any]) -> tuple[str, list[bool]]:
        options = arguments["options"]
        if options.get("call_format") is not None:
            options["call_format"] = CallFormat(**options["call_format"])
        return render_and_read(arguments["template"], arguments["messages"], arguments["fields"], options)

    return _answer(rendered, content)


def _answer(function: Callable[[dict[str, Any]], Any], content: bytes) -> bytes:
    try:
        result = {"result": function(json.loads(content))}
    except InvalidRequestError as e:
        result = {"error": e.data}
    except TokenizerError as e:
        result = {"error": {"problem": str(e), "path": "chat_template"}}
    return json.dumps(result).encode()


# Reasoning marks of model families

#: By the name that ``--reasoning-parser`` gives.
REASONING_MARKS = {
    # gpt-oss
    "harmony": ReasoningMarks(ANALYSIS, END),
    # Most models. DeepSeek R1 begins inside its reasoning; Qwen3 and Qwen 3.5 call tools without closing it.
    "qwen3": ReasoningMarks("<think>", "</think>", interrupts=("<tool_call>",)),
    "deepseek_r1": ReasoningMarks("<think>", "</think>", begins_inside=True, interrupts=("<tool_call>",)),
    # Magistral, Ministral 3
    "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
    # Gemma 4
    "gemma": ReasoningMarks("<|channel>thought", "<channel|>"),
    "seed_oss": ReasoningMarks("<seed:think>", "</seed:think>"),
    # Granite 3.2, in words
    "granite": ReasoningMarks("Here is my thought process:", "Here is my response:"),
    # Families whose answer has marks of its own
    "hunyuan_a13b": ReasoningMarks("<think>", "</think>"),
    "ernie45": ReasoningMarks("<think>", "</think>", begins_inside=True, interrupts=("<tool_call>",)),
}


#: Texts of chat templates that tell families with the marks of ``qwen3`` apart; the first that occurs.
_THINK_SIGNS = (("<answer>", "hunyuan_a13b"), ("<response>\n", "ernie45"), ("<response>\\n", "ernie45"))


def find_reasoning_marks(template: str) -> str | None:
    think = REASONING_MARKS["qwen3"]
    if think.end in template:
        if (name := next((name for sign, name in _THINK_SIGNS if sign in template), None)) is not None:
            return name
        # Some templates remove the reasoning of earlier answers, and open none.
        return "qwen3" if think.start in template else "deepseek_r1"
    if REASONING_MARKS["gemma"].end in template:  # those of the small models never write the start
        return "gemma"
    return next((name for name, marks in REASONING_MARKS.items() if marks.start in template), None)
