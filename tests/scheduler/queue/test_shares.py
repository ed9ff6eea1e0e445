"""Shares of tenants: deficit round robin, who holds more than its share, and what is reserved."""

from dataclasses import dataclass
from random import Random

import numpy as np
import pytest

from longshore.protocol.requests import RequestOptions, Tenant
from longshore.scheduler.queue.policies import FairPolicy, FairQueue
from longshore.scheduler.queue.shares import QUANTUM, RESERVED, Shares
from tests.scheduler.test_request import make_request

A, B, HEAVY = Tenant("a"), Tenant("b"), Tenant("heavy", 3)


@dataclass(eq=False)
class Job:
    """A request as `Shares` sees it."""

    tenant: Tenant
    num_tokens: int = 64
    row: int = 0
    num_computed: int = 0

    @property
    def options(self) -> RequestOptions:
        return RequestOptions(tenant=self.tenant)


class Engine:
    """Rows and a clock, for `Shares` alone."""

    def __init__(self, num_rows: int = 32, num_slots: int = 1 << 20) -> None:
        self.shares = Shares(num_rows, num_slots)
        self.free_rows = list(range(num_rows))
        self.generation = np.zeros(num_rows, np.int64)
        self.num_computed = np.zeros(num_rows, np.int64)

    def arrive(self, *jobs: Job) -> None:
        for job in jobs:
            self.shares.arrived(job, job.tenant)

    def admit(self, job: Job) -> None:
        job.row = self.free_rows.pop(0)
        self.generation[job.row], self.num_computed[job.row] = 1, job.num_tokens
        self.shares.admitted(job, job.num_computed)

    def end(self, job: Job) -> None:
        self.free_rows.append(job.row)
        self.generation[job.row] = self.num_computed[job.row] = 0
        self.shares.ended(job)

    def begin_step(self) -> None:
        self.shares.begin_step(self.generation, self.num_computed)


def test_tenants_take_turns_by_tokens_and_weight() -> None:
    engine = Engine(num_rows=4096)
    jobs = {
        tenant.name: [Job(tenant, size) for _ in range(200)]
        for tenant, size in ((A, 16), (B, 128), (HEAVY, 64))
    }
    engine.arrive(*(job for each in jobs.values() for job in each))
    served = dict.fromkeys(jobs, 0)
    for _ in range(200):
        name = engine.shares.first(list(jobs))
        assert name is not None
        job = jobs[name].pop()
        engine.admit(job)
        served[name] += job.num_tokens
    assert served["heavy"] == pytest.approx(3 * served["a"], abs=4 * QUANTUM)
    assert served["b"] == pytest.approx(served["a"], abs=2 * QUANTUM)


def test_output_is_paid_for_when_it_is_known() -> None:
    engine = Engine()
    long, short = Job(A, 16), Job(B, 16)
    engine.arrive(long, short, Job(A), Job(B))
    engine.admit(long)
    engine.admit(short)
    assert engine.shares.first(["a", "b"]) == "a"  # its turn goes on
    long.num_tokens += 10 * QUANTUM
    engine.end(long)
    engine.end(short)
    assert engine.shares.first(["a", "b"]) == "b"


def test_who_holds_its_share_comes_after_who_does_not() -> None:
    engine = Engine(num_rows=16)
    flood = [Job(A, 1) for _ in range(8)]
    engine.arrive(*flood)
    for job in flood[:6]:
        engine.admit(job)
    assert engine.shares.first(["a"]) == "a"  # nobody else is there
    late = [Job(HEAVY, 10_000) for _ in range(3)]
    engine.arrive(*late)
    engine.begin_step()
    for job in late[:2]:  # more tokens by far, and less than its share of the rows
        assert engine.shares.first(["a", "heavy"]) == "heavy"
        engine.admit(job)
    assert engine.shares.first(["a"]) == "a"  # if nobody else waits, it takes what is free


def test_tokens_that_are_held_count_as_rows_do() -> None:
    engine = Engine(num_rows=64, num_slots=1000)
    big, small = Job(A, 600), Job(B, 10)
    engine.arrive(big, small, Job(A), Job(B))
    engine.admit(big)
    engine.admit(small)
    engine.begin_step()
    assert [engine.shares.is_owed(name) for name in ("a", "b")] == [False, True]


def test_the_last_rows_are_kept_for_a_tenant_that_has_none() -> None:
    engine = Engine(num_rows=2 * RESERVED)
    flood = [Job(A, 1) for _ in range(2 * RESERVED)]
    engine.arrive(*flood)
    engine.begin_step()
    num_admitted = 0
    while engine.shares.first(["a"]) is not None:
        engine.admit(flood[num_admitted])
        num_admitted += 1
    assert num_admitted == 2 * RESERVED - 2
    late = Job(B, 1)
    engine.arrive(late)
    assert engine.shares.first(["a", "b"]) == "b"
    engine.admit(late)
    assert engine.shares.first(["a"]) is None


def test_a_long_prompt_leaves_tokens_for_who_is_owed_a_row() -> None:
    engine = Engine()
    flood, late = Job(A, 10_000), Job(B, 5)
    engine.arrive(flood)
    engine.begin_step()
    engine.admit(flood)
    engine.begin_step()
    assert engine.shares.chunk_limit(2048) is None
    engine.arrive(late)
    assert engine.shares.chunk_limit(2048) == (2048 - 1) // 2
    engine.admit(late)
    engine.begin_step()
    assert engine.shares.chunk_limit(2048) is None


def test_a_tenant_that_left_has_neither_debt_nor_credit() -> None:
    engine = Engine()
    first, other = Job(A, 100 * QUANTUM), Job(B, 1)
    engine.arrive(first, other)
    engine.admit(first)
    engine.end(first)
    engine.arrive(Job(A, 1))
    engine.begin_step()
    assert engine.shares.rank("a")[1] == 1


def test_numbers_of_tenants_that_left_are_used_again() -> None:
    engine, chance = Engine(num_rows=8), Random(0)
    live: list[Job] = []
    for turn in range(300):
        if live and (not engine.free_rows or chance.random() < 0.4):
            engine.end(live.pop(chance.randrange(len(live))))
        else:
            job = Job(Tenant(f"tenant-{turn}"), 1)
            engine.arrive(job)
            engine.begin_step()
            engine.admit(job)
            live.append(job)
        engine.begin_step()
        accounts = engine.shares._accounts
        assert {account.num_rows for account in accounts.values()} <= {1}
        assert len(accounts) == len(live)
        assert all(account.number < 8 for account in accounts.values())


def test_requests_of_one_tenant_are_served_by_priority_and_arrival() -> None:
    policy = FairPolicy()
    policy.shares = Shares(8, 1000)
    queue = policy.make_queue()
    assert isinstance(queue, FairQueue)
    for name, priority, now in (("late", 0, 3.0), ("first", 0, 1.0), ("urgent", -1, 2.0)):
        request = make_request(name, priority=priority, now=now)
        policy.arrived(request)
        queue.add(request)
    assert [request.request_id for request in queue] == ["urgent", "first", "late"]
    assert [queue.pop().request_id for _ in range(3)] == ["urgent", "first", "late"]
    assert queue.peek() is None
    with pytest.raises(LookupError):
        queue.pop()


def test_the_victim_is_of_a_tenant_that_runs_more_than_its_share() -> None:
    policy = FairPolicy()
    policy.shares = Shares(8, 1000)
    names = ["a1", "a2", "a3", "b1"]
    running = [
        make_request(name, tenant=Tenant(name[0]), now=float(now))
        for now, name in enumerate(names, start=1)
    ]
    for request in running:
        policy.arrived(request)
    assert names[policy.pick_victim(running)] == "a3"  # not b1, although it is the youngest
    assert names[policy.pick_victim([running[0], running[3]]) * 3] == "b1"
