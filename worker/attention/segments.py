"""Cuts a step's decodes into segments that waste little on padding."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from longshore.worker.attention.metadata import DecodeSegment

MIN_SEGMENT_BLOCKS: Final = 8
"""Shorter sequences share one segment: one more call costs more than this much padding."""

MAX_SEGMENT_TOKENS: Final = 1 << 16
"""Padded positions of one segment, which bounds the memory of its gathered keys and values."""


def length_classes(num_blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """(n,) a number per sequence, equal for lengths within a factor of two. Sort decodes by it."""
    rounded = np.maximum(num_blocks, MIN_SEGMENT_BLOCKS)
    return np.ceil(np.log2(rounded)).astype(np.int64)


def decode_segments(num_blocks: npt.NDArray[np.int64], block_size: int) -> list[DecodeSegment]:
    """num_blocks: (n,) blocks of each decode. A segment ends where `length_classes` change, so
    decodes ordered by them have the fewest."""
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
    """The same decodes where none attends to more than `max_blocks` blocks."""
    nums_seqs = [segment.num_seqs for segment in segments]
    num_blocks = np.repeat([segment.num_blocks for segment in segments], nums_seqs)
    return decode_segments(np.minimum(num_blocks, max_blocks), block_size)
