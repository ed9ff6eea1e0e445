"""A server that speaks the part of LMCache's protocol (0.5.6) that lmcache_mp uses, in threads of
this process. Its memory is a file of the system's shared memory, as LMCache's is.
"""

import hashlib
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq

from longshore.connectors.lmcache_mp.client import OPERATIONS

NAMES: Final = {number: name for name, number in OPERATIONS.items()}
CHUNK_SIZE: Final = 8


class LMCacheServer:
    """num_chunks: room in its memory. is_silent: answers nothing. calls: names of operations.
    gate: while it is clear, lookups are in progress."""

    def __init__(self, num_chunks: int = 200, chunk_size: int = CHUNK_SIZE) -> None:
        self.num_chunks, self.chunk_size = num_chunks, chunk_size
        self.is_silent = False
        self.has_pool = True
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[str] = []
        self.locked: dict[bytes, int] = {}
        self._of_engine: dict[int, int] = {}  # bytes per chunk
        self._chunks: OrderedDict[bytes, int] = OrderedDict()  # slot by hash, oldest first
        self._free = list(range(num_chunks))
        self._pending: dict[bytes, list[tuple[bytes, int]]] = {}
        self._lookups: dict[str, int] = {}
        self.path = Path("/dev/shm") / f"longshore-test-{os.getpid()}-{id(self):x}"
        self._slot_bytes = 64 << 10
        self.path.write_bytes(b"")
        os.truncate(self.path, num_chunks * self._slot_bytes)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self.url = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._socket.close()
        self._context.term()
        self.path.unlink()

    def damage(self) -> None:
        """Change every stored byte."""
        self.path.write_bytes(bytes(255 - byte for byte in self.path.read_bytes()))

    def _serve(self) -> None:
        while not self._ended.is_set():
            if not self._socket.poll(20):
                continue
            client, request_id, operation, *arguments = self._socket.recv_multipart()
            name = NAMES[msgspec.msgpack.decode(operation)]
            self.calls.append(name)
            if self.is_silent:
                continue
            try:
                answer = getattr(self, name)(*map(msgspec.msgpack.decode, arguments))
            except KeyError:
                continue  # what LMCache fails at, it does not answer
            frames = [client, request_id, operation]
            if answer is not None:
                frames.append(msgspec.msgpack.encode(answer))
            self._socket.send_multipart(frames)

    # Operations

    def get_chunk_size(self) -> int:
        return self.chunk_size

    def register_kv_cache_engine_driven_context(self, payload: dict[str, Any]) -> dict[str, Any]:
        assert payload["dtype_str"] == "uint8"
        assert payload["use_mla"]
        assert payload["num_layers"] == payload["num_physical_slots"] == 1
        size = payload["hidden_dim_size"]
        assert size <= self._slot_bytes
        self._of_engine[payload["instance_id"]] = size
        size = self.num_chunks * self._slot_bytes
        return {"shm_name": f"/{self.path.name}" if self.has_pool else "", "pool_size": size}

    def unregister_kv_cache_engine_driven_context(self, instance_id: int) -> None:
        del self._of_engine[instance_id]

    def _hashes(self, key: dict[str, Any]) -> list[bytes]:
        """Of the chunks of a key. Each depends on all tokens before its end."""
        found, size = [], self.chunk_size
        digest = hashlib.sha256(f"{key['model_name']} {key['cache_salt']}".encode())
        for start in range(0, key["end"], size):
            tokens = key["token_ids"][start : start + size]
            assert len(tokens) == size
            assert all(0 <= token < 1 << 32 for token in tokens)
            digest.update(repr(tokens).encode())
            if start >= key["start"]:
                found.append(digest.digest())
        return found

    def lookup(self, key: dict[str, Any], tp_size: int) -> None:
        assert key["worker_id"] is None
        assert key["num_kv_readers"] == 1
        num_found = 0
        for each in self._hashes(key):
            if each not in self._chunks:
                break
            self.locked[each] = self.locked.get(each, 0) + 1
            num_found += 1
        self._lookups[key["request_id"]] = num_found

    def query_prefetch_status(self, request_id: str) -> int | None:
        return self._lookups[request_id] if self.gate.is_set() else None

    def _unlock(self, hashes: list[bytes]) -> None:
        for each in hashes:
            self.locked[each] -= 1
            if not self.locked[each]:
                del self.locked[each]

    def free_lookup_locks(self, key: dict[str, Any], tp_size: int) -> None:
        num_found = self._lookups[key["request_id"]]
        first = key["start"] // self.chunk_size
        self._unlock(self._hashes(key)[: max(num_found - first, 0)])

    def end_session(self, request_id: str) -> None:
        self._lookups.pop(request_id, None)

    def _slot(self, key: dict[str, Any], slot: int, instance_id: int) -> dict[str, Any]:
        size = self._of_engine[instance_id]
        return {
            "offset": slot * self._slot_bytes,
            "length": size,
            "shape": [1, 1, size],
            "dtype": "uint8",
        }

    def prepare_store(self, key: dict[str, Any], instance_id: int) -> dict[str, Any]:
        slots, indices, reserved = [], [], []
        for index, each in enumerate(self._hashes(key)):
            if each in self._chunks:
                continue
            if not self._free:
                evicted = next((old for old in self._chunks if old not in self.locked), None)
                if evicted is None:
                    continue
                self._free.append(self._chunks.pop(evicted))
            reserved.append((each, self._free.pop()))
            slots.append(self._slot(key, reserved[-1][1], instance_id))
            indices.append(index)
        self._pending[msgspec.msgpack.encode(key)] = reserved
        return {"context": {"slots": slots, "chunk_indices": indices}}

    def commit_store(self, key: dict[str, Any], instance_id: int, data: bytes) -> bool:
        assert data == b""
        for each, slot in self._pending.pop(msgspec.msgpack.encode(key)):
            if each in self._chunks:
                self._free.append(slot)
            else:
                self._chunks[each] = slot
        return True

    def prepare_retrieve(self, key: dict[str, Any], instance_id: int) -> dict[str, Any]:
        hashes = self._hashes(key)
        assert all(each in self.locked for each in hashes)
        slots = [self._slot(key, self._chunks[each], instance_id) for each in hashes]
        return {"success": True, "data": b"", "context": {"slots": slots}}

    def commit_retrieve(self, key: dict[str, Any], instance_id: int) -> bool:
        self._unlock(self._hashes(key))
        return True
