"""What a chat asks for, whatever route it came by: OpenAI's, Anthropic's and Cohere's routes make a ``ChatCall`` each.

A route reads its body once, when it makes the call. Later errors name fields of the call; ``names`` has the route's.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel
from pydantic_core import from_json

from octavo.core.cache_hints import MAX_BREAKPOINTS
from octavo.server.answer_format import AnswerFormat, read_answer_format
from octavo.server.http.errors import invalid_at, unsupported
from octavo.server.openai.protocol import CustomTool, FormFields, FunctionTool, GenerationRequest, ImagePart, TextPart
from octavo.server.prompt_cache import MarkedConversation, Marks, seconds_of

if TYPE_CHECKING:
    from octavo.server.openai.protocol import ChatCompletionRequest, ChatMessage, TemplateOptions, Tool, ToolChoice
    from octavo.server.state import ServerState

#: A message as templates get it; images are parts ``{"type": "image_url", "image_url": {"url": ...}}``.
Message = dict[str, Any]


# Tools.

#: The limit of OpenAI's API.
MAX_TOOLS = 128
_MAX_DEPTH = 64
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_JSON_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
#: Keywords whose value is a schema, a list of schemas, or a mapping of names to schemas.
_SCHEMA_KEYWORDS = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")
_LIST_KEYWORDS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPPING_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

Choice = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call; it may stand for a custom tool, whose input is a text."""

    name: str
    #: JSON schema of its arguments.
    parameters: Mapping[str, Any]
    #: As the chat template gets it.
    shown: Mapping[str, Any]
    #: Of its definition in the request, and of its parameters there.
    path: str
    parameters_path: str
    #: Whether a grammar constrains its calls also if the model may choose to call.
    is_strict: bool = False
    is_custom: bool = False

    @classmethod
    def of(
        cls,
        path: str,
        name: str,
        fields: Mapping[str, Any],
        shown: Mapping[str, Any] | None = None,
        *,
        field: str = "parameters",
    ) -> Function:
        """Checks a function defined at ``path``.

        ``fields``: ``description``, ``parameters`` (in the request: ``field``) and ``strict``, as the template gets
        them unless it gets ``shown``.
        """
        place, parameters = f"{path}.{field}", fields.get("parameters")
        if shown is None:
            function = {"name": name, **{key: value for key, value in fields.items() if value is not None}}
            shown = {"type": "function", "function": function}
        if not parameters:
            schema: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
        elif parameters.get("type", "object") != "object":
            raise invalid_at(f"{place}.type", "must be 'object'", got=parameters["type"])
        else:
            _check_schema(parameters, place, 0)
            schema = {"type": "object", **parameters}
        return cls(name, schema, shown, path, place, bool(fields.get("strict")))

    @classmethod
    def of_custom(
        cls, path: str, name: str, description: str | None, input_format: Mapping[str, Any] | None
    ) -> Function:
        """The function for a custom tool; a grammar in its ``format`` becomes part of the description."""
        text = description or ""
        if input_format is not None and input_format.get("type") == "grammar":
            nested = input_format.get("grammar")
            grammar = nested if isinstance(nested, dict) else input_format
            text += f"\nThe input follows this {grammar.get('syntax')} grammar:\n{grammar.get('definition')}"
        schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
        parameters = {**schema, "additionalProperties": False}
        described = {"description": text.strip()} if text.strip() else {}
        function = {"name": name, **described, "parameters": parameters}
        return cls(name, parameters, {"type": "function", "function": function}, path, path, is_custom=True)


@dataclass(frozen=True, slots=True)
class RequestTools:
    """The functions of a chat request, and the choice among them."""

    #: The argument ``tools`` of the chat template.
    shown: list[Mapping[str, Any]] | None = None
    #: By name, those that may be called.
    functions: Mapping[str, Function] = field(default_factory=dict)
    #: "named": the one function must be called.
    choice: Choice = "none"
    parallel: bool = False

    @classmethod
    def of(
        cls,
        functions: Sequence[Function],
        choice: Choice = "auto",
        names: Iterable[str] | None = None,
        *,
        parallel: bool | None = None,
    ) -> RequestTools:
        """``names``: of the functions that may be called (default: all)."""
        if len(functions) > MAX_TOOLS:
            raise invalid_at("tools", f"has {len(functions)} functions; at most {MAX_TOOLS} are served")
        by_name: dict[str, Function] = {}
        for function in functions:
            if not _TOOL_NAME.fullmatch(function.name):
                problem = "must be 1 to 64 letters, digits, _ and -"
                raise invalid_at(f"{function.path}.name", problem, got=function.name)
            if function.name in by_name:
                raise invalid_at(f"{function.path}.name", f"there are two functions {function.name!r}")
            by_name[function.name] = function
        if choice == "none" or (choice == "auto" and not functions):
            return cls()
        if not functions:
            raise invalid_at("tool_choice", "is allowed only with tools")
        allowed = by_name.keys() if names is None else set(names)
        for name in allowed:
            if name not in by_name:
                raise invalid_at("tool_choice", f"names the function {name!r:.100}, which is not among tools")
        if not allowed:
            raise invalid_at("tool_choice", "must name a function")
        return cls(
            shown=[function.shown for function in functions],
            functions={name: function for name, function in by_name.items() if name in allowed},
            choice=choice,
            parallel=parallel is not False and choice != "named",
        )

    @property
    def callable(self) -> dict[str, Mapping[str, Any]]:
        """Parameter schemas by name."""
        return {name: function.parameters for name, function in self.functions.items()}

    @property
    def strict(self) -> frozenset[str]:
        return frozenset(name for name, function in self.functions.items() if function.is_strict)

    @property
    def custom(self) -> frozenset[str]:
        return frozenset(name for name, function in self.functions.items() if function.is_custom)

    @property
    def must_call(self) -> bool:
        """Whether the answer must consist of calls."""
        return self.choice in ("required", "named")


def _check_schema(schema: object, path: str, depth: int) -> None:
    """Refuses values that cannot be a JSON schema; the grammar checks the keywords."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise invalid_at(path, "must be a JSON schema, an object", got=schema)
    if depth > _MAX_DEPTH:
        raise invalid_at(path, f"is nested more than {_MAX_DEPTH} levels deep")
    types = schema.get("type", [])
    for kind in types if isinstance(types, list) else [types]:
        if not isinstance(kind, str) or kind not in _JSON_TYPES:
            raise invalid_at(f"{path}.type", "must be a JSON type", got=kind)
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise invalid_at(f"{path}.required", "must be a list of names", got=required)
    for key in _SCHEMA_KEYWORDS:
        if key in schema and not (key == "items" and isinstance(schema[key], list)):
            _check_schema(schema[key], f"{path}.{key}", depth + 1)
    for key in _LIST_KEYWORDS:
        if not isinstance(schema.get(key, []), list):
            raise invalid_at(f"{path}.{key}", "must be a list of schemas", got=schema[key])
        for k, item in enumerate(schema.get(key, [])):
            _check_schema(item, f"{path}.{key}[{k}]", depth + 1)
    for key in _MAPPING_KEYWORDS:
        if not isinstance(schema.get(key, {}), dict):
            raise invalid_at(f"{path}.{key}", "must map names to schemas", got=schema[key])
        for name, item in schema.get(key, {}).items():
            _check_schema(item, f"{path}.{key}.{name}", depth + 1)


def custom_input(arguments: str) -> str:
    """The input of a custom tool call, whose arguments may be truncated."""
    try:
        value = from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        return arguments
    return str(value["input"]) if isinstance(value, dict) and "input" in value else arguments


# Calls.


@dataclass(slots=True, kw_only=True)
class Conversation:
    """Messages, and how a chat template writes them."""

    messages: list[Message]
    tools: RequestTools = field(default_factory=RequestTools)
    #: A template of the model by its name, or the text of one; None: the model's own choice.
    template: str | None = None
    #: Further variables of the template.
    variables: Mapping[str, Any] = field(default_factory=dict)
    documents: list[dict[str, Any]] | None = None
    #: Whether the model shall reason, if the template can switch it; None: as it does by default.
    thinks: bool | None = None
    reasoning_effort: str | None = None
    #: Whether the last message is continued, and whether the assistant's answer is begun; None: if not continued.
    continues: bool = False
    opens: bool | None = None
    #: (message index, name) of fields that are no part of the API: the template must read each.
    extra_fields: Sequence[tuple[int, str]] = ()


@dataclass(slots=True, kw_only=True)
class ChatCall(Conversation):
    """A chat: a conversation, and what is asked of its answer."""

    #: Model, sampling parameters, and options of scheduling and streaming.
    fields: GenerationRequest
    answer_format: AnswerFormat | None = None
    max_tokens: int | None = None
    #: The request asks for as many tokens as fit, not for the model's default.
    has_no_token_limit: bool = False
    #: Most likely tokens per position beside the generated one; None: no logprobs.
    top_logprobs: int | None = None
    #: A predicted output.
    prediction: str | None = None
    add_special_tokens: bool = False
    parses_tool_calls: bool = True
    includes_reasoning: bool = True
    separates_reasoning: bool = True
    #: Text before the answer in the response.
    echo: str = ""
    #: The conversation with marks behind blocks: the prefix cache shall hold the prompt up to there.
    marked: Sequence[MarkedConversation] = ()
    #: Paths in errors -> the route's, where they differ.
    names: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.answer_format is not None:
            self.names = {**self.names, **self.answer_format.names}


#: What all routes that generate share, without the format of the answer.
_SHARED = GenerationRequest.model_fields.keys() - FormFields.model_fields.keys()


def generation_fields(body: BaseModel, **others: Any) -> GenerationRequest:
    """The fields of a validated body that all routes share, and ``others``."""
    values = {name: getattr(body, name) for name in body.model_fields_set & _SHARED}
    return _defaults().model_copy(update={**values, **others})


@functools.cache
def _defaults() -> GenerationRequest:
    return GenerationRequest.model_validate({})


# OpenAI's chats.


def read_chat(
    service: ServerState, body: ChatCompletionRequest, messages: Sequence[ChatMessage], path: str = "messages"
) -> ChatCall:
    """The call of a validated chat request with these messages, which stand at ``path``."""
    top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    if body.logprob_token_ids is not None:
        top_logprobs = len(body.logprob_token_ids)
    elif body.top_logprobs is not None and top_logprobs is None:
        raise invalid_at("top_logprobs", "is allowed only with logprobs=true")
    names = {"prompt": path, "messages": path}
    max_tokens = body.max_tokens
    if body.max_completion_tokens is not None:
        max_tokens, names["max_tokens"] = body.max_completion_tokens, "max_completion_tokens"
    prediction = None
    if body.prediction is not None:
        content = body.prediction.content
        prediction = content if isinstance(content, str) else "".join(part.text for part in content)
    tools = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls, service.leave_out_tool)
    return ChatCall(
        **conversation_fields(body, messages, tools),
        marked=_marked(body, messages, tools),
        fields=generation_fields(body),
        answer_format=read_answer_format(body),
        max_tokens=max_tokens,
        has_no_token_limit=body.has_no_token_limit,
        top_logprobs=top_logprobs,
        prediction=prediction,
        add_special_tokens=body.add_special_tokens is True,
        parses_tool_calls=body.parse_tool_calls is not False,
        includes_reasoning=body.include_reasoning is not False,
        separates_reasoning=body.separate_reasoning is not False and body.reasoning_format != "none",
        echo=_echo(messages) if body.echo else "",
        names=names,
    )


def _marked(
    body: ChatCompletionRequest, messages: Sequence[ChatMessage], tools: RequestTools
) -> list[MarkedConversation]:
    """The conversation with its last marks, at most ``MAX_BREAKPOINTS``."""
    ends: list[tuple[int, int]] = []  # (message, part); -1 is the last part
    for i, message in enumerate(messages):
        parts = message.content if isinstance(message.content, list) else []
        ends += [(i, k) for k, part in enumerate(parts) if _seconds_of(part) is not None]
        ends += [(i, -1)] if _seconds_of(message) is not None else []
    marked, ends = [], ends[-MAX_BREAKPOINTS:]
    offered = [_seconds_of(tool) for tool in body.tools or () if isinstance(tool, FunctionTool | CustomTool)]
    if any(offered):
        plain = [message_for_template(message) for message in messages]
        marked += MarkedConversation.with_tools(plain, tools, offered, MAX_BREAKPOINTS - len(ends))
    if ends:
        marks, copies = Marks(), [message_for_template(message) for message in messages]
        for i, k in reversed(ends):  # a mark behind an image is one more part
            copy, content = copies[i], messages[i].content
            if isinstance(content, str):
                copy["content"] = marks.add(content, _seconds_of(messages[i]))
            elif content:
                before, one, after = copy["content"][:k], copy["content"][k], copy["content"][k:][1:]
                seconds = _seconds_of(messages[i] if k == -1 else content[k])
                copy["content"] = [*before, *marks.add_to_parts([one], seconds), *after]
        marked.append(MarkedConversation(marks, copies, tools))
    return marked


def _seconds_of(marked: Any) -> float | None:
    return seconds_of(marked.cache_control, getattr(marked, "prompt_cache_breakpoint", None))


def conversation_fields(body: TemplateOptions, messages: Sequence[ChatMessage], tools: RequestTools) -> dict[str, Any]:
    """The fields of the ``Conversation`` of a body with options of the chat template."""
    return {
        "messages": [message_for_template(message) for message in messages],
        "tools": tools,
        "template": body.chat_template,
        "variables": body.chat_template_kwargs or {},
        "documents": body.documents,
        "thinks": body.thinks,
        "reasoning_effort": body.reasoning_effort,
        "continues": body.continue_final_message is True,
        "opens": body.add_generation_prompt,
        "extra_fields": [
            (i, name)
            for i, message in enumerate(messages)
            for name, value in (message.model_extra or {}).items()
            if value not in (None, "", [], {}, False)
        ],
    }


def message_for_template(message: ChatMessage) -> Message:
    """A message as a dict with the fields that were sent, null included."""
    # Not model_dump, which fails on deeply nested values.
    sent = message.model_fields_set
    fields = {**message.__dict__, **(message.model_extra or {})}
    plain = {name: value for name, value in fields.items() if name in sent}
    if isinstance(message.content, list):
        plain["content"] = [
            {"type": "image_url", "image_url": {"url": part.url}}
            if isinstance(part, ImagePart)
            else {"type": "text", "text": part.text}
            for part in message.content
        ]
    thought = message.reasoning_content or message.reasoning
    if not thought:  # parts without a text are encrypted, or summaries of others
        details = message.reasoning_details if isinstance(message.reasoning_details, list) else []
        texts = [part.get("text") for part in details if isinstance(part, dict)]
        thought = "".join(text for text in texts if isinstance(text, str))
    if thought:
        plain["reasoning_content"] = thought
    if message.tool_calls:
        plain["tool_calls"] = [_function_call(call) for call in message.tool_calls]
    return plain


def _function_call(call: dict[str, Any]) -> dict[str, Any]:
    """A custom tool call as a call of the function that stands for the tool; others as they are."""
    custom = call.get("custom")
    if call.get("type") != "custom" or not isinstance(custom, dict):
        return call
    arguments = json.dumps({"input": custom.get("input", "")}, ensure_ascii=False)
    rest = {name: value for name, value in call.items() if name != "custom"}
    return {**rest, "type": "function", "function": {"name": custom.get("name"), "arguments": arguments}}


def _echo(messages: Sequence[ChatMessage]) -> str:
    """The text of the last message if it is the assistant's."""
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant":
        return ""
    if isinstance(last.content, str):
        return last.content
    return "".join(part.text for part in last.content or [] if isinstance(part, TextPart))


def read_tools(
    tools: Sequence[Tool] | None,
    tool_choice: str | ToolChoice | None = None,
    parallel: bool | None = None,
    leave_out: Callable[[str, str], None] | None = None,
    *,
    strict: bool = False,
) -> RequestTools:
    """``leave_out`` gets the path and type of each tool that only another service could run (None: refused).

    ``strict``: all functions are.
    """
    functions: list[Function] = []
    for i, tool in enumerate(tools or ()):
        if isinstance(tool, FunctionTool):
            function, shown = tool.function, tool.sent
            if strict:
                shown = {**shown, "function": {**shown["function"], "strict": True}}
            fields = {"parameters": function.parameters, "strict": strict or function.strict}
            functions.append(Function.of(f"tools[{i}].function", function.name, fields, shown))
        elif isinstance(tool, CustomTool):
            custom = tool.custom
            functions.append(Function.of_custom(f"tools[{i}].custom", custom.name, custom.description, custom.format))
        elif leave_out is None or "function" in (tool.model_extra or {}):  # whose type must be function
            raise unsupported(f"tools[{i}].type", f"{tool.type!r:.100} is not supported: only functions are")
        else:
            leave_out(f"tools[{i}]", tool.type)
    choice, names = read_tool_choice(tool_choice)
    return RequestTools.of(functions, choice, names, parallel=parallel)


def read_tool_choice(choice: str | ToolChoice | None) -> tuple[Choice, list[str] | None]:
    """The choice, and the names of the functions that may be called (None: all)."""
    if choice is None:
        return "auto", None
    if isinstance(choice, str):
        if choice in ("none", "auto", "required"):
            return choice, None  # type: ignore[return-value]
        raise invalid_at("tool_choice", "must be none, auto, required or an object", got=choice)
    if choice.name is not None:
        return "named", [choice.name]
    if choice.type == "allowed_tools" and choice.allowed_tools is not None:
        return choice.allowed_tools.mode, [tool.name for tool in choice.allowed_tools.tools if tool.name is not None]
    raise invalid_at(
        "tool_choice",
        'must be {"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", "allowed_tools": '
        f'{{"mode": ..., "tools": [...]}}}}; its type is {choice.type!r:.100}',
    )
