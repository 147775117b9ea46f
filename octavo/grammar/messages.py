"""Messages of llguidance for those who wrote the grammar."""

from __future__ import annotations

import re

#: "at 2(4): ..." and "2(4): ...": line and column of a Lark grammar.
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
#: What the regex library says: the regex, a line that marks the place in it, and the error.
_REGEX = re.compile(r"regex parse error:\n(?:    .*\n)?( *)\^+.*\nerror: (.*)")
_LONGEST = 300


def readable(message: str, *, with_place: bool) -> str:
    """A message in one line; ``with_place``: lines and columns are those of the text that the user wrote."""
    found = _PLACE.match(message)
    place = f"line {found[1]}, column {found[2]}: " if found and with_place else ""
    text = message[found.end() :] if found else message
    if (regex := _REGEX.search(text)) is not None:
        text = f"{regex[2]}, at character {len(regex[1]) - 3} of the regex"
    elif text.startswith("oneOf constraints"):
        text = "a oneOf is supported if no value can be of two of its schemas, as far as that is easily seen"
    elif text.startswith("Resource "):
        text = f"the document {text.split()[1]} is not fetched; references are supported within a schema"
    elif text.startswith(("grammar size", "schema too large", "initial lexer configuration")):
        text = "it is too large to be compiled"
    elif text.startswith("recursion limit"):
        text = "it is nested too deeply"
    elif text.startswith("panic"):
        text = "it is too large to be compiled"
    else:
        text = text.partition("(in regex): ")[2] or text
    return place + text.strip().partition("\n")[0][:_LONGEST].removesuffix(":")
