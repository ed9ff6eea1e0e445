"""Plays random requests on an engine with a connector, and compares every token."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from longshore.deploy.llm.blocking_client import BlockingClient
from longshore.deploy.requests.live_requests import LiveRequest, LiveRequests
from longshore.protocol.outputs import EngineOutputs, FinishReason
from longshore.protocol.requests import AddRequest
from longshore.protocol.statistics import SchedulerStats
from longshore.testing.engines import AnyEngine, what_is_left
from longshore.testing.prompts import MAX_TOKENS, KnownPrompt, greedy

MAX_LIVE: Final = 10
LOGPROB_TOLERANCE: Final = 2e-3
STATS_TIMEOUT_S: Final = 10.0
PLAY_TIMEOUT_S: Final = 100.0


@dataclass(eq=False)
class _Playing:
    """A request.

    abort_after: after how many `receive` calls it is aborted; None: never.
    is_reused:   it has the id of an aborted request, whose transfers may go on. While they do, the
                 engine rejects the id.
    """

    live: LiveRequest
    prompt: KnownPrompt
    num_tokens: int
    abort_after: int | None
    is_reused: bool


class Player:
    """The client of an engine.

    prepare: called with the message of each request; returns the one that is sent.
    request_ids: of all requests so far.
    stats: the newest statistics of an engine in other processes.
    """

    def __init__(
        self,
        engine: AnyEngine,
        prompts: Sequence[KnownPrompt],
        seed: int,
        prepare: Callable[[AddRequest], AddRequest] = lambda message: message,
    ) -> None:
        self._engine, self._prepare = engine, prepare
        self._prompts = prompts
        self._chance = Random(f"player {seed}")
        self._client = BlockingClient(LiveRequests(Random(seed)), engine)
        self._playing: list[_Playing] = []
        self._aborted: list[str] = []
        self._num_submitted = 0
        self.request_ids: set[str] = set()
        self.stats: SchedulerStats | None = None
        self.num_compared: Counter[str] = Counter()

    def play(self, num_requests: int, *, aborts: float = 0.3) -> None:
        """Submit requests at random times and abort some of them at random points, until all have
        ended. Raises AssertionError for a wrong token."""
        deadline_s = time.monotonic() + PLAY_TIMEOUT_S
        num_left, chance = num_requests, self._chance
        while num_left or self._playing:
            assert time.monotonic() < deadline_s, (
                f"not answered in time: {self._ids()}; left are {what_is_left(self._engine)}"
            )
            if num_left and len(self._playing) < MAX_LIVE and chance.random() < 0.5:
                num_left -= 1
                is_aborted = chance.random() < aborts
                self.submit(
                    chance.choice(self._prompts),
                    num_tokens=chance.randint(1, MAX_TOKENS),
                    abort_after=chance.randrange(25) if is_aborted else None,
                )
            else:
                self.receive()

    def ask(self, prompt: KnownPrompt) -> None:
        """Submit a request and receive its whole answer."""
        self.submit(prompt)
        while self._playing:
            self.receive()

    def await_stats(self, condition: Callable[[SchedulerStats], bool]) -> bool:
        """Receive until an engine in other processes reports such statistics; whether it did within
        STATS_TIMEOUT_S."""
        deadline_s = time.monotonic() + STATS_TIMEOUT_S
        while self.stats is None or not condition(self.stats):
            if time.monotonic() >= deadline_s:
                return False
            self.receive()
        return True

    def submit(
        self, prompt: KnownPrompt, num_tokens: int = MAX_TOKENS, abort_after: int | None = None
    ) -> None:
        request_id = f"request-{self._num_submitted}"
        self._num_submitted += 1
        is_reused = bool(self._aborted) and self._chance.random() < 0.3
        if is_reused:
            request_id = self._aborted.pop()
        self.request_ids.add(request_id)
        live, message = self._client.requests.open(
            request_id, prompt.token_ids, greedy(num_tokens), on_change=lambda: None
        )
        self._engine.send(self._prepare(message))
        self._playing.append(_Playing(live, prompt, num_tokens, abort_after, is_reused))
        self._abort_due()

    def receive(self) -> EngineOutputs | None:
        """Receive once. Compares the requests that have ended, and aborts those that are due."""
        outputs = self._engine.receive()
        if outputs is not None:
            self.stats = outputs.stats or self.stats
            self._client.requests.apply(outputs)
        for playing in list(self._playing):
            if not playing.live.is_live:
                self._playing.remove(playing)
                self._compare_whole(playing)
            elif playing.abort_after is not None:
                playing.abort_after -= 1
        self._abort_due()
        return outputs

    def _abort_due(self) -> None:
        for playing in list(self._playing):
            if playing.abort_after is not None and playing.abort_after <= 0:
                self._playing.remove(playing)
                self._client.abort([playing.live])
                self._aborted.append(playing.live.request_id)
                self._compare(playing)
                self.num_compared["aborted"] += 1

    def _compare_whole(self, playing: _Playing) -> None:
        live = playing.live
        assert live.failure is None, live.failure
        assert live.finished is not None
        reason, message = live.finished.reason, live.finished.message
        if playing.is_reused and "being transferred" in (message or ""):
            return
        assert reason is FinishReason.LENGTH_CAPPED, f"{live.request_id}: {reason.name} {message}"
        assert self._compare(playing) == playing.num_tokens
        self.num_compared["finished"] += 1

    def _compare(self, playing: _Playing) -> int:
        """Compare the tokens so far; returns their number."""
        live, known = playing.live, playing.prompt
        answer = live.take_token_ids()
        scores = live.take_scores(len(answer))
        expected = list(known.answer[: len(answer)])
        about = f"{live.request_id}, a prompt of {len(known.token_ids)} tokens"
        assert answer == expected, f"{about}: other tokens than without a connector"
        for position, score in enumerate(scores):
            difference = abs(score.logprob - known.logprobs[position])
            assert difference < LOGPROB_TOLERANCE, (
                f"{about}: output token {position} is the same as without a connector, but its log "
                f"probability differs by {difference:.4f}: it was computed from wrong KV"
            )
        return len(answer)

    def _ids(self) -> list[str]:
        return [playing.live.request_id for playing in self._playing]
