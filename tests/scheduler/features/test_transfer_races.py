"""Random runs with every feature in them, against a connector and workers that do everything their
contract allows, at the worst moments.

The driver and the connector check ownership at every plan and every allocation, the workers check
that each position they read holds its own tokens' KV, and the clients that each token is theirs.
What is added here is the end: every request has one, and every block is free again.
"""

import random
from collections import Counter
from typing import Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.harness.player import Player, play

NUM_SEEDS: Final = 400
SHARDS: Final = 8


@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.req("CON-08", "CON-11", "MET-05", "MET-06", "MET-07", "MET-08", "PRE-06", "HSH-09")
def test_no_request_computes_on_the_block_of_another_whatever_transfers_do(shard: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(shard, NUM_SEEDS, SHARDS):
        try:
            player = play(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        seen.update(player.seen())
    assert seen.pop("drafts against a grammar") > 0  # the rarest: it takes two features and luck
    assert min(seen.values()) > 5, seen


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_whatever_transfers_do_in_many_more_runs(shard: int, long_run: bool) -> None:
    """1,600 runs, and with --long 8,000."""
    for seed in range(NUM_SEEDS + shard, (20 if long_run else 4) * NUM_SEEDS, SHARDS):
        play(seed)


class TransferMachine(RuleBasedStateMachine):
    """The same player with its actions chosen, and shrunk, by hypothesis."""

    @initialize(seed=st.integers(0, 10**6))
    def start(self, seed: int) -> None:
        self.player = Player(random.Random(seed))

    @rule(action=st.sampled_from(sorted(Player.ACTIONS)))
    def act(self, action: str) -> None:
        self.player.act(action)

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        driver = self.player.driver
        driver.scheduler.check()
        num_owned = len(driver.transfers.owned_ids())
        assert driver.num_free_blocks + num_owned + 1 <= driver.num_blocks

    def teardown(self) -> None:
        if hasattr(self, "player"):
            self.player.finish()


TestTransferMachine = TransferMachine.TestCase
TestTransferMachine.settings = settings(max_examples=60, stateful_step_count=60)


def test_the_same_calls_give_the_same_plans() -> None:
    for seed in range(10):
        runs = [[plan.digest for plan in play(seed).driver.plans] for _ in range(2)]
        assert runs[0] == runs[1]
