"""Nemotron Nano 2: `<TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>`. Nemotron 3
writes calls as Qwen3-Coder does."""

from collections.abc import Mapping
from typing import Final

from longshore.deploy.parsers.call_grammar import LarkRules, json_call_rule
from longshore.deploy.parsers.json_text import json_calls
from longshore.deploy.parsers.marked_calls import MarkedTools
from longshore.deploy.parsers.parser import CallForm, CallGrammar, Source, Steps

_BEGIN: Final = "<TOOLCALL>"
_END: Final = "</TOOLCALL>"


class NemotronTools(MarkedTools):
    begin, ends = _BEGIN, (_END,)
    special_tokens = (_BEGIN, _END)

    def _call(self, source: Source, start: int) -> Steps[bool]:
        return json_calls(source, start, separators=(",",))

    def call_grammar(
        self, forms: Mapping[str, CallForm], special_ids: Mapping[str, int]
    ) -> CallGrammar:
        rules = LarkRules(special_ids)
        call = rules.rule(json_call_rule(rules, forms))
        comma, end = rules.literal(", "), rules.literal(f"]{_END}")
        return CallGrammar(_BEGIN, rules.grammar(f'"[" {call} ({comma} {call})* {end}'))
