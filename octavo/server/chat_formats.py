"""How the served model writes calls and reasoning: by option, or as its chat template says."""

from __future__ import annotations

import functools
from collections.abc import Set

from octavo.core.reasoning import ReasoningMarks
from octavo.engine.tokenizer import Tokenizer
from octavo.engine.tool_messages import HERMES, CallFormat
from octavo.server.reasoning_parsers import ReasoningParser, find_reasoning_parser, load_reasoning_parser
from octavo.server.tool_parsers import ToolParser, find_tool_parser, load_tool_parser
from octavo.server.tool_parsers.json_calls import Hermes

_AUTO, _NONE = "auto", "none"


class ChatFormats:
    """The parsers of one server."""

    def __init__(self, tool_call_parser: str = _AUTO, reasoning_parser: str = _AUTO) -> None:
        """By name, ``module:Class``, ``auto`` or ``none``.

        Raises:
            ConfigError: there is no such parser.
        """
        #: Whether the format of calls is found by the template.
        self.finds_tools = tool_call_parser == _AUTO
        self._finds_reasoning = reasoning_parser == _AUTO
        named = tool_call_parser not in (_AUTO, _NONE)
        self._tool_parser = load_tool_parser(tool_call_parser) if named else None
        named = reasoning_parser not in (_AUTO, _NONE)
        self._reasoning_parser = load_reasoning_parser(reasoning_parser) if named else None

    def tool_parser(self, template: str, variables: Set[str]) -> type[ToolParser] | None:
        """The parser for answers to prompts of a chat template; None: calls are not told from content.

        ``variables``: those that the template reads.
        """
        if not self.finds_tools:
            return self._tool_parser
        parser = find_tool_parser(template)
        if parser is None and not {"tools", "custom_tools"} & variables:
            return Hermes  # the prompt describes this format
        return parser

    def reasoning_parser(self, template: str) -> type[ReasoningParser] | None:
        """The same for reasoning; None: it is not told from content."""
        return find_reasoning_parser(template) if self._finds_reasoning else self._reasoning_parser

    def named_marks(self) -> ReasoningMarks | None:
        """The marks of the parser that an option names; None: the chat template says them."""
        return None if self._reasoning_parser is None else self._reasoning_parser.marks()

    def call_format(self, template: str, variables: Set[str]) -> CallFormat:
        """How calls are written where it has to be said in words."""
        parser = self.tool_parser(template, variables)
        return (None if parser is None else parser.call_format(template)) or HERMES


@functools.lru_cache(maxsize=16)
def visible_tokens(tokenizer: Tokenizer, markers: tuple[str, ...]) -> frozenset[int]:
    """Ids of the special tokens of which these texts are made."""
    return frozenset(i for text, i in special_tokens(tokenizer).items() if any(text in marker for marker in markers))


@functools.lru_cache(maxsize=4)
def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of a tokenizer's special tokens by text."""
    ids = {text: tokenizer.convert_tokens_to_ids(text) for text in tokenizer.special_texts}
    return {text: token_id for text, token_id in ids.items() if token_id is not None}
