"""The scheduler half: which slot of the workers has which output, and which outputs are pulled.

A slot is free, is being pulled into, has an output, or is withdrawn: its output is offered to no
other reader, and the slot is free when the owner has confirmed that none reads it any more.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import msgspec

from longshore.connectors.base import (
    CacheLookup,
    ECRole,
    EncoderConnector,
    EncoderConnectorConfig,
)
from longshore.connectors.pull_encoder.messages import Commands, Report, SlotPull, SlotRow
from longshore.connectors.pull_encoder.options import read_encoder_options
from longshore.protocol.requests import MultimodalFeature

MAX_MISSES: Final = 1 << 16
"""Items that are remembered as missing until they are encoded."""


@dataclass(slots=True)
class _Output:
    """is_offered: to other engines. step: the last plan that saves or loads it; None: the one that
    is being built. ranks, has_failed: which ranks have pulled it, and whether one could not."""

    slot: int
    is_offered: bool = False
    step: int | None = None
    has_failed: bool = False
    ranks: set[int] = field(default_factory=set)


class PullEncoderConnector(EncoderConnector):
    """One class for all transports. transport: name of the connector."""

    contract_version: ClassVar[int] = 2
    transport: ClassVar[str]

    @classmethod
    def check_options(cls, options: Mapping[str, Any], role: ECRole) -> None:
        read_encoder_options(cls.transport, options, role)

    def __init__(self, config: EncoderConnectorConfig) -> None:
        super().__init__(config)
        self._options = read_encoder_options(self.transport, config.options, config.role)
        self.on_new_epoch()

    def on_new_epoch(self) -> None:
        # Slot 0 is the null block.
        self._free = list(range(self._options.max_outputs, 0, -1))
        self._outputs: OrderedDict[str, _Output] = OrderedDict()  # the latest use last
        self._pulls: dict[str, _Output] = {}
        self._missed: OrderedDict[str, None] = OrderedDict()
        self._used: list[_Output] = []  # by the plan that is being built
        self._num_leaving = 0  # slots of withdrawn outputs
        self._answered_step = 0
        self._is_short = False
        self._commands = Commands()

    def has_caches(self, item: MultimodalFeature) -> CacheLookup:
        key = _key(item)
        if key in self._outputs:
            return CacheLookup.LOADABLE
        if key in self._pulls:
            return CacheLookup.PENDING
        if not self.config.is_consumer or key in self._missed:
            return CacheLookup.MISSING
        slot = self._take_slot()
        if slot is None:
            return CacheLookup.MISSING
        self._pulls[key] = _Output(slot)
        self._commands.pulls.append(SlotPull(key, slot, item.num_tokens))
        return CacheLookup.PENDING

    def update_state_after_alloc(self, item: MultimodalFeature, row: int) -> None:
        key = _key(item)
        output = self._outputs.get(key)
        if output is not None:
            self._outputs.move_to_end(key)
            self._commands.loads.append(SlotRow(row, output.slot, item.num_tokens))
        else:
            self._missed.pop(key, None)
            if not self.config.is_producer or key in self._pulls:
                return
            slot = self._take_slot()
            if slot is None:
                return
            output = self._outputs[key] = _Output(slot, is_offered=True)
            self._commands.saves.append(SlotRow(row, output.slot, item.num_tokens, key))
        output.step = None
        self._used.append(output)

    def _take_slot(self) -> int | None:
        """A free slot. None if there is none: outputs are withdrawn then, for the next ones."""
        if not self._free:
            self._evict_oldest(1, offered=False)
        if self._free:
            return self._free.pop()
        self._is_short = True
        return None

    def build_connector_meta(self, step: int, answered_step: int) -> bytes:
        for output in self._used:
            output.step = step
        self._used.clear()
        self._answered_step = answered_step
        num_wanted = max(self._options.max_outputs // 8, int(self._is_short))
        self._evict_oldest(num_wanted - len(self._free) - self._num_leaving)
        if self._commands == Commands():
            return b""
        commands, self._commands = self._commands, Commands()
        return msgspec.msgpack.encode(commands)

    def _evict_oldest(self, count: int, *, offered: bool = True) -> None:
        """Evict `count` outputs that no plan in flight uses. offered: also those offered to other
        engines, whose slots are free later."""
        for key, output in list(self._outputs.items()) if count > 0 else ():
            is_idle = output.step is not None and output.step <= self._answered_step
            if count and is_idle and (offered or not output.is_offered):
                self._evict(key)
                count -= 1

    def _evict(self, key: str) -> None:
        output = self._outputs.pop(key)
        if output.is_offered:
            self._commands.withdrawn.append(key)
            self._num_leaving += 1
        else:
            self._free.append(output.slot)

    @property
    def has_pending_work(self) -> bool:
        return self._commands != Commands()

    def update_connector_output(self, rank: int, metadata: bytes) -> None:
        report = msgspec.msgpack.decode(metadata, type=Report)
        for key in report.pulled:
            self._pull_ended(key, rank, has_failed=False)
        for key in report.failed:
            self._pull_ended(key, rank, has_failed=True)
        self._free += report.free_slots
        self._num_leaving -= len(report.free_slots)
        self._is_short &= not report.free_slots

    def _pull_ended(self, key: str, rank: int, *, has_failed: bool) -> None:
        output = self._pulls[key]
        output.ranks.add(rank)
        output.has_failed |= has_failed
        if len(output.ranks) < self.config.num_ranks:
            return
        del self._pulls[key]
        if output.has_failed:
            self._free.append(output.slot)
            self.num_missed += 1
            self._missed[key] = None
            if len(self._missed) > MAX_MISSES:
                self._missed.popitem(last=False)
        else:
            output.step = 0
            self._outputs[key] = output

    def reset_cache(self) -> bool:
        outputs = self._outputs.values()
        if self._pulls or any((each.step or 0) > self._answered_step for each in outputs):
            return False
        for key in list(self._outputs):
            self._evict(key)
        return True


def _key(item: MultimodalFeature) -> str:
    """Of bounded length, whatever hash a client of the scheduler sends."""
    return hashlib.sha256(f"{item.num_tokens} {item.hash}".encode()).hexdigest()


class NixlEncoderConnector(PullEncoderConnector):
    transport = "nixl"
    worker_half: ClassVar[str] = "longshore.connectors.pull_encoder.worker:NixlEncoderWorker"


class MooncakeEncoderConnector(PullEncoderConnector):
    transport = "mooncake"
    worker_half: ClassVar[str] = "longshore.connectors.pull_encoder.worker:MooncakeEncoderWorker"
