"""Ranks that have not received the same plans of a scheduler that has died."""

from pathlib import Path

import pytest
import torch.distributed as dist

from longshore.protocol.arrays import int32_array
from longshore.protocol.plan import SchedulerOutput
from longshore.worker.errors import RankLost
from longshore.worker.ranks.last_plans import NUM_KEPT, LastPlans

TIMEOUT_S = 60.0


@pytest.fixture
def store(tmp_path: Path) -> "dist.Store":
    return dist.FileStore(str(tmp_path / "rendezvous"), 2)  # type: ignore[attr-defined,no-any-return]  # torch


def last_plans(
    store: "dist.Store",
    rank: int,
    num_plans: int,
    *,
    num_ranks: int = 2,
    epoch: int = 1,
    timeout_s: float = TIMEOUT_S,
) -> LastPlans:
    """Of a rank that has received plans up to step `num_plans`."""
    made = LastPlans(store, rank=rank, num_ranks=num_ranks, epoch=epoch, timeout_s=timeout_s)
    for step in range(1, num_plans + 1):
        made.add(plan(step))
    return made


def plan(step: int) -> SchedulerOutput:
    return SchedulerOutput(
        epoch=1,
        step=step,
        previous_step=step - 1,
        num_rows=1,
        num_scheduled_tokens=1,
        digest=step,
        zero_block_ids=int32_array(range(30_000)),  # too many for the header
    )


def steps(plans: list[SchedulerOutput] | None) -> list[int] | None:
    return None if plans is None else [plan.step for plan in plans]


@pytest.mark.parametrize(
    ("num_plans", "missed"),
    [
        ((0, 0, 0), ([], [], [])),
        ((7, 7, 7), ([], [], [])),
        ((3, 2, 1), ([], [3], [2, 3])),
        ((0, 2, 1), ([1, 2], [], [2])),
        ((50, 50 - NUM_KEPT, 49), ([], list(range(51 - NUM_KEPT, 51)), [50])),
    ],
)
def test_each_rank_gets_what_any_other_has_received(
    store: "dist.Store", num_plans: tuple[int, ...], missed: tuple[list[int], ...]
) -> None:
    ranks = [last_plans(store, *each, num_ranks=3) for each in enumerate(num_plans)]
    for rank in ranks:
        rank.publish()
    assert tuple(steps(rank.missed()) for rank in ranks) == missed


def test_plans_arrive_as_they_were_sent(store: "dist.Store") -> None:
    ahead, behind = last_plans(store, 0, 1), last_plans(store, 1, 0)
    ahead.publish()
    behind.publish()
    (received,) = behind.missed() or ()
    assert received.zero_block_ids.tolist() == plan(1).zero_block_ids.tolist()
    assert received.digest == 1


def test_nothing_is_known_before_all_ranks_have_published_in_this_epoch(
    store: "dist.Store",
) -> None:
    for rank in (0, 1):
        last_plans(store, rank, 4, epoch=1).publish()
    first, second = (last_plans(store, rank, 0, epoch=2) for rank in (0, 1))
    first.publish()
    assert first.missed() is None
    second.publish()
    assert first.missed() == []


def test_a_rank_that_does_not_publish_in_time_is_lost(store: "dist.Store") -> None:
    first = last_plans(store, 0, 3, timeout_s=0.0)
    first.publish()
    with pytest.raises(RankLost, match=r"not all ranks of rank 0's engine have noticed it"):
        first.missed()


def test_a_rank_that_is_too_far_behind_is_lost(store: "dist.Store") -> None:
    behind = last_plans(store, 1, 1)
    last_plans(store, 0, NUM_KEPT + 2).publish()
    behind.publish()
    with pytest.raises(RankLost, match=r"plans up to step 1, .* of steps 3 to 34; it cannot"):
        behind.missed()
