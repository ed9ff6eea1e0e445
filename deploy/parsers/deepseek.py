"""DeepSeek V3, R1 and V3.1: calls between markers of their own.

V3 writes `function`, a separator, the name, and the arguments in a block of code. V3.1 writes the
name, the separator and the arguments.
"""

import re
from collections.abc import Mapping
from typing import Final

from longshore.deploy.parsers.call_grammar import LarkRules
from longshore.deploy.parsers.json_text import MAX_NAME_CHARACTERS, is_name, json_arguments
from longshore.deploy.parsers.marked_calls import MarkedTools
from longshore.deploy.parsers.parser import CallForm, CallGrammar, Source, Steps

_ALL_BEGIN: Final = "<｜tool▁calls▁begin｜>"
_ALL_END: Final = "<｜tool▁calls▁end｜>"
_BEGIN: Final = "<｜tool▁call▁begin｜>"
_END: Final = "<｜tool▁call▁end｜>"
_SEPARATOR: Final = "<｜tool▁sep｜>"
_HEAD: Final = re.compile(
    rf"\s*(?:function{re.escape(_SEPARATOR)}\s*([\w.\-]+)\s*```json\s*|"
    rf"([\w.\-]+)\s*{re.escape(_SEPARATOR)}\s*)"
)


class DeepSeekTools(MarkedTools):
    begin, ends, section = _BEGIN, ("```", _END), (_ALL_BEGIN, _ALL_END)
    special_tokens = (_ALL_BEGIN, _ALL_END, _BEGIN, _END, _SEPARATOR)

    def _call(self, source: Source, start: int) -> Steps[bool]:
        brace = yield from source.find(start, "{", 2 * MAX_NAME_CHARACTERS)
        if brace is None:
            return False
        head = _HEAD.fullmatch(source.text, start, brace)
        if head is None:
            return False
        name = head[1] or head[2]
        return is_name(name, None) and (yield from json_arguments(source, brace, name))

    def call_grammar(
        self, forms: Mapping[str, CallForm], special_ids: Mapping[str, int]
    ) -> CallGrammar:
        rules = LarkRules(special_ids)
        calls = []
        for name, form in forms.items():
            arguments = rules.json_arguments(form)
            block = rules.literal(f"function{_SEPARATOR}{name}\n```json\n")
            calls.append(f"{block} {arguments} {rules.literal(chr(10) + '```')}")
            calls.append(f"{rules.literal(f'{name}{_SEPARATOR}')} {arguments}")
        return CallGrammar(_BEGIN, rules.grammar(f"({' | '.join(calls)}) {rules.literal(_END)}"))
