"""The prefill and decode engines that get requests of one gateway, and how many KV blocks each
has for its requests; without I/O."""

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
    """The capacities of engines that were open when they were last looked at, in KV blocks.

    engines: by number; they come and go. roles: of these, and of others.
    num_gateways: that divide the capacity of each engine.
    """

    def __init__(
        self,
        engines: Mapping[int, EngineState],
        roles: Mapping[int, Role],
        *,
        num_gateways: int,
    ) -> None:
        self._engines, self._roles = engines, roles
        self._num_gateways = num_gateways
        self._num_blocks: dict[int, int] = {}

    def __contains__(self, engine: int) -> bool:
        return engine in self._num_blocks

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
        """The engines that have a capacity here, and are not open any more."""
        return [engine for engine in self._num_blocks if not self.is_open(engine)]

    def update(self, engine: int) -> int | None:
        """The capacity of an open engine, if it is new or has changed."""
        num_blocks = self._capacity(engine)
        if self._num_blocks.get(engine) == num_blocks:
            return None
        self._num_blocks[engine] = num_blocks
        return num_blocks

    def remove(self, engine: int) -> None:
        """The engine was closed."""
        del self._num_blocks[engine]

    def largest(self, role: Role) -> int:
        """0 if there is no engine."""
        capacities = [self._num_blocks.get(engine, 0) for engine in self._engines_of(role)]
        return max(capacities, default=0)

    def blocks_of(self, num_tokens: int) -> int:
        """Blocks of a request of this length, at the engine where it needs the most."""
        ready = [each.ready for each in self._engines.values() if each.ready is not None]
        return max((each.capacity.blocks_of(num_tokens) for each in ready), default=num_tokens)

    @property
    def blocks_per_request(self) -> int:
        """The smallest capacity of a decode engine, divided by the requests that it can run at a
        time; at least 1."""
        shares = [
            self._num_blocks[engine] * self._num_gateways // ready.identity.max_num_seqs
            for engine in self._engines_of("decode")
            if engine in self._num_blocks and (ready := self._engines[engine].ready) is not None
        ]
        return max(1, min(shares, default=1))

    @property
    def max_model_len(self) -> int:
        """The limit of the engine whose requests must be the shortest."""
        ready = [each.ready for each in self._engines.values() if each.ready is not None]
        return min((each.identity.max_model_len for each in ready), default=sys.maxsize)

    def _engines_of(self, role: Role) -> list[int]:
        return [
            engine for engine, own in self._roles.items() if own == role and engine in self._engines
        ]

    def _capacity(self, engine: int) -> int:
        ready = self._engines[engine].ready
        assert ready is not None
        capacity, is_prefill = ready.capacity, self._roles[engine] == "prefill"
        num_blocks = capacity.num_leasable_blocks if is_prefill else capacity.num_blocks
        return max(1, num_blocks // self._num_gateways)
