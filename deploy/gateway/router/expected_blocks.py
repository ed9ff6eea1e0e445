"""Blocks that engines are about to compute: of prompts that were sent there.

Engines publish a block once it is computed, so requests with a common prefix that come at the same
time would not find each other otherwise.
"""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from longshore.deploy.gateway.router.block_index import BlockIndex
from longshore.deploy.requests.live_requests import LiveRequest

EXPIRED_PER_CALL: Final = 4
"""More than a call can add, so that they are not left behind; each has up to 64 blocks."""
KEPT_S: Final = 1.0
"""After the first token, so that the blocks are published before they are not expected any more."""


class _Expected(NamedTuple):
    engine: int
    hashes: Sequence[bytes]


class ExpectedBlocks:
    """The blocks expected in the index of a gateway, for its own requests."""

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self._unanswered: dict[LiveRequest, _Expected] = {}
        self._answered: deque[tuple[float, _Expected]] = deque()
        self._num_requests: Counter[tuple[int, bytes]] = Counter()  # that expect a block

    def add(self, request: LiveRequest, engine: int, hashes: Sequence[bytes]) -> None:
        """A request was sent to an engine, which will compute these blocks. It may have been sent
        to another one before."""
        if (former := self._unanswered.pop(request, None)) is not None:
            self._end(former)
        if hashes:
            self._unanswered[request] = _Expected(engine, hashes)
            self._num_requests.update((engine, each) for each in hashes)
            self._index.expect(engine, hashes)

    def note_answer(self, request: LiveRequest, now_s: float) -> None:
        """The request got its first token, or ended. May be called repeatedly."""
        if (expected := self._unanswered.pop(request, None)) is not None:
            self._answered.append((now_s + KEPT_S, expected))

    def expire(self, now_s: float) -> None:
        """Remove those of some requests that were answered some time ago. To be called for every
        request: the rest of those that are due is removed by the next calls."""
        for _ in range(EXPIRED_PER_CALL):
            if not self._answered or self._answered[0][0] > now_s:
                return
            _, expected = self._answered.popleft()
            self._end(expected)

    def _end(self, expected: _Expected) -> None:
        """Other requests may expect the same blocks."""
        engine, hashes = expected
        self._num_requests.subtract((engine, each) for each in hashes)
        ended = [each for each in hashes if not self._num_requests[engine, each]]
        for each in ended:
            del self._num_requests[engine, each]
        self._index.end_expecting(engine, ended)
