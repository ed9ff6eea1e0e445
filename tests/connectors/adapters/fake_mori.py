"""The published interface of MoRI-IO, as far as the transport uses it, between engines of one
process. Reads copy when they are posted, unless `network` holds them back."""

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch


class BackendType(Enum):
    RDMA = 1
    TCP = 2


@dataclass
class IOEngineConfig:
    host: str = ""
    port: int = 0


class EngineDesc(msgspec.Struct, frozen=True):
    key: str
    host: str
    port: int

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def unpack(data: bytes) -> "EngineDesc":
        return _decoded(data, EngineDesc)


class MemoryDesc(msgspec.Struct, frozen=True):
    engine_key: str
    data: int
    size: int

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def unpack(data: bytes) -> "MemoryDesc":
        return _decoded(data, MemoryDesc)


def _decoded(data: bytes, kind: Any) -> Any:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise RuntimeError("cannot unpack") from error


class Network:
    """is_held: reads stay in progress. fails: they fail."""

    def __init__(self) -> None:
        self.is_held = self.fails = False
        self.backends: list[BackendType] = []


network = Network()


class TransferStatus:
    def __init__(self, copy: Any) -> None:
        self._copy = copy
        self._succeeded: bool | None = None

    def _update(self) -> None:
        if self._succeeded is None and not network.is_held:
            self._succeeded = not network.fails
            if self._succeeded:
                self._copy()

    def Succeeded(self) -> bool:
        self._update()
        return self._succeeded is True

    def Failed(self) -> bool:
        self._update()
        return self._succeeded is False


@dataclass
class IOEngineSession:
    own: MemoryDesc
    remote: MemoryDesc

    def allocate_transfer_uid(self) -> int:
        return next(_ids)

    def batch_read(
        self,
        local_offsets: Sequence[int],
        remote_offsets: Sequence[int],
        sizes: Sequence[int],
        transfer_uid: int,
    ) -> TransferStatus:
        def copy() -> None:
            for target, source, size in zip(local_offsets, remote_offsets, sizes, strict=True):
                assert 0 <= target <= self.own.size - size
                assert 0 <= source <= self.remote.size - size
                ctypes.memmove(self.own.data + target, self.remote.data + source, size)

        return TransferStatus(copy)


class IOEngine:
    def __init__(self, key: str, config: IOEngineConfig) -> None:
        self._desc = EngineDesc(key, config.host, config.port)
        self.remote: dict[str, EngineDesc] = {}
        self.memory: list[MemoryDesc] = []

    def get_engine_desc(self) -> EngineDesc:
        return self._desc

    def create_backend(self, type: BackendType, config: Any = None) -> None:
        network.backends.append(type)

    def register_torch_tensor(self, tensor: torch.Tensor) -> MemoryDesc:
        assert tensor.is_contiguous()
        size = tensor.nelement() * tensor.element_size()
        self.memory.append(MemoryDesc(self._desc.key, tensor.data_ptr(), size))
        return self.memory[-1]

    def deregister_memory(self, mem_desc: MemoryDesc) -> None:
        self.memory.remove(mem_desc)

    def register_remote_engine(self, engine_desc: EngineDesc) -> None:
        self.remote[engine_desc.key] = engine_desc

    def deregister_remote_engine(self, engine_desc: EngineDesc) -> None:
        del self.remote[engine_desc.key]

    def create_session(self, local_mem: MemoryDesc, remote_mem: MemoryDesc) -> Any:
        known = remote_mem.engine_key in self.remote
        return IOEngineSession(local_mem, remote_mem) if known else None


_ids = count()


def install(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The module, where the library would be."""
    network.__dict__.update(Network().__dict__)
    module = ModuleType("mori.io")
    names = (BackendType, EngineDesc, IOEngine, IOEngineConfig, MemoryDesc)
    vars(module).update({each.__name__: each for each in names})
    monkeypatch.setitem(sys.modules, "mori", ModuleType("mori"))
    monkeypatch.setitem(sys.modules, "mori.io", module)
    return SimpleNamespace(**vars(module))
