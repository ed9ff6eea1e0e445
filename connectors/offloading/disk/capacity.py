"""Lowers the capacity of a store: deletes the oldest entries and moves the rest to the low slots.

All ranks move the same keys to the same slots, unless a kill left their indexes different; then the
ledger finds keys whose slots differ, and deletes them.
"""

import logging
from pathlib import Path

from longshore.connectors.offloading.disk.index import Entry, SlotIndex
from longshore.connectors.offloading.disk.io import Bytes, Direction, Transfer, run_all
from longshore.connectors.offloading.disk.segments import SegmentFiles, aligned_memory

logger = logging.getLogger(__name__)


def lower_capacity(
    directory: Path, index: SlotIndex, segments: SegmentFiles, num_slots: int
) -> None:
    """Can be interrupted at any point, and continues at the next call. Raises OSError."""
    entries = list(index.entries())
    num_deleted = max(0, len(entries) - num_slots)
    kept = entries[num_deleted:]
    index.clear([entry.slot for entry in entries[:num_deleted]])
    used = {entry.slot for entry in kept}
    free = (slot for slot in range(num_slots) if slot not in used)
    memory = aligned_memory(index.geometry.slot_bytes)
    for entry in kept:
        if entry.slot >= num_slots:
            _move(index, segments, entry, next(free), memory)
    segments.resize(num_slots)
    index.resize(num_slots)
    logger.warning(
        "disk store %s: the capacity was lowered to %d blocks; %d of %d were deleted",
        directory,
        num_slots,
        len(entries) - len(index),
        len(entries),
    )


def _move(index: SlotIndex, segments: SegmentFiles, entry: Entry, slot: int, memory: Bytes) -> None:
    """Copy one block. Damage is found by its checksum, when it is read; a block that the disk does
    not return is deleted."""
    source, target = (
        Transfer(
            segments.fd(segments.segment_of(at), create=True), segments.offset_of(at), [memory], []
        )
        for at in (entry.slot, slot)
    )
    (error,) = run_all(Direction.READ, [source])
    index.clear([entry.slot])
    if error is None:
        (error,) = run_all(Direction.WRITE, [target])
        if error is not None:
            raise error
        index.put([entry._replace(slot=slot)])
