"""Chat messages to the text a model was trained on, by the template that comes with the model."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.core.errors import InvalidRequestError, TokenizerError
from octavo.core.text_files import read_text
from octavo.engine.template_program import ExpressionError, template_variables, written
from octavo.engine.tool_messages import CallFormat, fit_tools

#: Written after a message that is to be continued, to find its end in what the template writes.
_END = "END_OF_CONTINUED_MESSAGE "
#: Stands for an image in a text, until the template gets it as a part or as its placeholder; characters of no text.
_IMAGE = "\ufdd0image\ufdd1"
#: A template that writes images names the type of such parts.
_WRITES_IMAGES = re.compile(r"""['"]image['"]""")


def load_chat_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """A model's templates by name; the usual one is ``default``. Empty if it has none.

    From ``chat_template.jinja`` and ``additional_chat_templates/NAME.jinja``, else from tokenizer_config.json, where
    ``chat_template`` is a text or a list of ``{"name": ..., "template": ...}``.
    """
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
    """The template in the file that the option ``chat_template`` names; None if it names none.

    Raises:
        ConfigError: the file cannot be read.
        TokenizerError: it is not a valid template.
    """
    if path is None:
        return None
    template = read_text(path, "chat_template")
    template_variables(template)
    return template


def choose_template(templates: Mapping[str, str], name_or_text: str | None, *, has_tools: bool) -> str:
    """The template that a request uses.

    Args:
        templates: the model's own.
        name_or_text: the name of one of these, or a template's text, or None.
        has_tools: whether tools were given; ``tool_use`` is then preferred.

    Raises:
        InvalidRequestError: there is none.
    """
    if name_or_text is not None:
        return templates.get(name_or_text, name_or_text)
    if has_tools and "tool_use" in templates:
        return templates["tool_use"]
    if "default" in templates:
        return templates["default"]
    if templates:
        raise InvalidRequestError(f"the model has several chat templates; name one: {', '.join(sorted(templates))}")
    raise InvalidRequestError(
        "the model has no chat template (it may be a base model): send a plain prompt, or start with the file of a "
        "template (option chat_template, --chat-template FILE)"
    )


def render_chat(template: str, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
    """Runs a template over messages.

    With a ``call_format``, tools, calls and results become text of messages where the template has no place for them.

    Args:
        template: its text.
        messages: each with ``role`` and ``content``: a text, or a list of parts ``{"type": "text", "text": ...}``, of
            which neighbours are joined with line breaks, and ``{"type": "image"}``.
        options: ``add_generation_prompt`` (default true): ends with what opens the assistant's answer.
            ``continue_final_message`` (false): ends with the last message's text instead of what closes it, so that it
            is continued. ``tools``: JSON schemas of callable tools. ``call_format``: how the model writes calls; see
            ``fit_tools``. ``image_placeholder``: of a model that sees images, what stands for one where the template
            takes text alone. Others are further names that the template may use.

    Raises:
        InvalidRequestError: a message is malformed, the options contradict each other, or the template refuses the
            conversation; with its own words.
        TokenizerError: the template is not valid, or does what a template must not.
    """
    return _render(template, list(_checked(messages, options)), **options)


def _checked(messages: object, options: Mapping[str, Any]) -> list[_Message]:
    sees = options.get("image_placeholder") is not None
    checked = [_message(i, message, sees) for i, message in enumerate(_listed("messages", messages))]
    if not checked:
        raise InvalidRequestError("messages must not be empty")
    return checked


def _render(
    template: str,
    checked: list[dict[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    call_format: CallFormat | None = None,
    image_placeholder: str | None = None,
    **variables: Any,
) -> str:
    if continue_final_message:
        if add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message continues the last message where add_generation_prompt begins a new one: set "
                "add_generation_prompt=False with it"
            )
        checked[-1]["content"] = checked[-1].get("content", "") + _END
    plain_tools = None if tools is None else [_plain(tool, "tools") for tool in _listed("tools", tools)]
    if call_format is not None:
        plain_tools = fit_tools(checked, plain_tools, call_format, template, template_variables(template))
    if image_placeholder is not None:
        _put_images(checked, template, image_placeholder)
    plain_variables = {name: _plain(value, name) for name, value in variables.items()}
    values: dict[str, Any] = {"messages": checked, "tools": plain_tools, "documents": None}
    values |= {"add_generation_prompt": bool(add_generation_prompt), **plain_variables}
    text = _first_written(template, values, checked)
    if not continue_final_message:
        return text
    end = text.rfind(_END.strip())
    if end < 0:
        raise InvalidRequestError("continue_final_message: the chat template does not write the last message as it is")
    # If the template trims messages, the space after the mark is gone, and those before it are to go.
    return text[:end] if text.startswith(_END, end) else text[:end].rstrip()


def render_and_read(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    fields: Sequence[tuple[int, str]],
    options: Mapping[str, Any],
) -> tuple[str, list[bool]]:
    """What a template writes of a conversation, and which fields of its messages it has read.

    Args:
        template: its text.
        messages: the conversation.
        fields: (index of a message, name) of those that are asked about.
        options: keywords of ``render_chat``.

    Raises:
        InvalidRequestError, TokenizerError: as ``render_chat``.
    """
    checked = _checked(messages, options)
    text = _render(template, list(checked), **options)
    return text, [name in checked[index].read for index, name in fields]


class _Message(dict[str, Any]):
    """A message that notes which of its fields a template reads."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read = set[str]()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As of a dict."""
        self.read.add(name)
        return super().get(name, default)

    def _all(self) -> dict[str, Any]:
        self.read |= set(super().keys())
        return dict(super().items())

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def keys(self) -> Any:
        """As of a dict."""
        return self._all().keys()

    def values(self) -> Any:
        """As of a dict."""
        return self._all().values()

    def items(self) -> Any:
        """As of a dict."""
        return self._all().items()

    def copy(self) -> dict[str, Any]:
        """As of a dict."""
        return self._all()


def _listed(name: str, value: object) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise InvalidRequestError(f"{name} must be a list, not {type(value).__name__}")
    return value


def _message(index: int, message: object, sees: bool) -> _Message:
    """A message as templates expect it: plain data, text content, no key without a value."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{where} must be a mapping with role and content, not {type(message).__name__}")
    plain: dict[str, Any] = {k: v for k, v in _plain(message, where).items() if v is not None}
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{where} must have a role, such as 'user'; its role is {role!r}")
    if "content" in plain:
        plain["content"] = _content(where, plain["content"], sees)
    elif role == "assistant":
        if "tool_calls" not in plain:  # legal in the OpenAI API: an answer without words
            plain["content"] = ""
    elif "tool_calls" not in plain:
        raise InvalidRequestError(f"{where} ({role}) has no content")
    for k, call in enumerate(_listed(f"{where}.tool_calls", plain.get("tool_calls", []))):
        _parse_arguments(f"{where}.tool_calls[{k}]", call)
    return _Message(plain)


def _content(where: str, content: object, sees: bool) -> str:
    """A content as text, with marks for images; ``sees``: whether there may be any."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where}: content must be a text or a list of parts, not {content!r}")
    pieces: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if sees and kind == "image":
            pieces.append(_IMAGE)
            continue
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequestError(f"{where}: only content parts of type 'text' are supported, not {kind or part!r}")
        if pieces and pieces[-1] is not _IMAGE:
            pieces.append("\n")
        pieces.append(part["text"])
    return "".join(pieces)


def _put_images(messages: list[dict[str, Any]], template: str, placeholder: str) -> None:
    """Gives contents the form in which the template takes images: parts, or texts with placeholders.

    A template that reads parts reads those of a text alone, too; as a text it is left where the template asks for that.
    """
    for message in messages:
        content = message.get("content")
        if not isinstance(content, str):
            continue
        if _WRITES_IMAGES.search(template) is None:
            message["content"] = content.replace(_IMAGE, placeholder)
        elif _IMAGE in content or "is string" not in template:
            message["content"] = _parts(content)


def _parts(content: str) -> list[dict[str, str]]:
    parts: list[dict[str, str]] = []
    for i, text in enumerate(content.split(_IMAGE)):
        parts += [{"type": "image"}] if i else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def _parse_arguments(where: str, call: object) -> None:
    """Clients send the arguments of a call as JSON text; templates expect what it says. What is no JSON stays text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where} must have a function with a name and arguments")
    arguments = function.get("arguments", "")
    if not isinstance(arguments, (str, dict)):
        raise InvalidRequestError(f"{where}.function.arguments must be JSON text, not {type(arguments).__name__}")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
    function["arguments"] = arguments


def _first_written(template: str, values: Mapping[str, Any], messages: list[dict[str, Any]]) -> str:
    """What a template writes, with calls as it takes them.

    Most expect what the arguments of a call say, some join their JSON text with other text; some ask whether a message
    has no content, others join it.
    """
    calling = [message for message in messages if message.get("tool_calls")]
    without = [message for message in calling if message.get("content") is None]
    functions = [call["function"] for message in calling for call in message["tool_calls"]]
    parsed = [function["arguments"] for function in functions]
    texts = [a if isinstance(a, str) else json.dumps(a, ensure_ascii=False) for a in parsed]
    variants = [
        (contents, arguments) for contents in ((False, True) if without else (True,)) for arguments in (parsed, texts)
    ]
    for has_content, arguments in variants if calling else []:
        for function, argument in zip(functions, arguments, strict=True):
            function["arguments"] = argument
        for message in without if has_content else []:
            message["content"] = ""
        with contextlib.suppress(ExpressionError):
            return written(template, values)
    return written(template, values)


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy made of JSON types only: other objects have methods that the sandbox knows nothing of."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth > 64:
        raise InvalidRequestError(f"{where} is nested too deeply")
    if isinstance(value, Mapping):
        return {str(k): _plain(v, where, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, where, depth + 1) for v in value]
    raise InvalidRequestError(f"{where} may hold only JSON values, not {type(value).__name__}")
