"""The form in which a chat template takes messages: contents as text or as parts, nulls, arguments of calls.

A template gets messages as they were sent, as in transformers, unless it loses or garbles them so: one that walks over
parts writes nothing of a text, one that joins text writes a list as Python's repr. Which form a template takes is not
read from its source, where macros and filters hide it. The conversation is rendered with a mark in the place of each
text, name and argument, and marks that are missing in what the template writes tell what it loses. The form is then
the one nearest to what was sent in which the template loses least. What it writes of marks depends on the shape of the
conversation alone, so the form is found once for each shape.
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

# Chat templates as programs of strangers: they run in jinja2's sandbox, and their output is bounded.

#: Longest text that a template may write, in characters.
MAX_RENDERED = 16 << 20


class ExpressionError(InvalidRequestError):
    """An expression of the template failed."""


def written(template: str, values: Mapping[str, Any]) -> str:
    """What a template writes."""
    compiled = _compiled(template)
    pieces: list[str] = []
    length = 0
    try:
        for piece in compiled.generate(values):
            length += len(piece)
            if length > MAX_RENDERED:
                raise InvalidRequestError(f"the chat template writes more than {MAX_RENDERED} characters")
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
    """Names that a template reads and does not set itself.

    Raises:
        TokenizerError: the template is not valid.
    """
    _compiled(template)
    return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(template)))


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """jinja2's sandbox, with a bound also on what one expression can make."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) <= 2**32 and abs(right) <= 64):
            raise jinja2.exceptions.SecurityError("power out of bounds")
        for many, times in ((left, right), (right, left)):
            if isinstance(many, (str, list, tuple)) and isinstance(times, int) and len(many) * times > MAX_RENDERED:
                raise jinja2.exceptions.SecurityError("repetition out of bounds")
        return super().call_binop(context, operator, left, right)


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``, which marks the assistant's text for training: here its body, nothing more."""

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
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter writes HTML escapes, which no model has seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


Message = dict[str, Any]

#: Stands for an image in a text, until the template gets it as a part or as its placeholder; characters of no text.
IMAGE = "\ufdd0image\ufdd1"
#: A template that writes images names the type of such parts.
_WRITES_IMAGES = re.compile(r"""['"]image['"]""")
#: Roles whose messages a template may leave out on purpose. Few know ``developer``, and none leaves it out on purpose.
_MAY_BE_LEFT_OUT = frozenset({"system", "assistant", "tool"})
#: Roles of the API, which a template need not write: what it writes of them may differ by their place alone.
_KNOWN_ROLES = _MAY_BE_LEFT_OUT | {"user", "developer"}

_MARK = re.compile(r"qz(\d+)q")
#: A part of a content, or a mapping of arguments, written by Python's repr.
_REPR_OF_PART = re.compile(r"'text': 'qz(\d+)q'")
_REPR_OF_VALUE = re.compile(r"'qz(\d+)q'")
#: JSON text written as a JSON string once more.
_ENCODED_TWICE = re.compile(r'\\"qz(\d+)q')

#: ``sent``: as it was sent. ``parts``: texts are a list of one part. ``text``: parts are joined with line breaks.
#: ``part``: they are joined to one part.
ContentForm = Literal["sent", "parts", "text", "part"]
_OTHER_CONTENTS: tuple[ContentForm, ...] = ("parts", "text", "part")


@dataclass(frozen=True, slots=True)
class MessageForm:
    """The form of a conversation's messages."""

    #: By role; ``sent`` for others.
    contents: Mapping[str, ContentForm] = field(default_factory=dict)
    #: Whether keys with null are left out.
    drops_nulls: bool = False
    #: Content of messages without one.
    no_content: Literal["sent", "null", "text"] = "sent"
    #: Arguments of calls: as sent, as what their JSON text says, or as JSON text.
    arguments: Literal["sent", "parsed", "text"] = "sent"


@dataclass(frozen=True, slots=True)
class Images:
    """How images are written in a conversation."""

    #: Stands for one where the template takes text alone.
    placeholder: str | None
    #: Whether the template writes parts that are images.
    by_template: bool

    @classmethod
    def of(cls, template: str, placeholder: str | None) -> Images:
        """Of a template and a model; ``placeholder`` is None if it sees none."""
        return cls(placeholder, _WRITES_IMAGES.search(template) is not None)


@dataclass(slots=True)
class _Marked:
    """A conversation with marks in the place of what a template has to write."""

    messages: list[Message]
    #: Index of a message whose role the template does not name -> the mark that takes its place.
    role_marks: dict[int, str] = field(default_factory=dict)
    #: Number of a mark -> index of its message.
    texts: dict[int, int] = field(default_factory=dict)
    calls: dict[int, int] = field(default_factory=dict)
    #: Of values of arguments; of each call one has to be written.
    arguments: dict[int, int] = field(default_factory=dict)
    roles: dict[int, int] = field(default_factory=dict)
    _count: Iterator[int] = field(default_factory=itertools.count)

    def mark(self, kind: dict[int, int], index: int) -> str:
        number = next(self._count)
        kind[number] = index
        return f"qz{number}q"


@dataclass(frozen=True, slots=True)
class _Losses:
    """What a template loses of a conversation."""

    #: Indices of messages, one entry for each text.
    texts: tuple[int, ...] = ()
    #: Calls and arguments, likewise.
    calls: tuple[int, ...] = ()
    roles: tuple[int, ...] = ()
    #: How often it writes None.
    nones: int = 0
    #: Whether it writes any text.
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
    """Gives messages the form in which a template takes them, in place.

    Args:
        template: its text.
        values: the variables of the template but ``messages``.
        messages: as they were sent.
        images: how images are written.
        adapts: whether null is never written as ``None``, nor arguments as Python's repr. transformers writes both.
        continues: whether a text follows that of the last message.

    Raises:
        InvalidRequestError: in every form the template loses a message of the user or of a role of one's own.
        TokenizerError: the template is not valid, or does what a template must not.
    """
    marked = _mark(messages, template, continues)
    shape = repr((values, marked.messages, adapts, images)).encode("utf-8", "surrogatepass")
    key = (template, hashlib.blake2b(shape, digest_size=16).digest())
    found = _known.get(key)
    if found is None:
        found = _find_form(template, values, marked, images, adapts=adapts)
        _known.put(key, found)
    form, losses = found
    if losses is not None:
        _refuse_lost(template, messages, losses)
    apply_form(form, messages, images, adapts=adapts)


def names_role(template: str, role: str) -> bool:
    """Whether a template asks for a role by its name."""
    return f"'{role}'" in template or f'"{role}"' in template


def _refuse_lost(template: str, messages: Sequence[Message], losses: _Losses) -> None:
    """Refuses a conversation of which a template loses what somebody wrote.

    Templates leave system messages and earlier turns of the assistant out on purpose, and those are not refused. Nor is
    what a template that writes no text at all does, if it does not name contents or there are calls, which may be what
    it writes.
    """
    for index in losses.roles:
        role = messages[index]["role"]
        raise InvalidRequestError(
            f"messages[{index}].role: the chat template neither names nor writes the role {role[:100]!r}"
        )
    if not losses.writes_texts and ("content" not in template or any(dict.get(m, "tool_calls") for m in messages)):
        return
    for index in losses.texts:
        message = messages[index]
        role = str(dict.get(message, "role"))
        if role not in _MAY_BE_LEFT_OUT and flat_text(dict.get(message, "content")).strip():
            raise InvalidRequestError(
                f"messages[{index}].content: the chat template writes no message of the role {role[:100]!r} here"
            )


# The search ---------------------------------------------------------------------------------------------------------


class _Known:
    """Forms that were found, the last ones used."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._found: OrderedDict[tuple[str, bytes], tuple[MessageForm, _Losses | None]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[str, bytes]) -> tuple[MessageForm, _Losses | None] | None:
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
            return self._found.get(key)

    def put(self, key: tuple[str, bytes], found: tuple[MessageForm, _Losses | None]) -> None:
        with self._lock:
            self._found[key] = found
            if len(self._found) > self._most:
                self._found.popitem(last=False)


_known = _Known(512)


def _find_form(
    template: str, values: Mapping[str, Any], marked: _Marked, images: Images, *, adapts: bool
) -> tuple[MessageForm, _Losses | None]:
    """The form in which a template loses least, and what it still loses; None: it fails in every form."""

    def losses_in(form: MessageForm) -> _Losses | None:
        messages = [_copied(message) for message in marked.messages]
        apply_form(form, messages, images, adapts=adapts)
        for index, mark in marked.role_marks.items():
            messages[index]["role"] = mark
        with contextlib.suppress(InvalidRequestError):
            return _losses(written(template, {**values, "messages": messages}), marked, adapts=adapts)
        return None

    form = MessageForm()
    losses = losses_in(form)
    choices = _choices(marked.messages)
    if losses is None:  # it fails, maybe for several reasons at once
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
    """Other values of a form's fields, but for contents, that make a difference to messages."""
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
    """Forms that differ in several ways from what was sent: some fifty at most, the likeliest first."""
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
    """What is missing in what a template wrote of marks."""
    text_lower = text.lower()  # some templates write names of roles, or more, in capitals
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


# Marks --------------------------------------------------------------------------------------------------------------


def _mark(messages: Sequence[Message], template: str, continues: bool) -> _Marked:
    """A conversation with marks; texts without characters stay, as templates ask for them, unless one is continued."""
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
            if not content:  # so that it is found out whether the role's contents may be lists
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


# The forms ----------------------------------------------------------------------------------------------------------


def apply_form(form: MessageForm, messages: Sequence[Message], images: Images, *, adapts: bool) -> None:
    """Gives messages a form, in place."""
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
    """A content as one text: its parts joined with line breaks, ``IMAGE`` in the place of images."""
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
    """What ``flat_text`` has joined, as texts between images."""
    parts: list[dict[str, str]] = []
    for i, text in enumerate(content.split(IMAGE)):
        parts += [{"type": "image"}] if i else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def parse_arguments(arguments: object) -> object:
    """What the JSON text of arguments says; what is no JSON stays text, as a model may have written it."""
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(arguments or "{}")
    return arguments


def arguments_text(arguments: object) -> str:
    """Arguments as JSON text, without escapes of letters, which models do not write."""
    parsed = parse_arguments({} if arguments is None else arguments)
    return parsed if isinstance(parsed, str) else json.dumps(parsed, ensure_ascii=False)


def _arguments(sent: object, form: Literal["sent", "parsed", "text"], *, adapts: bool) -> object:
    if form == "parsed":
        return parse_arguments(sent)
    if form == "text" or (adapts and isinstance(sent, str) and "\\u" in sent):
        return arguments_text(sent)
    return sent


# Tools, calls and their results in conversations, fitted to what a chat template reads.

Messages = list[dict[str, Any]]

_DESCRIPTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return the function name and a json object with its arguments, in this form:
{example}"""
#: Templates that know messages of tools.
_READS_RESULTS = re.compile(r"['\"]tool['\"]")
#: Templates that read the tools from the system message: of Phi-4-mini.
_READS_TOOLS_OF_MESSAGES = re.compile(r"message\[['\"]tools['\"]\]|message\.tools\b")
_NO_SYSTEM = re.compile(r"[Ss]ystem role (is )?not supported")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_ID_CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls: ``begin``, calls with ``separator`` between them, ``end``."""

    #: One call, in which ``{name}`` and ``{arguments}`` stand for its own.
    call: str
    #: None: there is only one call.
    separator: str | None = None
    begin: str = ""
    end: str = ""
    #: Beginning of ``begin`` and ``call`` that tells calls from content; None: they are told by where they stand.
    trigger: str | None = None

    def pieces(self, name: str) -> tuple[str, str]:
        """The text of a call before and after its arguments."""
        before, _, after = self.call.partition("{arguments}")
        return before.replace("{name}", name), after

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """The text of calls, given as names and the JSON text of the arguments."""
        texts = [arguments.join(self.pieces(name)) for name, arguments in calls]
        return self.begin + (self.separator or "").join(texts) + self.end


#: The most usual one: of Hermes, Qwen and many more.
HERMES = CallFormat(
    '<tool_call>\n{"name": "{name}", "arguments": {arguments}}\n</tool_call>', separator="\n", trigger="<tool_call>"
)


def fit_tools(
    messages: Messages,
    tools: list[Any] | None,
    calls: CallFormat,
    template: str,
    variables: Set[str],
) -> list[Any] | None:
    """Fits messages to a template, in place: what it has no place for becomes text. The tools that remain for it.

    Args:
        messages: those of the conversation, each with plain data.
        tools: the tools that are offered.
        calls: how calls are written in text.
        template: the template's text.
        variables: names that it reads.
    """
    reads_tools = bool({"tools", "custom_tools"} & variables)
    if tools and _READS_TOOLS_OF_MESSAGES.search(template):
        _attach(messages, tools)
    elif tools and not reads_tools:
        _describe(messages, tools, calls, template)
    if not reads_tools and not _READS_RESULTS.search(template):
        _write_results(messages)
    if "tool_calls" not in template:
        _write_calls(messages, calls)
    if "length != 9" in template:
        _shorten_ids(messages)
    return tools if reads_tools else None


def _attach(messages: Messages, tools: Sequence[Mapping[str, Any]]) -> None:
    """Gives the system message the functions, as JSON text, in a field of its own."""
    if messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": ""})
    functions = [tool.get("function", tool) for tool in tools]
    messages[0]["tools"] = json.dumps(functions, ensure_ascii=False)


def _describe(messages: Messages, tools: Sequence[Mapping[str, Any]], calls: CallFormat, template: str) -> None:
    """Says in the system message which tools there are."""
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


def _write_calls(messages: Messages, calls: CallFormat) -> None:
    """Puts calls into the content of their messages."""
    for message in messages:
        if entries := message.pop("tool_calls", None):
            pairs = [(call["function"]["name"], arguments_text(call["function"].get("arguments"))) for call in entries]
            message["content"] = "\n".join(filter(None, [flat_text(message.get("content")), calls.written(pairs)]))


def _write_results(messages: Messages) -> None:
    """Makes results a user's messages; consecutive ones are one message."""
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


def _shorten_ids(messages: Messages) -> None:
    for message in messages:
        for holder, key in [(message, "tool_call_id"), *((call, "id") for call in message.get("tool_calls") or ())]:
            if isinstance(holder.get(key), str) and not _SHORT_ID.fullmatch(holder[key]):
                holder[key] = _short_id(holder[key])


def _short_id(text: str) -> str:
    """Nine letters and digits, the same for the same id."""
    number = int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big")
    characters = ""
    for _ in range(9):
        number, digit = divmod(number, len(_ID_CHARACTERS))
        characters += _ID_CHARACTERS[digit]
    return characters
