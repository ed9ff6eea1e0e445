"""Calls that the request forces: a grammar makes the answer JSON, or the input of a custom tool,
without a model's own format."""

import json

from longshore.deploy.parsers.json_text import json_arguments, json_calls
from longshore.deploy.parsers.parser import (
    AnswerContext,
    Events,
    Source,
    ToolCall,
    ToolParser,
    show_rest,
)


class ForcedCalls(ToolParser):
    """name: the answer is the arguments of this function; None: it is an array of calls, each
    `{"name": ..., "parameters": {...}}`.
    is_text: it is the argument `input` of this function, not in JSON.
    model_format: the parser of the model's own format, which knows what ids its template accepts.
    """

    def __init__(
        self,
        name: str | None = None,
        model_format: ToolParser | None = None,
        *,
        is_text: bool = False,
    ) -> None:
        self._name = name
        self._is_text = is_text
        self._model_format = model_format

    def call_id(self) -> str:
        if self._model_format is None:
            return super().call_id()
        return self._model_format.call_id()

    def parse(self, source: Source, context: AnswerContext) -> Events:
        if self._is_text and self._name is not None:
            while not source.is_complete:
                yield None
            yield ToolCall(self._name, json.dumps({"input": source.take()}, ensure_ascii=False))
            return
        start = yield from source.space()
        if self._name is not None:
            is_call = yield from json_arguments(source, start, self._name)
        else:
            is_call = yield from json_calls(source, start, separators=(",",))
        if is_call:
            source.take((yield from source.space()))
        yield from show_rest(source)
