"""Sampled tokens that plans feed back to the first pipeline stage."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from longshore.protocol.arrays import int32_array
from longshore.protocol.errors import PlanMismatch
from longshore.protocol.plan import Rewind, SchedulerOutput
from longshore.protocol.rows import PlanFollower, RowTable
from longshore.worker.step.given_tokens import GivenTokens, fed_back_tokens
from longshore.worker.step.token_table import TokenTable
from tests.worker.plans import Entry, Planner

MAX_MODEL_LEN = 64


class Stage:
    """The rows and tokens of a first stage that has prefilled row 2 (5 tokens) and row 5 (3)."""

    def __init__(self) -> None:
        self.plans = Planner(num_blocks=40, block_size=4, max_model_len=MAX_MODEL_LEN)
        self.rows = RowTable(8)
        self.follower = PlanFollower(self.rows, epoch=1)
        self.tokens = TokenTable(8, MAX_MODEL_LEN, torch.device("cpu"))
        entries = [Entry(2, range(5)), Entry(5, range(3))]
        self.take(self.plans.plan({2: 5, 5: 3}, added=entries))

    def take(self, plan: SchedulerOutput, **changes: Any) -> GivenTokens | None:
        fed = {name: int32_array(ids) for name, ids in changes.items()}
        return fed_back_tokens(
            msgspec.structs.replace(plan, **fed),
            self.rows,
            self.follower.apply(plan),
            vocab_size=100,
            token_width=self.tokens.width,
            pin_memory=False,
        )


def test_each_token_is_written_where_its_row_computes_it() -> None:
    stage = Stage()
    for step in range(3):
        fed = stage.take(
            stage.plans.plan(), sampled_rows=[2, 5], sampled_tokens=[20 + step, 50 + step]
        )
        assert fed is not None
        fed.write(stage.tokens)
    assert stage.tokens.ids[2, 5:9].tolist() == [20, 21, 22, 0]
    assert stage.tokens.ids[5, 3:7].tolist() == [50, 51, 52, 0]
    assert np.count_nonzero(stage.tokens.ids.numpy()) == 6


def test_rows_that_wait_for_their_token_need_none() -> None:
    stage = Stage()
    fed = stage.take(stage.plans.plan({2: 0}), sampled_rows=[5], sampled_tokens=[50])
    assert fed is not None
    assert fed.index.tolist() == [5 * stage.tokens.width + 3]
    assert stage.take(stage.plans.plan({2: 0, 5: 0})) is None


def test_a_rewound_row_gets_its_last_known_token() -> None:
    stage = Stage()
    stage.take(stage.plans.plan(), sampled_rows=[2, 5], sampled_tokens=[20, 50])
    rewind = Rewind(2, num_computed_tokens=4, num_known_tokens=7)
    fed = stage.take(
        stage.plans.plan({2: 3}, rewound=[rewind]), sampled_rows=[2, 5], sampled_tokens=[21, 51]
    )
    assert fed is not None
    fed.write(stage.tokens)
    assert stage.tokens.ids[2, 6] == 21
    assert stage.tokens.ids[5, 4] == 51


@pytest.mark.parametrize(
    ("sampled_rows", "sampled_tokens", "words"),
    [
        ([], [], r"of rows \[\], but rows \[2, 5\]"),
        ([2], [20], r"of rows \[2\], but rows \[2, 5\]"),
        ([2, 5, 6], [20, 50, 60], r"of rows \[2, 5, 6\]"),
        ([2, 5], [20], "1 sampled tokens for 2 rows"),
        ([2, 5], [20, 100], r"outside 0\.\.99"),
        ([2, 5], [20, -1], r"outside 0\.\.99"),
    ],
)
def test_a_plan_without_the_sampled_tokens_that_it_computes_is_rejected(
    sampled_rows: list[int], sampled_tokens: list[int], words: str
) -> None:
    stage = Stage()
    with pytest.raises(PlanMismatch, match=words):
        stage.take(stage.plans.plan(), sampled_rows=sampled_rows, sampled_tokens=sampled_tokens)
