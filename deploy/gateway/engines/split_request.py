"""One request whose prompt one engine computes and whose answer another one continues, and the
phases that it passes; without I/O."""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from longshore.deploy.gateway.router.policies import Decision
from longshore.deploy.requests.live_requests import AT_NO_ENGINE, LiveRequest
from longshore.protocol.outputs import FinishedRequest


class Phase(enum.Enum):
    QUEUED = "waits for capacity at a decode engine"
    ADMITTED = "has it, and waits for capacity at a prefill engine"
    PREFILL = "is at a prefill engine"
    OFFERED = "has its first token, and waits for a decode engine"
    FORK = "waits until its parent is at a decode engine"
    SENT = "is at the engine that computes the rest"
    ENDED = "has ended"


TRANSITIONS: Final[Mapping[Phase, frozenset[Phase]]] = {
    Phase.QUEUED: frozenset({Phase.QUEUED, Phase.ADMITTED, Phase.FORK, Phase.SENT, Phase.ENDED}),
    Phase.ADMITTED: frozenset(
        {Phase.QUEUED, Phase.ADMITTED, Phase.PREFILL, Phase.SENT, Phase.ENDED}
    ),
    Phase.PREFILL: frozenset({Phase.QUEUED, Phase.OFFERED, Phase.ENDED}),
    Phase.OFFERED: frozenset({Phase.SENT, Phase.ENDED}),
    Phase.FORK: frozenset({Phase.QUEUED, Phase.FORK, Phase.SENT, Phase.ENDED}),
    Phase.SENT: frozenset({Phase.QUEUED, Phase.ENDED}),
    Phase.ENDED: frozenset(),
}
"""Which phases may follow one. QUEUED follows when an engine was lost or closed, or a fork's parent
has ended; a request is queued again before it gets another engine."""


@dataclass(eq=False)
class SplitRequest:
    """One request of `SplitRequests`, which changes it.

    on_change:  of the client.
    reserved:   the decode engine at which it has capacity, until it is sent there.
    decision:   by which that was chosen.
    params:     of an offer that has not been sent to a decode engine.
    owner:      the engine that has made it.
    first_end:  how its prefill leg has ended.
    offered_at: when that was, until its first token of the decode engine.
    awaits_token: it has got no token of its engine.
    stopped_at: number of its output tokens, if a stop string was found between the legs.
    forks:      which wait for it.
    """

    live: LiveRequest
    on_change: Callable[[], None]
    phase: Phase = Phase.QUEUED
    reserved: int | None = None
    decision: Decision | None = None
    params: dict[str, Any] | None = None
    owner: int = AT_NO_ENGINE
    first_end: FinishedRequest | None = None
    offered_at: float | None = None
    awaits_token: bool = False
    stopped_at: int | None = None
    forks: "list[SplitRequest]" = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.live.prompt_token_ids) + self.live.num_tokens

    def enter(self, phase: Phase) -> None:
        """Begin a phase."""
        assert phase in TRANSITIONS[self.phase], (self.phase, phase)
        self.phase = phase


def joined(first: FinishedRequest, last: FinishedRequest) -> FinishedRequest:
    """The end of a request, with what the engine knows that computed its prompt."""
    return msgspec.structs.replace(
        last,
        num_cached_tokens=first.num_cached_tokens,
        num_preemptions=first.num_preemptions + last.num_preemptions,
        events=first.events,
    )
