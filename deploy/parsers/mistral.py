"""Mistral: `[TOOL_CALLS]` before an array of calls, or before each call as `name[ARGS]{...}`.

The second form is that of the tokenizers since version 11; `[CALL_ID]` and an id may follow the
name, and `[ARGS]` may be missing.
"""

import re
import secrets
import string
from collections.abc import Mapping
from typing import Final

from longshore.deploy.parsers.call_grammar import LarkRules, json_call_rule
from longshore.deploy.parsers.json_text import (
    MAX_NAME_CHARACTERS,
    is_name,
    json_arguments,
    json_calls,
)
from longshore.deploy.parsers.marked_calls import MarkedTools
from longshore.deploy.parsers.parser import CallForm, CallGrammar, Source, Steps

_BEGIN: Final = "[TOOL_CALLS]"
_ARGUMENTS: Final = "[ARGS]"
_CALL_ID: Final = "[CALL_ID]"
_NAME: Final = re.compile(r"\s*([\w.\-]+)\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*")
_ID_CHARACTERS: Final = string.ascii_letters + string.digits


class MistralTools(MarkedTools):
    """Reads the tool calls of Mistral's models, whose templates accept only ids of nine letters and
    digits."""

    begin = _BEGIN
    special_tokens = (_BEGIN, _ARGUMENTS, _CALL_ID)

    def call_id(self) -> str:
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))

    def _call(self, source: Source, start: int) -> Steps[bool]:
        if source.text.startswith(("[", "{"), start):
            return (yield from json_calls(source, start, separators=(",",)))
        brace = yield from source.find(start, "{", 2 * MAX_NAME_CHARACTERS)
        if brace is None:
            return False
        head = _NAME.fullmatch(source.text, start, brace)
        if head is None or not is_name(head[1], None):
            return False
        return (yield from json_arguments(source, brace, head[1]))

    def call_grammar(
        self, forms: Mapping[str, CallForm], special_ids: Mapping[str, int]
    ) -> CallGrammar:
        rules = LarkRules(special_ids)
        call = rules.rule(json_call_rule(rules, forms))
        named = (
            f"{rules.literal(f'{name}{_ARGUMENTS}')} {rules.json_arguments(form)}"
            for name, form in forms.items()
        )
        comma = rules.literal(", ")
        array = f'"[" {call} ({comma} {call})* "]"'
        return CallGrammar(_BEGIN, rules.grammar(f"{array} | {' | '.join(named)}"))
