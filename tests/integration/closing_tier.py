"""A connector of tests/integration/test_kv_events.py, which the scheduler process imports."""

from longshore.connectors.base import SchedulerConnector
from longshore.protocol.arrays import EMPTY_INT32
from longshore.protocol.events import BlockStored, KVEvent


class ClosingTier(SchedulerConnector):
    """Reports one more block in host memory each time it is asked for events."""

    num_taken = 0

    def take_events(self) -> list[KVEvent]:
        assert self.config.publishes_events
        self.num_taken += 1
        name = b"taken %d times" % self.num_taken
        return [BlockStored(name, None, EMPTY_INT32, 0, medium="CPU")]
