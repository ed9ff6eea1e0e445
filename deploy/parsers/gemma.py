"""Gemma 4: `<|tool_call>call:NAME{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>`.

Keys are not quoted, and texts are between `<|"|>`, without escapes. Reasoning is a channel,
`<|channel>thought` to `<channel|>`.
"""

import json
from collections.abc import Mapping
from typing import Final

from longshore.deploy.parsers.call_grammar import LarkRules
from longshore.deploy.parsers.gemma_grammar import GemmaArguments
from longshore.deploy.parsers.json_text import MAX_DEPTH, MAX_NAME_CHARACTERS, is_name, read_json
from longshore.deploy.parsers.marked_calls import MarkedTools
from longshore.deploy.parsers.parser import (
    CallForm,
    CallGrammar,
    Lookahead,
    Source,
    Steps,
    Translation,
)
from longshore.deploy.parsers.think import TaggedReasoning
from longshore.deploy.parsers.translated_call import quoted_text, translated_call

_BEGIN: Final = "<|tool_call>"
_END: Final = "<tool_call|>"
_CALL: Final = "call:"
_QUOTE: Final = '<|"|>'
_PAIRS: Final = {"}": "{", "]": "["}
_KEY_ENDS: Final = ":{}[],<"
_VALUE_ENDS: Final = "{}[],<"


class GemmaTools(MarkedTools):
    begin, ends = _BEGIN, (_END,)
    special_tokens = (_BEGIN, _END, _QUOTE)

    def call_grammar(
        self, forms: Mapping[str, CallForm], special_ids: Mapping[str, int]
    ) -> CallGrammar:
        rules = LarkRules(special_ids)
        calls = (
            f"{rules.literal(name)} {GemmaArguments(rules, form, _QUOTE).rule()}"
            for name, form in forms.items()
        )
        start = f"{rules.literal(_CALL)} ({' | '.join(calls)}) {rules.literal(_END)}"
        return CallGrammar(_BEGIN, rules.grammar(start))

    def _call(self, source: Source, start: int) -> Steps[bool]:
        if (yield from source.begins_with(start, _CALL)) is None:
            return False
        start += len(_CALL)
        brace = yield from source.find(start, "{", MAX_NAME_CHARACTERS + 2)
        if brace is None:
            return False
        name = source.text[start:brace].strip()
        return is_name(name, None) and (yield from translated_call(source, brace, name, _arguments))


class GemmaReasoning(TaggedReasoning):
    begin, mark, end = "<|channel>thought", "<channel|>", "<channel|>"
    special_tokens = ("<|channel>", "<channel|>")


def _arguments(source: Source) -> Translation:
    """Brackets that do not match make invalid JSON, which is found out later."""
    opened: list[str] = []
    last = ""
    while True:
        source.take((yield from source.space()))
        if not source.text:
            return False
        if (yield from source.begins_with(0, _QUOTE)) is not None:
            source.take(len(_QUOTE))
            if not (yield from quoted_text(source, _QUOTE)):
                return False
            last = _QUOTE
            continue
        is_key = bool(opened) and opened[-1] == "{" and last in ("{", ",")
        if source.text[0] not in _KEY_ENDS:
            word = yield from _word(source, _KEY_ENDS if is_key else _VALUE_ENDS)
            if word is None:
                return False
            yield json.dumps(word, ensure_ascii=False) if is_key else _value(word)
            last = "word"
            continue
        last = source.take(1)
        match last:
            case "{" | "[":
                opened.append(last)
                if len(opened) > MAX_DEPTH:
                    return False
                yield last
            case "}" | "]":
                if not opened or opened.pop() != _PAIRS[last]:
                    return False
                yield last
                if not opened:
                    return True
            case "<":
                return False
            case _:
                yield f"{last} "


def _word(source: Source, ends: str) -> Lookahead[str | None]:
    """Take the text before one of the characters; None: there is none soon."""
    while True:
        end = next((i for i, one in enumerate(source.text) if one in ends), None)
        if end is not None and end <= 2 * MAX_NAME_CHARACTERS:
            return source.take(end).strip()
        if source.is_complete or len(source.text) > 2 * MAX_NAME_CHARACTERS:
            return None
        yield None


def _value(word: str) -> str:
    """As JSON: a number or constant, or else a text."""
    is_json = word == "null" or isinstance(read_json(word), bool | int | float)
    return word if is_json else json.dumps(word, ensure_ascii=False)
