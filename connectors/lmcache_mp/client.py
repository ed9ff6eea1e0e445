"""Calls of LMCache's server over ZMQ: the part of its protocol that this connector needs.

A request has the frames id, operation, arguments…, and its answer the frames id, operation, result,
each in msgpack. The server does not answer a request that it rejects or fails at.
"""

import time
from itertools import count
from typing import Any, Final

import msgspec
import zmq

from longshore.connectors.base.prefix_store.store import StoreError

OPERATIONS: Final = {
    "lookup": 8,
    "query_prefetch_status": 9,
    "free_lookup_locks": 12,
    "end_session": 13,
    "register_kv_cache_engine_driven_context": 14,
    "unregister_kv_cache_engine_driven_context": 15,
    "prepare_store": 16,
    "commit_store": 17,
    "prepare_retrieve": 18,
    "commit_retrieve": 19,
    "get_chunk_size": 21,
}
"""Their numbers in requests."""


class Key(msgspec.Struct, frozen=True):
    """IPCCacheServerKey: the chunks between `start` and `end` of a token sequence."""

    model_name: str
    token_ids: list[int]
    start: int
    end: int
    request_id: str
    cache_salt: str
    world_size: int = 1
    worker_id: int = 0
    num_kv_readers: int = 1


class Context(msgspec.Struct, frozen=True):
    """RegisterEngineDrivenContextPayload: a chunk is `hidden_dim_size` bytes without structure."""

    instance_id: int
    model_name: str
    block_size: int
    hidden_dim_size: int
    world_size: int = 1
    num_layers: int = 1
    num_physical_slots: int = 1
    dtype_str: str = "uint8"
    use_mla: bool = True  # one tensor instead of keys and values


class Pool(msgspec.Struct, frozen=True):
    """The server's shared memory. Without a name, the server has none."""

    shm_name: str = ""
    pool_size: int = 0


class Slot(msgspec.Struct, frozen=True):
    """A chunk in shared memory."""

    offset: int
    length: int


class Slots(msgspec.Struct, frozen=True):
    """chunk_indices: of a store, the chunks that the server does not have yet, one per slot."""

    slots: list[Slot] | None = None
    chunk_indices: list[int] = []


class Prepared(msgspec.Struct, frozen=True):
    context: Slots
    success: bool = True


class Client:
    """One connection; used by one thread at a time."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", url: str, timeout_s: float):
        self._timeout_s = timeout_s
        self._url = url
        self._ids = count()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(url)

    def call(self, operation: str, *arguments: object, answer: Any = None) -> Any:
        """answer: type of the result. Raises StoreError."""
        request_id = msgspec.msgpack.encode(next(self._ids))
        frames = [msgspec.msgpack.encode(each) for each in (OPERATIONS[operation], *arguments)]
        try:
            self._socket.send_multipart([request_id, *frames], zmq.NOBLOCK)
            found = self._receive(request_id)
            return msgspec.msgpack.decode(found[2], type=answer) if len(found) > 2 else None
        except (zmq.ZMQError, msgspec.DecodeError) as error:
            raise StoreError(f"LMCache's server at {self._url}: {operation}: {error}") from error

    def _receive(self, request_id: bytes) -> list[bytes]:
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            remaining_ms = max(0, int((deadline_s - time.monotonic()) * 1000))
            if not self._socket.poll(remaining_ms):
                raise StoreError(
                    f"LMCache's server at {self._url} did not answer within {self._timeout_s:g} s; "
                    "it may not run, or its log says why"
                )
            frames = self._socket.recv_multipart()
            if frames[0] == request_id:  # others are answers that came too late
                return frames

    def close(self) -> None:
        self._socket.close()
