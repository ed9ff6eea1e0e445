"""The routing of one gateway, assembled: the router, and what keeps its index up to date."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final

import zmq
from prometheus_client.core import Metric

from longshore.deploy.gateway.router.config import RoutingConfig, make_policy
from longshore.deploy.gateway.router.event_subscriber import EventSubscriber
from longshore.deploy.gateway.router.policies import PrefixAware
from longshore.deploy.gateway.router.router import Router
from longshore.deploy.gateway.router.routing_metrics import RoutingMetrics
from longshore.deploy.supervisor.replica import Role

MAX_WAIT_S: Final = 2.0
"""A gateway serves after this time, even if it does not know what all engines have."""
_POLL_S: Final = 0.01


class Routing:
    """Create it inside a running loop."""

    def __init__(
        self,
        config: RoutingConfig,
        num_engines: int,
        *,
        number: int,
        num_gateways: int,
        roles: Sequence[Role] = (),
    ) -> None:
        policy = make_policy(config, num_engines)
        self.router = Router(
            num_engines, policy, number=number, num_gateways=num_gateways, roles=roles
        )
        self._index = policy.index if isinstance(policy, PrefixAware) else None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._subscribers: list[EventSubscriber] = []
        if self._index is not None and config.prefix is not None:
            self._subscribers = [
                EventSubscriber(self._context, source, self._index, engine)
                for engine, source in enumerate(config.prefix.events)
            ]
        followers = [subscriber.follower for subscriber in self._subscribers]
        self._metrics = RoutingMetrics(self.router, self._index, followers)

    def follow(self, engine: int, is_ready: bool) -> None:
        """An engine is ready, or not. To be called at least at every change."""
        if self._subscribers:
            self._subscribers[engine].follow(is_ready)

    async def wait_until_known(self) -> None:
        """Wait for the snapshots of all engines that are ready, at most MAX_WAIT_S."""
        followed = [each.follower for each in self._subscribers if each.is_followed]
        for _ in range(round(MAX_WAIT_S / _POLL_S)):
            if all(follower.is_current for follower in followed):
                return
            await asyncio.sleep(_POLL_S)

    def lacking_knowledge(self) -> str | None:
        """Of which engines that are ready the blocks are not known; None if there are none."""
        unknown = [
            str(engine)
            for engine, subscriber in enumerate(self._subscribers)
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
        for subscriber in self._subscribers:
            subscriber.close()
        self._context.term()
