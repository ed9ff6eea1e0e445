"""Requests into an engine, for plain code: what `LLM` and its beam searches send with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Unpack

from longshore.deploy.requests.live_requests import (
    LiveRequest,
    LiveRequests,
    RequestFields,
)
from longshore.protocol.outputs import EngineOutputs
from longshore.protocol.requests import ClientRequest
from longshore.protocol.sampling import SamplingParams


class Engine(Protocol):
    """What carries requests: processes of its own, or objects in this one.

    num_blocks: in its KV cache, the null block included.
    """

    @property
    def num_blocks(self) -> int: ...

    def send(self, message: ClientRequest) -> None: ...

    def receive(self) -> EngineOutputs | None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Carrier:
    """Sends requests and gives them up; what comes back, the caller receives and applies."""

    requests: LiveRequests
    engine: Engine

    def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        **fields: Unpack[RequestFields],
    ) -> LiveRequest:
        """See `LiveRequests.open`."""
        live, message = self.requests.open(request_id, prompt_token_ids, sampling, **fields)
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
