"""Decides which engine gets a request; without I/O.

Of the engines whose role fits, and which run and admit requests, a policy chooses one by the loads
of all, what they have of the prompt, and the request's session.

Each gateway decides on its own, by its own index of blocks: a decision needs no message, and a
gateway that dies takes no other one's knowledge with it. The price is one index per gateway; what
another gateway has just sent to an engine is known once the engine has published it.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

from longshore.deploy.gateway.router.engine_loads import EngineLoads
from longshore.deploy.gateway.router.expected_blocks import ExpectedBlocks
from longshore.deploy.gateway.router.policies import (
    ByEngine,
    Decision,
    LeastLoaded,
    PrefixAware,
    Reason,
    RoutedPrompt,
    RoutingPolicy,
)
from longshore.deploy.requests.live_requests import LiveRequest
from longshore.protocol.commands import Role

Stage: TypeAlias = Literal["whole", "prefill", "decode"]
"""What is asked of an engine: a whole request, or one part of it."""

_ROLES: Final[dict[Stage, tuple[Role, ...]]] = {
    "whole": ("unified", "decode", "prefill"),
    "prefill": ("prefill", "unified", "decode"),
    "decode": ("decode", "unified", "prefill"),
}
"""Which engines serve a stage: those of the first role of which one is usable. Every engine can
compute whole requests, so one that is lost costs no answer while any other one is left."""


class CountedDecision(NamedTuple):
    """What decisions are counted by."""

    engine: int
    reason: Reason


class Router:
    """The decisions of one gateway.

    num_engines: engines at the beginning; others can be added.
    number, num_gateways: number of this gateway, and of gateways that use the engines.
    roles:   of these engines, by number; empty: all are unified.
    counts:  decisions so far.
    """

    def __init__(
        self,
        num_engines: int,
        policy: RoutingPolicy | None = None,
        *,
        number: int = 0,
        num_gateways: int = 1,
        roles: Sequence[Role] = (),
    ) -> None:
        self._policy = LeastLoaded() if policy is None else policy
        self._number = number
        self._roles: dict[int, Role] = {}
        self._engines: tuple[int, ...] = ()  # in order
        self._turn: int | None = (
            None  # this engine, or the next one; None: no engine was chosen yet
        )
        self._expected = ExpectedBlocks(policy.index) if isinstance(policy, PrefixAware) else None
        self.loads = EngineLoads(num_gateways=num_gateways)
        self.counts: Counter[CountedDecision] = Counter()
        for engine in range(num_engines):
            self.add_engine(engine, roles[engine] if roles else "unified")

    @property
    def roles(self) -> Mapping[int, Role]:
        """Roles of the engines that are there, by number; it changes with them."""
        return self._roles

    def add_engine(self, engine: int, role: Role = "unified") -> None:
        """From now on the engine can be chosen."""
        self._roles[engine] = role
        self._engines = tuple(sorted(self._roles))

    def remove_engine(self, engine: int) -> None:
        """The engine is about to go, and is not chosen any more."""
        del self._roles[engine]
        self._engines = tuple(sorted(self._roles))
        self.loads.remove_engine(engine)
        for decision in [each for each in self.counts if each.engine == engine]:
            del self.counts[decision]

    def choose(
        self,
        prompt: RoutedPrompt,
        num_own: ByEngine[int],
        is_usable: ByEngine[bool],
        now_s: float,
        stage: Stage = "whole",
    ) -> Decision | None:
        """The engine for a request; None if there is no usable one.

        num_own:   requests of this gateway, by engine.
        is_usable: whether an engine may be chosen. Those that have failed the request are not.
        """
        engines = self._candidates(is_usable, stage)
        if not engines:
            return None
        if self._expected is not None:
            self._expected.expire(now_s)
        loads = {engine: self.loads.load(engine, num_own[engine]) for engine in engines}
        decision = self._policy.choose(prompt, engines, loads)
        self._turn = decision.engine + 1
        self.counts[CountedDecision(decision.engine, decision.reason)] += 1
        return decision

    def note_sent(self, decision: Decision, request: LiveRequest) -> None:
        """The request was sent to the engine that was chosen for it."""
        self.loads.note_prompt(decision.engine, request, decision.num_cached_tokens)
        if self._expected is not None:
            self._expected.add(request, decision.engine, decision.next_hashes)

    def note_answer(self, request: LiveRequest, now_s: float) -> None:
        """The request got its first token, finished, was aborted, or has lost its engine. May be
        called repeatedly."""
        self.loads.note_answer(request)
        if self._expected is not None:
            self._expected.note_answer(request, now_s)

    def _candidates(self, is_usable: ByEngine[bool], stage: Stage) -> list[int]:
        """In the order in which it is their turn. The gateways begin with different engines."""
        if self._turn is None:
            first = self._number % max(1, len(self._engines))
        else:
            first = bisect_left(self._engines, self._turn)
        turns = self._engines[first:] + self._engines[:first]
        for role in _ROLES[stage]:
            if engines := [e for e in turns if is_usable[e] and self._roles[e] == role]:
                return engines
        return []
