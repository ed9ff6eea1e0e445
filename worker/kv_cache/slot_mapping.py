"""Where a token's KV lies: block_table[row][position // block_size] * block_size + offset.

Where several ranks share the tokens out, an entry of the table stands for `block_size` tokens of
each of them, and tokens of other ranks lie nowhere.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from longshore.worker.kv_cache.context_share import WHOLE_CONTEXT, ContextShare

NO_SLOT: Final = -1
"""Of a token that another rank keeps."""


def slots_at(
    block_table: npt.NDArray[np.int32],
    rows: npt.NDArray[np.int64],
    places: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
    block_size: int,
    share: ContextShare = WHOLE_CONTEXT,
) -> npt.NDArray[np.int64]:
    """block_table: (max_num_seqs, max_blocks); rows: (num_tokens,) -> (num_tokens,).

    places:     which column each token's position is in, and how far behind its start: divmod by
                the tokens that an entry stands for.
    block_size: tokens of a block that this rank keeps.
    """
    columns, offsets = places
    starts = block_table[rows, columns].astype(np.int64) * block_size
    if share.size == 1:
        return starts + offsets
    return np.where(share.keeps(offsets), starts + share.offsets(offsets), NO_SLOT)
