"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once per call."""

from typing import Final

from longshore.deploy.parsers.json_text import json_call
from longshore.deploy.parsers.parser import (
    AnswerContext,
    Content,
    Events,
    Source,
    ToolParser,
    show_until,
)

_BEGIN: Final = "<tool_call>"
_END: Final = "</tool_call>"


class HermesTools(ToolParser):
    """The end tag may be missing, as when the model ends its answer after the last call."""

    special_tokens = (_BEGIN, _END)

    def parse(self, source: Source, context: AnswerContext) -> Events:
        while (found := (yield from show_until(source, _BEGIN))) is not None:
            begin = found[0] + len(_BEGIN)
            start = yield from source.space(begin)
            if not (yield from json_call(source, start)):
                yield Content(source.take(begin))
                continue
            end = yield from source.space()
            has_end = yield from source.begins_with(end, _END)
            source.take((yield from source.space(end + len(_END) if has_end else end)))
