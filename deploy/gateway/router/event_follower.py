"""Follows the KV events of one engine, and keeps the index up to date with them; without I/O.

A follower begins with a snapshot. Then it applies batches by their numbers: a repeated one is
ignored; after a gap, or when nothing has come for a while, it asks for a replay; and if that begins
too late, for another snapshot. A batch of another start of the engine voids what is known. While an
answer is awaited, batches are held back, and what is known stays in use.

`docs/kv-events.md` describes the messages.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import msgspec

from longshore.deploy.gateway.router.block_index import MEDIA, BlockIndex, GroupInfo
from longshore.protocol.events import (
    END_OF_REPLAY,
    SEQUENCE_BYTES,
    SNAPSHOT_REQUEST,
    sequence_frame,
)

MAX_HELD: Final = 2000
"""Batches held back. If more are missing than that, a snapshot is asked for instead of a replay."""
PROBE_AFTER_S: Final = 1.0
"""Without a batch for this long, a replay shows whether the last one was lost."""
ANSWER_TIMEOUT_S: Final = 5.0
BATCHES_PER_CALL: Final = 4
_PUBLISHER_ID_BYTES: Final = 16


class _Stored(msgspec.Struct, array_like=True, gc=False, tag="BlockStored"):
    """The fields of `StoredBlocks` that are used here. The token ids are not decoded."""

    block_hashes: list[bytes]
    parent_block_hash: msgspec.Raw
    token_ids: msgspec.Raw
    block_size: int
    lora_id: msgspec.Raw
    medium: str
    lora_name: msgspec.Raw
    extra_keys: msgspec.Raw
    group_idx: int
    kv_cache_spec_kind: str
    kv_cache_spec_sliding_window: int | None
    locality: str | None


class _Removed(msgspec.Struct, array_like=True, gc=False, tag="BlockRemoved"):
    block_hashes: list[bytes]
    medium: str
    group_idx: int
    locality: str | None


class _Cleared(msgspec.Struct, array_like=True, gc=False, tag="AllBlocksCleared"):
    pass


_Event: TypeAlias = _Stored | _Removed | _Cleared


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_Event]
    data_parallel_rank: int | None
    publisher_id: bytes


_decode_batch: Final = msgspec.msgpack.Decoder(_Batch).decode


class EventFollower:
    """One engine's blocks in the index of a gateway.

    request: sends a request for missed events; its argument is the last frame.
    num_gaps, num_snapshots, num_bad: gaps found, snapshots applied, malformed messages.
    """

    def __init__(self, index: BlockIndex, engine: int, request: Callable[[bytes], None]) -> None:
        self._index = index
        self._engine = engine
        self._request = request
        self._publisher_id = b""
        self._next = 0
        self._has_snapshot = False
        self._awaited: bytes | None = None  # the request that has no answer yet
        self._asked_s = self._heard_s = 0.0
        self._held: deque[tuple[int, bytes]] = deque()
        self._parts: deque[bytes] = deque()  # of a snapshot
        self.num_gaps = self.num_snapshots = self.num_bad = 0

    @property
    def is_current(self) -> bool:
        """Everything that has arrived is in the index, and nothing is known to be missing."""
        return self._has_snapshot and not self._parts and not self._held

    @property
    def has_work(self) -> bool:
        """`work` has something to do."""
        can_go_on = self._has_snapshot and self._awaited is None
        can_go_on = can_go_on and self._index.has_slot(self._engine)
        return can_go_on and bool(self._parts or self._held)

    def begin(self, now_s: float) -> None:
        """The engine is ready: find out what it has."""
        self._void()
        self._ask(SNAPSHOT_REQUEST, now_s)

    def end(self) -> None:
        """The engine is lost: nothing is known of it, and nothing is asked until `begin`."""
        self._void()
        self._awaited = None

    def receive(self, frames: Sequence[bytes], now_s: float) -> None:
        """A published batch: topic, sequence number, payload."""
        if len(frames) == 3 and len(frames[1]) == SEQUENCE_BYTES:
            self._hold(frames, now_s)
        else:
            self.num_bad += 1

    def receive_answer(self, frames: Sequence[bytes], now_s: float) -> None:
        """A message of the answer to a request."""
        if len(frames) < 3 or frames[0]:
            self.num_bad += 1
        elif len(frames[2]) == _PUBLISHER_ID_BYTES and len(frames[1]) == SEQUENCE_BYTES:
            number = int.from_bytes(frames[1], "big")
            self._take_snapshot(number, frames[2], frames[3:], now_s)
        elif frames[2] == END_OF_REPLAY:
            self._end_replay(now_s)
        else:
            self.receive(frames[1:], now_s)

    def work(self, now_s: float) -> None:
        """Apply some of what has arrived."""
        for _ in range(BATCHES_PER_CALL):
            if not self.has_work:
                return
            try:
                self._apply_next(now_s)
            except msgspec.DecodeError:
                self.num_bad += 1
                self._has_snapshot = False  # `check` asks for one, at its own pace
                self._parts.clear()
                self._held.clear()

    def check(self, now_s: float) -> bool:
        """Whether all answers have come in time; call it about once a second. If not, connect
        again, and call `begin`."""
        if self._awaited is not None:
            return now_s - self._asked_s < ANSWER_TIMEOUT_S
        if not self._has_snapshot:
            if self._publisher_id:
                self._ask(SNAPSHOT_REQUEST, now_s)
        elif self.is_current and now_s - self._heard_s >= PROBE_AFTER_S:
            self._ask(sequence_frame(self._next), now_s)
        return True

    def _hold(self, frames: Sequence[bytes], now_s: float) -> None:
        self._heard_s = now_s
        self._held.append((int.from_bytes(frames[1], "big"), frames[2]))
        if len(self._held) > MAX_HELD:
            # They are missing from now on, and too many for a replay.
            self._held.clear()
            self._has_snapshot = False

    def _end_replay(self, now_s: float) -> None:
        if self._awaited is None or self._awaited == SNAPSHOT_REQUEST:
            return  # the answer to an earlier request
        self._awaited, self._heard_s = None, now_s
        self._held = deque(sorted(self._held))
        first = next((number for number, _ in self._held if number >= self._next), self._next)
        if first > self._next or not self._has_snapshot:  # the engine has them no more
            self._ask(SNAPSHOT_REQUEST, now_s)

    def _take_snapshot(
        self, number: int, publisher_id: bytes, payloads: Sequence[bytes], now_s: float
    ) -> None:
        if self._awaited != SNAPSHOT_REQUEST:
            return
        self._awaited, self._heard_s = None, now_s
        self._index.clear(self._engine)
        self._publisher_id, self._next = publisher_id, number + 1
        self._parts = deque(payloads)
        self._held = deque(batch for batch in self._held if batch[0] > number)
        self._has_snapshot = True
        self._index.is_known[self._engine] = not self._parts
        self.num_snapshots += 1

    def _ask(self, request: bytes, now_s: float) -> None:
        self._awaited, self._asked_s = request, now_s
        self._request(request)

    def _void(self) -> None:
        self._index.clear(self._engine)
        self._index.is_known[self._engine] = False
        self._has_snapshot = False
        self._publisher_id = b""
        self._held.clear()
        self._parts.clear()

    def _apply_next(self, now_s: float) -> None:
        if self._parts:
            self._apply(_decode_batch(self._parts.popleft()))
            self._index.is_known[self._engine] = not self._parts
            return
        number, payload = self._held[0]
        batch = _decode_batch(payload)
        if batch.publisher_id != self._publisher_id:
            # A batch of another start of the engine: an earlier one, or one that is not known yet.
            self._void()
            self._ask(SNAPSHOT_REQUEST, now_s)
        elif number > self._next:
            self.num_gaps += 1
            is_long = number - self._next > MAX_HELD // 2
            self._ask(SNAPSHOT_REQUEST if is_long else sequence_frame(self._next), now_s)
        else:
            self._held.popleft()
            if number == self._next:
                self._apply(batch)
                self._next += 1

    def _apply(self, batch: _Batch) -> None:
        index, engine = self._index, self._engine
        for event in batch.events:
            if isinstance(event, _Cleared):
                index.clear(engine)
                if not index.has_slot(engine):  # what follows would be lost
                    self._has_snapshot = False  # `check` asks for one, at its own pace
                    self._index.is_known[engine] = False
                    self._parts.clear()
                    return
            elif event.locality == "REMOTE" or event.medium not in MEDIA:
                continue  # all engines can have it, so it does not matter which one is chosen
            elif isinstance(event, _Removed):
                index.remove(engine, event.block_hashes, event.group_idx, event.medium)
            else:
                index.describe_group(event.group_idx, _group_info(event))
                index.store(engine, event.block_hashes, event.group_idx, event.medium)


def _group_info(event: _Stored) -> GroupInfo:
    match event.kv_cache_spec_kind:
        case "sliding_window" if event.kv_cache_spec_sliding_window is not None:
            return GroupInfo(event.block_size, event.kv_cache_spec_sliding_window - 1)
        case "mamba":
            return GroupInfo(event.block_size, 1)
        case _:
            return GroupInfo(event.block_size)
