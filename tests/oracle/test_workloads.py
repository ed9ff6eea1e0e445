"""The driver notices schedulers that break a promise."""

from collections.abc import Sequence

import pytest

from longshore.protocol.client import AddRequest
from tests.oracle.block_pool import Block
from tests.oracle.plan import OraclePlan
from tests.oracle.request import TextbookRequest
from tests.oracle.textbook import TextbookScheduler
from tests.oracle.workloads import Workload, drive


class ForgetsSalt(TextbookScheduler):
    def add_request(self, message: AddRequest, *, client: int = 0, now: float) -> None:
        super().add_request(message, client=client, now=now)
        for request in self.waiting:
            request.salt = None


class MixesUpHits(TextbookScheduler):
    def _find_prefix(self, request: TextbookRequest) -> list[Block]:
        return super()._find_prefix(request)[::-1]


class IgnoresAborts(TextbookScheduler):
    def abort(self, handles: Sequence[int], *, client: int = 0) -> None:
        pass


class ForgetsFinishedRows(TextbookScheduler):
    def schedule(self, now: float) -> OraclePlan | None:
        plan = super().schedule(now)
        return None if plan is None else plan._replace(finished=())


class GetsStuck(TextbookScheduler):
    def schedule(self, now: float) -> OraclePlan | None:
        return super().schedule(now) if now < 2 else None


def drive_some_workloads(scheduler_type: type[TextbookScheduler]) -> None:
    for seed in range(100):
        workload = Workload.random(seed)
        scheduler = scheduler_type(
            workload.scheduler,
            workload.cache,
            num_blocks=workload.num_blocks,
            eos_token_ids=workload.eos_token_ids,
        )
        drive(scheduler, workload)


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (ForgetsSalt, "wrong KV at position 0"),
        (MixesUpHits, "wrong KV at position 0"),
        (IgnoresAborts, "still alive after its abort"),
        (ForgetsFinishedRows, "has a row already|rows are held"),
        (GetsStuck, "never answered"),
    ],
)
def test_driver_finds_what_is_broken(broken: type[TextbookScheduler], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        drive_some_workloads(broken)
