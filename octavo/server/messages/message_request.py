"""A request of the Messages API as the internal chat request."""

from __future__ import annotations

import json
from typing import Any

from octavo.engine.chat_template import choose_template
from octavo.engine.template_program import template_variables
from octavo.server.body_parts import BodyPart, entries, not_supported, wrong
from octavo.server.fields import Unsupported
from octavo.server.messages.message_protocol import CountTokensRequest, MessagesRequest
from octavo.server.prompt_fields import THINKING_VARIABLES
from octavo.server.sampling_fields import SamplingFields
from octavo.server.service import Service

#: Fields of a chat by their names here; errors about a chat are told under these.
RENAMED = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config",
    "reasoning_effort": "output_config",
    "parallel_tool_calls": "tool_choice",
}
#: Fields of this route that are refused.
UNSUPPORTED = {
    "container": Unsupported("code is not run"),
    "mcp_servers": Unsupported("MCP servers are not called; a client can offer their tools as its own", ([],)),
    "context_management": Unsupported("send the messages that the model shall see"),
    "inference_geo": Unsupported("the model runs where this server does"),
    "speed": Unsupported("there is one speed", ("standard",)),
    "diagnostics": Unsupported("/metrics counts what the prefix cache finds"),
    "service_tier": Unsupported("there is one tier", ("auto", "standard_only")),
    "n": Unsupported("there is one message for each request", (1,)),
}
#: Accepted with any value: marks for caches, and labels.
HARMLESS = frozenset({"cache_control", "user_profile_id", "workspace_id"})

_MARKS = ("cache_control", "citations")


def chat_body(service: Service, body: CountTokensRequest) -> dict[str, Any]:
    """Fields of the chat that a request asks for.

    Raises:
        ApiError: 400, naming what is malformed or not supported.
    """
    messages = _messages(body)
    chat = {name: value for name in SamplingFields.model_fields if (value := getattr(body, name)) is not None}
    chat |= {"model": body.model, "messages": messages} | _tools(body) | _output_config(body)
    if messages and messages[-1]["role"] == "assistant":
        if "tool_calls" in messages[-1]:
            raise wrong("messages", "the last message uses a tool; its tool_result must follow")
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if variables := _thinking(service, body):
        chat["chat_template_kwargs"] = {**variables, **(body.chat_template_kwargs or {})}
    if isinstance(body, MessagesRequest):
        chat |= {"max_completion_tokens": body.max_tokens, "stop": body.stop_sequences, "stream": body.stream}
        if body.metadata is not None:
            metadata = BodyPart("metadata", body.metadata)
            chat["user"] = metadata.take("user_id", str, None)
            metadata.refuse_rest()
    return chat


def _messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _texts("system", body.system)})
    used: set[str] = set()
    for message in entries("messages", body.messages):
        role = message.choice("role", ("user", "assistant", "system"))
        where, content = message.at("content"), message.take_any("content")
        message.refuse_rest()
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for block in entries(where, blocks):
            _add_block(messages, role, block, used)
        if not blocks:
            messages.append({"role": role, "content": ""})
    return messages


def _add_block(messages: list[dict[str, Any]], role: str, block: BodyPart, used: set[str]) -> None:
    """Adds a block to the last message, if it is of the same turn, or as a message of its own."""
    kind = block.take("type", str)
    if kind == "text":
        _turn(messages, role)["content"].append({"type": "text", "text": block.take("text", str)})
    elif kind == "tool_result" and role == "user":
        messages.append(_tool_result(block, used))
    elif kind == "tool_use" and role == "assistant":
        call_id, name, given = block.take("id", str), block.take("name", str), block.take("input", dict)
        used.add(call_id)
        function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
        calls = _turn(messages, role).setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})
        if (caller := block.take("caller", dict, {"type": "direct"})).get("type") != "direct":
            raise not_supported(block.at("caller"), f"tools are used by the model, not by {caller!r:.100}")
    elif kind == "thinking" and role == "assistant":
        turn = _turn(messages, role)
        turn["reasoning_content"] = turn.get("reasoning_content", "") + block.take("thinking", str)
        block.take_any("signature")  # thinking is not signed here
    else:
        known = "text and tool_result" if role == "user" else "text" if role == "system" else "text, tool_use, thinking"
        raise not_supported(block.where, f"its type is {kind[:100]!r}; in a message of the {role} there can be {known}")
    block.refuse_rest(*_MARKS)


def _turn(messages: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """The last message if it is of this role, else a new one: consecutive messages of a role are one turn."""
    if not messages or messages[-1]["role"] != role or isinstance(messages[-1]["content"], str):
        messages.append({"role": role, "content": []})
    return messages[-1]


def _tool_result(block: BodyPart, used: set[str]) -> dict[str, Any]:
    call_id = block.take("tool_use_id", str)
    if call_id not in used:
        raise wrong(block.at("tool_use_id"), f"there is no tool_use {call_id[:100]!r} before it")
    content = _texts(block.at("content"), block.take_any("content", ""))
    if block.take("is_error", bool, False):
        # A chat has no other place for it.
        content = [{"type": "text", "text": f"Error: {content[0]['text'] if content else ''}"}, *content[1:]]
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _texts(where: str, value: Any) -> list[dict[str, Any]]:
    """A text, or blocks of text, as parts of a chat's message."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    parts = []
    for block in entries(where, value):
        kind = block.take("type", str)
        if kind != "text":
            raise not_supported(block.where, f"its type is {kind[:100]!r}; the model reads text only")
        parts.append({"type": "text", "text": block.take("text", str)})
        block.refuse_rest(*_MARKS)
    return parts


def _tools(body: CountTokensRequest) -> dict[str, Any]:
    """Tools and the choice among them, in the notation of chats."""
    tools = []
    for tool in entries("tools", body.tools or []):
        kind = tool.take("type", str, "custom")
        if kind != "custom":
            raise not_supported(tool.where, f"its type is {kind[:100]!r}; only tools of the client can be used")
        function: dict[str, Any] = {"name": tool.take("name", str), "parameters": tool.take("input_schema", dict)}
        function |= {"description": tool.take("description", str, None), "strict": tool.take("strict", bool, None)}
        if (callers := tool.take("allowed_callers", list, ["direct"])) != ["direct"]:
            raise not_supported(tool.at("allowed_callers"), f"tools are used by the model, not by {callers!r:.100}")
        tool.refuse_rest("cache_control", "eager_input_streaming")
        tools.append({"type": "function", "function": {k: v for k, v in function.items() if v is not None}})
    found: dict[str, Any] = {"tools": tools} if tools else {}
    if body.tool_choice is not None:
        choice = BodyPart("tool_choice", body.tool_choice)
        kind = choice.choice("type", ("auto", "any", "tool", "none"))
        named = {"type": "function", "function": {"name": choice.take("name", str)}} if kind == "tool" else None
        found["tool_choice"] = named or {"any": "required"}.get(kind, kind)
        if choice.take("disable_parallel_tool_use", bool, False):
            found["parallel_tool_calls"] = False
        choice.refuse_rest()
    return found


def _output_config(body: CountTokensRequest) -> dict[str, Any]:
    if body.output_config is None:
        return {}
    config = BodyPart("output_config", body.output_config)
    found: dict[str, Any] = {}
    if (effort := config.take("effort", str, None)) is not None:
        found["reasoning_effort"] = effort
    if (given := config.take("format", dict, None)) is not None:
        form = BodyPart("output_config.format", given)
        form.choice("type", ("json_schema",))
        schema = {"name": "output", "schema": form.take("schema", dict), "strict": True}
        found["response_format"] = {"type": "json_schema", "json_schema": schema}
        form.refuse_rest()
    config.refuse_rest()
    return found


def _thinking(service: Service, body: CountTokensRequest) -> dict[str, Any]:
    """The variable that tells the chat template whether the model shall think."""
    if body.thinking is None:
        return {}
    thinking = BodyPart("thinking", body.thinking)
    kind = thinking.choice("type", ("enabled", "disabled", "adaptive"))
    if kind == "enabled" and thinking.take("budget_tokens", int) < 1:
        raise wrong("thinking.budget_tokens", "it must be at least 1")
    if (display := thinking.take("display", str, None)) is not None:
        raise not_supported("thinking.display", f"thinking comes whole, not {display[:20]!r}")
    thinking.refuse_rest()
    template = choose_template(service.llm.tokenizer.chat_templates, None, has_tools=bool(body.tools))
    names = [name for name in THINKING_VARIABLES if name in template_variables(template)]
    thinks = service.formats.reasoning_parser(template) is not None
    if not names and kind != "adaptive" and thinks != (kind == "enabled"):
        cannot = "switch it off" if thinks else "think"
        raise not_supported("thinking", f"{kind}: the model cannot {cannot}, by its chat template")
    return {} if kind == "adaptive" else {name: kind == "enabled" for name in names}
