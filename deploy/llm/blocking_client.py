"""Submits requests to an engine from synchronous code: for `LLM` and its beam searches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from longshore.deploy.requests.live_requests import LiveRequest, LiveRequests
from longshore.protocol.outputs import EngineOutputs
from longshore.protocol.requests import NO_OPTIONS, ClientRequest, RequestOptions
from longshore.protocol.sampling import SamplingParams
from longshore.protocol.statistics import SchedulerStats


class EngineConnection(Protocol):
    """An engine in processes of its own, or in this process.

    num_blocks: blocks of its KV cache, including the null block.
    stats:      its latest statistics, which may be a second old; None before the first.
    reset_prefix_cache: False while a request holds blocks.
    """

    @property
    def num_blocks(self) -> int: ...

    def send(self, message: ClientRequest) -> None: ...

    def receive(self) -> EngineOutputs | None: ...

    def stats(self) -> SchedulerStats | None: ...

    def reset_prefix_cache(self) -> bool: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class BlockingClient:
    """Submits, stops and aborts requests. The caller receives the outputs and applies them."""

    requests: LiveRequests
    engine: EngineConnection

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
    ) -> LiveRequest:
        """See `LiveRequests.open`."""
        live, message = self.requests.open(
            request_id,
            prompt_token_ids,
            sampling,
            options,
            on_change=on_change,
            fork_of=fork_of,
            num_primed=num_primed,
        )
        self.engine.send(message)
        return live

    def abort(self, requests: Sequence[LiveRequest]) -> None:
        message = self.requests.abort(requests)
        if message is not None:
            self.engine.send(message)

    def stop(self, live: LiveRequest, num_tokens: int) -> None:
        """See `LiveRequests.stop`."""
        message = self.requests.stop(live, num_tokens)
        if message is not None:
            self.engine.send(message)
