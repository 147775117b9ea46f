"""How models mark what they think before they answer, and how the marks of a model are found."""

from __future__ import annotations

from octavo.core.plugins import load_class
from octavo.server.reasoning_parsers.reasoning_parser import ReasoningParser


class Think(ReasoningParser):
    """``<think>...</think>``: Qwen3, and most others."""

    start, end = "<think>", "</think>"


class DeepSeekR1(Think):
    """The same of models that begin within it, without its beginning."""

    begins_inside = True


class MistralReasoning(ReasoningParser):
    """Magistral, Ministral 3."""

    start, end = "[THINK]", "[/THINK]"


class GemmaReasoning(ReasoningParser):
    """Gemma 4."""

    start, end = "<|channel>thought", "<channel|>"


class SeedOss(ReasoningParser):
    """Seed-OSS."""

    start, end = "<seed:think>", "</seed:think>"


class GraniteReasoning(ReasoningParser):
    """Granite 3.2, in words."""

    start, end = "Here is my thought process:", "Here is my response:"


#: By the name that ``--reasoning-parser`` gives.
REASONING_PARSERS: dict[str, type[ReasoningParser]] = {
    "qwen3": Think,
    "deepseek_r1": DeepSeekR1,
    "mistral": MistralReasoning,
    "gemma": GemmaReasoning,
    "seed_oss": SeedOss,
    "granite": GraniteReasoning,
}
#: Names that vLLM has for them, of models with the same marks.
_OTHER_NAMES = {"deepseek_v3": "qwen3", "glm45": "qwen3", "gemma4": "gemma"}


def load_reasoning_parser(name: str) -> type[ReasoningParser]:
    """The parser of this name, or the class that ``module:Class`` names.

    Raises:
        ConfigError: there is none.
    """
    base = "octavo.server.reasoning_parsers.reasoning_parser.ReasoningParser"
    return load_class(_OTHER_NAMES.get(name, name), REASONING_PARSERS, ReasoningParser, "reasoning_parser", base)


def find_reasoning_parser(template: str) -> type[ReasoningParser] | None:
    """The parser for the marks that a chat template speaks of, if they are known."""
    if Think.end in template and Think.start not in template:
        return DeepSeekR1  # it takes the reasoning out of earlier answers, and opens none
    return next((parser for parser in REASONING_PARSERS.values() if parser.start in template), None)
