# ruff: noqa: RUF001 (tokens of DeepSeek)
"""Tool call parsers, by name or by chat template. Read ``tool_parser`` first: the base class and its events."""

from __future__ import annotations

from octavo.core.plugins import load_class
from octavo.server.tool_parsers.formats import (
    DeepSeek,
    FunctionGemma,
    Gemma,
    Granite,
    Hermes,
    Llama3,
    Mistral,
    Phi4Mini,
    Pythonic,
    QwenCoder,
)
from octavo.server.tool_parsers.tool_parser import ToolParser

#: Names of ``--tool-call-parser``.
TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": Hermes,
    "llama3_json": Llama3,
    "mistral": Mistral,
    "pythonic": Pythonic,
    "deepseek": DeepSeek,
    "gemma": Gemma,
    "functiongemma": FunctionGemma,
    "qwen3_coder": QwenCoder,
    "granite": Granite,
    "phi4_mini_json": Phi4Mini,
}
#: vLLM's names.
_OTHER_NAMES = {
    "llama4_pythonic": "pythonic",
    "deepseek_v3": "deepseek",
    "deepseek_v31": "deepseek",
    "qwen3_xml": "qwen3_coder",
    "gemma4": "gemma",
    "llama4_json": "llama3_json",
}
#: Texts of chat templates that identify a format: the first entry whose texts all occur (None: no parser).
_SIGNS = (
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<tool_call>", "<arg_key>"), None),
    (("<tool_calls>[",), None),
    (("<tool_call>", '"arguments"'), "hermes"),
    (("<tool_call>", '\\"arguments\\"'), "hermes"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<｜tool▁call▁begin｜>",), "deepseek"),
    (("<|tool_call>call:",), "gemma"),
    (("<start_function_call>",), "functiongemma"),
    (("functools[",), "phi4_mini_json"),
    (("<|tool_call|>", "<|/tool_call|>"), "phi4_mini_json"),
    (("<|tool|>", "<|/tool|>"), "phi4_mini_json"),  # its own, which does not say how calls are written
    (("<|tool_call|>",), "granite"),
    (("[func_name1(",), "pythonic"),
    (('"parameters": dictionary of argument name and its value',), "llama3_json"),
)


def load_tool_parser(name: str) -> type[ToolParser]:
    """The parser of a name or of ``module:Class``; raises ``ConfigError``."""
    base = "octavo.server.tool_parsers.ToolParser"
    return load_class(_OTHER_NAMES.get(name, name), TOOL_PARSERS, ToolParser, "tool_call_parser", base)


def find_tool_parser(template: str) -> type[ToolParser] | None:
    for signs, name in _SIGNS:
        if all(sign in template for sign in signs):
            return None if name is None else TOOL_PARSERS[name]
    return None


__all__ = ["TOOL_PARSERS", "ToolParser", "find_tool_parser", "load_tool_parser"]
