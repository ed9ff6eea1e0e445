"""Copies by a kernel: few programs read and write pieces of memory by address. Host memory must be
registered and mapped, with the address that it has on the host. Needs Triton."""

import triton
import triton.language as tl
from torch import Tensor

PIECE_BYTES: tl.constexpr = tl.constexpr(16 << 10)
"""Copied by one program at a time."""

NUM_PROGRAMS = 16
"""At most this many of a device's multiprocessors are busy with copies. Together they keep 256 KiB
on the way, more than a PCIe 5.0 link transfers within its latency."""


@triton.jit(do_not_specialize=["num_pieces"])  # type: ignore[untyped-decorator]
def _kernel(pieces_ptr, num_pieces, WORD: tl.constexpr, WORD_BYTES: tl.constexpr):
    words = tl.arange(0, PIECE_BYTES // WORD_BYTES)
    for piece in range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        place = pieces_ptr + 3 * piece
        target = tl.load(place).to(tl.pointer_type(WORD))
        source = tl.load(place + 1).to(tl.pointer_type(WORD))
        is_inside = words < tl.load(place + 2) // WORD_BYTES
        tl.store(target + words, tl.load(source + words, mask=is_inside), mask=is_inside)


def copy_pieces(pieces: Tensor, word_bytes: int) -> None:
    """Launch the copies of `pieces` on the current stream.

    pieces:     (n, 3) int64 on the device, n > 0: address to write, address to read, and number of
                bytes, at most PIECE_BYTES. No piece overlaps another one that is written.
    word_bytes: 8, 4, 2 or 1: divides all of these numbers.
    """
    word = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}[word_bytes]
    grid = (min(len(pieces), NUM_PROGRAMS),)
    _kernel[grid](pieces, len(pieces), WORD=word, WORD_BYTES=word_bytes, num_warps=8)
