"""Calls with a tag per argument: Qwen3-Coder, Qwen3.5 and later, Nemotron 3; GLM-4.5 and later;
MiniMax M2.

A text is written as it is, and other values as JSON, so the parser asks the function's schema what
a value is.
"""

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from longshore.deploy.parsers.call_grammar import LarkRules, properties_of
from longshore.deploy.parsers.json_text import MAX_NAME_CHARACTERS, is_name
from longshore.deploy.parsers.parser import (
    AnswerContext,
    CallForm,
    CallGrammar,
    Content,
    Events,
    Source,
    Steps,
    ToolParser,
    Translation,
    show_until,
)
from longshore.deploy.parsers.translated_call import json_of, quoted_text, translated_call, types_of

MAX_VALUE_CHARACTERS: Final = 64 << 10
"""Limit of a value that is no text: it is read as a whole."""

_TEXT: Final = frozenset({"string"})


class XmlTools(ToolParser):
    """Reads the calls of one of these formats. A value ends with its end tag if the next argument
    or the end of the call follows; otherwise, the tag is part of the value.

    section: around calls; empty: nothing is. Without it, only declared functions are called.
    call:    what begins a call, before its name, and what ends it.
    name_end: after the name; empty: the first tag.
    key, value: before and after the name of an argument, and its value.
    has_lines: a value is on lines of its own.
    """

    section: ClassVar[tuple[str, str]] = ("", "")
    call: ClassVar[tuple[str, str]]
    name_end: ClassVar[str] = ""
    key: ClassVar[tuple[str, str]]
    value: ClassVar[tuple[str, str]]
    has_lines: ClassVar[bool] = False

    def parse(self, source: Source, context: AnswerContext) -> Events:
        section, section_end = self.section
        begin = self.call[0]
        markers, ends = ((section, begin), (section_end,)) if section else ((begin,), ())
        is_inside = not section
        while (found := (yield from show_until(source, *markers))) is not None:
            index, marker = found
            end = index + len(marker)
            start, names = end, None if is_inside else context.tool_names
            if section and marker == section:
                index, names = (yield from source.space(end)), None
                start = index + len(begin)
                if (yield from source.begins_with(index, begin)) is None:
                    yield Content(source.take(end))
                    continue
            if not (yield from self._call(source, start, names, context)):
                yield Content(source.take(end))
                continue
            is_inside = is_inside or names is None
            if (yield from source.take_markers(*ends)):
                is_inside = False

    def _call(
        self, source: Source, start: int, names: frozenset[str] | None, context: AnswerContext
    ) -> Steps[bool]:
        """A call whose name is at `start`."""
        end = yield from source.find(start, self.name_end or "<", MAX_NAME_CHARACTERS + 2)
        if end is None:
            return False
        name = source.text[start:end].strip()
        if not is_name(name, names) or any(character.isspace() for character in name):
            return False
        schema = context.schemas.get(name, {})
        after = end + len(self.name_end)
        return (
            yield from translated_call(source, after, name, lambda it: self._arguments(it, schema))
        )

    def _arguments(self, source: Source, schema: Any) -> Translation:
        properties = schema.get("properties")
        separator = "{"
        while True:
            start = yield from source.space()
            marker = yield from source.begins_with(start, self.key[0], self.call[1])
            if marker is None:
                return False
            source.take(start + len(marker))
            if marker == self.call[1]:
                yield "{}" if separator == "{" else "}"
                return True
            end = yield from source.find(0, self.key[1], MAX_NAME_CHARACTERS)
            if end is None:
                return False
            key = source.take(end).strip()
            source.take(len(self.key[1]))
            if self.value[0]:
                start = yield from source.space()
                if (yield from source.begins_with(start, self.value[0])) is None:
                    return False
                source.take(start + len(self.value[0]))
            yield f"{separator}{json.dumps(key, ensure_ascii=False)}: "
            separator = ", "
            declared = properties.get(key) if isinstance(properties, dict) else None
            if not (yield from self._value(source, types_of(declared, schema))):
                return False

    def _value(self, source: Source, types: frozenset[str]) -> Translation:
        end, followers = self.value[1], (self.key[0], self.call[1])
        if types == _TEXT:
            return (yield from quoted_text(source, end, followers, has_lines=self.has_lines))
        index = yield from source.find(0, end, MAX_VALUE_CHARACTERS)
        if index is None:
            return False
        text = source.take(index)
        source.take(len(end))
        if self.has_lines:
            text = text.removeprefix("\n").removesuffix("\n")
        yield json_of(text, types)
        return True

    def call_grammar(
        self, forms: Mapping[str, CallForm], special_ids: Mapping[str, int]
    ) -> CallGrammar:
        rules = LarkRules(special_ids)
        line = f"{rules.literal(chr(10))}?"
        section, section_end = self.section
        begin, end = self.call if section else ("", self.call[1])
        calls = (
            f"{rules.literal(f'{begin}{name}{self.name_end}')} {line} "
            f"{self._arguments_rule(rules, form, line)} {rules.literal(end)}"
            for name, form in forms.items()
        )
        call = rules.rule(" | ".join(calls))
        if not section:
            return CallGrammar(self.call[0], rules.grammar(call))
        all_calls = f"{line} ({call} {line})+ {rules.literal(section_end)}"
        return CallGrammar(section, rules.grammar(all_calls))

    def _arguments_rule(self, rules: LarkRules, form: CallForm, line: str) -> str:
        edge = "\n" if self.has_lines else ""
        begin, end = rules.literal(f"{self.value[0]}{edge}"), f"{edge}{self.value[1]}"
        if self.value[0]:
            begin = f"{line} {begin}"
        if form.schema is None and form.syntax is None:
            key = rules.text_until(self.key[1], r"[^<>\n]+")
            return f"({rules.literal(self.key[0])} {key} {begin} {rules.text_until(end)} {line})*"
        written = []
        for name, schema, is_required in properties_of(form):
            head = rules.literal(f"{self.key[0]}{name}{self.key[1]}")
            one = rules.rule(f"{head} {begin} {rules.value(schema, form, end)} {line}")
            written.append(one if is_required else f"{one}?")
        return " ".join(written)


class Qwen3CoderTools(XmlTools):
    """`<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`. Models
    sometimes leave out `<tool_call>`."""

    section = ("<tool_call>", "</tool_call>")
    call = ("<function=", "</function>")
    name_end = ">"
    key = ("<parameter=", ">")
    value = ("", "</parameter>")
    has_lines = True
    special_tokens = section


class GlmTools(XmlTools):
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>`."""

    call = ("<tool_call>", "</tool_call>")
    key = ("<arg_key>", "</arg_key>")
    value = ("<arg_value>", "</arg_value>")
    special_tokens = (*call, *key, *value)


class MiniMaxTools(XmlTools):
    """`<minimax:tool_call><invoke name="NAME"><parameter name="KEY">value</parameter></invoke>
    </minimax:tool_call>`."""

    section = ("<minimax:tool_call>", "</minimax:tool_call>")
    call = ('<invoke name="', "</invoke>")
    name_end = '">'
    key = ('<parameter name="', '">')
    value = ("", "</parameter>")
    special_tokens = section
