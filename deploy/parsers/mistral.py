"""Mistral: `[TOOL_CALLS]` before an array of calls, or before each call as `name[ARGS]{...}`.

The second form is that of the tokenizers since version 11; `[CALL_ID]` and an id may follow the
name, and `[ARGS]` may be missing.
"""

import re
import secrets
import string
from typing import Final

from longshore.deploy.parsers.json_text import (
    MAX_NAME_CHARACTERS,
    is_name,
    json_arguments,
    json_calls,
)
from longshore.deploy.parsers.parser import (
    AnswerContext,
    Content,
    Events,
    Source,
    Steps,
    ToolParser,
    show_until,
)

_BEGIN: Final = "[TOOL_CALLS]"
_ARGUMENTS: Final = "[ARGS]"
_CALL_ID: Final = "[CALL_ID]"
_NAME: Final = re.compile(r"\s*([\w.\-]+)\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*")
_ID_CHARACTERS: Final = string.ascii_letters + string.digits


class MistralTools(ToolParser):
    """Its templates accept only ids of nine letters and digits."""

    special_tokens = (_BEGIN, _ARGUMENTS, _CALL_ID)

    def call_id(self) -> str:
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))

    def parse(self, source: Source, context: AnswerContext) -> Events:
        while (found := (yield from show_until(source, _BEGIN))) is not None:
            begin = found[0] + len(_BEGIN)
            start = yield from source.space(begin)
            if source.text.startswith(("[", "{"), start):
                is_call = yield from json_calls(source, start, separators=(",",))
            else:
                is_call = yield from self._named_call(source, start)
            if is_call:
                source.take((yield from source.space()))
            else:
                yield Content(source.take(begin))

    def _named_call(self, source: Source, start: int) -> Steps[bool]:
        brace = yield from source.find(start, "{", 2 * MAX_NAME_CHARACTERS)
        if brace is None:
            return False
        head = _NAME.fullmatch(source.text, start, brace)
        if head is None or not is_name(head[1], None):
            return False
        return (yield from json_arguments(source, brace, head[1]))
