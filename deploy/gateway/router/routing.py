"""The routing of one gateway, assembled: the router, and what keeps its index up to date."""

import asyncio
from collections.abc import Iterable
from typing import Final

import zmq
from prometheus_client.core import Metric

from longshore.deploy.gateway.router.config import RoutingConfig, make_policy
from longshore.deploy.gateway.router.event_follower import EventFollower
from longshore.deploy.gateway.router.event_subscriber import EventSubscriber
from longshore.deploy.gateway.router.policies import PrefixAware
from longshore.deploy.gateway.router.router import Router
from longshore.deploy.gateway.router.routing_metrics import RoutingMetrics
from longshore.protocol.commands import EngineMember

MAX_WAIT_S: Final = 2.0
"""A gateway serves after this time, even if it does not know what all engines have."""
_POLL_S: Final = 0.01


class Routing:
    """The routing of one gateway, with its subscriptions to KV events. Create it inside a running
    loop."""

    def __init__(
        self,
        config: RoutingConfig,
        engines: Iterable[EngineMember],
        *,
        number: int,
        num_gateways: int,
    ) -> None:
        policy = make_policy(config)
        self.router = Router(0, policy, number=number, num_gateways=num_gateways)
        self._index = policy.index if isinstance(policy, PrefixAware) else None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._subscribers: dict[int, EventSubscriber] = {}
        self._followers: dict[int, EventFollower] = {}
        self._metrics = RoutingMetrics(self.router, self._index, self._followers)
        for member in engines:
            self.add_engine(member)

    def add_engine(self, member: EngineMember) -> None:
        """A new engine, which can be chosen."""
        engine = member.number
        if self._index is not None:
            self._index.add_engine(engine)
            if member.events is not None:
                subscriber = EventSubscriber(self._context, member.events, self._index, engine)
                self._subscribers[engine] = subscriber
                self._followers[engine] = subscriber.follower
        self.router.add_engine(engine, member.role)
        self._tidy_index()

    def remove_engine(self, engine: int) -> None:
        """The engine is about to go, and is not chosen any more."""
        self.router.remove_engine(engine)
        if (subscriber := self._subscribers.pop(engine, None)) is not None:
            del self._followers[engine]
            subscriber.close()
        if self._index is not None:
            self._index.remove_engine(engine)
        self._tidy_index()

    def _tidy_index(self) -> None:
        """One of the subscribers does it, in parts."""
        for subscriber in self._subscribers.values():
            subscriber.work_soon()
            return

    def follow(self, engine: int, is_ready: bool) -> None:
        """An engine is ready, or not. To be called at least at every change."""
        if (subscriber := self._subscribers.get(engine)) is not None:
            subscriber.follow(is_ready)

    async def wait_until_known(self) -> None:
        """Wait for the snapshots of all engines that are ready, at most MAX_WAIT_S."""
        followed = [each.follower for each in self._subscribers.values() if each.is_followed]
        for _ in range(round(MAX_WAIT_S / _POLL_S)):
            if all(follower.is_current for follower in followed):
                return
            await asyncio.sleep(_POLL_S)

    def lacking_knowledge(self) -> str | None:
        """Say of which engines that are ready the blocks are not known; None if there are none."""
        unknown = [
            str(engine)
            for engine, subscriber in self._subscribers.items()
            if self._index is not None
            and subscriber.is_followed
            and not self._index.is_known[engine]
        ]
        if not unknown:
            return None
        return f"routing does not know the KV blocks of engine {', '.join(unknown)}"

    def collect(self) -> Iterable[Metric]:
        """The metrics, for a registry."""
        return self._metrics.collect()

    def close(self) -> None:
        for subscriber in self._subscribers.values():
            subscriber.close()
        self._context.term()
