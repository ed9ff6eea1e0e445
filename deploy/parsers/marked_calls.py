"""Formats in which a marker of its own begins each call."""

from abc import abstractmethod
from typing import ClassVar

from longshore.deploy.parsers.parser import (
    AnswerContext,
    Content,
    Events,
    Source,
    Steps,
    ToolParser,
    show_until,
)


class MarkedTools(ToolParser):
    """Reads the call after each marker. Text after a marker that is no call stays text.

    begin: the marker.
    ends:  what may follow a call, in this order. A model that ends its answer after the last call
           may leave it out.
    section: markers around the calls, which are removed, also if there is no valid call between
           them.
    """

    begin: ClassVar[str]
    ends: ClassVar[tuple[str, ...]] = ()
    section: ClassVar[tuple[str, ...]] = ()

    def parse(self, source: Source, context: AnswerContext) -> Events:
        markers = (*self.section, self.begin)
        while (found := (yield from show_until(source, *markers))) is not None:
            index, marker = found
            end = index + len(marker)
            start = yield from source.space(end)
            if marker != self.begin:
                source.take(start)
            elif (yield from self._call(source, start)):
                yield from source.take_markers(*self.ends)
            else:
                yield Content(source.take(end))

    @abstractmethod
    def _call(self, source: Source, start: int) -> Steps[bool]:
        """The call, or the calls, at `start`. Takes them with the text before them; False: there
        are none, and nothing is taken."""
