"""The bundled demo model: it calls `lookup` where it would say that it does not know a container.

`C417 unknown` is what it answers if the chat does not list C417. Its template shows results of
tools before the question, and the model answers from them.
"""

import json
import re
from typing import Final

from longshore.deploy.model.demo import UNLISTED
from longshore.deploy.parsers.parser import (
    AnswerContext,
    Events,
    Source,
    ToolCall,
    ToolParser,
    show_rest,
)

FUNCTION: Final = "lookup"
PARAMETER: Final = "container"
_CALL: Final = re.compile(rf"\s*(C[0-9]{{3}}) {UNLISTED}\s*")
_ID_CHARACTERS: Final = len("C000")


class DemoTools(ToolParser):
    """An answer is a call only as a whole, and only if the request declares the function."""

    def parse(self, source: Source, context: AnswerContext) -> Events:
        if FUNCTION in context.tool_names:
            while not source.is_complete and _may_become_call(source.text.strip()):
                yield None
            call = _CALL.fullmatch(source.text)
            if source.is_complete and call is not None:
                source.take()
                yield ToolCall(FUNCTION, json.dumps({PARAMETER: call[1]}))
        yield from show_rest(source)


def _may_become_call(text: str) -> bool:
    return f"{text[:_ID_CHARACTERS]} {UNLISTED}".startswith(text)
