"""Divides a step's decodes into segments with little padding."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from longshore.worker.attention.metadata import DecodeSegment

MIN_SEGMENT_BLOCKS: Final = 8
"""Shorter sequences share one segment, because another call costs more than this much padding."""

MAX_SEGMENT_TOKENS: Final = 1 << 16
"""Maximum padded positions of a segment; limits the memory of its gathered keys and values."""


def length_classes(num_blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """(n,) the length class of each sequence: lengths of a class are within a factor of two."""
    rounded = np.maximum(num_blocks, MIN_SEGMENT_BLOCKS)
    return np.ceil(np.log2(rounded)).astype(np.int64)


def decode_segments(num_blocks: npt.NDArray[np.int64], block_size: int) -> list[DecodeSegment]:
    """num_blocks: (n,) blocks of each decode. A segment ends where the length class changes, so
    decodes sorted by class have the fewest segments."""
    if len(num_blocks) == 0:
        return []
    classes = length_classes(num_blocks)
    borders = np.flatnonzero(np.diff(classes)) + 1
    segments = []
    for first, end in zip([0, *borders.tolist()], [*borders.tolist(), len(classes)], strict=True):
        longest = int(num_blocks[first:end].max())
        step = max(1, MAX_SEGMENT_TOKENS // (longest * block_size))
        segments += [
            DecodeSegment(start, min(step, end - start), longest)
            for start in range(first, end, step)
        ]
    return segments


def capped_segments(
    segments: Sequence[DecodeSegment], max_blocks: int, block_size: int
) -> list[DecodeSegment]:
    """Segments of the same decodes if none attends to more than `max_blocks` blocks."""
    nums_seqs = [segment.num_seqs for segment in segments]
    num_blocks = np.repeat([segment.num_blocks for segment in segments], nums_seqs)
    return decode_segments(np.minimum(num_blocks, max_blocks), block_size)
