# ruff: noqa: RUF001 (tokens of DeepSeek)
"""Tool call parsers, by name or by chat template. Read ``tool_parser`` first: the base class and its events."""

from __future__ import annotations

from octavo.core.plugins import load_class
from octavo.server.tool_parsers.formats import (
    DeepSeek,
    Granite,
    Harmony,
    Hermes,
    Hunyuan,
    KimiK2,
    Lfm2,
    Llama3,
    Mistral,
    NemotronNano2,
    Olmo3,
    Phi4Mini,
    Pythonic,
)
from octavo.server.tool_parsers.tagged_formats import (
    DeepSeekMarkup,
    FunctionGemma,
    Gemma,
    Glm,
    MiniMaxM2,
    QwenCoder,
    SeedOss,
    Step3,
)
from octavo.server.tool_parsers.tool_parser import ToolParser

#: Names of ``--tool-call-parser``.
TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": Hermes,
    "llama3_json": Llama3,
    "mistral": Mistral,
    "pythonic": Pythonic,
    "olmo3": Olmo3,
    "lfm2": Lfm2,
    "deepseek": DeepSeek,
    "deepseek_v32": DeepSeekMarkup,
    "gemma": Gemma,
    "functiongemma": FunctionGemma,
    "qwen3_coder": QwenCoder,
    "seed_oss": SeedOss,
    "glm45": Glm,
    "minimax_m2": MiniMaxM2,
    "step3": Step3,
    "kimi_k2": KimiK2,
    "harmony": Harmony,
    "granite": Granite,
    "hunyuan_a13b": Hunyuan,
    "nemotron_nano_v2": NemotronNano2,
    "phi4_mini_json": Phi4Mini,
}
#: Names of vLLM and SGLang.
OTHER_NAMES = {
    "llama4_pythonic": "pythonic",
    "llama4_json": "llama3_json",
    "llama3": "llama3_json",
    "deepseek_v3": "deepseek",
    "deepseek_v31": "deepseek",
    "deepseek_v4": "deepseek_v32",
    "deepseekv3": "deepseek",
    "deepseekv31": "deepseek",
    "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v32",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_xml": "qwen3_coder",
    "mimo": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "gemma4": "gemma",
    "glm": "glm45",
    "glm47": "glm45",
    "granite4": "hermes",
    "ernie45": "hermes",
    "hunyuan": "hunyuan_a13b",
    "jamba": "hunyuan_a13b",
    "phi4_mini": "phi4_mini_json",
    "openai": "harmony",
    "gpt_oss": "harmony",
}
#: Texts of chat templates that identify a format: the first entry whose texts all occur (None: no parser).
_SIGNS = (
    (("｜DSML｜",), "deepseek_v32"),
    (("<|channel|>analysis<|message|>",), "harmony"),
    (("<tool_calls{}>",), None),
    (("<seed:tool_call>",), "seed_oss"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("steptml:",), "step3"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<TOOLCALL>",), "nemotron_nano_v2"),
    (("<function_calls>", "</function_calls>"), "olmo3"),
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<tool_call>", "<arg_key>"), "glm45"),
    (("<tool_calls>[",), "hunyuan_a13b"),
    (("<tool_call>", '"arguments"'), "hermes"),
    (("<tool_call>", '\\"arguments\\"'), "hermes"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<｜tool▁call▁begin｜>",), "deepseek"),
    (("<|tool_call>call:",), "gemma"),
    (("<start_function_call>",), "functiongemma"),
    (("<|tool_list_start|>",), "lfm2"),
    (("'List of tools: ['",), "lfm2"),
    (('"List of tools: ["',), "lfm2"),
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
    known = name if ":" in name else name.replace("-", "_")
    return load_class(OTHER_NAMES.get(known, known), TOOL_PARSERS, ToolParser, "tool_call_parser", base)


def find_tool_parser(template: str) -> type[ToolParser] | None:
    for signs, name in _SIGNS:
        if all(sign in template for sign in signs):
            return None if name is None else TOOL_PARSERS[name]
    return None


__all__ = ["TOOL_PARSERS", "ToolParser", "find_tool_parser", "load_tool_parser"]
