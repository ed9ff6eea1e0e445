"""The gateway of a simulation: the real router, which knows what engines publish at once."""

from collections.abc import Sequence
from itertools import groupby

from longshore.deploy.gateway.router.block_index import GroupInfo
from longshore.deploy.gateway.router.config import PrefixRoutingConfig, RoutingConfig, make_policy
from longshore.deploy.gateway.router.policies import PolicyName, PrefixAware, RoutedPrompt
from longshore.deploy.gateway.router.router import Router
from longshore.deploy.requests.live_requests import LiveRequest
from longshore.protocol.events import BlockRemoved, BlockStored, KVEvent
from longshore.protocol.requests import AddRequest
from longshore.scheduler.config import CacheConfig

MAX_HASHES = 10_000_000


class SimulatedGateway:
    """One gateway in front of all engines.

    router: its `counts` are the decisions by reason.
    """

    def __init__(
        self, policy: PolicyName, num_engines: int, cache: CacheConfig, hash_seed: bytes
    ) -> None:
        prefix = PrefixRoutingConfig(
            (), hash_seed.hex(), cache.hash_algorithm, cache.tokens_per_hash, MAX_HASHES
        )
        chosen = make_policy(RoutingConfig(policy, prefix=prefix))
        self.router = Router(num_engines, chosen)
        self._index = chosen.index if isinstance(chosen, PrefixAware) else None
        if self._index is not None:
            for engine in range(num_engines):
                self._index.add_engine(engine)
                self._index.is_known[engine] = True  # a new engine has nothing
            self._index.describe_group(0, GroupInfo(cache.block_size))
        self._usable = [True] * num_engines
        self._num_live = [0] * num_engines
        self._live: dict[int, tuple[LiveRequest, int]] = {}  # with the engine, by handle

    @property
    def needs_events(self) -> bool:
        """Whether `publish` must be called."""
        return self._index is not None

    def send(self, message: AddRequest, session_key: str | None, now_s: float) -> int:
        """The engine that gets the request."""
        prompt = RoutedPrompt(message.prompt_token_ids, session_key=session_key)  # type: ignore[arg-type]
        decision = self.router.choose(prompt, self._num_live, self._usable, now_s)
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
        return decision.engine

    def note_first_token(self, handle: int, now_s: float) -> None:
        """A request got its first token."""
        self.router.note_answer(self._live[handle][0], now_s)

    def note_end(self, handle: int, now_s: float) -> None:
        """A request has ended."""
        live, engine = self._live.pop(handle)
        self.router.note_answer(live, now_s)
        self._num_live[engine] -= 1

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
