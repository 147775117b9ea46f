"""Parsers of what models think before they answer, and how the one of a model is found."""

from __future__ import annotations

from octavo.core.plugins import load_class
from octavo.core.reasoning import ReasoningMarks
from octavo.engine.reasoning_marks import REASONING_MARKS, find_reasoning_marks
from octavo.server.reasoning_parsers.reasoning_parser import ReasoningParser


def _parser(name: str, marks: ReasoningMarks) -> type[ReasoningParser]:
    fields: dict[str, object] = {"start": marks.start, "end": marks.end, "begins_inside": marks.begins_inside}
    fields["interrupts"] = marks.interrupts
    return type(name, (ReasoningParser,), {"__doc__": f"{marks.start} ... {marks.end}", **fields})


#: By the name that ``--reasoning-parser`` gives.
REASONING_PARSERS = {name: _parser(name, marks) for name, marks in REASONING_MARKS.items()}
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
    name = find_reasoning_marks(template)
    return None if name is None else REASONING_PARSERS[name]
