"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once per call."""

from collections.abc import Mapping
from typing import Final

from longshore.deploy.parsers.call_grammar import LarkRules, json_call_rule
from longshore.deploy.parsers.json_text import json_call
from longshore.deploy.parsers.marked_calls import MarkedTools
from longshore.deploy.parsers.parser import CallForm, CallGrammar, Source, Steps

_BEGIN: Final = "<tool_call>"
_END: Final = "</tool_call>"


class HermesTools(MarkedTools):
    begin, ends = _BEGIN, (_END,)
    special_tokens = (_BEGIN, _END)

    def _call(self, source: Source, start: int) -> Steps[bool]:
        return json_call(source, start)

    def call_grammar(
        self, forms: Mapping[str, CallForm], special_ids: Mapping[str, int]
    ) -> CallGrammar:
        rules = LarkRules(special_ids)
        call = rules.rule(json_call_rule(rules, forms))
        line = f"{rules.literal(chr(10))}?"
        return CallGrammar(_BEGIN, rules.grammar(f"{line} {call} {line} {rules.literal(_END)}"))
