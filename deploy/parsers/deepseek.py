"""DeepSeek V3, R1 and V3.1: calls between markers of their own.

V3 writes `function`, a separator, the name, and the arguments in a block of code. V3.1 writes the
name, the separator and the arguments.
"""

import re
from typing import Final

from longshore.deploy.parsers.json_text import MAX_NAME_CHARACTERS, is_name, json_arguments
from longshore.deploy.parsers.parser import (
    AnswerContext,
    Content,
    Events,
    Source,
    Steps,
    ToolParser,
    show_until,
)

_ALL_BEGIN: Final = "<｜tool▁calls▁begin｜>"
_ALL_END: Final = "<｜tool▁calls▁end｜>"
_BEGIN: Final = "<｜tool▁call▁begin｜>"
_END: Final = "<｜tool▁call▁end｜>"
_SEPARATOR: Final = "<｜tool▁sep｜>"
_HEAD: Final = re.compile(
    rf"\s*(?:function{re.escape(_SEPARATOR)}\s*([\w.\-]+)\s*```json\s*|"
    rf"([\w.\-]+)\s*{re.escape(_SEPARATOR)}\s*)"
)


class DeepSeekTools(ToolParser):
    """Markers around the calls are removed, also if there is no valid call between them."""

    special_tokens = (_ALL_BEGIN, _ALL_END, _BEGIN, _END, _SEPARATOR)

    def parse(self, source: Source, context: AnswerContext) -> Events:
        while (found := (yield from show_until(source, _ALL_BEGIN, _ALL_END, _BEGIN))) is not None:
            index, marker = found
            begin = index + len(marker)
            if marker != _BEGIN:
                source.take((yield from source.space(begin)))
            elif not (yield from self._call(source, begin)):
                yield Content(source.take(begin))

    def _call(self, source: Source, start: int) -> Steps[bool]:
        brace = yield from source.find(start, "{", 2 * MAX_NAME_CHARACTERS)
        if brace is None:
            return False
        head = _HEAD.fullmatch(source.text, start, brace)
        if head is None:
            return False
        name = head[1] or head[2]
        if not is_name(name, None) or not (yield from json_arguments(source, brace, name)):
            return False
        index = yield from source.space()
        if (yield from source.begins_with(index, "```")) is not None:
            index = yield from source.space(index + len("```"))
        if (yield from source.begins_with(index, _END)) is not None:
            index = yield from source.space(index + len(_END))
        source.take(index)
        return True
