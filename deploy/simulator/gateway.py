"""The gateway of a simulation: the real router, which knows what engines publish at once."""

from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np

from longshore.deploy.gateway.router.block_index import GroupInfo
from longshore.deploy.gateway.router.config import PrefixRoutingConfig, RoutingConfig, make_policy
from longshore.deploy.gateway.router.policies import PolicyName, PrefixAware, RoutedPrompt
from longshore.deploy.gateway.router.router import Router
from longshore.deploy.requests.live_requests import LiveRequest
from longshore.deploy.simulator.clock import Clock
from longshore.protocol.commands import Role
from longshore.protocol.events import BlockRemoved, BlockStored, KVEvent
from longshore.protocol.outputs import EngineOutputs, FinishedRequest
from longshore.protocol.requests import AddRequest
from longshore.scheduler.config import CacheConfig

MAX_HASHES = 10_000_000


class SimulatedGateway:
    """One gateway in front of all engines, which compute whole requests.

    router: its `counts` are the decisions by reason.
    send_to: called with the number of a request, an engine, and the message for it.
    on_first_token: called with the number of a request that has got its first token.
    on_end: called with the number of a request that has ended, and how.
    """

    def __init__(
        self,
        policy: PolicyName,
        roles: Sequence[Role],
        cache: CacheConfig,
        hash_seed: bytes,
        clock: Clock,
        *,
        num_requests: int,
        send_to: Callable[[int, int, AddRequest], None],
        on_first_token: Callable[[int], None],
        on_end: Callable[[int, FinishedRequest], None],
    ) -> None:
        prefix = PrefixRoutingConfig(hash_seed.hex(), cache.hash_algorithm, cache.tokens_per_hash)
        chosen = make_policy(
            RoutingConfig(routing_policy=policy, routing_index_blocks=MAX_HASHES, prefix=prefix)
        )
        self.router = Router(len(roles), chosen, roles=roles)
        self._index = chosen.index if isinstance(chosen, PrefixAware) else None
        if self._index is not None:
            for engine in range(len(roles)):
                self._index.add_engine(engine)
                self._index.is_known[engine] = True  # a new engine has nothing
            self._index.describe_group(0, GroupInfo(cache.block_size))
        self._clock = clock
        self._send_to = send_to
        self._on_first_token, self._on_end = on_first_token, on_end
        self._usable = [True] * len(roles)
        self._num_live = [0] * len(roles)
        self._live: dict[int, tuple[LiveRequest, int]] = {}  # with the engine, by number
        self._has_token = np.zeros(num_requests, bool)  # by number

    @property
    def needs_events(self) -> bool:
        """Whether `publish` must be called."""
        return self._index is not None

    def send(self, message: AddRequest, session_key: str | None) -> None:
        """A request arrives. Its handle is its number."""
        prompt = RoutedPrompt(message.prompt_token_ids, session_key=session_key)  # type: ignore[arg-type]
        decision = self.router.choose(prompt, self._num_live, self._usable, self._clock.now_s)
        assert decision is not None, "all engines are usable"
        live = LiveRequest(
            message.request_id,
            message.handle,
            range(len(message.prompt_token_ids)),  # the router asks for their number only
            message,
            _ignore_change,
        )
        self.router.note_sent(decision, live)
        self._num_live[decision.engine] += 1
        self._live[message.handle] = live, decision.engine
        self._send_to(message.handle, decision.engine, message)

    def deliver(self, engine: int, outputs: EngineOutputs) -> None:
        """An engine has sent the outputs of a step."""
        handles, now_s = outputs.handles, self._clock.now_s
        has_token = self._has_token[handles]
        if not has_token.all():
            for number in handles[~has_token].tolist():
                self.router.note_answer(self._live[number][0], now_s)
                self._on_first_token(number)
            self._has_token[handles] = True
        for finished in outputs.finished:
            live, _ = self._live.pop(finished.handle)
            self.router.note_answer(live, now_s)
            self._num_live[engine] -= 1
            self._on_end(finished.handle, finished)

    def publish(self, engine: int, events: Sequence[KVEvent]) -> None:
        """An engine has stored and removed blocks."""
        index = self._index
        assert index is not None
        for (kind, medium), run in groupby(events, lambda event: (type(event), event.medium)):
            hashes = [
                each.block_hash for each in run if isinstance(each, BlockStored | BlockRemoved)
            ]
            if kind is BlockStored:
                index.store(engine, hashes, 0, medium)
            elif kind is BlockRemoved:
                index.remove(engine, hashes, 0, medium)


def _ignore_change() -> None:
    """Nothing waits for the change of a simulated request."""
