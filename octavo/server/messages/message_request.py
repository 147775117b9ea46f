"""A request of the Messages API as the internal chat request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from octavo.engine.chat_template import choose_template
from octavo.engine.template_program import template_variables
from octavo.server.api_errors import wrong
from octavo.server.message_fields import THINKING_VARIABLES
from octavo.server.messages.message_parts import (
    ClientTool,
    ContentBlock,
    DocumentBlockParam,
    ImageBlockParam,
    SearchResultParam,
    ServerToolUseParam,
    TextBlockParam,
    ToolResultParam,
    ToolUseParam,
    WebSearchError,
    WebSearchResultParam,
)
from octavo.server.messages.message_protocol import CountTokensRequest, MessagesRequest
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


def chat_body(service: Service, body: CountTokensRequest) -> dict[str, Any]:
    """Fields of the chat that a request asks for.

    Raises:
        ApiError: 400, naming what contradicts itself or is not supported.
    """
    messages = _messages(body)
    chat = {name: value for name in SamplingFields.model_fields if (value := getattr(body, name)) is not None}
    chat |= {"model": body.model, "messages": messages} | _tools(service, body) | _output_config(body)
    if messages and messages[-1]["role"] == "assistant":
        if "tool_calls" in messages[-1]:
            raise wrong("messages", "the last message uses a tool; its tool_result must follow")
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.thinking is not None and body.thinking.budget_tokens is not None and body.thinking_token_budget is None:
        chat["thinking_token_budget"] = body.thinking.budget_tokens
    if variables := {**_thinking(service, body), **(body.chat_template_kwargs or {})}:
        chat["chat_template_kwargs"] = variables
    if body.thinking is not None and body.thinking.display == "omitted":
        chat["include_reasoning"] = False
    if isinstance(body, MessagesRequest):
        chat |= {"stop": body.stop_sequences, "stream": body.stream}
        chat["user"] = body.metadata and body.metadata.user_id
    return chat


def _messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _texts(body.system)})
    used: set[str] = set()
    for i, message in enumerate(body.messages):
        content = message.content
        blocks = [TextBlockParam(type="text", text=content)] if isinstance(content, str) else content
        if not blocks:
            messages.append({"role": message.role, "content": ""})
        for k, block in enumerate(blocks):
            if isinstance(block, ToolResultParam | WebSearchResultParam):
                messages.append(_tool_result(block, used, f"messages[{i}].content[{k}]"))
                continue
            turn = _turn(messages, message.role)
            if isinstance(block, ContentBlock):
                turn["content"] += _parts(block, f"messages[{i}].content[{k}]")
            elif isinstance(block, ToolUseParam | ServerToolUseParam):
                used.add(block.id)
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                turn.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})
            else:
                turn["reasoning_content"] = turn.get("reasoning_content", "") + block.thinking
    for said in messages:
        said["content"] = _joined(said["content"])
    return messages


def _joined(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """A content without images as one text, blocks as lines: templates write nothing between parts."""
    if isinstance(content, str) or any(part["type"] != "text" for part in content):
        return content
    return "\n".join(part["text"] for part in content)


def _turn(messages: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """The last message if it is of this role, else a new one: consecutive messages of a role are one turn."""
    if not messages or messages[-1]["role"] != role or isinstance(messages[-1]["content"], str):
        messages.append({"role": role, "content": []})
    return messages[-1]


def _tool_result(block: ToolResultParam | WebSearchResultParam, used: set[str], where: str) -> dict[str, Any]:
    if block.tool_use_id not in used:
        raise wrong(f"{where}.tool_use_id", f"there is no tool_use {block.tool_use_id[:100]!r} before it")
    if isinstance(block, WebSearchResultParam):
        return {"role": "tool", "tool_call_id": block.tool_use_id, "content": _texts(_found(block))}
    blocks = [] if block.content is None else block.content
    content = (
        _texts(blocks)
        if isinstance(blocks, str)
        else [piece for k, part in enumerate(blocks) for piece in _parts(part, f"{where}.content[{k}]")]
    )
    if block.is_error:
        # A chat has no other place for it.
        has_text = bool(content) and "text" in content[0]
        error = f"Error: {content[0]['text'] if has_text else ''}"
        content = [{"type": "text", "text": error}, *content[1 if has_text else 0 :]]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _found(block: WebSearchResultParam) -> str:
    """What a search found, as far as it can be read."""
    if isinstance(block.content, WebSearchError):
        return f"Error: {block.content.error_code}"
    ages = [f" ({page.page_age})" if page.page_age else "" for page in block.content]
    return "\n".join(f"{page.title}: {page.url}{age}" for page, age in zip(block.content, ages, strict=True))


def _parts(block: ContentBlock, where: str) -> list[dict[str, Any]]:
    """A block as parts of a chat's message: documents as texts between marks, as Anthropic's guide writes them."""
    if isinstance(block, TextBlockParam | ImageBlockParam):
        return [_part(block, where)]
    header: dict[str, str | None]
    if isinstance(block, SearchResultParam):
        header = {"source": block.source, "title": block.title}
        inner = [{"type": "text", "text": part.text} for part in block.content]
    else:
        header, inner = {"title": block.title, "context": block.context}, _document(block, f"{where}.source")
    head = "".join(f"<{name}>{text}</{name}>\n" for name, text in header.items() if text)
    if len(inner) == 1 and inner[0]["type"] == "text":  # one part: no template writes anything between the lines
        inner = [{"type": "text", "text": f"<document>\n{head}{inner[0]['text']}\n</document>"}]
    else:
        inner = [{"type": "text", "text": f"<document>\n{head}"}, *inner, {"type": "text", "text": "\n</document>"}]
    return inner


def _document(block: DocumentBlockParam, where: str) -> list[dict[str, Any]]:
    """What a document holds."""
    source = block.source
    name = "data" if source.type == "text" else "content"
    if (value := getattr(source, name)) is None:
        raise wrong(f"{where}.{name}", f"it is missing, for a source of type {source.type!r}")
    if isinstance(value, str):
        return _texts(value)
    return [_part(part, f"{where}.content[{k}]") for k, part in enumerate(value)]


def _part(block: TextBlockParam | ImageBlockParam, where: str) -> dict[str, Any]:
    """A block as a part of a chat's message."""
    if isinstance(block, TextBlockParam):
        return {"type": "text", "text": block.text}
    source = block.source
    name = "data" if source.type == "base64" else "url"
    if (value := getattr(source, name)) is None:
        raise wrong(f"{where}.source.{name}", f"it is missing, for a source of type {source.type!r}")
    url = f"data:{source.media_type or ''};base64,{value}" if name == "data" else value
    return {"type": "image_url", "image_url": {"url": url}}


def _texts(value: str | Sequence[TextBlockParam]) -> list[dict[str, Any]]:
    """A text, or blocks of text, as parts of a chat's message."""
    texts = [value] if isinstance(value, str) else [block.text for block in value]
    return [{"type": "text", "text": text} for text in texts]


def _tools(service: Service, body: CountTokensRequest) -> dict[str, Any]:
    """Tools and the choice among them, in the notation of chats."""
    tools = []
    for i, tool in enumerate(body.tools or []):
        if isinstance(tool, ClientTool):
            tools.append({"type": "function", "function": _function(tool)})
        else:
            service.leave_out_tool(f"tools[{i}]", tool.type)
    fields: dict[str, Any] = {"tools": tools} if tools else {}
    choice = body.tool_choice
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name or ""}}
        fields["tool_choice"] = named if choice.type == "tool" else {"any": "required"}.get(choice.type, choice.type)
        if choice.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False
    return fields


def _function(tool: ClientTool) -> dict[str, Any]:
    description = tool.description
    if tool.input_examples:
        examples = json.dumps(tool.input_examples, ensure_ascii=False)
        description = f"{description or ''}\nExamples of its input: {examples}".strip()
    function = {"name": tool.name, "parameters": tool.input_schema, "description": description, "strict": tool.strict}
    return {name: value for name, value in function.items() if value is not None}


def _output_config(body: CountTokensRequest) -> dict[str, Any]:
    config, fields = body.output_config, dict[str, Any]()
    if config is not None and config.effort is not None:
        fields["reasoning_effort"] = config.effort
    if config is not None and config.format is not None:
        schema = {"name": "output", "schema": config.format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _thinking(service: Service, body: CountTokensRequest) -> dict[str, Any]:
    """The variable that tells the chat template whether the model shall think; a hint where there is none."""
    if body.thinking is None or body.thinking.type == "adaptive":
        return {}
    template = choose_template(service.llm.tokenizer.chat_templates, None, has_tools=bool(body.tools))
    names = template_variables(template)
    return {name: body.thinking.type == "enabled" for name in THINKING_VARIABLES if name in names}
