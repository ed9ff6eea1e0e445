"""Reasoning between two tags; `<think>` and `</think>` for Qwen3, DeepSeek R1 and most others."""

from longshore.deploy.parsers.parser import (
    AnswerContext,
    Events,
    Reasoning,
    ReasoningParser,
    Source,
    show_rest,
    show_until,
)


class TaggedReasoning(ReasoningParser):
    """The begin tag is in the prompt or at the beginning of the answer, else the answer has no
    reasoning. White space around the reasoning is removed."""

    def parse(self, source: Source, context: AnswerContext) -> Events:
        start = yield from source.space()
        begins = yield from source.begins_with(start, self.begin)
        if begins is not None or context.prompt_end.rstrip().endswith(self.begin):
            source.take((yield from source.space(start + len(begins or ""))))
            found = yield from show_until(source, self.mark, kind=Reasoning)
            if found is not None:
                source.take((yield from source.space(found[0] + len(self.mark))))
        yield from show_rest(source)


class ThinkReasoning(TaggedReasoning):
    begin, mark, end = "<think>", "</think>", "</think>"
    special_tokens = (begin, mark)
