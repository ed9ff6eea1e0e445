"""The prefill and decode engines that get requests of one gateway, and how many tokens of its
requests each has KV blocks for; without I/O."""

import sys
from collections.abc import Iterator, Mapping
from typing import Protocol

from longshore.protocol.commands import Role
from longshore.protocol.handshake import EngineReady


class EngineState(Protocol):
    """What is used of an `EngineClient`."""

    ready: EngineReady | None

    @property
    def is_running(self) -> bool: ...

    @property
    def closed_reason(self) -> str | None: ...


class EngineCapacities:
    """The capacities of engines that were open when they were last looked at, in tokens.

    engines: by number; they come and go. roles: of these, and of others.
    num_gateways: that divide the capacity of each engine.
    max_leased_share: of the KV blocks of a prefill engine, which it may keep for decode engines.
    """

    def __init__(
        self,
        engines: Mapping[int, EngineState],
        roles: Mapping[int, Role],
        *,
        num_gateways: int,
        max_leased_share: float,
    ) -> None:
        self._engines, self._roles = engines, roles
        self._num_gateways = num_gateways
        self._max_leased_share = max_leased_share
        self._num_tokens: dict[int, int] = {}

    def __contains__(self, engine: int) -> bool:
        return engine in self._num_tokens

    def is_open(self, engine: int) -> bool:
        """Whether an engine gets new requests."""
        client = self._engines.get(engine)
        if client is None or client.ready is None:
            return False
        return client.is_running and client.closed_reason is None

    def has_engine(self, role: Role) -> bool:
        """Whether there is an engine of a role; it may be lost or closed."""
        return bool(self._engines_of(role))

    def any_open(self, role: Role) -> bool:
        return any(True for _ in self.open_engines(role))

    def open_engines(self, role: Role) -> Iterator[int]:
        """Each is looked at when it is its turn: what is sent to one may lose the next one."""
        return filter(self.is_open, self._engines_of(role))

    @property
    def closed_engines(self) -> list[int]:
        """Those that have a capacity here, and are not open any more."""
        return [engine for engine in self._num_tokens if not self.is_open(engine)]

    def update(self, engine: int) -> int | None:
        """The capacity of an open engine, if it is new or has changed."""
        num_tokens = self._capacity(engine)
        if self._num_tokens.get(engine) == num_tokens:
            return None
        self._num_tokens[engine] = num_tokens
        return num_tokens

    def remove(self, engine: int) -> None:
        """The engine was closed."""
        del self._num_tokens[engine]

    def largest(self, role: Role) -> int:
        """0 if there is no engine."""
        capacities = [self._num_tokens.get(engine, 0) for engine in self._engines_of(role)]
        return max(capacities, default=0)

    @property
    def tokens_per_request(self) -> int:
        """The smallest capacity of a decode engine, divided by the requests that it can run at a
        time; at least 1."""
        shares = [
            self._num_tokens[engine] * self._num_gateways // ready.identity.max_num_seqs
            for engine in self._engines_of("decode")
            if engine in self._num_tokens and (ready := self._engines[engine].ready) is not None
        ]
        return max(1, min(shares, default=1))

    @property
    def max_model_len(self) -> int:
        """Of the engine whose requests must be the shortest."""
        ready = [each.ready for each in self._engines.values() if each.ready is not None]
        return min((each.identity.max_model_len for each in ready), default=sys.maxsize)

    def _engines_of(self, role: Role) -> list[int]:
        return [
            engine for engine, own in self._roles.items() if own == role and engine in self._engines
        ]

    def _capacity(self, engine: int) -> int:
        ready = self._engines[engine].ready
        assert ready is not None
        num_tokens = ready.num_blocks * ready.identity.block_size
        share = self._max_leased_share if self._roles[engine] == "prefill" else 1.0
        return max(1, int(num_tokens * share) // self._num_gateways)
