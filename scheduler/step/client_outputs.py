"""Outputs for clients: columns of tokens per client, and the ends of requests."""

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from longshore.protocol.arrays import (
    EMPTY_FLOAT32,
    EMPTY_INT32,
    Float32Array,
    Int32Array,
    Int64Array,
)
from longshore.protocol.outputs import (
    EngineOutputs,
    FinishedRequest,
    FinishReason,
    TokenLogprobs,
)
from longshore.protocol.routed_experts import MAX_REQUEST_BYTES
from longshore.scheduler.request import Request


@dataclass(slots=True)
class _Bucket:
    """The outputs of one client: arrays per step, which are joined when taken."""

    handles: list[Int32Array] = field(default_factory=list)
    tokens: list[Int32Array] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: list[FinishedRequest] = field(default_factory=list)


class ClientOutputs:
    """Collects the outputs of each client until the process sends them."""

    def __init__(self) -> None:
        self._buckets: defaultdict[int, _Bucket] = defaultdict(_Bucket)

    def add_tokens(
        self, clients: Int64Array, handles: Int64Array | Int32Array, tokens: Int32Array
    ) -> None:
        """Token `tokens[i]` is the next of `handles[i]` at client `clients[i]`."""
        for client in np.unique(clients).tolist():
            mine = clients == client
            self.add_client_tokens(client, handles[mine].astype(np.int32), tokens[mine])

    def add_client_tokens(self, client: int, handles: Int32Array, tokens: Int32Array) -> None:
        """`add_tokens` for handles of one client. Keeps the arrays until they are sent."""
        bucket = self._buckets[client]
        bucket.handles.append(handles)
        bucket.tokens.append(tokens)

    def add_logprobs(self, client: int, entries: TokenLogprobs) -> None:
        """Log probabilities of one client; their owners are handles."""
        self._buckets[client].logprobs.append(entries)

    def add_finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        message: str | None = None,
        pooled: Float32Array | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
        session_continues: bool = False,
    ) -> None:
        """The request, which has no row any more, has ended, or only its output if its session
        continues."""
        queued = request.events[0][1]
        self._buckets[request.client_index].finished.append(
            FinishedRequest(
                handle=request.handle,
                reason=reason,
                num_output_tokens=len(request.token_ids) - request.num_prompt_tokens,
                stop_token_id=request.stop_reason,
                num_cached_tokens=max(request.num_cached_tokens, 0),  # if it was never scheduled
                num_preemptions=request.num_preemptions,
                message=message,
                kv_transfer_params=kv_transfer_params,
                pooled=EMPTY_FLOAT32 if pooled is None else pooled,
                events=tuple([(event, at - queued) for event, at in request.events]),
                num_draft_tokens=request.num_draft_tokens,
                num_accepted_tokens=request.num_accepted_tokens,
                num_invalid_draft_tokens=request.num_invalid_draft_tokens,
                session_continues=session_continues,
                num_nans_in_logits=request.num_nans_in_logits,
                routed_experts=request.routed_experts,
            )
        )

    def add_rejection(
        self, client: int, handle: int, reason: FinishReason, message: str, num_output_tokens: int
    ) -> None:
        """A request was rejected."""
        self._buckets[client].finished.append(
            FinishedRequest(handle, reason, num_output_tokens, message=message)
        )

    def take(self) -> list[tuple[int, EngineOutputs]]:
        """(client, message) for every client with outputs. Ends with many experts are divided among
        messages."""
        taken = []
        for client, bucket in self._buckets.items():
            first, *others = _divided(bucket.finished)
            outputs = EngineOutputs(
                handles=_join(bucket.handles),
                tokens=_join(bucket.tokens),
                logprobs=_join_logprobs(bucket.logprobs) if bucket.logprobs else None,
                finished=first,
            )
            taken += [(client, outputs), *((client, EngineOutputs(finished=f)) for f in others)]
        self._buckets.clear()
        return taken


def _divided(finished: list[FinishedRequest]) -> list[tuple[FinishedRequest, ...]]:
    """In parts whose experts fit in one message; at least one."""
    starts, num_bytes = [0], 0
    for index, end in enumerate(finished):
        if end.routed_experts is not None:
            num_bytes += end.routed_experts.data.nbytes
            if num_bytes > MAX_REQUEST_BYTES:
                starts.append(index)
                num_bytes = end.routed_experts.data.nbytes
    return [tuple(finished[slice(*ends)]) for ends in pairwise([*starts, len(finished)])]


def _join(arrays: list[Int32Array]) -> Int32Array:
    if not arrays:
        return EMPTY_INT32
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _join_logprobs(parts: list[TokenLogprobs]) -> TokenLogprobs:
    if len(parts) == 1:
        return parts[0]
    columns = zip(*(msgspec.structs.astuple(part) for part in parts), strict=True)
    return TokenLogprobs(*map(np.concatenate, columns))
