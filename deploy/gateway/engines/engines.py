"""The engines of one gateway, used as if they were one."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Unpack

from longshore.deploy.gateway.engines.engine_choice import EngineChoice
from longshore.deploy.gateway.engines.engine_client import EngineClient
from longshore.deploy.requests.live_requests import (
    LiveRequest,
    RequestFields,
    seed_source,
)
from longshore.protocol.errors import EngineDead
from longshore.protocol.handshake import ClientHello, EngineReady
from longshore.protocol.sampling import SamplingParams
from longshore.protocol.statistics import BlockSnapshot, EngineReport, SchedulerStats
from longshore.protocol.transport.channel import Endpoint


class Engines:
    """Sends each prompt to one engine, and its forks (samples, beams) to the same one. Create it
    inside a running loop.

    number, num_gateways: number of this gateway, and of gateways that use the engines.
    seed:     the seeds of requests without a seed are derived from it, to be reproducible; they
              differ between gateways.
    on_stats: called with an engine's number and its statistics.
    why_stopped: see EngineClient.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        hello: ClientHello,
        *,
        number: int = 0,
        num_gateways: int = 1,
        seed: int | None = None,
        on_stats: Callable[[str, SchedulerStats], None],
        why_stopped: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._choice = EngineChoice(len(endpoints), number=number, num_gateways=num_gateways)
        self._on_stats = on_stats
        seeds = seed_source(seed, number)
        self.clients = [
            EngineClient(
                endpoint,
                hello,
                seeds=seeds,
                on_stats=self._stats_taker(engine),
                why_stopped=why_stopped,
            )
            for engine, endpoint in enumerate(endpoints)
        ]

    def _stats_taker(self, engine: int) -> Callable[[SchedulerStats], None]:
        def take(stats: SchedulerStats) -> None:
            self._choice.note_report(
                engine,
                num_requests=stats.num_running + stats.num_waiting,
                num_own=self.clients[engine].num_live_requests,
            )
            self._on_stats(str(engine), stats)

        return take

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def death(self) -> EngineDead | None:
        """Death of the first engine that has died, which ends the deployment."""
        return next((c.death for c in self.clients if c.death is not None), None)

    @property
    def num_own_requests(self) -> int:
        """Live requests of this gateway."""
        return sum(client.num_live_requests for client in self.clients)

    @property
    def num_live_requests(self) -> int:
        """Live requests of the deployment; those of other gateways as of the engines' last
        report."""
        return self.num_own_requests + self._choice.num_others

    async def wait_until_ready(self) -> EngineReady:
        """The first engine's description. Raises HandshakeRejected or EngineDead with a reason."""
        ready = await asyncio.gather(*(client.wait_until_ready() for client in self.clients))
        return ready[0]

    async def describe(self, timeout_s: float, engine: int = 0) -> EngineReport:
        """See EngineClient."""
        return await self.clients[engine].describe(timeout_s)

    async def describe_blocks(self, timeout_s: float, engine: int = 0) -> BlockSnapshot:
        """See EngineClient."""
        return await self.clients[engine].describe_blocks(timeout_s)

    def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        **fields: Unpack[RequestFields],
    ) -> LiveRequest:
        """Queue one request at the least loaded engine, or a fork at its parent's engine; see
        `LiveRequests.open`. Raises EngineDead."""
        fork_of = fields.get("fork_of")
        engine = self._choose() if fork_of is None else fork_of.engine
        live = self.clients[engine].submit(
            request_id,
            prompt_token_ids,
            sampling,
            **fields,
        )
        live.engine = engine
        if fork_of is None:
            self._choice.note_prompt(engine, live)
            live.on_change = partial(self._first_change, live, fields["on_change"])
        return live

    def _first_change(self, live: LiveRequest, on_change: Callable[[], None]) -> None:
        self._choice.note_answer(live)
        live.on_change = on_change
        on_change()

    def _choose(self) -> int:
        engine = self._choice.choose(
            [client.num_live_requests for client in self.clients],
            [client.death is None for client in self.clients],
        )
        if engine is None:
            assert self.death is not None
            raise self.death
        return engine

    def abort(self, requests: Sequence[LiveRequest]) -> None:
        """See EngineClient."""
        for live in requests:
            self._choice.note_answer(live)
        for engine, client in enumerate(self.clients):
            there = [live for live in requests if live.engine == engine]
            if there:
                client.abort(there)

    def stop(self, live: LiveRequest, num_tokens: int) -> None:
        """See EngineClient."""
        self.clients[live.engine].stop(live, num_tokens)

    def shut_down(self, reason: str) -> None:
        """See EngineClient."""
        for client in self.clients:
            client.shut_down(reason)

    def close(self) -> None:
        """See EngineClient."""
        for client in self.clients:
            client.close()
