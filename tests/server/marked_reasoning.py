"""Reasoning with marks that are tokens of the demo model, which has none of its own."""

from __future__ import annotations

from octavo.server.reasoning_parsers import ReasoningParser


class IssueReasoning(ReasoningParser):
    start, end = "<issue_start>", "<issue_closed>"
