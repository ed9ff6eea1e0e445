"""Who samples in a step, and what delivering their tokens needs of them, gathered once.

In a steady decode the same rows sample step after step, so what is gathered for one plan serves the
next ones too, until somebody comes, leaves or is sent back (`RunningTable.version`).
"""

from copy import copy

import numpy as np

from longshore.protocol.arrays import BoolArray, Int32Array, Int64Array
from longshore.scheduler.step.running import RunningTable


class SamplingRows:
    """Rows of a plan that sample, as they are when it is built.

    rows:        (n,) ascending; `index` selects the same ones, as a slice where they are the first.
    generations: (n,) of their occupants.
    version:     the table's. While it has this one, the occupants are the same, and so is the rest.
    is_plain:    one more token is all that their answer means: no row `is_special`.
    clients, handles: (n,) where their tokens go; `client` is the one client of all, if it is one.
    """

    def __init__(self, running: RunningTable, rows: Int64Array) -> None:
        num_rows = len(rows)
        self.rows = rows
        self.index: Int64Array | slice = rows
        if num_rows and rows[-1] == num_rows - 1:
            self.index = slice(0, num_rows)
        self.generations: Int64Array = running.generation[rows]
        self.version = running.version
        self.is_plain = not np.count_nonzero(running.is_special[rows])
        self.handles: Int32Array = running.handle[rows].astype(np.int32)
        self.clients: Int64Array = running.client[rows]
        is_one_client = num_rows and np.count_nonzero(self.clients == self.clients[0]) == num_rows
        self.client = int(self.clients[0]) if is_one_client else None
        self._stop_ids = None
        if running.has_stop_ids:  # a line per column compares faster
            self._stop_ids = np.ascontiguousarray(running.stop_ids[rows].T)

    def serves(self, running: RunningTable, rows: Int64Array) -> bool:
        """Whether these rows are the ones this was gathered for, with nothing changed since."""
        if self.version != running.version or len(self.rows) != len(rows):
            return False
        return not np.count_nonzero(self.rows != rows)

    def part(self, is_in: BoolArray) -> "SamplingRows":
        """Those of the rows where `is_in` (n,), whose occupants are still the same."""
        part = copy(self)
        part.rows = part.index = self.rows[is_in]
        part.generations = self.generations[is_in]
        part.handles, part.clients = self.handles[is_in], self.clients[is_in]
        if self._stop_ids is not None:
            part._stop_ids = self._stop_ids[:, is_in]
        return part

    def has_stop_id(self, token_ids: Int32Array) -> bool:
        """Whether any of the tokens, one per row, is a stop id of its row."""
        stop_ids = self._stop_ids
        return stop_ids is not None and bool(np.count_nonzero(stop_ids == token_ids))
