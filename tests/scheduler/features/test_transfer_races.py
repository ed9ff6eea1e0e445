"""Random runs with every feature in them, against a connector and workers that do everything their
contract allows, at the worst moments.

The driver and the connector check ownership at every plan and every allocation, the workers check
that each position they read holds its own tokens' KV, and the clients that each token is theirs.
What is added here is the end: every request has one, and every block is free again.
"""

import random
from typing import Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.harness.player import (
    HintingPlayer,
    JobsPlayer,
    Player,
    PressedPlayer,
    StatesPlayer,
    play,
)
from tests.harness.random_runs import run_until_seen

NUM_SEEDS: Final = 400
SHARDS: Final = 8
RARE: Final = ("drafts against a grammar", "everything in one run", "resets")
"""These take several features and luck."""

most_of_them_long = pytest.mark.parametrize(
    "shard", [0, *(pytest.param(shard, marks=pytest.mark.long) for shard in range(1, SHARDS))]
)


@most_of_them_long
@pytest.mark.req("CON-08", "CON-11", "MET-05", "MET-06", "MET-07", "MET-08", "PRE-06", "HSH-09")
def test_no_request_computes_on_the_block_of_another_whatever_transfers_do(shard: int) -> None:
    kinds = Player(random.Random(0)).seen()
    least = {what: 1 if what in RARE else 6 for what in kinds}
    run_until_seen(lambda seed: play(seed).seen(), range(shard, NUM_SEEDS, SHARDS), least)


@most_of_them_long
@pytest.mark.req("TIE-03", "TIE-04", "TIE-06", "TIE-07", "TIE-08", "ERR-14")
def test_swapped_requests_keep_their_kv_whatever_transfers_do(shard: int) -> None:
    """The ranks compare what they copy, late, with what each position must have."""
    whats = ("swapped out", "swapped in", "no room", "epochs", "session inputs", "rewinds")
    run_until_seen(
        lambda seed: play(seed, 200, PressedPlayer).seen(),
        range(shard, NUM_SEEDS // 4, SHARDS),
        dict.fromkeys(whats, 1),
    )


@most_of_them_long
@pytest.mark.req("SPD-04", "FEA-01")
def test_hints_and_forks_with_grammars_and_drafts_change_no_token(shard: int) -> None:
    """Drafts, masks, forks, preemption, hints and transfers, all in one run."""
    whats = (
        "actions with retained prefixes",
        "forks with a grammar",
        "lost grammars",
        "their accepted drafts",
        "their drafts against a grammar",
        "their preemptions",
        "copied blocks",
        "abandoned loads",
    )
    run_until_seen(
        lambda seed: play(seed, 200, HintingPlayer).seen(),
        range(shard, NUM_SEEDS // 4, SHARDS),
        dict.fromkeys(whats, 1),
    )


@most_of_them_long
@pytest.mark.req("SCH-24", "COW-01", "COW-04")
def test_forks_and_sessions_begin_with_states_of_their_own_tokens(shard: int) -> None:
    whats = (
        "actions with states of forks",
        "actions with states of sessions",
        "kept states",
        "copied blocks",
        "session inputs",
        "preemptions",
        "rewinds",
        "epochs",
        "loads",
        "abandoned loads",
        "next turns that begin with an answer",
    )
    run_until_seen(
        lambda seed: play(seed, 200, StatesPlayer).seen(),
        range(shard, NUM_SEEDS, SHARDS),
        dict.fromkeys(whats, 6),
    )


@pytest.mark.req("ERR-34", "SCH-17", "CTM-11", "CTM-12")
def test_pins_change_no_token_and_stop_no_request_whatever_happens() -> None:
    """Turns of jobs with forks, sessions, transfers, swaps, preemption and new epochs."""
    whats = ("pin hits", "expired pins", "pins that yielded", "preemptions", "epochs", "loads")
    run_until_seen(
        lambda seed: play(seed, 200, JobsPlayer).seen(),
        range(24),
        dict.fromkeys(whats, 1),
    )


def test_a_failed_load_of_a_victim_ends_its_swap() -> None:
    """In this run, a load fails between the choice of the victim and the end of its last step."""
    play(1099)


def test_blocks_of_a_request_whose_logits_were_nan_are_written_again_while_they_are_sent() -> None:
    """In this run, their next reader computes them in chunks that end within a block."""
    play(5529, 200, HintingPlayer)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_whatever_transfers_do_in_many_more_runs(shard: int) -> None:
    for seed in range(NUM_SEEDS + shard, 8 * NUM_SEEDS, SHARDS):
        play(seed)
        play(seed, 200, PressedPlayer)
        play(seed, 200, HintingPlayer)
        play(seed, 200, JobsPlayer)
        play(seed, 200, StatesPlayer)


class TransferMachine(RuleBasedStateMachine):
    """The same player with its actions chosen, and shrunk, by hypothesis."""

    kind: type[Player] = Player

    @initialize(seed=st.integers(0, 10**6))
    def start(self, seed: int) -> None:
        self.player = self.kind(random.Random(seed))

    @rule(action=st.sampled_from(sorted(Player.ACTIONS)))
    def act(self, action: str) -> None:
        self.player.act(action)

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        driver = self.player.driver
        num_owned = len(driver.transfers.owned_ids())
        assert driver.num_free_blocks + num_owned + 1 <= driver.num_blocks

    def teardown(self) -> None:
        if hasattr(self, "player"):
            self.player.finish()


TestTransferMachine = TransferMachine.TestCase
TestTransferMachine.settings = settings(max_examples=60, stateful_step_count=60)


class SwapMachine(TransferMachine):
    kind = PressedPlayer


TestSwapMachine = SwapMachine.TestCase
TestSwapMachine.settings = settings(max_examples=60, stateful_step_count=80)


class HintMachine(TransferMachine):
    kind = HintingPlayer


TestHintMachine = HintMachine.TestCase
TestHintMachine.settings = settings(max_examples=60, stateful_step_count=80)


class StatesMachine(TransferMachine):
    kind = StatesPlayer


TestStatesMachine = StatesMachine.TestCase
TestStatesMachine.settings = settings(max_examples=60, stateful_step_count=80)


class PinMachine(TransferMachine):
    kind = JobsPlayer


TestPinMachine = pytest.mark.req("ERR-34")(PinMachine.TestCase)
TestPinMachine.settings = settings(max_examples=20, stateful_step_count=60)


def test_the_same_calls_give_the_same_plans() -> None:
    for seed in range(10):
        runs = [[plan.digest for plan in play(seed).driver.plans] for _ in range(2)]
        assert runs[0] == runs[1]
