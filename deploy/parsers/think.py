"""Qwen3, DeepSeek R1 and others: reasoning between `<think>` and `</think>`."""

from typing import Final

from longshore.deploy.parsers.parser import (
    AnswerContext,
    Events,
    Reasoning,
    ReasoningParser,
    Source,
    show_rest,
    show_until,
)

_BEGIN: Final = "<think>"
_END: Final = "</think>"


class ThinkReasoning(ReasoningParser):
    """The begin tag is in the prompt or at the beginning of the answer, else the answer has no
    reasoning. White space around the reasoning is removed."""

    special_tokens = (_BEGIN, _END)

    def parse(self, source: Source, context: AnswerContext) -> Events:
        start = yield from source.space()
        begins = yield from source.begins_with(start, _BEGIN)
        if begins is not None or context.prompt_end.rstrip().endswith(_BEGIN):
            source.take((yield from source.space(start + len(begins or ""))))
            found = yield from show_until(source, _END, kind=Reasoning)
            if found is not None:
                source.take((yield from source.space(found[0] + len(_END))))
        yield from show_rest(source)
