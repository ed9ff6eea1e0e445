"""The engines of one gateway, used as if they were one.

Requests of an engine that is lost or paused are resumed on another one that runs, or else when the
first engine is ready again.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from longshore.deploy.gateway.engines.engine_client import EngineClient
from longshore.deploy.gateway.engines.split_requests import (
    SplitRequests,
)
from longshore.deploy.gateway.router.policies import Decision, RoutedPrompt
from longshore.deploy.gateway.router.router import Router, Stage
from longshore.deploy.gateway.router.stages import routed_prompt, routed_so_far, stage_of
from longshore.deploy.gateway.settings import SplitSettings
from longshore.deploy.requests.live_requests import LiveRequest, seed_source
from longshore.protocol.commands import Role
from longshore.protocol.errors import EngineDead
from longshore.protocol.handshake import ClientHello, EngineReady
from longshore.protocol.requests import NO_OPTIONS, RequestOptions
from longshore.protocol.sampling import SamplingParams
from longshore.protocol.statistics import BlockSnapshot, EngineReport, SchedulerStats
from longshore.protocol.transport.channel import Endpoint

MOVED_PER_TURN: Final = 16
"""Requests of lost engines that are sent to others in one iteration of the event loop, at 0.1 to
0.5 ms each."""


class Engines:
    """Sends each prompt to one engine, and its forks (samples, beams) to the same one. Create it
    inside a running loop.

    endpoints: of the engines 0, 1 and so on; others can be added.
    router:   decides which engine gets a prompt; it has the same engines, and knows their roles.
    roles:    of these engines, if there is no router; empty: all are unified.
    split_config: how requests are divided among prefill and decode engines, while there are both.
    num_gateways: that use these engines.
    number:   number of this gateway.
    seed:     the seeds of requests without a seed are derived from it, to be reproducible; they
              differ between gateways.
    on_submit: called before a request is submitted.
    on_stats: called with an engine's number and its statistics.
    on_ready: called with an engine's number and whether it is ready, at every change of its state.
    why_stopped: see EngineClient.
    why_lost: returns the supervisor's reason why an engine, by its number, is being restarted.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        hello: ClientHello,
        *,
        router: Router | None = None,
        roles: Sequence[Role] = (),
        split_config: SplitSettings = SplitSettings(),  # noqa: B008  # it is immutable
        num_gateways: int = 1,
        number: int = 0,
        seed: int | None = None,
        on_submit: Callable[[], None] = lambda: None,
        on_stats: Callable[[str, SchedulerStats], None],
        on_ready: Callable[[int, bool], None] = lambda engine, is_ready: None,
        why_stopped: Callable[[], str | None] = lambda: None,
        why_lost: Callable[[int], str | None] = lambda engine: None,
    ) -> None:
        self._router = router or Router(len(endpoints), roles=roles)
        self._loop = asyncio.get_running_loop()
        self._on_submit = on_submit
        self._on_stats = on_stats
        self._on_ready = on_ready
        self._why_lost = why_lost
        self._is_draining = False
        self._hello = hello
        self._seeds = seed_source(seed, number)
        self._why_stopped = why_stopped
        self.clients: dict[int, EngineClient] = {}
        self._leaving: dict[int, EngineClient] = {}  # removed, with requests that are not moved yet
        self._moves_soon = self._splits_soon = False
        self.split = SplitRequests(
            split_config,
            self.clients,
            self._router,
            self._seeds,
            num_gateways=num_gateways,
            usable=self._usable,
            now=self._loop.time,
        )
        for engine, endpoint in enumerate(endpoints):
            self.add_engine(engine, endpoint)

    def add_engine(self, engine: int, endpoint: Endpoint) -> None:
        """Connect to an engine, which the router has got, too. It is used once it is ready."""
        while engine in self._leaving:  # a former one of this number
            self._move_some()
        self.clients[engine] = EngineClient(
            endpoint,
            self._hello,
            number=engine,
            seeds=self._seeds,
            on_stats=self._stats_taker(engine),
            on_change=self._move_requests,
            on_late_end=partial(self.split.late_end, engine),
            why_stopped=self._why_stopped,
        )

    def remove_engine(self, engine: int) -> None:
        """Use an engine no more, which is not the only one, and which the router has lost already.
        Its requests are resumed on others, and then it is disconnected."""
        self._leaving[engine] = self.clients.pop(engine)
        self._on_ready(engine, False)
        self._change_split()
        self._move_some()

    @property
    def _all_clients(self) -> list[EngineClient]:
        return [*self.clients.values(), *self._leaving.values()]

    def _stats_taker(self, engine: int) -> Callable[[SchedulerStats], None]:
        def take(stats: SchedulerStats) -> None:
            if engine not in self.clients:
                return  # it is about to be disconnected
            self._router.loads.note_report(
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
        """Death of the first engine that will not return."""
        return next((c.death for c in self.clients.values() if c.death is not None), None)

    @property
    def not_ready_reason(self) -> str | None:
        """Why requests wait; None if at least one engine is ready."""
        if self.death is not None:
            return str(self.death)
        running = [client for client in self.clients.values() if client.is_running]
        if running:
            closed = [client.closed_reason for client in running]
            return None if None in closed else f"the engine is {closed[0]}; requests wait"
        lost = [
            (engine, client)
            for engine, client in self.clients.items()
            if client.loss or client.pause
        ]
        if not lost:
            return "not connected yet"
        engine, client = lost[0]
        if client.is_asleep:
            return f"the engine is {client.pause}; requests wait"
        why = self._why_lost(engine) or client.loss or client.pause
        return f"the engine is being restarted: {why}"

    @property
    def is_asleep(self) -> bool:
        """Whether all engines sleep."""
        return bool(self.clients) and all(each.is_asleep for each in self.clients.values())

    @property
    def num_own_requests(self) -> int:
        """Live requests of this gateway."""
        num_sent = sum(client.num_live_requests for client in self._all_clients)
        return self.split.num_held + num_sent

    @property
    def num_live_requests(self) -> int:
        """Live requests of the deployment; those of other gateways as of the engines' last
        report."""
        return self.num_own_requests + self._router.loads.num_others

    async def wait_until_ready(self, *, awaits_all: bool = True) -> EngineReady:
        """Wait for all engines, or for one; the others join later. Returns the description of one.
        Raises HandshakeRejected or EngineDead with a reason."""
        clients = self.clients.values()
        waits = [asyncio.create_task(client.wait_until_ready()) for client in clients]
        try:
            for wait in asyncio.as_completed(waits):
                ready = await wait
                if not awaits_all:
                    break
        finally:
            for task in waits:
                task.cancel()
        return ready

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
        options: RequestOptions = NO_OPTIONS,
        *,
        on_change: Callable[[], None],
        fork_of: LiveRequest | None = None,
        num_primed: int = 0,
        session_key: str | None = None,
    ) -> LiveRequest:
        """Queue one request at the engine that the router chooses, or a fork at its parent's
        engine; see `LiveRequests.open`. If no engine is ready, it waits for one. Raises EngineDead,
        or TooManyWaiting.

        session_key: requests with the same one belong together.
        """
        self._on_submit()
        request = request_id, prompt_token_ids, sampling, options
        if self.split.takes(prompt_token_ids, sampling, options, fork_of, num_primed):
            return self.split.submit(
                *request,
                on_change=on_change,
                fork_of=fork_of,
                num_primed=num_primed,
                session_key=session_key,
            )
        if fork_of is not None and self._usable().get(fork_of.engine, False):
            return self.clients[fork_of.engine].submit(
                *request, on_change=on_change, fork_of=fork_of, num_primed=num_primed
            )  # else what it would start from is lost
        prompt = routed_prompt(prompt_token_ids, sampling, options, session_key)
        decision = self._choose(prompt, stage_of(sampling, options, num_primed))
        live = self.clients[decision.engine].submit(
            *request, on_change=on_change, num_primed=num_primed
        )
        live.session_key = session_key
        self._await_first_change(live, decision)
        return live

    def _await_first_change(self, live: LiveRequest, decision: Decision) -> None:
        if live.engine != decision.engine:
            return  # that engine was lost meanwhile, and the request was moved
        self._router.note_sent(decision, live)
        live.on_change = partial(self._first_change, live, live.on_change)

    def _first_change(self, live: LiveRequest, on_change: Callable[[], None]) -> None:
        self._note_answer(live)
        live.on_change = on_change
        on_change()

    def _note_answer(self, live: LiveRequest) -> None:
        self._router.note_answer(live, self._loop.time())

    def _choose(self, prompt: RoutedPrompt, stage: Stage = "whole") -> Decision:
        decision = self._router.choose(
            prompt,
            {engine: client.num_live_requests for engine, client in self.clients.items()},
            self._usable(),
            self._loop.time(),
            stage,
        )
        if decision is None:
            assert self.death is not None
            raise self.death
        return decision

    def _usable(self) -> dict[int, bool]:
        """Which engines run and admit requests; if none does, those that run; if none does, those
        that may return."""
        clients = self.clients.items()
        is_open = {each: one.is_running and one.closed_reason is None for each, one in clients}
        if any(is_open.values()):
            return is_open
        if any(client.is_running for client in self.clients.values()):
            return {engine: client.is_running for engine, client in clients}
        return {engine: client.death is None for engine, client in clients}

    def _move_requests(self) -> None:
        """An engine was lost or paused, or runs: no request waits for one while another runs."""
        for engine, client in self.clients.items():
            self._on_ready(engine, client.is_ready)
        self._change_split()
        if not any(client.is_running for client in self.clients.values()):
            for client in self.clients.values() if self._is_draining else ():
                if not client.is_ready:  # a paused one may have new workers soon
                    client.shut_down(f"the engine has stopped: {client.loss or 'it was not ready'}")
            return
        for engine, client in self.clients.items():
            if client.is_running or client.death is not None:
                continue
            self._router.loads.note_report(engine, num_requests=0, num_own=0)  # all are moved
        self._move_some()

    def _change_split(self) -> None:
        if self.split.engines_changed() and not self._splits_soon:
            self._splits_soon = True
            self._loop.call_soon(self._change_split_again)

    def _change_split_again(self) -> None:
        self._splits_soon = False
        self._change_split()

    def _move_some(self) -> None:
        """Resume some requests of engines that are gone, or do not run while others do."""
        self._moves_soon = False
        left = MOVED_PER_TURN
        is_any_running = any(client.is_running for client in self.clients.values())
        moving = [
            client
            for client in self.clients.values()
            if is_any_running and not client.is_running and client.death is None
        ]
        for client in (*moving, *self._leaving.values()):
            released = client.release_some(left)
            left -= len(released)
            self._resume_elsewhere(released)
        for engine, client in list(self._leaving.items()):
            if not client.num_live_requests:
                del self._leaving[engine]
                client.close()
        has_more = any(client.num_live_requests for client in moving if not client.is_running)
        if (has_more or self._leaving) and not self._moves_soon:
            self._moves_soon = True
            self._loop.call_soon(self._move_some)

    def _resume_elsewhere(self, requests: Sequence[LiveRequest]) -> None:
        for live in requests:
            if self.split.moved(live):
                continue
            self._note_answer(live)
            decision = self._choose(routed_so_far(live))
            live.engine = decision.engine
            self._await_first_change(live, decision)
            self.clients[live.engine].resume([live])

    def abort(self, requests: Sequence[LiveRequest]) -> None:
        """See EngineClient."""
        for live in requests:
            self._note_answer(live)
        for live in reversed(requests):  # forks first
            self.split.abort(live)
        by_engine: dict[int, list[LiveRequest]] = {}
        for live in requests:
            by_engine.setdefault(live.engine, []).append(live)
        for engine, there in by_engine.items():
            if (client := self._client_of(engine)) is not None:
                client.abort(there)

    def _client_of(self, engine: int) -> EngineClient | None:
        return self.clients.get(engine) or self._leaving.get(engine)

    def stop(self, live: LiveRequest, num_tokens: int) -> None:
        """See EngineClient."""
        if self.split.stop(live, num_tokens):
            return
        if (client := self._client_of(live.engine)) is not None:  # else it has finished there
            client.stop(live, num_tokens)

    def begin_drain(self) -> None:
        """No engine is restarted from now on: requests that no other one can resume have failed."""
        self._is_draining = True
        self._move_requests()

    def shut_down(self, reason: str) -> None:
        """See EngineClient."""
        self.split.fail_held(EngineDead(reason))
        for client in self._all_clients:
            client.shut_down(reason)

    def close(self) -> None:
        """See EngineClient."""
        for client in self._all_clients:
            client.close()
