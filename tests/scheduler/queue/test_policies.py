"""Which queue is tried next, which request is preempted, and policies of other packages."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from longshore.protocol.errors import ConfigError
from longshore.scheduler.queue.outside_policies import (
    ENTRY_POINT_GROUP,
    CheckedPolicy,
    PolicyError,
    load_policy,
)
from longshore.scheduler.queue.policies import (
    POLICIES,
    ContinuumPolicy,
    FairQueue,
    FCFSPolicy,
    FCFSQueue,
    OrderedPolicy,
    PriorityPolicy,
    PriorityQueue,
)
from longshore.scheduler.queue.queues import WaitingRequests
from longshore.scheduler.request import Request
from tests.harness.shared_drivers import pressed
from tests.harness.tokens import prompt_of
from tests.scheduler.test_request import make_request


def turn(name: str, job_id: str | None = None, now: float = 1.0, **fields: Any) -> Request:
    return make_request(name, job_id=job_id, now=now, **{"is_last_step": True} | fields)


# Which of the two queues


@pytest.mark.req("QUE-04")
def test_fcfs_looks_at_what_was_set_aside_first() -> None:
    waiting, skipped = turn("new", now=1.0), turn("old", now=2.0)
    assert FCFSPolicy().prefers_skipped(waiting, skipped)


@pytest.mark.req("QUE-04")
def test_priority_compares_the_two_heads() -> None:
    policy = PriorityPolicy()
    first, second, third = turn("a", priority=0), turn("b", priority=1), turn("c", priority=1)
    assert policy.prefers_skipped(second, first)
    assert not policy.prefers_skipped(first, second)
    assert not policy.prefers_skipped(second, third)
    assert policy.prefers_skipped(third, second)


@pytest.mark.req("QUE-01")
@pytest.mark.parametrize(
    ("name", "served"),
    [("fcfs", "abc"), ("priority", "bca"), ("continuum", "cab"), ("fair", "bca")],
)
def test_both_queues_serve_in_the_order_of_the_policy(name: str, served: str) -> None:
    kinds = {name: type(policy().make_queue()) for name, policy in POLICIES.items()}
    assert kinds == {
        "fcfs": FCFSQueue,
        "priority": PriorityQueue,
        "continuum": PriorityQueue,
        "fair": FairQueue,
    }
    for enter in (WaitingRequests.add, WaitingRequests.add_blocked):
        waiting = WaitingRequests(POLICIES[name]())
        for request_id, priority, now in (("a", 2, 2.0), ("b", 0, 3.0), ("c", 1, 1.0)):
            enter(waiting, turn(request_id, priority=priority, now=now))
        assert [waiting.pop().request_id for _ in range(3) if waiting.peek()] == list(served)


# The victim


@pytest.mark.req("PRE-02")
def test_victim_is_the_youngest_under_fcfs() -> None:
    running = [turn(str(index), priority=-index) for index in range(3)]
    assert FCFSPolicy().pick_victim(running) == 2


@pytest.mark.req("PRE-02")
def test_victim_is_the_last_in_order_under_priority() -> None:
    running = [
        turn("a", priority=1, now=1.0),
        turn("b", priority=1, now=3.0),
        turn("c", priority=0, now=9.0),
        turn("d", priority=1, now=2.0),
    ]
    assert PriorityPolicy().pick_victim(running) == 1


@pytest.mark.req("PRE-02", "CTM-10")
def test_victim_is_the_last_whose_job_is_not_pinned_under_continuum() -> None:
    policy = ContinuumPolicy()
    running = [turn("a"), turn("b", "free"), turn("c", "pinned"), turn("d", "pinned too")]
    policy.update_pinned_state({"pinned", "pinned too"})
    assert policy.pick_victim(running) == 1
    assert policy.pick_victim(running[2:]) == 1  # all are pinned: the tail
    policy.update_pinned_state(())
    assert policy.pick_victim(running) == 3


# Continuum


@pytest.mark.req("QUE-07")
def test_a_turn_has_the_position_of_the_first_turn_of_its_job() -> None:
    waiting = WaitingRequests(ContinuumPolicy())
    for request in (
        turn("first of a", "a", now=1.0),
        turn("loner", now=2.0),
        turn("first of b", "b", now=3.0),
        turn("second of a", "a", now=4.0),
        turn("other loner", now=4.0),
    ):
        waiting.add(request)
    assert [request.request_id for request in waiting] == [
        "first of a", "second of a", "loner", "first of b", "other loner"
    ]  # fmt: skip


@pytest.mark.req("QUE-07")
def test_requests_of_pinned_jobs_go_first_in_both_queues_as_soon_as_they_are_pinned() -> None:
    waiting = WaitingRequests(ContinuumPolicy())
    for name, now in (("a", 1.0), ("b", 2.0), ("c", 3.0)):
        waiting.add(turn(name, name, now))
    waiting.add_blocked(turn("d", "d", 4.0))
    waiting.update_pinned_state(["c", "d"])
    assert [request.request_id for request in waiting] == ["c", "d", "a", "b"]
    waiting.update_pinned_state(["b"])
    assert [request.request_id for request in waiting] == ["b", "a", "c", "d"]
    waiting.update_pinned_state([])
    assert [request.request_id for request in waiting] == ["a", "b", "c", "d"]


@pytest.mark.req("CTM-01")
@pytest.mark.parametrize("name", ["fcfs", "priority"])
def test_jobs_and_pins_mean_nothing_to_the_other_policies(name: str) -> None:
    waiting = WaitingRequests(load_policy(name))
    for request in (turn("a", "a", 1.0), turn("b", "b", 2.0), turn("second of a", "a", 3.0)):
        waiting.add(request)
    waiting.update_pinned_state(["b"])
    assert [request.request_id for request in waiting] == ["a", "b", "second of a"]
    policy = load_policy(name)
    policy.update_pinned_state(["b"])
    assert policy.pick_victim(list(waiting)) == 2
    assert policy.pick_victim(list(waiting)[:2]) == 1


def test_a_job_without_live_requests_is_removed_unless_it_is_pinned() -> None:
    policy = ContinuumPolicy()
    for job_id in ("pinned", "gone"):
        first = turn(f"first of {job_id}", job_id, now=1.0)
        policy.arrived(first)
        policy.ended(first)
    policy.update_pinned_state(["pinned"])
    later = [turn("p", "pinned", now=5.0), turn("g", "gone", now=5.0)]
    for request in later:
        policy.arrived(request)
    assert [policy.order(request) for request in later] == [(False, 1.0, 5.0), (True, 5.0, 5.0)]


def test_the_state_of_continuum_is_bounded_by_the_live_jobs() -> None:
    policy = ContinuumPolicy()
    lasting = turn("lasting", "lasting", now=0.0)
    policy.arrived(lasting)
    for number in range(2000):
        request = turn(f"r{number}", f"job {number}", now=1.0 + number)
        policy.arrived(request)
        policy.ended(request)
        assert len(policy._jobs) <= 64
    assert policy.order(lasting) == (True, 0.0, 0.0)


class ContinuumAgainstAList(RuleBasedStateMachine):
    """Turns arrive, are admitted, preempted and ended while pins come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = ContinuumPolicy()
        self.waiting = WaitingRequests(self.policy)
        self.queued: list[Request] = []
        self.running: list[Request] = []
        self.first_arrival: dict[str, float] = {}
        self.pinned: set[str] = set()
        self.now = 0.0

    @rule(job=st.sampled_from([None, "a", "b", "c"]), blocked=st.booleans())
    def arrive(self, job: str | None, blocked: bool) -> None:
        self.now += 1.0
        request = turn(f"r{self.now:05}", job, self.now)
        live_jobs = {each.options.job_id for each in self.queued + self.running}
        if job is not None and job not in live_jobs | self.pinned:
            self.first_arrival.pop(job, None)
        self.first_arrival.setdefault(job or request.request_id, self.now)
        (self.waiting.add_blocked if blocked else self.waiting.add)(request)
        self.queued.append(request)

    @rule(jobs=st.sets(st.sampled_from("abc")))
    def pin(self, jobs: set[str]) -> None:
        # A job without live requests that is not pinned any more is removed at once.
        live_jobs = {each.options.job_id for each in self.queued + self.running}
        for job in self.pinned - jobs - live_jobs:
            self.first_arrival.pop(job, None)
        self.pinned = {job for job in jobs if job in self.first_arrival}
        self.waiting.update_pinned_state(self.pinned)

    @precondition(lambda self: self.queued)
    @rule()
    def admit(self) -> None:
        head = self.waiting.peek()
        assert head is self.in_order()[0]
        assert self.waiting.pop() is head
        self.queued.remove(head)
        self.running.append(head)

    @precondition(lambda self: self.queued)
    @rule()
    def set_aside(self) -> None:
        assert self.waiting.peek() is not None
        self.waiting.set_aside()
        self.waiting.end_step()

    @precondition(lambda self: self.running)
    @rule()
    def preempt(self) -> None:
        unpinned = [each for each in self.running if each.options.job_id not in self.pinned]
        victim = self.running.pop(self.policy.pick_victim(self.running))
        assert victim is (unpinned[-1] if unpinned else victim)
        self.waiting.put_back(victim)
        self.queued.append(victim)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        self.finish(request)

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def end_while_it_waits(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.queued))
        self.queued.remove(request)
        self.waiting.remove(request)
        self.finish(request)

    def finish(self, request: Request) -> None:
        self.waiting.ended(request)

    def in_order(self) -> list[Request]:
        def position(request: Request) -> tuple[bool, float, float]:
            job = request.options.job_id or request.request_id
            return job not in self.pinned, self.first_arrival[job], request.arrival_time

        return sorted(self.queued, key=position)

    @invariant()
    def it_serves_in_the_order_of_the_list(self) -> None:
        assert list(self.waiting) == self.in_order()


TestContinuumAgainstAList = pytest.mark.req("QUE-07")(ContinuumAgainstAList.TestCase)


# In the scheduler


@pytest.mark.req("QUE-06")
@pytest.mark.parametrize("name", list(POLICIES))
@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_no_request_of_equal_priority_is_overtaken_under_pressure(
    name: str, steps_in_flight: int, seed: int
) -> None:
    random = Random(seed)
    driver = pressed(name, max_num_seqs=4, max_steps_in_flight=steps_in_flight)
    for index in range(14):
        prompt = prompt_of(random.randrange(1, 20), random.randrange(80))
        driver.add(f"r{index}", prompt, max_tokens=random.randrange(1, 12))
        for _ in range(random.randrange(5)):
            driver.step()
            running = [driver.requests[each].arrival_time for each in driver.running]
            waiting = [request.arrival_time for request in driver.scheduler.waiting]
            assert running + waiting == sorted(running + waiting)
    driver.run()
    assert len(driver.finished) == 14
    assert any(end.num_preemptions for end in driver.finished.values())


# Policies from elsewhere


class Shortest(OrderedPolicy):
    """The smallest policy there can be."""

    def order(self, request: Any) -> Any:
        return request.num_prompt_tokens


@pytest.fixture
def module() -> Iterator[ModuleType]:
    """An importable module that holds `Shortest`, and things that are no policies."""
    made = ModuleType("some_policies")
    made.Shortest = Shortest  # type: ignore[attr-defined]
    made.NoPolicy = dict  # type: ignore[attr-defined]
    made.NeedsArguments = CheckedPolicy  # type: ignore[attr-defined]
    sys.modules["some_policies"] = made
    yield made
    del sys.modules["some_policies"]


def install(folder: Path, name: str, entry_points: dict[str, str]) -> None:
    """What pip writes for a package with these entry points."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{key} = {value}" for key, value in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{ENTRY_POINT_GROUP}]", *lines, ""]))


@pytest.mark.parametrize("name", list(POLICIES))
def test_built_in_policies_are_loaded_by_name(name: str) -> None:
    assert type(load_policy(name)) is POLICIES[name]
    assert load_policy(name) is not load_policy(name)


def test_a_class_is_loaded_by_its_import_path_and_serves(module: ModuleType) -> None:
    waiting = WaitingRequests(load_policy("some_policies:Shortest"))
    for name, prompt in (("long", 9), ("short", 2), ("middle", 5)):
        waiting.add(make_request(name, prompt=prompt))
    assert [request.request_id for request in waiting] == ["short", "middle", "long"]


def test_an_installed_policy_is_loaded_by_its_entry_point(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "theirs", {"shortest": "some_policies:Shortest", "fcfs": "nothing:At"})
    monkeypatch.syspath_prepend(tmp_path)
    policy = load_policy("shortest")
    policy.make_queue()
    assert policy.pick_victim([turn("a", prompt=3), turn("b", prompt=1)]) == 0
    assert isinstance(load_policy("fcfs"), FCFSPolicy)  # a built-in name cannot be replaced


def test_an_unknown_name_is_rejected_with_all_that_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "theirs", {"shortest": "some_policies:Shortest"})
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"unknown .* 'random'; use one of fcfs, priority, continuum, fair, shortest or",
    ):
        load_policy("random")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:Policy", "no_such_module"),
        ("some_policies:Missing", "Missing"),
        (
            "some_policies:NoPolicy",
            "is a dict; it must extend longshore.scheduler.queue.policies",
        ),
        ("some_policies:NeedsArguments", "cannot be created.*argument"),
        (":", "cannot be created"),
    ],
)
def test_an_invalid_policy_is_rejected_with_the_reason(
    module: ModuleType, name: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load_policy(name)
    assert repr(name) in str(caught.value)


class Wrong(OrderedPolicy):
    """Gives the answers it was made with; an exception is raised."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers

    def _answer(self, method: str, otherwise: Any) -> Any:
        answer = self.answers.get(method, otherwise)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def make_queue(self) -> Any:
        return self._answer("make_queue", super().make_queue())

    def order(self, request: Any) -> Any:
        return self._answer("order", 1)

    def prefers_skipped(self, waiting: Any, skipped: Any) -> Any:
        return self._answer("prefers_skipped", True)

    def pick_victim(self, running: Any) -> Any:
        return self._answer("pick_victim", 0)

    def arrived(self, request: Any) -> None:
        self._answer("arrived", None)

    def ended(self, request: Any) -> None:
        self._answer("ended", None)


def ask_everything(policy: CheckedPolicy) -> None:
    """Call each of a policy's methods."""
    waiting = WaitingRequests(policy)
    waiting.add(turn("a"))
    waiting.add_blocked(turn("b"))
    waiting.peek()
    policy.pick_victim(list(waiting))
    waiting.ended(turn("a"))


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        *((name, ZeroDivisionError("oh")) for name in (
            "make_queue", "order", "prefers_skipped", "pick_victim", "arrived", "ended",
        )),
        *(("pick_victim", answer) for answer in (-1, 2, None, True, 0.0, "a")),
        *(("prefers_skipped", answer) for answer in (None, 1, "skipped")),
        *(("order", answer) for answer in (None, math.nan, [1], (1, None), (1, (2,)))),
        *(("make_queue", answer) for answer in (None, [], {})),
    ],
)  # fmt: skip
def test_an_invalid_value_from_a_policy_is_an_error_with_policy_and_method(
    method: str, answer: Any
) -> None:
    with pytest.raises(PolicyError, match=rf"'theirs'.*{method}.*") as caught:
        ask_everything(CheckedPolicy(Wrong(**{method: answer}), "theirs"))
    assert ("ZeroDivisionError" if isinstance(answer, Exception) else repr(answer)) in str(
        caught.value
    )


def test_scheduler_stops_with_the_name_of_a_policy_that_picks_no_victim(module: ModuleType) -> None:
    class PicksNobody(Shortest):
        def pick_victim(self, running: Any) -> int:
            return len(running)

    module.PicksNobody = PicksNobody  # type: ignore[attr-defined]
    driver = pressed("some_policies:PicksNobody")
    for index in range(4):
        driver.add(f"r{index}", prompt_of(8, 20 * index), max_tokens=16)
    with pytest.raises(PolicyError, match=r"'some_policies:PicksNobody': pick_victim returned \d"):
        driver.run()


def test_orders_of_two_shapes_are_rejected_before_anything_is_queued() -> None:
    wrong = Wrong(order=(1, "a"))
    waiting = WaitingRequests(CheckedPolicy(wrong, "theirs"))
    waiting.add(turn("a"))
    for order in ((1, 2), 1, (1,), ("a", 1)):
        wrong.answers["order"] = order
        with pytest.raises(PolicyError, match="not comparable"):
            waiting.add(turn("b"))
        with pytest.raises(PolicyError, match="not comparable"):
            waiting.add_blocked(turn("b"))
    assert [request.request_id for request in waiting] == ["a"]


def test_a_policy_cannot_change_the_scheduler_s_list_of_running_requests() -> None:
    class Greedy(OrderedPolicy):
        def order(self, request: Any) -> Any:
            return 0

        def pick_victim(self, running: Any) -> int:
            running.clear()
            return 0

    running = [turn("a"), turn("b")]
    with pytest.raises(PolicyError, match="pick_victim"):
        CheckedPolicy(Greedy(), "greedy").pick_victim(running)
    assert len(running) == 2


class EldestFirst(FCFSPolicy):
    """First come, first preempted: two requests could chase each other off their rows for ever."""

    def pick_victim(self, running: Any) -> int:
        return 0


def test_a_victim_that_the_policy_serves_first_is_replaced_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = pressed(scheduler={"policy": EldestFirst()})
    keys = [driver.add(f"r{index}", prompt_of(14, 25 * index), max_tokens=14) for index in range(4)]
    driver.run(limit=300)
    assert all(len(driver.received[key]) == 14 for key in keys)
    assert sum(driver.finished[key].num_preemptions for key in keys) > 0
    assert [text for text in caplog.messages if "serves first" in text] == [
        "scheduling policy 'EldestFirst' preempts the request that it serves first; preempting "
        "the youngest other request instead, so that one can make progress (logged once)"
    ]


@pytest.mark.parametrize(
    ("prompts", "answer", "victim"),
    [
        ([3, 1, 2], 0, 0),
        ([3, 1, 2], 2, 2),
        ([3, 1, 2], 1, 2),  # `Shortest` serves it first
        ([3, 2, 1], 2, 1),
        ([3], 0, 0),  # no other request runs
    ],
)
def test_any_victim_but_the_one_served_first_is_taken_from_a_policy_with_an_order(
    module: ModuleType, prompts: list[int], answer: int, victim: int
) -> None:
    class Picks(Shortest):
        def pick_victim(self, running: Any) -> int:
            return answer

    policy = CheckedPolicy(Picks(), "picks")
    policy.make_queue()
    running = [turn(name, prompt=prompt) for name, prompt in zip("abc", prompts, strict=False)]
    assert policy.pick_victim(running) == victim
