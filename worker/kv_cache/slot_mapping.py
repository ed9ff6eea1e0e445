"""The slot of a token's KV: block_table[row][position // block_size] * block_size + offset.

With context parallelism, a table entry covers `block_size` tokens of each rank, and tokens that
other ranks store have no slot.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from longshore.worker.kv_cache.context_share import WHOLE_CONTEXT, ContextShare

NO_SLOT: Final = -1
"""Slot of a token that another rank stores."""


def slots_at(
    block_table: npt.NDArray[np.int32],
    rows: npt.NDArray[np.int64],
    places: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
    block_size: int,
    share: ContextShare = WHOLE_CONTEXT,
) -> npt.NDArray[np.int64]:
    """block_table: (max_num_seqs, max_blocks); rows: (num_tokens,) -> slots, (num_tokens,).

    places:     column and offset of each token: divmod of its position by the tokens of an entry.
    block_size: tokens of a block that this rank stores.
    """
    columns, offsets = places
    starts = block_table[rows, columns].astype(np.int64) * block_size
    if share.size == 1:
        return starts + offsets
    return np.where(share.keeps(offsets), starts + share.offsets(offsets), NO_SLOT)
