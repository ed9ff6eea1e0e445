"""Whatever is done to a recorded scheduler, in whatever order, a replay repeats every plan: from
the start, and from the snapshot of each file, as after the ring has lost its beginning.

What is done is that of `tests.harness.player`: prefix hits, preemption, swaps, forks, sessions,
grammars, drafts, adapters, pins, hints, transfers, resets and new epochs, with one or two steps in
flight.
"""

import contextlib
import random
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from longshore.scheduler.recorder.entries import segment_files
from longshore.scheduler.recorder.recorder import Recorder
from longshore.scheduler.recorder.replay import Replay
from tests.harness.player import HintingPlayer, JobsPlayer, Player, PressedPlayer, StatesPlayer
from tests.harness.random_runs import run_until_seen
from tests.scheduler.recorder.recorded_runs import UNLIMITED, recorded_schedulers

PLAYERS = (Player, PressedPlayer, JobsPlayer, HintingPlayer, StatesPlayer)
NUM_SEEDS = 24
SHARDS = 4


class RecordedRun:
    """A player whose scheduler is recorded, in files of a temporary folder."""

    def __init__(self, kind: type[Player], seed: int) -> None:
        self._closing = contextlib.ExitStack()
        folder = self._closing.enter_context(tempfile.TemporaryDirectory())
        self._path = Path(folder) / "record"
        self.recorder = Recorder(self._path, UNLIMITED, forks=False)
        self._closing.callback(self.recorder.close)
        with recorded_schedulers(self.recorder):
            self.player = kind(random.Random(seed))

    def begin_file(self) -> None:
        """Begin a file with a snapshot of now."""
        self.recorder.begin_file()

    def check(self) -> int:
        """Replay all files, and each of them alone; returns how many there were."""
        with self._closing:
            self.player.finish()
            self.recorder.close()
            files = segment_files(self._path)
            whole = self._replay(self._path)
            assert whole == len(self.player.driver.plans)
            assert sum(map(self._replay, files)) == whole
            return len(files)

    def _replay(self, path: Path) -> int:
        """The number of plans, all of which are equal."""
        result = Replay(path).run()
        assert result.difference is None, (path.name, result)
        assert not result.raised
        return result.num_plans


def run(kind: type[Player], seed: int) -> Counter[str]:
    """A run of 120 actions, with a new file after every tenth one, on average."""
    recorded = RecordedRun(kind, seed)
    chance = random.Random(-seed)
    for _ in range(120):
        recorded.player.act_randomly()
        if chance.random() < 0.1:
            recorded.begin_file()
    num_files = recorded.check()
    return Counter(recorded.player.seen()) + Counter(files=num_files)


@pytest.mark.parametrize(
    "shard",
    [0, *(pytest.param(shard, marks=pytest.mark.long) for shard in range(1, SHARDS))],
)
def test_any_run_is_replayed_from_its_start_and_from_every_snapshot(shard: int) -> None:
    seen = ("files", "loads", "preemptions", "epochs", "masks", "accepted drafts", "rewinds")
    run_until_seen(
        lambda seed: run(PLAYERS[seed // SHARDS % len(PLAYERS)], seed),
        range(shard, NUM_SEEDS, SHARDS),
        dict.fromkeys(seen, 1),
    )


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_many_more_runs_are_replayed(shard: int) -> None:
    for seed in range(NUM_SEEDS + shard, 25 * NUM_SEEDS, SHARDS):
        for kind in PLAYERS:
            run(kind, seed)


class RecordMachine(RuleBasedStateMachine):
    """The same, with actions and files chosen, and shrunk, by hypothesis."""

    @initialize(seed=st.integers(0, 10**6), kind=st.sampled_from(PLAYERS))
    def start(self, seed: int, kind: type[Player]) -> None:
        self.recorded = RecordedRun(kind, seed)

    @rule(action=st.sampled_from(sorted(Player.ACTIONS)))
    def act(self, action: str) -> None:
        self.recorded.player.act(action)

    @rule(count=st.integers(1, 12))
    def act_often(self, count: int) -> None:
        """What happens often, such as steps, happens often here."""
        for _ in range(count):
            self.recorded.player.act_randomly()

    @rule()
    def begin_file(self) -> None:
        self.recorded.begin_file()

    @rule(seconds=st.sampled_from([0.5, 40.0]))
    def wait(self, seconds: float) -> None:
        self.recorded.player.driver.now += seconds

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        self.recorded.player.driver.check_blocks()

    def teardown(self) -> None:
        if hasattr(self, "recorded"):
            self.recorded.check()


TestRecordMachine = RecordMachine.TestCase
TestRecordMachine.settings = settings(max_examples=25, stateful_step_count=30)
