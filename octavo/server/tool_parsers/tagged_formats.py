# ruff: noqa: RUF001, RUF002 (tokens of DeepSeek and Step)
"""Formats that write a call's arguments one by one, each in tags or as a member: Qwen3-Coder, GLM, MiniMax, Gemma.

The tool's schema tells the type of a value (``argument_values``). A call is emitted when it is whole.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from octavo.engine.chat_messages import CallFormat
from octavo.server.tool_parsers.argument_values import argument_schema, literal, read_value
from octavo.server.tool_parsers.tool_parser import EndOfText, Malformed, Reading, ToolParser

_MAX_DEPTH = 64
_BARE = re.compile(r"[^,{}\[\]<>\s:]*")
_NO_LIMIT = 1 << 40


class CallsByArgument(ToolParser):
    """Emits a call when it is whole, so that a malformed one becomes content.

    If the text ends within a call after its name, the call is emitted with its whole arguments.
    """

    #: No argument has begun, so the text may end here without a loss.
    between = False

    @abstractmethod
    def read_members(self, name: str, members: dict[str, str]) -> Reading[None]:
        """Passes the arguments of a call and adds the JSON text of each value to ``members``, by name."""

    def read_call(self, name: str) -> Reading[None]:
        """Passes the rest of a call after its name, and emits it."""
        self.check_name(name)
        members: dict[str, str] = {}
        try:
            yield from self.read_members(name, members)
        except EndOfText:
            complete = self.between and not self._cut and self._position == len(self._text)
            self._emit_call(name, members, "}" if complete else "")
            raise
        self._emit_call(name, members, "}")

    def _emit_call(self, name: str, members: dict[str, str], end: str) -> None:
        self.start_call(name)
        pairs = [f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in members.items()]
        self.add_arguments("{" + ", ".join(pairs) + end)


@dataclass(frozen=True, slots=True)
class Tags:
    """The texts of a format with tags, in the order in which a call has them."""

    #: Texts before a name; white space may stand between them.
    call: tuple[str, ...]
    #: Texts that end a name. Tags among them belong to what follows.
    name_ends: tuple[str, ...]
    argument: str
    key_end: str
    value_end: str
    #: Texts after the arguments.
    ends: tuple[str, ...]
    #: Before a value, if it has a tag of its own.
    value: str = ""
    #: Around all calls: texts of which one begins them, and the end.
    calls: tuple[str, ...] = ()
    calls_end: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        texts = (*self.calls, *self.call, self.argument, self.value, self.value_end, *self.ends, *self.calls_end)
        return tuple(dict.fromkeys(filter(None, texts)))

    @property
    def value_ends(self) -> tuple[str, ...]:
        """Texts that end a value: a closing tag may be missing."""
        return tuple(dict.fromkeys((self.value_end, self.argument, *self.ends)))


class TaggedCalls(CallsByArgument):
    """Calls in the tags of a model family. Closing tags may be missing: an argument ends at the next tag."""

    tags: ClassVar[Tags]
    #: For grammars; formats that depend on the chat template make theirs in ``call_format``.
    form: ClassVar[CallFormat]
    #: Tags at which a call may begin without those before them.
    lone: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        if "tags" in cls.__dict__:
            cls.markers = cls.tags.all
            cls.begins = cls.tags.calls or cls.tags.call[:1]

    def parse(self) -> Reading[None]:
        tags = self.tags
        while True:
            marker = yield from self.content(*self._starts())
            expected = tags.call if marker in tags.calls else tags.call[tags.call.index(marker) + 1 :]
            for text in expected:
                yield from self.space()
                yield from self.expect(text)
            name, end = yield from self.until_any(*tags.name_ends)
            if end in tags.all:
                self._position -= len(end)
            yield from self.read_call(name.strip().strip("\"'"))
            for end in tags.ends[1:]:
                yield from self.close(end)
            if tags.calls_end:
                yield from self.close(*tags.calls_end)

    def _starts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.tags.calls, self.tags.call[0], *self.lone)))

    def read_members(self, name: str, members: dict[str, str]) -> Reading[None]:
        tags = self.tags
        after = (*tags.ends, *tags.calls_end, *self._starts())
        while True:
            self.between = True
            yield from self.space()
            tag = yield from self.expect(tags.argument, *after)
            self.between = False
            if tag != tags.argument:
                if tag != tags.ends[0]:
                    self._position -= len(tag)
                return
            key, _, is_text = (yield from self.until(tags.key_end)).partition('" string="')
            key = key.strip().strip("\"'")
            if tags.value:
                yield from self.space()
                yield from self.expect(tags.value)
            text, tag = yield from self.until_any(*tags.value_ends, limit=_NO_LIMIT)
            if tag != tags.value_end:
                self._position -= len(tag)
            members[key] = _dumped(self._value(text, name, key, is_text))

    def _value(self, text: str, name: str, key: str, is_text: str) -> Any:
        """``is_text``: what a tag says of the type: true, false, or nothing."""
        if is_text == "true":
            return text
        if is_text == "false":
            return literal(text)
        text = text.removeprefix("\n").removesuffix("\n")
        return read_value(text, argument_schema(self.tools[name], key), self.tools[name])

    @classmethod
    def call_format(cls, template: str) -> CallFormat:
        return cls.form


def _form(tags: Tags, call: str, argument: str, **others: Any) -> CallFormat:
    return CallFormat(call, argument=argument, stops=tags.value_ends, **others)


class QwenCoder(TaggedCalls):
    """``<tool_call><function=f><parameter=a>text</parameter></function></tool_call>``: Qwen3-Coder, Qwen 3.5."""

    tags = Tags(
        call=("<tool_call>", "<function="),
        name_ends=(">",),
        argument="<parameter=",
        key_end=">",
        value_end="</parameter>",
        ends=("</function>", "</tool_call>"),
    )
    form = _form(
        tags,
        "<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>",
        "<parameter={key}>\n{value}\n</parameter>\n",
        separator="\n",
        trigger="<tool_call>",
    )
    lone = ("<function=",)


class SeedOss(TaggedCalls):
    """The tags of Qwen3-Coder within ``<seed:tool_call>``: Seed-OSS."""

    tags = Tags(
        call=("<seed:tool_call>", "<function="),
        name_ends=(">",),
        argument="<parameter=",
        key_end=">",
        value_end="</parameter>",
        ends=("</function>", "</seed:tool_call>"),
    )
    form = _form(
        tags,
        "<seed:tool_call>\n<function={name}>\n{arguments}</function>\n</seed:tool_call>",
        "<parameter={key}>{value}</parameter>\n",
        separator="\n",
        trigger="<seed:tool_call>",
    )
    lone = ("<function=",)


class Glm(TaggedCalls):
    """``<tool_call>f<arg_key>a</arg_key><arg_value>text</arg_value></tool_call>``: GLM 4.5 to 4.7."""

    tags = Tags(
        call=("<tool_call>",),
        name_ends=("\n", "<arg_key>", "</tool_call>"),
        argument="<arg_key>",
        key_end="</arg_key>",
        value="<arg_value>",
        value_end="</arg_value>",
        ends=("</tool_call>",),
    )

    @classmethod
    def call_format(cls, template: str) -> CallFormat:
        # GLM 4.5 and 4.6 write line breaks between the tags, GLM 4.7 does not.
        line = "" if "</arg_key><arg_value>" in template else "\n"
        call = f"<tool_call>{{name}}{line}{{arguments}}</tool_call>"
        argument = f"<arg_key>{{key}}</arg_key>{line}<arg_value>{{value}}</arg_value>{line}"
        return _form(cls.tags, call, argument, separator=line, trigger="<tool_call>")


class MiniMaxM2(TaggedCalls):
    """``<minimax:tool_call><invoke name="f"><parameter name="a">text</parameter></invoke></minimax:tool_call>``."""

    tags = Tags(
        calls=("<minimax:tool_call>",),
        call=("<invoke name=",),
        name_ends=(">",),
        argument="<parameter name=",
        key_end=">",
        value_end="</parameter>",
        ends=("</invoke>",),
        calls_end=("</minimax:tool_call>",),
    )
    form = _form(
        tags,
        '<invoke name="{name}">\n{arguments}</invoke>\n',
        '<parameter name="{key}">{value}</parameter>\n',
        separator="",
        begin="<minimax:tool_call>\n",
        end="</minimax:tool_call>",
        trigger="<minimax:tool_call>",
    )


class DeepSeekMarkup(TaggedCalls):
    """DeepSeek V3.2 and V4: MiniMax's tags with the prefix ``｜DSML｜``, and the type of each value in its tag."""

    _CALLS = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")
    tags = Tags(
        calls=_CALLS,
        call=('<｜DSML｜invoke name="',),
        name_ends=('">',),
        argument='<｜DSML｜parameter name="',
        key_end='">',
        value_end="</｜DSML｜parameter>",
        ends=("</｜DSML｜invoke>",),
        calls_end=tuple(text.replace("<", "</") for text in _CALLS),
    )

    @classmethod
    def call_format(cls, template: str) -> CallFormat:
        kind = "tool_calls" if "tool_calls>" in template else "function_calls"
        call = '<｜DSML｜invoke name="{name}">\n{arguments}</｜DSML｜invoke>\n'
        argument = '<｜DSML｜parameter name="{key}" string="{is_text}">{value}</｜DSML｜parameter>\n'
        begin = f"<｜DSML｜{kind}>"
        return _form(
            cls.tags, call, argument, separator="", begin=f"{begin}\n", end=f"</｜DSML｜{kind}>", trigger=begin
        )


class Step3(TaggedCalls):
    """``<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">...`` of Step 3."""

    tags = Tags(
        calls=("<｜tool_calls_begin｜>",),
        call=("<｜tool_call_begin｜>", "function", "<｜tool_sep｜>", "<steptml:invoke name="),
        name_ends=(">",),
        argument="<steptml:parameter name=",
        key_end=">",
        value_end="</steptml:parameter>",
        ends=("</steptml:invoke>", "<｜tool_call_end｜>"),
        calls_end=("<｜tool_calls_end｜>",),
    )
    form = _form(
        tags,
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">{arguments}</steptml:invoke>'
        "<｜tool_call_end｜>",
        '<steptml:parameter name="{key}">{value}</steptml:parameter>',
        separator="",
        begin="<｜tool_calls_begin｜>",
        end="<｜tool_calls_end｜>",
        trigger="<｜tool_calls_begin｜>",
    )


class Gemma(CallsByArgument):
    """``<|tool_call>call:f{a:<|"|>text<|"|>,b:1}<tool_call|>`` of Gemma 4."""

    _BEGIN, _END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
    markers: ClassVar[tuple[str, ...]] = (_BEGIN, _END, _QUOTE)
    begins: ClassVar[tuple[str, ...]] = (_BEGIN,)

    def parse(self) -> Reading[None]:
        while True:
            yield from self.content(self._BEGIN)
            yield from self.space()
            yield from self.expect("call:")
            yield from self._call()
            while (yield from self.close(self._END)) is None and (yield from self.optional("call:")) is not None:
                yield from self._call()

    def _call(self) -> Reading[None]:
        name = yield from self.name()
        yield from self.space()
        yield from self.expect("{")
        yield from self.read_call(name)

    def read_members(self, name: str, members: dict[str, str]) -> Reading[None]:
        while (yield from self._another("}")):
            key = yield from self._key()
            members[key] = _dumped((yield from self._value(0)))

    def _another(self, end: str) -> Reading[bool]:
        """Passes the separator before a value; false: the end was there."""
        yield from self.space()
        yield from self.optional(",")
        yield from self.space()
        return (yield from self.optional(end)) is None

    def _key(self) -> Reading[str]:
        if (yield from self.optional(self._QUOTE)) is not None:
            key = yield from self.until(self._QUOTE)
        else:
            key = yield from self.matched(_BARE)
        yield from self.space()
        yield from self.expect(":")
        if not key:
            raise Malformed
        return key

    def _value(self, depth: int) -> Reading[Any]:
        yield from self.space()
        if depth > _MAX_DEPTH:
            raise Malformed
        if (yield from self.optional(self._QUOTE)) is not None:
            return (yield from self.until(self._QUOTE, limit=_NO_LIMIT))
        if (yield from self.optional("{")) is not None:
            members: dict[str, Any] = {}
            while (yield from self._another("}")):
                key = yield from self._key()
                members[key] = yield from self._value(depth + 1)
            return members
        if (yield from self.optional("[")) is not None:
            items: list[Any] = []
            while (yield from self._another("]")):
                items.append((yield from self._value(depth + 1)))
            return items
        text = yield from self.matched(_BARE)
        if not text:  # nothing would be passed
            raise Malformed
        return literal(text)

    @classmethod
    def call_format(cls, template: str) -> CallFormat:
        call = f"{cls._BEGIN}call:{{name}}{{{{arguments}}}}{cls._END}"
        form = CallFormat(call, "", trigger=cls._BEGIN, argument="{key}:{value}", argument_separator=",")
        return replace(form, values="quoted", quote=cls._QUOTE)


class FunctionGemma(Gemma):
    """``<start_function_call>call:f{a:<escape>text<escape>}<end_function_call>`` of FunctionGemma."""

    _BEGIN, _END, _QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"
    markers: ClassVar[tuple[str, ...]] = (_BEGIN, _END, _QUOTE)
    begins: ClassVar[tuple[str, ...]] = (_BEGIN,)


def _dumped(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        raise Malformed from None
