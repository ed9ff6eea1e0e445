"""The gateway of a simulation with prefill and decode engines: `SplitRequests` of a real gateway
decides which engine gets which part of a request, and when."""

import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec

from longshore.deploy.gateway.engines.split_requests import SplitRequests
from longshore.deploy.gateway.router.policies import RoutedPrompt
from longshore.deploy.gateway.router.stages import stage_of
from longshore.deploy.gateway.settings import SplitSettings
from longshore.deploy.requests.live_requests import LiveRequest, LiveRequests
from longshore.deploy.simulator.gateway import SimulatedGateway
from longshore.deploy.simulator.records import SplitRecord
from longshore.protocol.handshake import EngineReady
from longshore.protocol.outputs import EngineOutputs
from longshore.protocol.requests import AddRequest, RequestOptions
from longshore.protocol.sampling import SamplingParams

NO_LIMIT: Final = SplitSettings(disaggregation_max_waiting=sys.maxsize)


@dataclass(slots=True)
class _Client:
    """Who waits for a request. live: None until it is sent."""

    number: int
    sent_s: float
    live: LiveRequest | None = None
    has_token: bool = False


class SimulatedLegs:
    """What a gateway has of one engine: an `EngineClient` that is always connected.

    send: called with the messages of its requests.
    """

    is_running: Final = True
    closed_reason: Final = None

    def __init__(
        self, number: int, ready: EngineReady, seeds: random.Random, send: Callable[..., None]
    ) -> None:
        self.ready: EngineReady | None = ready
        self._number, self._send = number, send
        self._requests = LiveRequests(seeds, engine=number)

    @property
    def num_live_requests(self) -> int:
        return len(self._requests)

    def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        options: RequestOptions,
        *,
        on_change: Callable[[], None],
    ) -> LiveRequest:
        live, message = self._requests.open(
            request_id, prompt_token_ids, sampling, options, on_change=on_change
        )
        self._send(self._number, message)
        return live

    def resume(
        self, requests: Iterable[LiveRequest], *, fork_of: LiveRequest | None = None
    ) -> None:
        for live in requests:
            self._send(self._number, self._requests.resume(live, fork_of))

    def release_transfers(self, transfer_ids: Sequence[str]) -> None:
        raise AssertionError("every offer is used: no engine is lost, and no client leaves")

    def deliver(self, outputs: EngineOutputs) -> None:
        self._requests.apply(outputs)


class SplitGateway(SimulatedGateway):
    """After its creation, `begin` must be called with what each engine says of itself."""

    def begin(self, engines: Sequence[EngineReady]) -> None:
        seeds = random.Random(0)
        self._clients: dict[str, _Client] = {}  # by request id
        self._legs = {
            number: SimulatedLegs(number, ready, seeds, self._send_leg)
            for number, ready in enumerate(engines)
        }
        self._gaps_s: list[float] = []
        self._split = SplitRequests(
            NO_LIMIT,
            self._legs,
            self.router,
            seeds,
            num_gateways=1,
            usable=lambda: self._usable,
            now=lambda: self._clock.now_s,
        )
        self._split.on_gap = self._gaps_s.append
        self._split.engines_changed()

    @property
    def record(self) -> SplitRecord:
        """How requests have been split so far."""
        return SplitRecord(
            {str(name): count for name, count in sorted(self._split.outcomes.items())},
            {str(name): count for name, count in sorted(self._split.skips.items())},
            self._gaps_s,
        )

    def send(self, message: AddRequest, session_key: str | None) -> None:
        client = _Client(message.handle, self._clock.now_s)
        self._clients[message.request_id] = client
        on_change = partial(self._changed, client)
        token_ids: Any = message.prompt_token_ids  # an array is a sequence, but not for mypy
        request = message.request_id, token_ids, message.sampling, message.options
        if self._split.takes(token_ids, message.sampling, message.options):
            client.live = self._split.submit(*request, on_change=on_change, session_key=session_key)
            return
        prompt = RoutedPrompt(token_ids, session_key=session_key)
        num_own = {number: legs.num_live_requests for number, legs in self._legs.items()}
        stage = stage_of(message.sampling, message.options)
        decision = self.router.choose(prompt, num_own, self._usable, self._clock.now_s, stage)
        assert decision is not None, "all engines are usable"
        client.live = self._legs[decision.engine].submit(*request, on_change=on_change)
        self.router.note_sent(decision, client.live)

    def deliver(self, engine: int, outputs: EngineOutputs) -> None:
        self._legs[engine].deliver(outputs)

    def _send_leg(self, engine: int, message: AddRequest) -> None:
        client = self._clients[message.request_id]
        age_s = self._clock.now_s - client.sent_s  # in virtual time
        message = msgspec.structs.replace(message, age_s=age_s)
        self._send_to(client.number, engine, message)

    def _changed(self, client: _Client) -> None:
        """There is a token, or the end."""
        live = client.live
        assert live is not None
        if not client.has_token:
            self.router.note_answer(live, self._clock.now_s)
            if live.num_tokens:
                client.has_token = True
                self._on_first_token(client.number)
        if live.finished is not None:
            del self._clients[live.request_id]
            self._on_end(client.number, live.finished)
