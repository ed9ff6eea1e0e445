"""The driver notices schedulers that break a promise."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from longshore.protocol.outputs import TransferReport
from longshore.protocol.requests import AddRequest
from tests.oracle.block_pool import Block, TextbookBlockPool
from tests.oracle.driver import Surroundings, drive
from tests.oracle.plan import Answer, OraclePlan
from tests.oracle.request import TextbookRequest
from tests.oracle.tables import BlockTables
from tests.oracle.textbook import TextbookScheduler
from tests.oracle.workloads import Workload


class ForgetsSalt(TextbookScheduler):
    def add_request(self, message: AddRequest, *, client: int = 0, now: float) -> None:
        super().add_request(
            replace(message, options=replace(message.options, cache_salt=None)),
            client=client,
            now=now,
        )


class TablesMixedUp(BlockTables):
    def find_prefix(self, request: TextbookRequest) -> list[Block]:
        return super().find_prefix(request)[::-1]


class MixesUpHits(TextbookScheduler):
    def _reset(self) -> None:
        super()._reset()
        self.tables.__class__ = TablesMixedUp


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


class ForgetsAdapters(TextbookScheduler):
    def add_request(self, message: AddRequest, *, client: int = 0, now: float) -> None:
        super().add_request(
            replace(message, options=replace(message.options, lora=None)), client=client, now=now
        )


class ForgetsItems(TextbookScheduler):
    def add_request(self, message: AddRequest, *, client: int = 0, now: float) -> None:
        super().add_request(
            replace(message, options=replace(message.options, multimodal=())),
            client=client,
            now=now,
        )


class EncodesOnlyOnce(TextbookScheduler):
    def schedule(self, now: float) -> OraclePlan | None:
        plan = super().schedule(now)
        resumed = {each.request_id for each in plan.admitted if each.resumed} if plan else set()
        inputs = [each for each in plan.encoder_inputs if each[0] not in resumed] if plan else []
        return None if plan is None else plan._replace(encoder_inputs=tuple(inputs))


class FreesEncoderBlocks(TextbookScheduler):
    def update_from_output(self, answer: Answer) -> None:
        super().update_from_output(answer)
        for request in self.running:
            self.tables.pool.free(request.encoder_blocks)
            request.encoder_blocks = []


class NamesDrafts(TextbookScheduler):
    def update_from_output(self, answer: Answer) -> None:
        """Every draft counts as right."""
        for entry in self.unanswered[0].entries if self.unanswered else ():
            entry.num_drafts = max(len(answer.tokens.get(entry.request.request_id, ())) - 1, 0)
        super().update_from_output(answer)


class PoolWithoutFences(TextbookBlockPool):
    def available(self, answered_step: int | None = None) -> list[Block]:
        return super().available()


class IgnoresFences(TextbookScheduler):
    def _reset(self) -> None:
        super()._reset()
        self.tables.pool = PoolWithoutFences(self.num_blocks)


class FreesWhatIsBeingLoaded(TextbookScheduler):
    def abandon_load(self, request: TextbookRequest) -> None:
        assert request.load is not None
        self.transfers.loads.remove(request.load)


class BelievesLoads(TextbookScheduler):
    def update_from_transfers(self, report: TransferReport, now: float) -> None:
        super().update_from_transfers(
            replace(report, failed_block_ids=report.failed_block_ids[:0]), now
        )


class BelievesSynchronousLoads(TextbookScheduler):
    def update_from_output(self, answer: Answer) -> None:
        super().update_from_output(answer._replace(failed_block_ids=()))


def drive_some_workloads(
    scheduler_type: type[TextbookScheduler], feature: str | None, num_workloads: int
) -> None:
    for seed in range(num_workloads):
        workload = Workload.random(seed, () if feature is None else (feature,))
        surroundings = Surroundings.of(workload)
        scheduler = scheduler_type(
            workload.scheduler,
            workload.cache,
            num_blocks=workload.num_blocks,
            eos_token_ids=workload.eos_token_ids,
            connector=surroundings.connector,
            grammars=surroundings.grammars,
            num_ranks=workload.num_ranks,
            cross=workload.cross,
        )
        drive(scheduler, workload, surroundings)


@pytest.mark.parametrize(
    ("broken", "feature", "complaint"),
    [
        (ForgetsSalt, None, "position 0 of .* has the KV of other"),
        (MixesUpHits, None, "position 0 of .* has the KV of other"),
        (IgnoresAborts, None, "still alive after its abort"),
        (ForgetsFinishedRows, None, "has a row already|rows are held|never dropped"),
        (GetsStuck, None, "never answered"),
        (ForgetsAdapters, "lora", "KV of other tokens|too many adapters"),
        (ForgetsItems, "encoder", "not encoded|KV of other tokens"),
        (EncodesOnlyOnce, "cross", None),
        (FreesEncoderBlocks, "cross", "reads others' output"),
        (NamesDrafts, "drafts", None),
        (IgnoresFences, "connector", "overwrites blocks of step"),
        (FreesWhatIsBeingLoaded, "connector", "overwrites blocks of|KV of other tokens"),
        (BelievesLoads, "connector", None),
        (BelievesSynchronousLoads, "rewind", None),
    ],
)
def test_driver_finds_what_is_broken(
    broken: type[TextbookScheduler], feature: str | None, complaint: str | None
) -> None:
    with pytest.raises(AssertionError, match=complaint):
        drive_some_workloads(broken, feature, 300)
