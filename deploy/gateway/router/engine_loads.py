"""How loaded each engine is, as far as one gateway knows.

**Own requests** are counted exactly. Until its first token, a request counts one more per
TOKENS_PER_REQUEST tokens of its prompt that the engine has to compute, because prompts make steps
long, and their lengths vary more than the number of requests. The p99 time to first token was 251
and 196 ms (2 and 4 simulated engines), 381 and 340 ms when counting requests only, 411 and 440 ms
with round robin; for prompts of similar length 34, 41 and 30 ms.

**Requests of other gateways** at an engine are those of its last report (once a second), minus this
gateway's own at that time; requests aborted just before count as others' until the next report.
They are divided by the number of gateways. Undivided, all gateways would send to the engine that
was empty a second ago: with 4 gateways and 4 engines that takes 483 ms, worse than random (450),
against 353 divided and 339 without reports (each gateway spreads its own requests evenly, so the
sum is even). With one engine 2.5 times slower it takes 571 ms undivided, 414 divided and 482
without reports.
"""

from collections import Counter
from typing import Final

from longshore.deploy.requests.live_requests import LiveRequest

TOKENS_PER_REQUEST: Final = 256
"""Prompt tokens waiting for a first token that count as one request."""


class EngineLoads:
    """num_gateways: if it is 1, all requests of a report are this gateway's own."""

    def __init__(self, *, num_gateways: int = 1) -> None:
        self._num_gateways = num_gateways
        self._num_others: Counter[int] = Counter()  # by engine
        self._unanswered: dict[LiveRequest, tuple[int, int]] = {}  # engine, tokens
        self._num_prompt_tokens: Counter[int] = Counter()

    def note_report(self, engine: int, *, num_requests: int, num_own: int) -> None:
        """An engine reported `num_requests` running or waiting, `num_own` of this gateway."""
        if self._num_gateways > 1:
            self._num_others[engine] = max(0, num_requests - num_own)

    def note_prompt(self, engine: int, request: LiveRequest, num_cached_tokens: int = 0) -> None:
        """A request that is not a fork was sent to this engine, which probably has the KV of its
        first `num_cached_tokens` tokens. It may have been sent to another one before."""
        self.note_answer(request)
        num_tokens = max(0, len(request.prompt_token_ids) - num_cached_tokens)
        self._unanswered[request] = engine, num_tokens
        self._num_prompt_tokens[engine] += num_tokens

    def note_answer(self, request: LiveRequest) -> None:
        """The request got its first token, finished or was aborted. May be called repeatedly."""
        if (sent := self._unanswered.pop(request, None)) is not None:
            engine, num_tokens = sent
            if engine in self._num_prompt_tokens:  # else it was removed
                self._num_prompt_tokens[engine] -= num_tokens

    def remove_engine(self, engine: int) -> None:
        """The engine is about to go; answers of its requests do not count any more."""
        del self._num_others[engine], self._num_prompt_tokens[engine]

    @property
    def num_others(self) -> int:
        """Requests of other gateways at all engines."""
        return self._num_others.total()

    def load(self, engine: int, num_own: int) -> float:
        """Load of an engine, in requests. num_own: requests of this gateway at the engine."""
        num_others = self._num_others[engine] / self._num_gateways
        return num_own + num_others + self._num_prompt_tokens[engine] / TOKENS_PER_REQUEST
