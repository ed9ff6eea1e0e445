"""Engines without connections: what a gateway submits, and outputs that are applied by hand."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from longshore.deploy.gateway.request_turns import RequestTurns
from longshore.deploy.requests.live_requests import LiveRequest, LiveRequests
from longshore.protocol.outputs import EngineOutputs, FinishedRequest, FinishReason

VECTOR: Final = np.ones(2, np.float32)


class DirectEngines:
    """Takes all requests, in place of `Engines`. sent: in the order of their submission."""

    def __init__(self) -> None:
        self.requests = LiveRequests()
        self.sent: list[LiveRequest] = []
        self.num_aborted = 0
        self.turns, self.end_turns = RequestTurns(), RequestTurns()

    @property
    def num_live_requests(self) -> int:
        return len(self.requests)

    def submit(
        self, request_id: str, prompt: Sequence[int], sampling: Any, options: Any, **fields: Any
    ) -> Any:
        fields.pop("session_key", None)
        live, _ = self.requests.open(request_id, prompt, sampling, options, **fields)
        self.sent.append(live)
        return live

    def abort(self, requests: Sequence[LiveRequest]) -> None:
        self.num_aborted += len(requests)
        self.requests.abort(requests)

    def finish(self, live: LiveRequest) -> None:
        """It ends with a token and a vector."""
        end = FinishedRequest(live.handle, FinishReason.STOPPED, 1, pooled=VECTOR)
        handles = np.array([live.handle], np.int32)
        self.requests.apply(EngineOutputs(handles, handles * 0 + 5, finished=(end,)))
