"""Converts chat messages to the form that a chat template takes: contents as text or as parts, nulls, arguments.

A template gets messages as they were sent, as in transformers, unless it drops or garbles them: a template that walks
over parts writes nothing of a text, one that joins text writes a list as Python's repr. The form is not read from the
template's source, where macros and filters hide it: the conversation is rendered with a mark in place of each text,
name and argument, and missing marks show the losses. ``fit_messages`` searches the form nearest to the sent one with
the smallest losses. Losses depend on the shape of the conversation alone, so each shape is searched once.

``fit_tools`` writes tools, calls and results as text if a template cannot take them. ``render_template`` renders.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from octavo.core.errors import InvalidRequestError, TokenizerError
from octavo.engine.harmony import render_harmony

#: Longest rendered text in characters.
MAX_RENDERED = 16 << 20
Message = dict[str, Any]

#: Marks an image in a flat text; made of noncharacters, which no text has.
IMAGE = "\ufdd0image\ufdd1"
#: A template that writes images names the type of these parts.
_WRITES_IMAGES = re.compile(r"""['"]image['"]""")
#: Roles whose messages templates drop on purpose; no template does so with ``developer``.
_MAY_BE_LEFT_OUT = frozenset({"system", "assistant", "tool"})
#: Roles of the API, whose names a template need not write.
_KNOWN_ROLES = _MAY_BE_LEFT_OUT | {"user", "developer"}

_MARK = re.compile(r"qz(\d+)q")
#: Parts and arguments that were written by Python's repr.
_REPR_OF_PART = re.compile(r"'text': 'qz(\d+)q'")
_REPR_OF_VALUE = re.compile(r"'qz(\d+)q'")
#: JSON text that was encoded twice.
_ENCODED_TWICE = re.compile(r'\\"qz(\d+)q')

#: Most conversation shapes whose forms are kept, the last used ones.
_MAX_FORMS = 512
#: ``sent``: unchanged. ``parts``: a text becomes a list of one part. ``text``: parts are joined with line breaks.
#: ``part``: parts are joined to one part.
ContentForm = Literal["sent", "parts", "text", "part"]
_OTHER_CONTENTS: tuple[ContentForm, ...] = ("parts", "text", "part")


@dataclass(frozen=True, slots=True)
class MessageForm:
    #: By role; ``sent`` for others.
    contents: Mapping[str, ContentForm] = field(default_factory=dict)
    #: Whether null values are removed.
    drops_nulls: bool = False
    no_content: Literal["sent", "null", "text"] = "sent"
    #: Arguments of calls: as sent, parsed, or JSON text.
    arguments: Literal["sent", "parsed", "text"] = "sent"


_forms: OrderedDict[tuple[str, bytes], tuple[MessageForm, _Losses | None]] = OrderedDict()
_forms_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Images:
    #: Stands for an image where the template takes text only.
    placeholder: str | None
    by_template: bool

    @classmethod
    def of(cls, template: str, placeholder: str | None) -> Images:
        """``placeholder``: None if the model takes no images."""
        return cls(placeholder, _WRITES_IMAGES.search(template) is not None)


@dataclass(slots=True)
class _Marked:
    """A conversation whose texts, call names and arguments are replaced by marks."""

    messages: list[Message]
    #: Marks of roles that the template does not name, by message index.
    role_marks: dict[int, str] = field(default_factory=dict)
    #: Message indices by mark numbers.
    texts: dict[int, int] = field(default_factory=dict)
    calls: dict[int, int] = field(default_factory=dict)
    #: Of argument values; the template must write one of each call.
    arguments: dict[int, int] = field(default_factory=dict)
    roles: dict[int, int] = field(default_factory=dict)
    _count: Iterator[int] = field(default_factory=itertools.count)

    def mark(self, kind: dict[int, int], index: int) -> str:
        number = next(self._count)
        kind[number] = index
        return f"qz{number}q"


@dataclass(frozen=True, slots=True)
class _Losses:
    """The marks that a template does not write, as indices of messages."""

    #: One entry for each text.
    texts: tuple[int, ...] = ()
    calls: tuple[int, ...] = ()
    roles: tuple[int, ...] = ()
    #: How often it writes None.
    nones: int = 0
    writes_texts: bool = True

    @property
    def weight(self) -> tuple[int, int]:
        return len(self.texts) + len(self.calls) + len(self.roles), self.nones


def fit_messages(
    template: str,
    values: Mapping[str, Any],
    messages: list[Message],
    images: Images,
    *,
    adapts: bool,
    continues: bool = False,
) -> None:
    """Converts messages, in place, to the form that the template takes.

    Args:
        values: the template's variables except ``messages``.
        adapts: never writes null as ``None`` nor arguments as Python's repr, both of which transformers does.
        continues: the prompt ends with the last message's text.

    Raises:
        InvalidRequestError: every form loses a message of the user or of a custom role.
        TokenizerError: the template is invalid, or was stopped by the sandbox.
    """
    marked = _mark(messages, template, continues)
    shape = repr((values, marked.messages, adapts, images)).encode("utf-8", "surrogatepass")
    key = (template, hashlib.blake2b(shape, digest_size=16).digest())
    with _forms_lock:
        cached = _forms.get(key)
    form, losses = cached or _find_form(template, values, marked, images, adapts=adapts)
    with _forms_lock:
        _forms[key] = form, losses
        _forms.move_to_end(key)
        if len(_forms) > _MAX_FORMS:
            _forms.popitem(last=False)
    if losses is not None:
        _refuse_lost(template, messages, losses)
    apply_form(form, messages, images, adapts=adapts)


def names_role(template: str, role: str) -> bool:
    return f"'{role}'" in template or f'"{role}"' in template


def _refuse_lost(template: str, messages: Sequence[Message], losses: _Losses) -> None:
    """Refuses a conversation if the template drops text of the user or of a custom role.

    Templates drop system messages and earlier assistant turns on purpose. A template that writes no text at all is
    accepted if it never mentions contents or the conversation has calls.
    """
    for index in losses.roles:
        role = messages[index]["role"]
        raise InvalidRequestError(
            f"the chat template neither names nor writes the role {role[:100]!r}", path=f"messages[{index}].role"
        )
    if not losses.writes_texts and ("content" not in template or any(dict.get(m, "tool_calls") for m in messages)):
        return
    for index in losses.texts:
        message = messages[index]
        role = str(dict.get(message, "role"))
        if role not in _MAY_BE_LEFT_OUT and flat_text(dict.get(message, "content")).strip():
            raise InvalidRequestError(
                f"the chat template writes no message of the role {role[:100]!r} here",
                path=f"messages[{index}].content",
            )


# The search for a form


def _find_form(
    template: str, values: Mapping[str, Any], marked: _Marked, images: Images, *, adapts: bool
) -> tuple[MessageForm, _Losses | None]:
    """Searches the form with the smallest losses; the losses are None if the template fails in every form."""

    def losses_in(form: MessageForm) -> _Losses | None:
        messages = [_copied(message) for message in marked.messages]
        apply_form(form, messages, images, adapts=adapts)
        for index, mark in marked.role_marks.items():
            messages[index]["role"] = mark
        with contextlib.suppress(InvalidRequestError):
            return _losses(render_template(template, {**values, "messages": messages}), marked, adapts=adapts)
        return None

    form = MessageForm()
    losses = losses_in(form)
    choices = _choices(marked.messages)
    if losses is None:  # the template fails, perhaps for several reasons at once
        for candidate in _combined(marked.messages, choices):
            losses = losses_in(candidate)
            if losses is not None:
                form = candidate
                break
        else:
            return MessageForm(), None
    for options in itertools.product(*([{}, *options] for options in choices)):
        if losses.weight == (0, 0):
            return form, losses
        candidate = replace(form, **{name: value for option in options for name, value in option.items()})
        other = losses_in(candidate) if candidate != form else None
        if other is not None and other.weight < losses.weight:
            form, losses = candidate, other
    for index in dict.fromkeys(losses.texts):
        role = str(marked.messages[index]["role"])
        for content in _OTHER_CONTENTS if index in losses.texts else ():
            candidate = replace(form, contents={**form.contents, role: content})
            other = losses_in(candidate)
            if other is not None and other.weight < losses.weight:
                form, losses = candidate, other
    return form, losses


def _choices(messages: Sequence[Message]) -> list[list[dict[str, Any]]]:
    """The values of ``MessageForm`` fields except ``contents`` that change these messages."""
    choices: list[list[dict[str, Any]]] = []
    calls = [call["function"].get("arguments") for message in messages for call in message.get("tool_calls") or ()]
    others: tuple[str, ...] = ("parsed",) if any(isinstance(arguments, str) for arguments in calls) else ()
    others += ("text",) if calls else ()
    choices.append([{"arguments": other} for other in others])
    if any(message.get("content") is None for message in messages):
        choices.append([{"no_content": other} for other in ("null", "text")])
    if any(value is None for message in messages for name, value in message.items() if name != "content"):
        choices.append([{"drops_nulls": True}])
    return [options for options in choices if options]


def _combined(messages: Sequence[Message], choices: Sequence[list[dict[str, Any]]]) -> Iterator[MessageForm]:
    """Forms that differ from the sent one in several fields, the most likely first; about 50 at most."""
    fields = [
        {name: value for option in options for name, value in option.items()}
        for options in itertools.product(*([{}, *options] for options in choices))
    ]
    for further in fields[1:]:
        yield replace(MessageForm(), **further)
    roles = list(dict.fromkeys(str(message["role"]) for message in messages if message.get("content") is not None))
    few: list[dict[str, Any]] = [{}]
    if choices:
        few += [{"arguments": "parsed", "no_content": "text", "drops_nulls": drops} for drops in (False, True)]
    for content in _OTHER_CONTENTS:
        for further in few:
            yield replace(MessageForm(dict.fromkeys(roles, content)), **further)
    for forms in itertools.product(_OTHER_CONTENTS[:2], repeat=len(roles)) if 1 < len(roles) <= 4 else ():
        yield replace(MessageForm(dict(zip(roles, forms, strict=True))), **few[-1])


def _losses(text: str, marked: _Marked, *, adapts: bool) -> _Losses:
    text_lower = text.lower()  # some templates write roles in capitals
    written_marks = _numbers(_MARK, text_lower)
    repr_of_part = _numbers(_REPR_OF_PART, text_lower)
    bad_arguments = _numbers(_ENCODED_TWICE, text_lower)
    if adapts:
        bad_arguments |= _numbers(_REPR_OF_VALUE, text_lower)
    good_arguments = {
        marked.arguments[number] for number in written_marks - bad_arguments if number in marked.arguments
    }
    lost_calls = [index for number, index in marked.calls.items() if number not in written_marks]
    lost_calls += [index for index in dict.fromkeys(marked.arguments.values()) if index not in good_arguments]
    lost_calls += [marked.arguments[number] for number in bad_arguments if number in marked.arguments]
    return _Losses(
        tuple(i for number, i in marked.texts.items() if number not in written_marks or number in repr_of_part),
        tuple(lost_calls),
        tuple(i for number, i in marked.roles.items() if number not in written_marks),
        text.count("None") if adapts else 0,
        not written_marks.isdisjoint(marked.texts),
    )


def _numbers(pattern: re.Pattern[str], text: str) -> set[int]:
    return {int(match[1][:9]) for match in pattern.finditer(text)}


def _mark(messages: Sequence[Message], template: str, continues: bool) -> _Marked:
    """Replaces texts by marks; empty texts stay, as templates test for them, unless the last one is continued."""
    marked = _Marked([])
    for index, message in enumerate(messages):
        copy = _copied(message)
        if copy["role"] not in _KNOWN_ROLES and not names_role(template, copy["role"]):
            marked.role_marks[index] = marked.mark(marked.roles, index)
        content = copy.get("content")
        if isinstance(content, str) and (content.strip() or (continues and index == len(messages) - 1)):
            copy["content"] = marked.mark(marked.texts, index)
        elif isinstance(content, list):
            for part in content:
                if part.get("type") == "text":
                    part["text"] = marked.mark(marked.texts, index)
            if not content:  # tells whether the role's contents may be lists
                content.append({"type": "text", "text": marked.mark(marked.texts, index)})
        for call in copy.get("tool_calls") or ():
            function = call["function"]
            function["name"] = marked.mark(marked.calls, index)
            function["arguments"] = _mark_arguments(marked, index, function.get("arguments"))
        marked.messages.append(copy)
    return marked


def _mark_arguments(marked: _Marked, index: int, sent: object) -> object:
    parsed = parse_arguments(sent)
    if isinstance(parsed, str):
        return marked.mark(marked.arguments, index)
    names = list(parsed) if isinstance(parsed, dict) and parsed else ["argument"]
    values = {name: marked.mark(marked.arguments, index) for name in names}
    return json.dumps(values, ensure_ascii=False) if isinstance(sent, str) else values


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copied(inner) for name, inner in dict.items(value)}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


def apply_form(form: MessageForm, messages: Sequence[Message], images: Images, *, adapts: bool) -> None:
    for message in messages:
        if form.drops_nulls:
            for name in [name for name, value in dict.items(message) if value is None]:
                del message[name]
        content = dict.get(message, "content")
        if content is not None:
            message["content"] = _content(content, form.contents.get(str(dict.get(message, "role")), "sent"), images)
        elif form.no_content != "sent":
            message["content"] = None if form.no_content == "null" else ""
        for call in dict.get(message, "tool_calls") or ():
            function = call["function"]
            if "arguments" in function or form.arguments != "sent":
                function["arguments"] = _arguments(function.get("arguments"), form.arguments, adapts=adapts)


def _content(content: str | list[Any], form: ContentForm, images: Images) -> str | list[Any]:
    if isinstance(content, list) and any(part.get("type") == "image" for part in content):
        if not images.by_template:
            form = "text"
        elif form == "text":
            form = "part"
    if form == "text":
        text = flat_text(content)
        return text if images.placeholder is None else text.replace(IMAGE, images.placeholder)
    if form == "part" or (form == "parts" and isinstance(content, str)):
        return to_parts(flat_text(content)) or [{"type": "text", "text": ""}]
    return content


def flat_text(content: object) -> str:
    """Joins the parts of a content with line breaks; ``IMAGE`` stands for an image."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    pieces: list[str] = []
    for part in content:
        if part.get("type") == "image":
            pieces.append(IMAGE)
            continue
        if pieces and pieces[-1] is not IMAGE:
            pieces.append("\n")
        pieces.append(part["text"])
    return "".join(pieces)


def to_parts(content: str) -> list[dict[str, str]]:
    """Splits a flat text at its images."""
    parts: list[dict[str, str]] = []
    for i, text in enumerate(content.split(IMAGE)):
        parts += [{"type": "image"}] if i else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def parse_arguments(arguments: object) -> object:
    """Parses JSON text; other text is returned as it is, since a model may have written it."""
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(arguments or "{}")
    return arguments


def arguments_text(arguments: object) -> str:
    """Writes arguments as JSON text without ASCII escapes, which models do not write."""
    parsed = parse_arguments({} if arguments is None else arguments)
    return parsed if isinstance(parsed, str) else json.dumps(parsed, ensure_ascii=False)


def _arguments(sent: object, form: Literal["sent", "parsed", "text"], *, adapts: bool) -> object:
    if form == "parsed":
        return parse_arguments(sent)
    if form == "text" or (adapts and isinstance(sent, str) and "\\u" in sent):
        return arguments_text(sent)
    return sent


# Tools, calls and their results

Messages = list[dict[str, Any]]

_DESCRIPTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return the function name and a json object with its arguments, in this form:
{example}"""
#: Matches templates that take messages of tools.
_READS_RESULTS = re.compile(r"['\"]tool['\"]")
#: Matches templates that read the tools from the system message, as Phi-4-mini's.
_READS_TOOLS_OF_MESSAGES = re.compile(r"message\[['\"]tools['\"]\]|message\.tools\b")
_NO_SYSTEM = re.compile(r"[Ss]ystem role (is )?not supported")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_ID_CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes tool calls: ``begin``, the calls joined with ``separator``, ``end``."""

    #: Template of a call, with ``{name}`` and ``{arguments}``; ``{index}``: the number of the call, ``{id}``: nine
    #: letters and digits.
    call: str
    #: None: a message has one call at most.
    separator: str | None = None
    begin: str = ""
    end: str = ""
    #: Beginning of ``begin`` and ``call`` that tells calls from content; None: their position tells.
    trigger: str | None = None
    #: Template of an argument, with ``{key}``, ``{value}`` and perhaps ``{is_text}``; None: arguments are JSON objects.
    argument: str | None = None
    argument_separator: str = ""
    #: Values of such arguments. ``text``: strings as they are, others as JSON. ``json``, ``python``: literals.
    #: ``quoted``: strings between ``quote``, names of members without quotes.
    values: Literal["text", "json", "python", "quoted"] = "text"
    quote: str = ""
    #: Texts that end a value.
    stops: Sequence[str] = ()
    #: Text before an answer that is no call.
    answer: str = ""

    def pieces(self, name: str) -> tuple[str, str]:
        """Returns the text of a call before and after its arguments."""
        before, _, after = self.call.partition("{arguments}")
        return before.replace("{name}", name), after

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Writes calls, each a name and the JSON text of its arguments."""
        texts = []
        for index, (name, arguments) in enumerate(calls):
            text = self._arguments(arguments).join(self.pieces(name))
            texts.append(text.replace("{index}", str(index)).replace("{id}", _short_id(f"{index} {name}")))
        return self.begin + (self.separator or "").join(texts) + self.end

    def _arguments(self, text: str) -> str:
        if self.argument is None:
            return text
        arguments = parse_arguments(text)
        if not isinstance(arguments, dict):
            arguments = {"<parameter-name>": "<value>"}
        return self.argument_separator.join(
            self.argument_pieces(key, is_text=isinstance(value, str)).replace("{value}", self.value_text(value))
            for key, value in arguments.items()
        )

    def argument_pieces(self, key: str, *, is_text: bool) -> str:
        """Returns the text of an argument, with ``{value}`` in it."""
        template = (self.argument or "").replace("{is_text}", "true" if is_text else "false")
        return template.replace("{key}", key)

    def value_text(self, value: Any) -> str:
        """Writes the value of an argument."""
        if self.values == "python":
            return repr(value)
        if isinstance(value, str) and self.values != "json":
            return self.quote + value + self.quote
        if self.values == "quoted" and isinstance(value, dict):
            return "{" + ",".join(f"{key}:{self.value_text(member)}" for key, member in value.items()) + "}"
        if self.values == "quoted" and isinstance(value, list):
            return "[" + ",".join(map(self.value_text, value)) + "]"
        return json.dumps(value, ensure_ascii=False)


#: The most common format: Hermes, Qwen and many more.
HERMES = CallFormat(
    '<tool_call>\n{"name": "{name}", "arguments": {arguments}}\n</tool_call>', separator="\n", trigger="<tool_call>"
)


def fit_tools(
    messages: Messages, tools: list[Any] | None, calls: CallFormat, template: str, variables: Set[str]
) -> list[Any] | None:
    """Converts tools, calls and results, in place, to text if the template cannot take them.

    ``variables``: names that the template reads. Returns the tools to pass to the template.
    """
    reads_tools = bool({"tools", "custom_tools"} & variables)
    if tools and _READS_TOOLS_OF_MESSAGES.search(template):
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": ""})
        functions = [tool.get("function", tool) for tool in tools]
        messages[0]["tools"] = json.dumps(functions, ensure_ascii=False)
    elif tools and not reads_tools:
        _describe(messages, tools, calls, template)
    if not reads_tools and not _READS_RESULTS.search(template):
        _write_results(messages)
    for message in messages if "tool_calls" not in template else ():
        if entries := message.pop("tool_calls", None):
            pairs = [(call["function"]["name"], arguments_text(call["function"].get("arguments"))) for call in entries]
            message["content"] = "\n".join(filter(None, [flat_text(message.get("content")), calls.written(pairs)]))
    if "length != 9" in template:
        for message in messages:
            for holder, key in [(message, "tool_call_id"), *((call, "id") for call in message.get("tool_calls") or ())]:
                if isinstance(holder.get(key), str) and not _SHORT_ID.fullmatch(holder[key]):
                    holder[key] = _short_id(holder[key])
    return tools if reads_tools else None


def _describe(messages: Messages, tools: Sequence[Mapping[str, Any]], calls: CallFormat, template: str) -> None:
    example = calls.written([("<function-name>", "<args-json-object>")])
    text = _DESCRIPTION.replace("{example}", example)
    text = text.replace("{tools}", "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    role = "user" if _NO_SYSTEM.search(template) else "system"
    if messages[0]["role"] == role:
        content = flat_text(messages[0].get("content"))
        parts = [content, text] if role == "system" else [text, content]
        messages[0]["content"] = "\n\n".join(filter(None, parts))
    else:
        messages.insert(0, {"role": role, "content": text})


def _write_results(messages: Messages) -> None:
    """Turns tool results into user messages; consecutive results become one message."""
    joined: Messages = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            result = flat_text(message.get("content"))
            message = {"role": "user", "content": f"<tool_response>\n{result}\n</tool_response>"}
        if is_result and after_result:
            joined[-1]["content"] += f"\n{message['content']}"
        else:
            joined.append(message)
        after_result = is_result
    messages[:] = joined


def _short_id(text: str) -> str:
    number = int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big")
    characters = ""
    for _ in range(9):
        number, digit = divmod(number, len(_ID_CHARACTERS))
        characters += _ID_CHARACTERS[digit]
    return characters


# Rendering in jinja2's sandbox


class ExpressionError(InvalidRequestError): ...


def render_template(template: str, values: Mapping[str, Any]) -> str:
    """Renders a template in the sandbox."""
    compiled = _compiled(template)
    pieces: list[str] = []
    length = 0
    try:
        for piece in compiled.generate(values):
            length += len(piece)
            if length > MAX_RENDERED:
                raise InvalidRequestError(
                    f"the chat template writes more than {MAX_RENDERED} characters", path="messages"
                )
            pieces.append(piece)
    except InvalidRequestError:
        raise
    except jinja2.exceptions.SecurityError as e:
        raise TokenizerError(f"the chat template was stopped: {e}") from e
    except Exception as e:  # an expression of the template may raise anything
        raise ExpressionError(f"the chat template refuses this conversation: {str(e) or type(e).__name__}") from e
    return "".join(pieces)


@functools.lru_cache(maxsize=32)
def template_variables(template: str) -> frozenset[str]:
    """Returns the names that a template reads and does not set itself."""
    _compiled(template)
    return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(template)))


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """jinja2's sandbox, with limits on the results of ``*`` and ``**``."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) <= 2**32 and abs(right) <= 64):
            raise jinja2.exceptions.SecurityError("power out of bounds")
        for many, times in ((left, right), (right, left)):
            if isinstance(many, (str, list, tuple)) and isinstance(times, int) and len(many) * times > MAX_RENDERED:
                raise jinja2.exceptions.SecurityError("repetition out of bounds")
        return super().call_binop(context, operator, left, right)


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``, which marks the assistant's text for training: renders its body."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


@functools.lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    try:
        return _environment().from_string(template)
    except jinja2.exceptions.TemplateSyntaxError as e:
        raise TokenizerError(f"the chat template is not valid jinja: line {e.lineno}: {e.message}") from e
    except RecursionError:
        raise TokenizerError("the chat template is nested too deeply") from None


@functools.cache
def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["render_harmony"] = render_harmony
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter writes HTML escapes, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)
