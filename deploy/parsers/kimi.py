"""Kimi K2: calls with an id that the model writes, `functions.NAME:INDEX`."""

import re
from collections.abc import Mapping
from typing import Final

from longshore.deploy.parsers.call_grammar import LarkRules
from longshore.deploy.parsers.json_text import MAX_NAME_CHARACTERS, is_name, json_arguments
from longshore.deploy.parsers.marked_calls import MarkedTools
from longshore.deploy.parsers.parser import CallForm, CallGrammar, Source, Steps

_ALL_BEGIN: Final = "<|tool_calls_section_begin|>"
_ALL_END: Final = "<|tool_calls_section_end|>"
_BEGIN: Final = "<|tool_call_begin|>"
_ARGUMENTS: Final = "<|tool_call_argument_begin|>"
_END: Final = "<|tool_call_end|>"
_ID: Final = re.compile(r"\s*((?:functions\.)?([^\s:<]+)(?::[0-9]+)?)\s*")


class KimiTools(MarkedTools):
    """The chat template shows the ids of former calls, so calls keep those of the model."""

    begin, ends, section = _BEGIN, (_END,), (_ALL_BEGIN, _ALL_END)
    special_tokens = (_ALL_BEGIN, _ALL_END, _BEGIN, _ARGUMENTS, _END)

    def _call(self, source: Source, start: int) -> Steps[bool]:
        end = yield from source.find(start, _ARGUMENTS, 2 * MAX_NAME_CHARACTERS)
        head = None if end is None else _ID.fullmatch(source.text, start, end)
        if end is None or head is None or not is_name(head[2], None):
            return False
        start = yield from source.space(end + len(_ARGUMENTS))
        return (yield from json_arguments(source, start, head[2], call_id=head[1]))

    def call_grammar(
        self, forms: Mapping[str, CallForm], special_ids: Mapping[str, int]
    ) -> CallGrammar:
        rules = LarkRules(special_ids)
        number = rules.rule("/[0-9]+/", is_terminal=True)
        calls = (
            f"{rules.literal(f'functions.{name}:')} {number} {rules.literal(_ARGUMENTS)} "
            f"{rules.json_arguments(form)}"
            for name, form in forms.items()
        )
        return CallGrammar(_BEGIN, rules.grammar(f"({' | '.join(calls)}) {rules.literal(_END)}"))
