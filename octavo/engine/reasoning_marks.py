"""How the families of models mark their reasoning, and how the marks of a model are found."""

from __future__ import annotations

from octavo.core.reasoning import ReasoningMarks

#: By the name that ``--reasoning-parser`` gives.
REASONING_MARKS = {
    # Most models; the second without its beginning, as those that it is of begin within it. Some call a tool without
    # closing their reasoning (Qwen3, Qwen 3.5).
    "qwen3": ReasoningMarks("<think>", "</think>", interrupts=("<tool_call>",)),
    "deepseek_r1": ReasoningMarks("<think>", "</think>", begins_inside=True, interrupts=("<tool_call>",)),
    # Magistral, Ministral 3
    "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
    # Gemma 4
    "gemma": ReasoningMarks("<|channel>thought", "<channel|>"),
    "seed_oss": ReasoningMarks("<seed:think>", "</seed:think>"),
    # Granite 3.2, in words
    "granite": ReasoningMarks("Here is my thought process:", "Here is my response:"),
}


def find_reasoning_marks(template: str) -> str | None:
    """The name of the marks that a chat template speaks of, if they are known."""
    think = REASONING_MARKS["qwen3"]
    if think.end in template and think.start not in template:
        return "deepseek_r1"  # it takes the reasoning out of earlier answers, and opens none
    return next((name for name, marks in REASONING_MARKS.items() if marks.start in template), None)
