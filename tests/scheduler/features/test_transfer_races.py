"""Random runs against a connector and workers that do everything their contract allows, at the
worst moments.

The driver and the connector check ownership at every plan and every allocation, the workers check
that each position they read holds its own tokens' KV, and the clients that each token is theirs.
What is added here is the end: everybody gets an answer, and every block comes back.
"""

import random
from typing import Any, Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from longshore.protocol.outputs import FinishReason
from tests.harness.connector import Mischief
from tests.harness.driver import Driver, connected
from tests.harness.tokens import expected_output
from tests.harness.transfers import Load

LOAD_TIMEOUT_S: Final = 30.0
NUM_SEEDS: Final = 400
SHARDS: Final = 8


class Player:
    """Plays one engine. All it draws comes from `chance`, so a seed is a whole run."""

    ACTIONS: Final = {
        "add": 8,
        "step": 20,
        "plan": 10,
        "execute": 8,
        "answer": 8,
        "end_load": 14,
        "write": 5,
        "end_send": 5,
        "end_store": 5,
        "repeat": 3,
        "lie": 3,
        "abort": 3,
        "stop": 2,
        "wait": 1,
        "reset": 1,
        "die": 0.5,
    }

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.may_fail = chance.random() < 0.75
        caches = chance.random() < 0.8
        num_groups = 1 if caches else chance.choice([1, 2])
        self.driver = connected(
            num_blocks=num_groups * chance.randrange(12, 30),
            num_groups=num_groups,
            num_ranks=chance.choice([1, 1, 2, 3]),
            rules=Mischief(
                match=chance.random(),
                background=chance.random(),
                delay_free=chance.choice([0.0, 0.4]),
                store=chance.choice([0.0, 0.4]),
            ).rules(chance),
            cache={
                "enable_prefix_caching": caches,
                "watermark": chance.choice([0.0, 0.1]),
                "preempt_threshold": chance.choice([1.0, 0.8]),
                "admit_threshold": 0.6,
            },
            fail_sync=self._failing,
            max_model_len=40,
            max_num_seqs=chance.randrange(1, 6),
            max_num_batched_tokens=chance.choice([7, 16, 40, 100]),
            max_steps_in_flight=chance.choice([1, 2, 2]),
            max_loading_blocks=chance.choice([None, 3, 100]),
            scheduler_reserve_full_isl=chance.random() < 0.3,
            policy=chance.choice(["fcfs", "priority"]),
            load_failure_policy=chance.choice(["recompute", "recompute", "fail"]),
            load_timeout_s=LOAD_TIMEOUT_S,
        )
        self.max_tokens: dict[tuple[int, int], int] = {}
        self.said: list[tuple[int, str, str]] = []  # (rank, kind, request id) of good reports

    def act(self, action: str) -> None:
        """Let something happen, if it can."""
        getattr(self, f"_{action}")()

    def act_randomly(self) -> None:
        names, weights = list(self.ACTIONS), list(self.ACTIONS.values())
        self.act(self.chance.choices(names, weights)[0])

    # Clients

    def _add(self) -> None:
        chance, number = self.chance, len(self.driver.names)
        request_id = f"r{number}"
        if number and chance.random() < 0.05:
            request_id = chance.choice(list(self.driver.names.values()))
        prompt = [7] * chance.choice([0, 4, 9, 13]) + [20 + number % 70] * chance.randrange(1, 12)
        max_tokens = chance.randrange(1, 12)
        key = self.driver.add(
            request_id, prompt, max_tokens=max_tokens, priority=chance.randrange(3)
        )
        self.max_tokens[key] = max_tokens

    def _abort(self) -> None:
        if self.driver.names:
            self.driver.abort(self.chance.choice(list(self.driver.names)))

    def _stop(self) -> None:
        if self.driver.names:
            key = self.chance.choice(list(self.driver.names))
            self.driver.stop_found(key, self.chance.randrange(4))

    def _wait(self) -> None:
        self.driver.now += LOAD_TIMEOUT_S

    def _reset(self) -> None:
        all_free = self.driver.num_free_blocks == self.driver.num_blocks - 1
        assert self.driver.scheduler.reset_prefix_cache() == all_free

    # Workers

    def _step(self) -> None:
        self.driver.step()

    def _plan(self) -> None:
        nan_ids: set[str] = set()
        if self.may_fail and self.chance.random() < 0.1:
            nan_ids = set(self.chance.choices([*self.driver.workers.request_ids.values(), ""]))
        self.driver.plan(nan_ids=nan_ids)

    def _execute(self) -> None:
        if self.driver.workers.received:
            self.driver.execute()

    def _answer(self) -> None:
        if self.driver.unanswered:
            self.driver.answer()

    def _die(self) -> None:
        self.driver.restart_workers(late_outputs=True)
        self.said.clear()

    # Transfers

    def _failing(self, load: Load) -> list[int]:
        if not self.may_fail or self.chance.random() < 0.5:
            return []
        return [block_id for block_id in sorted(load.targets) if self.chance.random() < 0.5]

    def _pending(self, kind: str) -> tuple[str, int] | None:
        transfers = self.driver.transfers
        pending = [
            (request_id, rank)
            for request_id in (transfers.loading if kind == "load" else transfers.sending)
            for rank in transfers.ranks_left(kind, request_id)
        ]
        return self.chance.choice(pending) if pending else None

    def _write(self) -> None:
        if pending := self._pending("load"):
            load = self.driver.transfers.loading[pending[0]]
            self.driver.ranks.write(*pending, failing=self._failing(load))

    def _end_load(self) -> None:
        if pending := self._pending("load"):
            load = self.driver.transfers.loading[pending[0]]
            self.driver.ranks.end_load(*pending, failing=self._failing(load))
            self.said.append((pending[1], "load", pending[0]))

    def _end_send(self) -> None:
        if pending := self._pending("send"):
            self.driver.ranks.end_send(*pending)
            self.said.append((pending[1], "send", pending[0]))

    def _end_store(self) -> None:
        if self.driver.ranks.stores:
            self.driver.ranks.end_store(self.chance.choice(self.driver.ranks.stores))

    def _repeat(self) -> None:
        """A rank says again what it has said, of a transfer that has no successor of that name."""
        if not self.said:
            return
        rank, kind, request_id = self.chance.choice(self.said)
        transfers = self.driver.transfers
        live = transfers.loading if kind == "load" else transfers.sending
        if request_id in live and rank in transfers.ranks_left(kind, request_id):
            return
        ids = [request_id]
        self.driver.ranks.report(rank, **{"receiving" if kind == "load" else "sending": ids})

    def _lie(self) -> None:
        """Reports about nothing: of other ranks, other epochs, other requests."""
        driver, chance = self.driver, self.chance
        request_id = chance.choice([*driver.names.values(), "unheard-of"])
        match chance.randrange(4):
            case 0:
                driver.ranks.report(
                    chance.choice([-1, 99]), receiving=[request_id], sending=[request_id]
                )
            case 1:
                driver.ranks.report(
                    0, receiving=[request_id], epoch=driver.epoch + chance.choice([-1, 1])
                )
            case 2:
                driver.ranks.report(0, receiving=["unheard-of"], sending=["unheard-of"])
            case 3 if request_id not in driver.transfers.loading:
                driver.ranks.report(0, receiving=[request_id])

    # The end

    def finish(self) -> None:
        """No more mischief but lateness: in the end everybody has an answer."""
        driver = self.driver
        for _ in range(3000):
            was_busy = bool(driver.unanswered)
            if driver.step() is not None or was_busy:
                if self.chance.random() < 0.3:
                    self._end_something()
            elif driver.transfers.is_idle and not driver.scheduler.has_unfinished_requests():
                break
            else:  # whoever waits, waits for time or for a transfer
                driver.now += LOAD_TIMEOUT_S
                if driver.plan() is None:
                    self._end_something()
        driver.check_idle()
        self._check_answers()

    def _end_something(self) -> None:
        self.act(self.chance.choice(["end_load", "end_send", "end_store"]))

    def _check_answers(self) -> None:
        driver = self.driver
        first: dict[str, tuple[int, int]] = {}
        for key, request_id in driver.names.items():
            first.setdefault(request_id, key)
            end, tokens = driver.finished[key], driver.received[key]
            assert tokens == expected_output(request_id, len(tokens))
            if end.reason is FinishReason.LENGTH_CAPPED:
                assert len(tokens) == self.max_tokens[key]
            elif end.reason is FinishReason.ERROR:
                was_hit = driver.config.load_failure_policy == "fail" and self.may_fail
                is_namesake = first[request_id] != key
                assert (
                    is_namesake
                    or request_id in driver.not_finite
                    or (was_hit and request_id in driver.spoiled_ids)
                    or "load_timeout_s" in (end.message or "")
                ), f"{request_id} failed for nothing: {end.message}"
            else:
                assert end.reason in (
                    FinishReason.ABORTED,
                    FinishReason.STOPPED,
                    FinishReason.IGNORED,
                )


def play(seed: int, num_actions: int = 150) -> Driver:
    """One random run."""
    player = Player(random.Random(seed))
    for _ in range(num_actions):
        player.act_randomly()
    player.finish()
    return player.driver


@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.req("CON-08", "CON-11", "MET-05", "MET-06", "MET-07", "MET-08", "PRE-06", "HSH-09")
def test_no_request_computes_on_the_block_of_another_whatever_transfers_do(shard: int) -> None:
    seen: dict[str, int] = {}
    for seed in range(shard, NUM_SEEDS, SHARDS):
        try:
            driver = play(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        stats = driver.scheduler.make_stats()
        for name, count in {
            "loads": len(driver.adversary.loads_begun),
            "abandoned": len(driver.adversary.abandoned),
            "preempted": stats.num_preemptions,
            "rewound": stats.num_rewinds,
            "stored": len(driver.stored),
            "told wrong": stats.num_bad_messages,
            "epochs": len(driver.adversary.epochs),
        }.items():
            seen[name] = seen.get(name, 0) + count
    assert all(count > 5 for count in seen.values()), seen


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
        known = {id_ for _, block_ids in driver.transfers.owned() for id_ in block_ids}
        assert driver.num_free_blocks + len(known) + 1 <= driver.num_blocks

    def teardown(self) -> None:
        if hasattr(self, "player"):
            self.player.finish()


TestTransferMachine = TransferMachine.TestCase
TestTransferMachine.settings = settings(max_examples=60, stateful_step_count=60)


def test_the_same_calls_give_the_same_plans() -> None:
    for seed in range(10):
        runs: list[Any] = [[plan.digest for plan in play(seed).plans] for _ in range(2)]
        assert runs[0] == runs[1]
