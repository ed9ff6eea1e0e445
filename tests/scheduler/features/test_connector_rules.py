"""One small situation per rule of transfers (docs/connectors.md), whose connector does what the
test says."""

from typing import Any

import msgspec
import pytest

from longshore.connectors.base import (
    AskLater,
    ConnectorOutput,
    FinishAction,
    Match,
    Matched,
    RequestView,
    StepView,
)
from longshore.protocol.outputs import FinishReason, RequestEvent, TransferReport
from longshore.protocol.requests import CacheHint, Tenant
from longshore.scheduler.request import RequestStatus
from tests.harness.connector import AdversarialConnector, has_leading, has_stored
from tests.harness.driver import Driver
from tests.harness.kv_groups import BLOCK_SIZE
from tests.harness.shared_drivers import connected
from tests.harness.tokens import expected_output, prompt_of

EVERYTHING = 1 << 20


def background(num_tokens: int = EVERYTHING, **settings: Any) -> Driver:
    """A connector that has `num_tokens` leading tokens of every request, loaded in background."""
    rules = {"match": has_leading(num_tokens, is_async=True)}
    return connected(**({"rules": rules} | settings))


def in_step(num_tokens: int = EVERYTHING, **settings: Any) -> Driver:
    """The same, loaded within the step."""
    rules = {"match": has_leading(num_tokens, is_async=False)}
    return connected(**({"rules": rules} | settings))


LOOKS = {"stores": lambda: False}
"""Rules of a connector that is told of storable blocks, and stores none."""


def only(*request_ids: str, num_tokens: int = EVERYTHING, is_async: bool = True) -> dict[str, Any]:
    """Rules of a connector that has something for these requests alone."""
    has = has_leading(num_tokens, is_async=is_async)

    def match(request: RequestView, num_computed_tokens: int) -> Match:
        return (
            has(request, num_computed_tokens) if request.request_id in request_ids else Matched(0)
        )

    return {"match": match}


def settle(driver: Driver) -> None:
    """Everything ends, and nothing remains."""
    for _ in range(20):
        driver.ranks.end_all()
        driver.run_until_idle()
        if driver.transfers.is_idle and not driver.ranks.stores:
            break
    driver.check_idle()


@pytest.mark.req("CFG-03")
def test_a_producer_loads_nothing_and_a_consumer_stores_nothing() -> None:
    stored: dict[str, int] = {}
    loaded: dict[str, int] = {}
    for role in ("kv_both", "kv_producer", "kv_consumer"):
        rules = {"match": has_leading(8, is_async=False)} | LOOKS
        driver = connected(rules=rules, kv_role=role)
        key = driver.add("r", prompt_of(20), max_tokens=4)
        settle(driver)
        driver.check_complete(key)
        loaded[role] = driver.scheduler.make_stats().num_external_hit_tokens
        stored[role] = sum(len(view.storable) for view in driver.connector.steps)
    assert loaded == {"kv_both": 8, "kv_producer": 0, "kv_consumer": 8}
    assert stored["kv_both"] > 0 < stored["kv_producer"]
    assert stored["kv_consumer"] == 0


# The order and the number of calls


@pytest.mark.parametrize("reads_ahead", [False, True])
def test_a_connector_that_reads_ahead_knows_the_blocks_of_a_queued_request(
    reads_ahead: bool,
) -> None:
    driver = connected(rules={})
    hashes: list[int] = []
    connector = driver.scheduler._transfers.connector
    connector.reads_ahead = reads_ahead
    queued = connector.on_new_request

    def on_new_request(request: RequestView) -> None:
        hashes.append(len(request.block_hashes))
        queued(request)

    connector.on_new_request = on_new_request
    driver.add("request", prompt_of(4 * BLOCK_SIZE + 1))
    assert hashes == [4 if reads_ahead else 0]


def test_a_lookup_says_how_long_the_request_has_waited() -> None:
    waited: list[float] = []

    def match(request: RequestView, num_computed_tokens: int) -> Match:
        waited.append(request.waiting_s)
        return AskLater() if request.waiting_s < 2.0 else Matched(0)

    driver = connected(rules={"match": match})
    driver.now = 50.0
    driver.add("request", prompt_of(9))
    for now in (50.5, 51.5, 52.5):
        driver.now = now
        driver.plan()
    assert waited == [0.5, 1.5, 2.5]
    assert driver.requests["request"].row >= 0


def test_a_connector_knows_the_options_of_a_request() -> None:
    seen: list[RequestView] = []

    def match(request: RequestView, num_computed_tokens: int) -> Match:
        seen.append(request)
        return Matched(0)

    driver = connected(rules={"match": match})
    options: dict[str, Any] = {
        "cache_salt": "salt",
        "job_id": "job",
        "tenant": Tenant("key"),
        "cache_hint": CacheHint(ttl_s=5.0),
        "kv_transfer_params": {"a": 1},
    }
    driver.add("request", prompt_of(9), **options)
    driver.plan()
    assert {name: getattr(seen[0], name) for name in options} == options


def test_a_connector_cannot_change_the_tokens_of_a_request() -> None:
    seen: list[RequestView] = []

    def match(request: RequestView, num_computed_tokens: int) -> Match:
        seen.append(request)
        return Matched(0)

    driver = connected(rules={"match": match})
    driver.add("request", prompt_of(9))
    driver.plan()
    with pytest.raises(ValueError, match="read-only"):
        seen[0].token_ids[0] = 1


def test_a_connector_keeps_a_request_from_cached_blocks_but_not_from_its_own_loads() -> None:
    driver = connected(rules=only("loads", num_tokens=8))
    driver.adversary.no_hits |= {"computes", "loads"}
    keys = [driver.add(name, prompt_of(17)) for name in ("first", "computes", "loads", "hits")]
    settle(driver)
    driver.check_complete(*keys)
    cached = [driver.finished[key].num_cached_tokens for key in keys]
    assert cached == [0, 0, 8, 16]
    stats = driver.scheduler.make_stats()
    assert stats.num_prefix_hit_tokens == 16
    assert stats.num_external_hit_tokens == 8


@pytest.mark.req("CON-15", "CON-17")
def test_a_plain_step_calls_the_connector_for_its_metadata_alone() -> None:
    driver = connected(max_steps_in_flight=1)
    calls = driver.adversary.calls
    key = driver.add("r", prompt_of(5))
    assert calls == ["bind_blocks", "on_new_request"]
    driver.step()
    assert calls[2:] == [
        "get_num_new_matched_tokens",
        *["update_state_after_alloc"] * calls.count("update_state_after_alloc"),
        "build_connector_meta",
    ]
    del calls[:]
    driver.step()
    driver.step()
    assert calls == ["build_connector_meta"] * 2
    del calls[:]
    driver.run_until_idle()
    assert calls == [
        "build_connector_meta",
        "request_finished",
        "build_connector_meta",  # the workers learn of the end
    ]
    driver.check_complete(key)


@pytest.mark.req("CON-17")
def test_a_steady_step_without_news_calls_no_hook() -> None:
    driver = connected(rules=LOOKS, block_size=16, max_model_len=256, verify_plan=False)
    driver.add("r", prompt_of(18), max_tokens=200)
    driver.steps(5)
    del driver.adversary.calls[:], driver.adversary.steps[:]
    driver.steps(32)
    assert driver.adversary.calls == ["build_connector_meta"] * 2
    assert [len(step.storable) for step in driver.adversary.steps] == [1, 1]


@pytest.mark.req("CON-07", "CON-17")
def test_a_connector_that_needs_every_step_is_asked_in_every_step() -> None:
    connector = AdversarialConnector()
    connector.needs_every_step = True
    driver = Driver(connector=connector, block_size=16, max_model_len=256, verify_plan=False)
    driver.add("r", prompt_of(18), max_tokens=200)
    driver.steps(40)
    assert [step.step for step in connector.steps] == list(range(1, 41))


@pytest.mark.req("CON-07")
def test_a_store_begins_and_is_sent_in_steady_steps() -> None:
    driver = connected(
        rules={"stores": lambda: True}, block_size=16, max_model_len=256, verify_plan=False
    )
    driver.add("r", prompt_of(18), max_tokens=200)
    driver.steps(10)
    del driver.adversary.calls[:], driver.plans[:]
    wanted = driver.scheduler.running.wanted
    driver.scheduler.running.wanted = None  # type: ignore[method-assign,assignment]
    driver.steps(16)
    driver.scheduler.running.wanted = wanted  # type: ignore[method-assign]
    assert driver.adversary.calls == ["build_connector_meta"]  # when the block's plan is answered
    stores = [store for plan in driver.plans for store in driver.commands_of(plan).stores]
    assert len(stores) == 1
    driver.abort((0, 0))
    settle(driver)


def test_work_that_a_report_brings_is_sent_with_the_next_steady_plan() -> None:
    class Answering(AdversarialConnector):
        """Has work for the workers after each of their messages."""

        is_due = False

        def update_connector_output(self, output: ConnectorOutput) -> None:
            super().update_connector_output(output)
            self.is_due = True

        @property
        def has_pending_work(self) -> bool:
            return self.is_due

        def build_connector_meta(self, step: StepView) -> bytes:
            self.is_due = False
            return super().build_connector_meta(step)

    connector = Answering()
    driver = Driver(connector=connector, block_size=16, max_model_len=256, verify_plan=False)
    driver.add("r", prompt_of(18), max_tokens=200)
    driver.steps(5)
    del connector.steps[:]
    driver.steps(3)
    assert connector.steps == []
    message = TransferReport(1, 0, connector_metadata=b"one")
    driver.scheduler.update_from_transfers(message, driver.now)
    driver.steps(2)
    assert [step.step for step in connector.steps] == [9]
    driver.plan()
    driver.execute()
    step = driver.unanswered[0]
    step.output = msgspec.structs.replace(step.output, connector_metadata=b"two")
    driver.answer()
    driver.steps(2)
    assert [step.step for step in connector.steps] == [9, 12]


def test_a_connector_hears_of_uncached_blocks_in_a_steady_step() -> None:
    """The output of a request that has ended was not finite; the others continue as before."""
    driver = connected(verify_plan=False)
    driver.add("other", prompt_of(6, 40), max_tokens=30)
    bad = driver.add("bad", prompt_of(6), max_tokens=30)
    driver.steps(4)
    driver.plan()
    driver.abort(bad)
    driver.answer()
    driver.plan()  # says that the request has ended; the plan before it is unanswered
    del driver.adversary.steps[:]
    driver.answer(nan_rows=[1])
    driver.scheduler.running.wanted = None  # type: ignore[method-assign,assignment]
    driver.plan()
    assert any(step.uncached for step in driver.adversary.steps)


@pytest.mark.req("CON-07")
def test_metadata_of_the_step_rides_on_its_plan() -> None:
    driver = in_step(8)
    driver.add("r", prompt_of(10))
    plan = driver.plan()
    assert plan is not None
    (load,) = driver.commands_of(plan).loads
    assert load.request_id == "r"
    assert (load.first, len(load.prefixes)) == (0, 8)
    assert driver.adversary.steps[-1].step == plan.step == 1
    assert [one.request_id for one in driver.adversary.steps[-1].admitted] == ["r"]
    settle(driver)


@pytest.mark.req("CON-06")
def test_external_tokens_are_paired_with_the_blocks_after_the_local_hits() -> None:
    driver = connected(rules=only("b"))
    first = driver.add("a", prompt_of(9))
    driver.run_until_idle()
    second = driver.add("b", prompt_of(14))
    driver.plan()
    (load,) = driver.adversary.loads_begun
    assert (load.first, len(load.prefixes)) == (8, 6)
    assert len(load.targets) == 2
    driver.ranks.end_load("b")
    driver.plan()
    table = driver.workers.tables[0][0]
    assert set(table[2:4]) == load.targets
    settle(driver)
    driver.check_complete(first, second)
    assert (
        driver.finished[second].num_cached_tokens == 13
    )  # the last token is computed all the same


# Asking


@pytest.mark.req("CON-04")
def test_a_request_whose_connector_does_not_know_yet_lets_others_pass() -> None:
    answers: list[Match] = [AskLater(), AskLater(), Matched(8)]

    def match(request: RequestView, num_computed_tokens: int) -> Match:
        return answers.pop(0) if request.request_id == "asks" else Matched(0)

    driver = connected(rules={"match": match}, max_steps_in_flight=1)
    asks = driver.add("asks", prompt_of(10))
    other = driver.add("other", prompt_of(6, 40))
    plans = [driver.step() for _ in range(3)]
    assert [[start.request_id for start in plan.added] for plan in plans if plan] == [
        ["other"],
        [],
        ["asks"],
    ]
    assert plans[2] is not None
    assert plans[2].added[0].num_computed_tokens == 8
    assert driver.adversary.asked["asks"] == 3
    settle(driver)
    driver.check_complete(asks, other)


@pytest.mark.req("CON-04")
def test_an_engine_that_has_to_ask_later_is_idle_and_continues_when_the_connector_knows() -> None:
    answers: list[Match] = [AskLater()] * 5

    def match(request: RequestView, num_computed_tokens: int) -> Match:
        return answers.pop() if answers else Matched(0)

    driver = connected(rules={"match": match})
    key = driver.add("r", prompt_of(10))
    for _ in range(5):
        assert driver.plan() is None
    settle(driver)
    driver.check_complete(key)


@pytest.mark.req("CON-05", "KVM-10")
def test_a_background_load_holds_uncached_blocks_and_no_row_until_it_is_reported() -> None:
    driver = connected(rules={"match": has_leading(12, is_async=True)} | LOOKS)
    key = driver.add("r", prompt_of(13))
    twin = driver.add("twin", prompt_of(13))
    free = driver.num_free_blocks
    plan = driver.plan()
    assert plan is not None
    assert (plan.num_rows, plan.num_scheduled_tokens, plan.added) == (0, 0, ())
    assert driver.num_free_blocks == free - 8  # four each: nothing of the other could be found
    assert driver.scheduler.get_request_counts() == (0, 2)
    for _ in range(3):
        driver.step()
    driver.ranks.end_load("r")
    plan = driver.step()
    assert plan is not None
    (start,) = plan.added
    assert (start.request_id, start.num_computed_tokens) == ("r", 12)
    assert driver.adversary.asked == {"r": 1, "twin": 1}
    third = driver.add("third", prompt_of(13))
    plan = driver.step()
    assert plan is not None
    assert plan.added[0].request_id == "third"  # found what was loaded, and had nothing to load
    assert plan.added[0].num_computed_tokens == 12
    settle(driver)
    loaded = next(blocks for step in driver.adversary.steps for blocks in step.storable)
    assert (loaded.request_id, len(loaded.block_hashes)) == ("r", 3)
    driver.check_complete(key, twin, third)


@pytest.mark.req("REQ-08")
@pytest.mark.parametrize("how", ["it succeeds", "it is too late", "an abort", "a new epoch"])
def test_the_end_of_a_request_says_when_its_load_began_and_ended(how: str) -> None:
    driver = background(12, load_timeout_s=10.0, num_blocks=60)
    key = driver.add("r", prompt_of(13))
    driver.now += 1.0
    driver.plan()
    driver.now += 2.0
    match how:
        case "it succeeds":
            driver.ranks.end_load("r")
        case "it is too late":
            driver.now += 10.0
        case "an abort":
            driver.abort(key)
        case "a new epoch":
            driver.restart_workers()
            driver.adversary.match = lambda request, num_computed_tokens: Matched(0)
    settle(driver)
    load = [(event, at) for event, at in driver.finished[key].events if "LOAD" in event.name]
    (_, began), (_, ended) = load
    assert [event for event, _ in load] == [RequestEvent.LOAD_BEGUN, RequestEvent.LOAD_ENDED]
    assert began >= 1.0
    assert ended - began == (12.0 if how == "it is too late" else 2.0)


@pytest.mark.req("CON-05")
def test_a_request_that_was_loaded_is_not_asked_about_again() -> None:
    driver = background(max_num_seqs=1)
    keys = [driver.add(name, prompt_of(9, start)) for name, start in (("a", 0), ("b", 30))]
    driver.plan()
    driver.ranks.end_all()
    settle(driver)
    assert driver.adversary.asked == {"a": 1, "b": 1}
    driver.check_complete(*keys)


@pytest.mark.req("CON-05")
def test_a_request_whose_load_took_too_long_is_not_asked_about_again_when_the_load_has_ended() -> (
    None
):
    driver = connected(rules=only("late"), max_num_seqs=1, load_timeout_s=5.0)
    late = driver.add("late", prompt_of(9))
    driver.plan()
    runs = driver.add("runs", prompt_of(9, 30), max_tokens=20)
    driver.step()
    driver.now += 5.0
    driver.step()
    assert driver.adversary.abandoned == ["late"]
    driver.ranks.end_load("late")
    assert driver.scheduler.make_stats().num_quarantined_blocks == 0
    assert driver.requests["late"].row < 0, "it waits for the row"
    settle(driver)
    assert driver.adversary.asked["late"] == 1
    driver.check_complete(late, runs)


@pytest.mark.req("SCH-13")
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("length", [8, 9])
def test_the_last_token_is_computed_also_when_all_were_loaded(is_async: bool, length: int) -> None:
    rules = {"match": lambda request, num_computed_tokens: Matched(EVERYTHING, is_async)}
    driver = connected(rules=rules)
    key = driver.add("r", prompt_of(length))
    driver.plan()
    (load,) = driver.adversary.loads_begun
    assert len(load.prefixes) == length
    driver.ranks.end_all()
    driver.step()
    (start,) = [start for plan in driver.plans for start in plan.added]
    assert start.num_computed_tokens == length - 1
    settle(driver)
    driver.check_complete(key)


def test_a_loaded_request_that_was_preempted_is_asked_about_again() -> None:
    driver = connected(num_blocks=9, max_model_len=32, rules=only("young", num_tokens=8))
    old = driver.add("old", prompt_of(11), max_tokens=16)
    young = driver.add("young", prompt_of(11, 40), max_tokens=12)
    driver.plan()
    driver.ranks.end_load("young")
    while not driver.finished:
        driver.step()
        driver.ranks.end_all()
    assert driver.scheduler.make_stats().num_preemptions == 1
    assert driver.adversary.asked["young"] > 1
    settle(driver)
    driver.check_complete(old)
    driver.check_complete(young)


# Ownership


@pytest.mark.parametrize("is_async", [False, True])
def test_a_block_of_a_plan_in_flight_is_not_the_target_of_a_load(is_async: bool) -> None:
    rules = only("loads", is_async=is_async)
    driver = connected(num_blocks=9, rules=rules, max_model_len=32, max_loading_blocks=8)
    leaves = driver.add("leaves", prompt_of(20))
    driver.plan()
    driver.plan()
    driver.abort(leaves)
    loads = driver.add("loads", prompt_of(20, 40))
    assert driver.num_free_blocks == 8
    while driver.unanswered:  # `Transfers.begin` rejects blocks of these plans
        driver.answer()
        driver.plan()
    assert driver.adversary.loads_begun
    settle(driver)
    driver.check_complete(loads)


def test_a_block_of_a_plan_in_flight_is_reused_for_compute() -> None:
    driver = connected(num_blocks=9, max_model_len=32)
    leaves = driver.add("leaves", prompt_of(28))
    driver.plan()
    driver.abort(leaves)
    stays = driver.add("stays", prompt_of(28, 40))
    plan = driver.plan()
    assert plan is not None
    assert [start.request_id for start in plan.added] == ["stays"]
    settle(driver)
    driver.check_complete(stays)


@pytest.mark.req("CON-08", "MET-08")
@pytest.mark.parametrize("end", ["length", "abort", "stop"])
def test_blocks_of_an_ended_request_stay_until_they_are_sent(end: str) -> None:
    driver = connected(
        num_ranks=2, rules={"depart": lambda request: FinishAction(True, {"lease": 5})}
    )
    key = driver.add("r", prompt_of(9), max_tokens=4)
    if end == "length":
        driver.run_until_idle()
    else:
        driver.step()
        driver.step()
        if end == "abort":
            driver.abort(key)
        else:
            driver.stop_found(key, 1)
        driver.run_until_idle()
    assert driver.finished[key].kv_transfer_params == {"lease": 5}
    held = driver.num_blocks - 1 - driver.num_free_blocks
    assert driver.adversary.ended_transfers == []
    assert held == len(driver.transfers.sending["r"]) >= 3
    driver.ranks.end_send("r", 0)
    assert driver.num_blocks - 1 - driver.num_free_blocks == held
    driver.ranks.end_send("r", 1)
    assert driver.adversary.ended_transfers == ["r"]
    settle(driver)


@pytest.mark.req("CON-08")
def test_request_finished_is_called_once_per_accepted_request_and_never_for_a_rejected_one() -> (
    None
):
    driver = background(max_num_seqs=1, load_timeout_s=5.0)
    keys = {
        name: driver.add(name, prompt_of(9, 20 * index), max_tokens=3)
        for index, name in enumerate(["runs", "loads", "waits", "stops"])
    }
    rejected = [
        driver.add("runs", prompt_of(5)),
        driver.add("long", prompt_of(100)),
        driver.add("empty", []),
        driver.add("wrong", [10**6]),
    ]
    driver.plan()
    driver.ranks.end_load("runs")
    driver.step()
    driver.abort(keys["loads"])
    driver.abort(keys["waits"])
    driver.stop_found(keys["runs"], 1)
    done = driver.add("done", prompt_of(5), outputs=expected_output("done", 2), max_tokens=2)
    settle(driver)
    assert set(driver.adversary.begun) - {"done"} == {"runs", "loads", "waits", "stops"}
    assert driver.adversary.begun == driver.adversary.ended
    assert set(driver.adversary.ended.values()) == {1}
    assert {driver.reason(key) for key in rejected} <= {FinishReason.IGNORED, FinishReason.ERROR}
    assert driver.reason(done) is FinishReason.LENGTH_CAPPED


def test_an_aborted_requests_load_keeps_its_blocks_until_it_has_ended() -> None:
    driver = background(12, num_ranks=2)
    key = driver.add("r", prompt_of(13))
    driver.plan()
    driver.ranks.write("r", 0)
    driver.abort(key)
    assert driver.reason(key) is FinishReason.ABORTED
    assert driver.adversary.abandoned == ["r"]
    assert driver.scheduler.make_stats().num_quarantined_blocks == 4
    driver.ranks.end_load("r", 0)
    assert driver.scheduler.make_stats().num_quarantined_blocks == 4
    driver.ranks.end_load("r", 1)
    assert driver.scheduler.make_stats().num_quarantined_blocks == 0
    settle(driver)


def test_after_the_deadline_the_request_computes_on_other_blocks() -> None:
    driver = background(12, load_timeout_s=10.0)
    key = driver.add("r", prompt_of(13), max_tokens=20)
    driver.plan()
    (load,) = driver.adversary.loads_begun
    while not driver.adversary.abandoned:
        driver.step()
        assert driver.now < 20.0
    driver.step()
    driver.step()
    assert driver.workers.request_ids == {0: "r"}
    assert not load.targets & set(driver.workers.tables[0][0])
    assert driver.scheduler.make_stats().num_quarantined_blocks == 4
    driver.step()
    driver.ranks.write("r", 0)  # late, and into blocks without an owner
    driver.run_until_idle()
    driver.check_complete(key)
    assert driver.scheduler.make_stats().num_quarantined_blocks == 4
    driver.ranks.end_load("r")
    assert driver.scheduler.make_stats().num_quarantined_blocks == 0
    settle(driver)


def test_the_id_of_a_request_whose_load_is_in_quarantine_loads_nothing_else() -> None:
    driver = background(12, num_blocks=60)
    first = driver.add("r", prompt_of(13))
    driver.plan()
    driver.abort(first)
    again = driver.add("r", prompt_of(13))
    driver.run_until_idle()
    driver.ranks.end_load("r")  # of the first life, whatever became of the second
    if again not in driver.finished:
        driver.run_until_idle()
    settle(driver)
    assert again in driver.finished


def test_the_id_of_a_request_whose_blocks_are_being_sent_is_rejected() -> None:
    driver = connected(rules={"depart": lambda request: FinishAction(True)})
    first = driver.add("r", prompt_of(9))
    driver.run_until_idle()
    again = driver.add("r", prompt_of(9))
    assert driver.reason(again) in (FinishReason.ERROR, FinishReason.IGNORED)
    driver.ranks.end_send("r")
    third = driver.add("r", prompt_of(9))
    settle(driver)
    driver.check_complete(first, third)


def test_held_blocks_outlive_their_request_until_they_are_released() -> None:
    driver = connected(rules={"stores": lambda: True}, max_steps_in_flight=1)
    key = driver.add("r", prompt_of(9), max_tokens=4)
    driver.run_until_idle()
    assert key in driver.finished
    assert [(len(store.block_ids), len(store.block_hashes)) for store in driver.ranks.stores] == [
        (2, 2),
        (1, 1),
    ]
    assert driver.num_free_blocks == driver.num_blocks - 1 - 3
    other = driver.add("other", prompt_of(20, 40), max_tokens=30)
    driver.run_until_idle()
    stored = {
        (store.group, block_hash)
        for store in driver.ranks.stores
        for block_hash in store.block_hashes
    }
    for store in list(driver.ranks.stores):
        driver.ranks.end_store(store)
    assert set(driver.stored) == stored
    driver.check_complete(other)
    settle(driver)


def test_a_block_that_a_store_released_is_fenced_by_the_plan_that_still_computes_on_it() -> None:
    rules = only("loads") | {"stores": lambda: True}
    driver = connected(num_blocks=9, max_model_len=32, max_loading_blocks=8, rules=rules)
    leaves = driver.add("leaves", prompt_of(9), max_tokens=12)
    driver.plan()
    driver.answer()
    driver.plan()
    driver.plan()
    (store,) = driver.ranks.stores
    driver.abort(leaves)
    driver.ranks.end_store(store)
    loads = driver.add("loads", prompt_of(31, 40), max_tokens=1)
    assert driver.num_free_blocks == 8
    for _ in range(3):  # `Transfers.begin` rejects blocks of these plans
        driver.answer()
        driver.plan()
    assert driver.adversary.loads_begun
    settle(driver)
    driver.check_complete(loads)


@pytest.mark.req("CON-15")
def test_a_hold_that_does_not_exist_cannot_be_released() -> None:
    driver = connected()
    holder = driver.adversary.holder
    hold_id = holder.hold([3, 4])
    assert driver.num_free_blocks == driver.num_blocks - 3
    holder.release(hold_id)
    for number in (hold_id, 99):
        with pytest.raises(KeyError):
            holder.release(number)
    assert driver.num_free_blocks == driver.num_blocks - 1


# Reports


@pytest.mark.req("CON-11")
def test_a_load_has_ended_when_all_ranks_have_said_so() -> None:
    driver = background(8, num_ranks=3)
    key = driver.add("r", prompt_of(9))
    driver.plan()
    for rank in (2, 0):
        driver.ranks.end_load("r", rank)
        driver.step()
        assert driver.scheduler.get_request_counts() == (0, 1)
        assert driver.adversary.ended_transfers == []
    assert driver.scheduler.make_stats().num_bad_messages == 0
    driver.ranks.report(2, receiving=["r"])  # said already
    assert driver.scheduler.make_stats().num_bad_messages == 1
    driver.step()
    assert driver.scheduler.get_request_counts() == (0, 1)
    driver.ranks.end_load("r", 1)
    assert driver.adversary.ended_transfers == ["r"]
    driver.step()
    assert driver.scheduler.get_request_counts() == (1, 0)
    settle(driver)
    driver.check_complete(key)


@pytest.mark.req("CON-11")
def test_metadata_of_the_ranks_reaches_the_connector() -> None:
    driver = connected(num_ranks=2)
    driver.ranks.report(0, metadata=b"zero")
    driver.ranks.report(1, metadata=b"one")
    received = [bytes(item) for output in driver.adversary.outputs for item in output.metadata]
    assert received == [b"zero", b"one"]
    assert {output.step for output in driver.adversary.outputs} == {0}


def test_metadata_of_an_answer_reaches_the_connector_with_its_step() -> None:
    driver = connected(max_steps_in_flight=1)
    driver.add("r", prompt_of(5))
    driver.plan()
    driver.execute()
    (step,) = driver.unanswered
    assert step.output is not None
    step.output = msgspec.structs.replace(step.output, connector_metadata=b"from the step")
    driver.answer()
    output = driver.adversary.outputs[-1]
    assert (output.step, [bytes(item) for item in output.metadata]) == (1, [b"from the step"])


@pytest.mark.req("MET-08")
def test_reports_about_nothing_change_nothing() -> None:
    driver = background(8, num_ranks=2)
    loads = driver.add("loads", prompt_of(9))
    gone = driver.add("gone", prompt_of(9, 40))
    driver.plan()
    driver.ranks.end_load("gone")
    driver.abort(gone)
    free = driver.num_free_blocks
    for rank in (0, 1, 2, -1):
        driver.ranks.report(rank, receiving=["gone", "unknown"], sending=["gone", "loads"])
    driver.ranks.report(7, receiving=["loads"])
    driver.ranks.report(-1, receiving=["loads"])
    driver.ranks.report(0, receiving=["loads"], epoch=9)
    driver.ranks.report(1, receiving=["loads"], epoch=0)
    assert driver.scheduler.make_stats().num_bad_messages == 20
    assert driver.num_free_blocks == free
    assert driver.scheduler.get_request_counts() == (0, 1)
    settle(driver)
    driver.check_complete(loads)


def test_an_unsolicited_report_wakes_an_idle_engine() -> None:
    driver = background(8)
    key = driver.add("r", prompt_of(9))
    driver.run_until_idle()
    assert driver.plan() is None
    driver.ranks.end_load("r")
    plan = driver.plan()
    assert plan is not None
    assert [start.request_id for start in plan.added] == ["r"]
    settle(driver)
    driver.check_complete(key)


def test_a_connector_gets_a_plan_for_its_stores_although_no_request_runs() -> None:
    driver = connected(rules={"stores": lambda: True}, max_steps_in_flight=1)
    driver.add("r", prompt_of(9), max_tokens=1)
    driver.step()
    assert not driver.scheduler.has_unfinished_requests()
    assert driver.scheduler.has_transfers()
    plan = driver.step()
    assert plan is not None
    assert driver.commands_of(plan).stores
    settle(driver)


# Failures


@pytest.mark.req("MET-07")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_failed_background_load_is_computed_from_its_first_bad_block_on(num_ranks: int) -> None:
    rules = {"match": has_leading(16, is_async=True)} | LOOKS
    driver = connected(rules=rules, num_ranks=num_ranks)
    key = driver.add("r", prompt_of(18))
    driver.plan()
    (load,) = driver.adversary.loads_begun
    bad = load.block_ids[0][2]
    driver.ranks.end_load("r", 0, failing=[bad])
    if num_ranks == 2:
        driver.ranks.end_load("r", 1, failing=[load.block_ids[0][3]])
    driver.step()
    (start,) = [start for plan in driver.plans for start in plan.added]
    assert start.num_computed_tokens == 2 * BLOCK_SIZE
    assert start.block_ids[0].tolist()[:4] == load.block_ids[0]
    settle(driver)
    storable = {
        id_ for step in driver.adversary.steps for item in step.storable for id_ in item.block_ids
    }
    assert load.targets <= storable  # cached when they were computed, and not before
    driver.check_complete(key)


def test_what_a_failed_load_left_unwritten_is_cleared_and_the_rest_is_not() -> None:
    driver = background(16)
    driver.add("r", prompt_of(18))
    plan = driver.plan()
    assert plan is not None
    assert plan.zero_block_ids.tolist() == []
    (load,) = driver.adversary.loads_begun
    driver.ranks.end_load("r", failing=load.block_ids[0][2:])
    plan = driver.step()
    assert plan is not None
    zeroed = set(plan.zero_block_ids.tolist())
    assert set(load.block_ids[0][2:]) <= zeroed
    assert not set(load.block_ids[0][:2]) & zeroed
    settle(driver)


@pytest.mark.req("MET-05")
def test_policy_fail_ends_a_request_whose_background_load_fails() -> None:
    driver = background(16, load_failure_policy="fail")
    bad, good = driver.add("bad", prompt_of(18)), driver.add("good", prompt_of(18, 40))
    driver.plan()
    driver.ranks.end_load("bad", failing=[driver.adversary.loads_begun[0].block_ids[0][2]])
    driver.ranks.end_load("good")
    settle(driver)
    assert driver.reason(bad) is FinishReason.ERROR
    assert "load" in (driver.finished[bad].message or "")
    driver.check_complete(good)


def fails_at(index: int) -> Any:
    """The block at this place of the first load fails."""
    left = [index]
    return lambda load: [load.block_ids[0][left.pop()]] if left else []


@pytest.mark.req("MET-05", "MET-06")
@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_failed_load_in_a_step_rewinds_all_requests_that_used_the_block(in_flight: int) -> None:
    driver = in_step(12, fail_sync=fails_at(1), max_steps_in_flight=in_flight)
    keys = [driver.add("loads", prompt_of(18), max_tokens=6)]
    keys.append(driver.add("hits", prompt_of(18), max_tokens=6))
    keys.append(driver.add("other", prompt_of(9, 60), max_tokens=6))
    driver.plan()
    assert driver.plans[0].added[1].num_computed_tokens >= 16  # found what is being loaded
    if in_flight == 2:
        driver.plan()
    driver.answer()
    plan = driver.plan()
    assert plan is not None
    rows = {driver.workers.request_ids[rewind.row]: rewind for rewind in plan.rewound}
    assert set(rows) == {"loads", "hits"}
    for rewind in rows.values():
        assert rewind.num_computed_tokens == BLOCK_SIZE
        assert rewind.num_known_tokens == 18  # the prompt: all sampled tokens are void
    assert driver.scheduler.make_stats().num_rewinds == 2
    late = driver.add("late", prompt_of(18), max_tokens=6)
    settle(driver)
    driver.check_complete(*keys, late)


def provisional_hits(*request_ids: str, **settings: Any) -> Driver:
    """These requests load in background after 12 tokens that "a" loads in its step, which has not
    been answered; the third block of that load fails."""
    in_the_step = has_leading(12, is_async=False)
    in_background = only(*request_ids)["match"]

    def match(request: RequestView, num_computed_tokens: int) -> Match:
        rule = in_the_step if request.request_id == "a" else in_background
        matched: Match = rule(request, num_computed_tokens)
        return matched

    driver = connected(rules={"match": match}, fail_sync=fails_at(2), **settings)
    driver.add("a", prompt_of(13))
    for index, request_id in enumerate(request_ids):
        driver.add(request_id, [*prompt_of(12), *prompt_of(6, 40 + 10 * index)])
    driver.plan()
    assert [load.first for load in driver.adversary.loads_begun] == [0, *[12] * len(request_ids)]
    return driver


def test_a_loaded_request_whose_hits_prove_wrong_is_rewound() -> None:
    driver = provisional_hits("b")
    driver.ranks.end_load("b")
    driver.plan()
    driver.answer()
    plan = driver.plan()
    assert plan is not None
    assert [rewind.num_computed_tokens for rewind in plan.rewound] == [8, 8]
    settle(driver)
    driver.check_complete(*driver.names)


@pytest.mark.req("MET-06")
def test_a_load_whose_hits_prove_wrong_while_it_runs_counts_up_to_them() -> None:
    driver = provisional_hits("b", "c", long_prefill_token_threshold=2)
    driver.answer()
    driver.ranks.end_load("b")
    driver.step()
    driver.step()
    driver.ranks.end_load("c")  # shares a block with b that b is computing anew
    settle(driver)
    driver.check_complete(*driver.names)


@pytest.mark.req("MET-06")
def test_a_request_that_waits_with_hits_that_prove_wrong_releases_them() -> None:
    driver = provisional_hits("b", max_num_seqs=2, policy="priority")
    driver.ranks.end_load("b")
    driver.add("takes the row", prompt_of(5, 60), priority=-1)
    driver.plan()
    driver.answer()
    assert driver.scheduler.get_request_counts() == (2, 1)
    used = {id_ for tables in driver.workers.tables.values() for ids in tables for id_ in ids}
    assert len(used) == 6
    assert driver.num_free_blocks == driver.num_blocks - 1 - len(used - {3, 4})
    settle(driver)
    driver.check_complete(*driver.names)


@pytest.mark.req("MET-06")
def test_a_block_that_failed_is_not_found_by_its_hash() -> None:
    driver = in_step(12, fail_sync=fails_at(1), max_steps_in_flight=1)
    key = driver.add("loads", prompt_of(13), max_tokens=1)
    driver.plan()
    driver.abort(key)
    driver.answer()
    uncached = {id_ for step in driver.adversary.steps for id_ in step.uncached}
    late = driver.add("late", prompt_of(13), max_tokens=2)
    plan = driver.plan()
    assert plan is not None
    uncached |= set(driver.adversary.steps[-1].uncached)
    assert driver.adversary.loads_begun[0].block_ids[0][1] in uncached
    assert len(driver.adversary.loads_begun) == 2
    assert driver.adversary.loads_begun[1].first == BLOCK_SIZE
    settle(driver)
    driver.check_complete(late)


def test_blocks_after_a_failed_block_are_uncached_although_their_request_has_ended() -> None:
    driver = connected(
        rules=only("loads", num_tokens=8, is_async=False),
        fail_sync=fails_at(0),
        max_steps_in_flight=1,
    )
    key = driver.add("loads", prompt_of(17), max_tokens=1)
    driver.plan()
    driver.abort(key)
    driver.answer()
    keys = [driver.add(name, prompt_of(17)) for name in ("again", "then")]
    driver.plan()
    last = driver.add("last", prompt_of(17))
    settle(driver)
    driver.check_complete(*keys, last)


@pytest.mark.req("MET-05")
def test_policy_fail_ends_only_the_requests_that_used_the_block() -> None:
    driver = in_step(12, fail_sync=fails_at(1), load_failure_policy="fail")
    bad = [driver.add(name, prompt_of(18)) for name in ("loads", "hits")]
    other = driver.add("other", prompt_of(9, 60))
    driver.plan()
    driver.plan()
    settle(driver)
    for key in bad:
        assert driver.reason(key) is FinishReason.ERROR
        assert driver.received[key] == []
    driver.check_complete(other)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_requests_that_got_or_found_a_failed_block_afterwards_are_left_alone(policy: str) -> None:
    driver = connected(
        num_blocks=10,
        max_model_len=32,
        rules=only("loads", num_tokens=12, is_async=False),
        fail_sync=fails_at(1),
        load_failure_policy=policy,
    )
    loads = driver.add("loads", prompt_of(18))
    driver.plan()
    driver.abort(loads)
    keys = [driver.add(name, prompt_of(31, 40), max_tokens=1) for name in ("later", "finds")]
    driver.plan()
    tables = driver.workers.tables
    assert driver.adversary.loads_begun[0].targets & set(tables[0][0]) & set(tables[1][0])
    settle(driver)
    driver.check_complete(*keys)
    assert driver.scheduler.make_stats().num_rewinds == 0


def test_nothing_that_rests_on_a_failed_load_is_stored() -> None:
    driver = connected(
        rules={"match": has_leading(8, is_async=False), "stores": lambda: True},
        fail_sync=fails_at(0),
    )
    key = driver.add("r", prompt_of(17))
    settle(driver)  # `end_store` looks at what is stored
    assert driver.stored
    driver.check_complete(key)


@pytest.mark.req("MET-06")
def test_a_request_that_found_blocks_of_a_step_that_was_not_finite_computes_them_again() -> None:
    driver = connected()
    bad = driver.add("bad", prompt_of(17))
    hits = driver.add("hits", prompt_of(18), max_tokens=6)
    driver.plan(nan_ids=["bad"])
    assert driver.plans[0].added[1].num_computed_tokens == 16
    driver.plan(nan_ids=["bad"])
    late = driver.add("late", prompt_of(17))
    settle(driver)
    assert driver.reason(bad) is FinishReason.ERROR
    driver.check_complete(hits)
    driver.check_complete(late)


def test_a_preempted_request_does_not_keep_a_token_made_void_by_a_failed_load() -> None:
    driver = connected(
        num_blocks=9,
        max_model_len=32,
        rules=only("young", num_tokens=8, is_async=False),
        fail_sync=fails_at(0),
    )
    old = driver.add("old", prompt_of(15), max_tokens=12)
    driver.step()
    young = driver.add("young", prompt_of(15, 40), max_tokens=12)
    settle(driver)
    assert driver.finished[young].num_preemptions > 0
    driver.check_complete(old, young)


def test_a_token_of_a_rewound_request_that_is_preempted_next_is_void() -> None:
    driver = connected(
        num_blocks=9,
        max_model_len=32,
        rules=only("young", num_tokens=8, is_async=False),
        fail_sync=fails_at(0),
    )
    old = driver.add("old", prompt_of(15), max_tokens=12)
    young = driver.add("young", prompt_of(15, 40), max_tokens=12)
    driver.plan()
    driver.plan()
    driver.answer()
    plan = driver.plan()
    assert plan is not None
    assert len(plan.preempted_rows) == 1  # rewound, and out of blocks before it could begin
    settle(driver)
    assert driver.finished[young].num_preemptions > 0
    driver.check_complete(old, young)


def test_a_loaded_request_keeps_the_hits_whose_first_block_was_uncached() -> None:
    driver = connected(rules=only("loads", num_tokens=16), max_num_seqs=1)
    first = driver.add("first", prompt_of(13))
    driver.run_until_idle()
    bad = driver.add("bad", [*prompt_of(4), 60, 61], max_tokens=8)
    loads = driver.add("loads", prompt_of(18))
    driver.plan()
    assert driver.adversary.loads_begun == []  # no row is left to look further
    driver.abort(bad)
    driver.run_until_idle()
    (load,) = driver.adversary.loads_begun
    assert load.first == 12
    bad = driver.add("bad", [*prompt_of(4), 60, 61], max_tokens=8)
    driver.plan()
    driver.ranks.end_load("loads")
    driver.plan(nan_ids=["bad"])
    settle(driver)
    assert driver.reason(bad) is FinishReason.ERROR
    driver.check_complete(first, loads)


@pytest.mark.parametrize("chunk", [3, 5])
def test_two_rows_that_share_an_uncached_block_cache_it_once(chunk: int) -> None:
    settings = {"long_prefill_token_threshold": chunk, "max_steps_in_flight": 1}
    driver = connected(rules=LOOKS, num_blocks=17, **settings)
    first = driver.add("first", prompt_of(5))
    driver.run_until_idle()
    bad = driver.add("bad", prompt_of(9))
    if chunk < 5:
        driver.step()
    shares = [driver.add(name, prompt_of(10)) for name in ("b", "c")]
    driver.plan(nan_ids=["bad"])
    assert [start.num_computed_tokens for start in driver.plans[-1].added][-2:] == [8, 8]
    driver.answer()
    assert driver.reason(bad) is FinishReason.ERROR
    plan = driver.plan()
    assert plan is not None
    assert [rewind.num_computed_tokens for rewind in plan.rewound] == [4, 4]
    settle(driver)
    views = driver.adversary.steps
    cached = [item for view in views for item in view.storable if item.step == plan.step]
    block_ids = [id_ for item in cached for id_ in item.block_ids]
    assert len(block_ids) == len(set(block_ids))
    assert block_ids or chunk < 5
    everything = driver.add("everything", prompt_of(60, 40))
    settle(driver)
    again = driver.add("again", prompt_of(10))  # finds nothing under the old hashes
    settle(driver)
    driver.check_complete(first, *shares, everything, again)


def finished_with_a_cached_block_that_no_plan_lists() -> Driver:
    """The last block of a request was cached when there was nothing more to plan."""
    driver = connected(
        num_blocks=9,
        max_model_len=32,
        max_loading_blocks=8,
        rules=only("loads") | {"stores": lambda: True},
    )
    driver.add("r", prompt_of(9), max_tokens=4)
    while driver.plan() is not None:
        pass
    while not driver.finished:
        driver.plan()
        driver.answer()
    driver.ranks.end_all()
    return driver


def test_a_block_that_was_uncached_before_the_next_plan_is_not_reported() -> None:
    driver = finished_with_a_cached_block_that_no_plan_lists()
    key = driver.add("loads", prompt_of(31, 40), max_tokens=1)
    settle(driver)  # `build_connector_meta` rejects cached blocks that are being loaded
    driver.check_complete(key)


def test_cached_blocks_of_an_old_epoch_are_not_reported_in_the_new_one() -> None:
    driver = finished_with_a_cached_block_that_no_plan_lists()
    driver.restart_workers(late_outputs=True)
    del driver.adversary.steps[:]
    key = driver.add("next", prompt_of(3, 40))
    settle(driver)
    storable = [blocks for step in driver.adversary.steps for blocks in step.storable]
    assert {blocks.request_id for blocks in storable} == {"next"}
    driver.check_complete(key)


# Epochs


def test_a_new_epoch_starts_from_empty_rows_in_the_old_order() -> None:
    driver = background(8, num_blocks=60)
    keys = [
        driver.add(name, prompt_of(length, start))
        for name, length, start in (("a", 3, 0), ("b", 3, 30), ("loads", 9, 70))
    ]
    driver.plan()
    driver.ranks.end_load("a")
    driver.ranks.end_load("b")
    driver.step()
    driver.step()
    assert driver.scheduler.get_request_counts() == (2, 1)
    driver.restart_workers(late_outputs=True)
    assert driver.scheduler.get_request_counts() == (0, 3)
    assert driver.num_free_blocks == 59
    assert driver.adversary.epochs == [2]
    driver.ranks.report(0, receiving=["loads"], epoch=1)
    while driver.unanswered:
        driver.answer()
    driver.adversary.match = lambda request, num_computed_tokens: Matched(0)
    plan = driver.plan()
    assert plan is not None
    assert (plan.epoch, plan.step, plan.previous_step) == (2, 1, 0)
    again = [start.request_id for start in plan.added]
    assert sorted(again) == ["a", "b", "loads"]
    assert again.index("a") < again.index("b")
    assert [start.num_computed_tokens for start in plan.added] == [0, 0, 0]
    settle(driver)
    driver.check_complete(*keys)


def test_sends_and_holds_end_with_their_epoch() -> None:
    driver = connected(rules={"depart": lambda request: FinishAction(True), "stores": lambda: True})
    driver.add("r", prompt_of(9))
    driver.run_until_idle()
    (hold_id, *_) = driver.transfers.holding
    assert driver.transfers.sending
    assert driver.num_free_blocks < driver.num_blocks - 1
    driver.restart_workers(late_outputs=True)
    assert driver.num_free_blocks == driver.num_blocks - 1
    holder = driver.adversary.holder
    with pytest.raises(KeyError):
        holder.release(hold_id)
    driver.ranks.report(0, sending=["r"])
    driver.check_idle()


# Progress


def test_loaded_requests_that_wait_free_blocks_for_the_head_the_youngest_first() -> None:
    has = has_leading(EVERYTHING, is_async=True)
    knows_the_head = False

    def match(request: RequestView, num_computed_tokens: int) -> Match:
        if request.request_id != "head":
            return has(request, num_computed_tokens)
        return Matched(0) if knows_the_head else AskLater()

    driver = connected(num_blocks=17, max_loading_blocks=16, rules={"match": match})
    head = driver.add("head", prompt_of(25))
    names = ["a", "b", "c"]
    keys = [driver.add(name, prompt_of(15, 50 + 12 * i)) for i, name in enumerate(names)]
    driver.plan()
    assert driver.num_free_blocks == 4
    driver.ranks.end_all()
    knows_the_head = True
    driver.answer()
    plan = driver.plan()
    assert plan is not None
    assert [start.request_id for start in plan.added] == ["head", "a", "b"]
    assert driver.adversary.asked["a"] == driver.adversary.asked["b"] == 1
    settle(driver)
    assert driver.adversary.asked["c"] > 1
    driver.check_complete(head, *keys)


def test_the_only_running_request_is_not_starved_by_loads_that_wait() -> None:
    driver = connected(
        num_blocks=12,
        max_model_len=40,
        max_num_seqs=1,
        max_num_batched_tokens=8,
        max_loading_blocks=11,
        policy="priority",
        rules=only("a", "b"),
    )
    keys = [driver.add(name, prompt_of(9, 40), priority=1) for name in ("a", "b")]
    driver.plan()
    driver.ranks.end_all()
    big = driver.add("big", prompt_of(25), max_tokens=12, priority=0)
    settle(driver)
    driver.check_complete(big)
    driver.check_complete(*keys)


def test_loads_together_stay_below_their_bound() -> None:
    driver = background(max_loading_blocks=8, num_blocks=40)
    keys = [driver.add(f"r{index}", prompt_of(11, 20 * index)) for index in range(4)]
    driver.plan()
    assert [load.request_id for load in driver.adversary.loads_begun] == ["r0", "r1"]
    driver.ranks.end_load("r0")
    driver.step()  # r0 runs; its blocks are no load's any more
    driver.step()
    assert [load.request_id for load in driver.adversary.loads_begun] == ["r0", "r1", "r2"]
    settle(driver)
    driver.check_complete(*keys)


def test_a_load_in_quarantine_does_not_count_towards_the_bound() -> None:
    driver = background(max_loading_blocks=3, num_blocks=40)
    abandoned = driver.add("abandoned", prompt_of(11))
    driver.plan()
    driver.abort(abandoned)
    assert driver.scheduler.make_stats().num_quarantined_blocks == 3
    key = driver.add("next", prompt_of(11, 20))
    driver.plan()
    assert [load.request_id for load in driver.adversary.loads_begun] == ["abandoned", "next"]
    settle(driver)
    driver.check_complete(key)


def test_loads_above_the_bound_begin_one_at_a_time() -> None:
    driver = background(max_loading_blocks=3)
    large = [("a", 0), ("b", 40)]
    keys = [driver.add(name, prompt_of(20, start)) for name, start in large]
    keys.append(driver.add("small", prompt_of(6, 80)))
    driver.plan()
    assert [load.request_id for load in driver.adversary.loads_begun] == ["a"]
    driver.ranks.end_load("a")
    driver.step()  # it runs; nothing loads
    driver.step()
    assert [load.request_id for load in driver.adversary.loads_begun] == ["a", "b"]
    assert driver.running == ["a"]  # the small one does not begin before the large one ends
    settle(driver)
    assert [load.request_id for load in driver.adversary.loads_begun] == ["a", "b", "small"]
    driver.check_complete(*keys)


@pytest.mark.parametrize("num_tokens", [20, 36])
def test_a_load_that_fits_the_empty_pool_begins_when_it_is_alone(num_tokens: int) -> None:
    driver = background(num_blocks=11, max_model_len=40)  # the default bound is 5 blocks
    runs = driver.add("runs", prompt_of(3, 60), max_tokens=1)
    driver.step()
    key = driver.add("large", prompt_of(num_tokens), max_tokens=1)
    settle(driver)
    assert [load.request_id for load in driver.adversary.loads_begun] == ["runs", "large"]
    assert len(driver.adversary.loads_begun[-1].targets) == num_tokens // 4
    driver.check_complete(runs, key)


def test_a_large_load_computes_if_blocks_are_in_quarantine_and_nothing_runs() -> None:
    driver = background(num_blocks=11, max_model_len=40, max_num_batched_tokens=16)
    hangs = driver.add("hangs", prompt_of(8, 60))
    driver.plan()
    driver.abort(hangs)
    key = driver.add("large", prompt_of(36), max_tokens=1)
    driver.step()
    driver.step()
    assert driver.running == ["large"]
    assert [load.request_id for load in driver.adversary.loads_begun] == ["hangs"]
    settle(driver)
    driver.check_complete(key)


@pytest.mark.req("PRE-06")
def test_a_preempted_requests_transfers_keep_their_blocks() -> None:
    driver = connected(num_blocks=10, max_model_len=32, rules={"stores": lambda: True})
    old = driver.add("old", prompt_of(11), max_tokens=16)
    young = driver.add("young", prompt_of(11, 40), max_tokens=16)
    for _ in range(200):
        driver.step()  # `check_blocks` looks after every call
        if len(driver.ranks.stores) > 1:
            driver.ranks.end_store(driver.ranks.stores[0])
        if driver.finished.keys() >= {old, young}:
            break
    preempted = [id_ for step in driver.adversary.steps for id_ in step.preempted]
    assert preempted
    settle(driver)
    driver.check_complete(old, young)


def test_a_block_of_two_loads_in_quarantine_counts_once() -> None:
    driver = connected(rules=only("a", "b"))
    first = driver.add("first", prompt_of(9))
    driver.run()  # its two full blocks are prefix hits of the others
    free = driver.num_free_blocks
    keys = [driver.add(name, prompt_of(14)) for name in ("a", "b")]
    driver.plan()
    driver.abort(*keys)
    assert (
        driver.scheduler.make_stats().num_quarantined_blocks == free - driver.num_free_blocks == 6
    )
    settle(driver)
    driver.check_complete(first)


def test_a_request_in_quarantine_is_not_asked_about() -> None:
    driver = background(12, load_timeout_s=3.0)
    key = driver.add("r", prompt_of(13), max_tokens=8)
    other = driver.add("other", prompt_of(13, 50), max_tokens=8)
    driver.plan()
    driver.ranks.end_load("other")
    for _ in range(30):
        driver.step()
    assert driver.adversary.abandoned == ["r"]
    assert driver.adversary.asked["r"] == 1
    settle(driver)
    driver.check_complete(key, other)


def test_the_state_of_a_load_can_be_seen_from_outside() -> None:
    driver = background(12)
    driver.add("r", prompt_of(13))
    driver.plan()
    (waiting,) = driver.scheduler.make_report(driver.now, "engine").waiting
    assert waiting.request_id == "r"
    assert waiting.status == RequestStatus.WAITING_FOR_REMOTE_KVS.name
    assert "load" in waiting.waits_for
    driver.ranks.end_load("r")
    settle(driver)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_the_only_running_request_waits_for_transfers_and_keeps_its_blocks(in_flight: int) -> None:
    """It would be admitted and preempted again and again, and its blocks stored each time."""
    stores = True
    driver = connected(
        num_blocks=12,
        max_model_len=40,
        max_num_batched_tokens=8,
        max_steps_in_flight=in_flight,
        rules={"stores": lambda: stores},
    )
    ended = driver.add("ended", prompt_of(24, 40), max_tokens=1)
    driver.run_until_idle()
    assert driver.num_free_blocks == 5  # its stores own the others
    num_before = len(driver.plans)
    big = driver.add("big", prompt_of(25), max_tokens=4, skip_reading_prefix_cache=True)
    small = driver.add("small", prompt_of(3, 60), max_tokens=1)
    driver.steps(30)
    assert driver.running == ["big"]
    assert sum(plan.num_scheduled_tokens for plan in driver.plans[num_before:]) == 16
    (waiting,) = driver.scheduler.make_report(driver.now, "engine").waiting
    assert waiting.waits_for == (
        "transfers to end: the running request needs more blocks than are free"
    )
    stores = False
    settle(driver)
    assert driver.scheduler.make_stats().num_preemptions == 0
    driver.check_complete(ended, big, small)


@pytest.mark.req("POO-11")
def test_a_fork_that_loads_gets_no_blocks_of_a_parent_that_ends() -> None:
    """It gets its blocks from the load; a second hold would never be released."""
    driver = connected(rules={"match": has_stored({"fork": 16})}, max_steps_in_flight=1)
    parent = driver.add("parent", prompt_of(12), max_tokens=20)
    driver.steps(2)
    fork = driver.add("fork", prompt_of(18), fork_of=parent[1])
    driver.steps(2)
    assert driver.requests["fork"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    driver.abort(parent)
    driver.scheduler.check()  # its blocks are those of num_loading_blocks
    driver.ranks.end_load("fork")
    driver.scheduler.check()
    driver.run()
    driver.check_idle()
    driver.check_complete(fork)


def test_a_session_that_is_stopped_with_loaded_blocks_keeps_none_of_them() -> None:
    """They have the KV of fewer tokens than its row had."""
    driver = connected(rules={"match": has_stored({"s": 16})}, max_steps_in_flight=1)
    key = driver.add("s", prompt_of(18), max_tokens=9, resumable=True, keeps_blocks=True)
    driver.steps(2)
    driver.ranks.end_load("s")
    while len(driver.received[key]) < 2:
        driver.step()
    request = driver.requests["s"]
    driver.scheduler._lifecycle.preempt(request, driver.now)
    driver.scheduler.reset_prefix_cache()
    driver.plan()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    driver.ranks.end_load("s")
    assert request.has_new_token
    assert request.hold is not None
    driver.stop_found(key, 1)
    assert request.status is RequestStatus.WAITING_FOR_STREAMING_REQ
    assert request.hold is None
    driver.continue_session(key, [70], max_tokens=2, resumable=False)
    driver.steps(2)
    driver.ranks.end_load("s")
    driver.run()
    driver.check_idle()
    assert driver.received[key][2:] == expected_output("s", 2)


def test_a_connector_knows_no_blocks_of_a_request_with_no_store() -> None:
    driver = connected(rules=LOOKS)
    seen: dict[str, int] = {}

    def depart(request: RequestView) -> FinishAction:
        seen[request.request_id] = len(request.block_hashes)
        return FinishAction()

    driver.scheduler._transfers.connector._depart = depart
    for name in ("private", "public"):
        driver.add(name, prompt_of(20), no_store=name == "private", max_tokens=1)
    settle(driver)
    assert seen == {"private": 0, "public": 5}
    storable = [each for view in driver.connector.steps for each in view.storable]
    assert {each.request_id for each in storable} == {"public"}
    assert sum(len(each.block_ids) for each in storable) == 5
