"""Where a token's KV lies: block_table[row][position // block_size] * block_size + offset."""

import numpy as np
import numpy.typing as npt


def slot_mapping(
    block_table: npt.NDArray[np.int32],
    rows: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    block_size: int,
) -> npt.NDArray[np.int64]:
    """block_table: (max_num_seqs, max_blocks); rows, positions: (num_tokens,) -> (num_tokens,)."""
    return slots_at(block_table, rows, np.divmod(positions, block_size), block_size)


def slots_at(
    block_table: npt.NDArray[np.int32],
    rows: npt.NDArray[np.int64],
    places: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
    block_size: int,
) -> npt.NDArray[np.int64]:
    """The same, where it is known which column a position is in, and how far behind its start."""
    columns, offsets = places
    return block_table[rows, columns].astype(np.int64) * block_size + offsets
