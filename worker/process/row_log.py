"""Debug log lines: in which step each request takes a row, is rewound, and frees the row."""

import logging

from longshore.protocol.logs.records import fields
from longshore.protocol.plan import SchedulerOutput

logger = logging.getLogger(__name__)


class RowLog:
    """Remembers the request of each row whose start it has seen."""

    def __init__(self) -> None:
        self._ids: dict[int, str] = {}

    def log_plan(self, plan: SchedulerOutput) -> None:
        """Called with every plan; does nothing unless debug logging is on."""
        if not logger.isEnabledFor(logging.DEBUG):
            return
        for why, rows in (("ended", plan.finished_rows), ("preempted", plan.preempted_rows)):
            for row in rows.tolist():
                about = fields(request_id=self._ids.pop(row, None), step_id=plan.step, row=row)
                logger.debug("%s; the row is free", why, extra=about)
        for rewind in plan.rewound:
            about = fields(
                request_id=self._ids.get(rewind.row),
                step_id=plan.step,
                row=rewind.row,
                computed_tokens=rewind.num_computed_tokens,
            )
            logger.debug("rewound", extra=about)
        for start in plan.added:
            self._ids[start.row] = start.request_id
            about = fields(
                request_id=start.request_id,
                step_id=plan.step,
                row=start.row,
                known_tokens=start.num_known_tokens,
                computed_tokens=start.num_computed_tokens,
            )
            logger.debug("started", extra=about)
