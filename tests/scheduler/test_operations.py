"""What the process around the scheduler calls it for, and what it learns from it."""

import msgspec
import pytest

from longshore.connectors.base import ConnectorOutput, FinishAction, RequestView
from longshore.protocol.arrays import Int32Array
from longshore.protocol.events import BlockRemoved, BlockStored, KVEvent
from longshore.protocol.outputs import FinishReason, ModelRunnerOutput, RequestEvent
from longshore.protocol.requests import MultimodalFeature, Tenant
from longshore.protocol.sampling import RepetitionDetection
from longshore.protocol.statistics import TenantStats
from tests.harness.connector import AdversarialConnector, has_stored
from tests.harness.driver import Driver
from tests.harness.grammar import FakeCompiler, grammar_for
from tests.harness.shared_drivers import pressed
from tests.harness.tokens import EOS, expected_output, prompt_of, steady_token

BOTH = pytest.mark.parametrize("steps_in_flight", [1, 2])


class WatchingConnector(AdversarialConnector):
    """Notes some hooks. views: each request as the connector saw it when it was new."""

    def __init__(self, **stored: int) -> None:
        super().__init__(
            match=has_stored(stored),
            depart=lambda request: FinishAction(params={"from": request.request_id}),
        )
        self.views: dict[str, RequestView] = {}
        self.log: list[str] = []

    def on_new_request(self, request: RequestView) -> None:
        super().on_new_request(request)
        self.views[request.request_id] = request

    def update_connector_output(self, output: ConnectorOutput) -> None:
        super().update_connector_output(output)
        self.log.append(f"answer {output.step}")

    def request_finished(
        self, request: RequestView, block_ids: tuple[Int32Array, ...]
    ) -> FinishAction:
        self.log.append(f"end of {request.request_id}")
        return super().request_finished(request, block_ids)

    def reset_cache(self) -> bool:
        self.log.append("reset")
        return True

    def take_events(self) -> list[KVEvent]:
        return [BlockRemoved(b"a tier's", 0, "CPU")]

    def shutdown(self) -> None:
        self.log.append("shutdown")


# Operations


@pytest.mark.req("SCH-22")
@BOTH
def test_every_operation_of_the_scheduler_does_what_its_name_says(steps_in_flight: int) -> None:
    connector = WatchingConnector()
    driver = Driver(
        max_num_seqs=1,
        max_steps_in_flight=steps_in_flight,
        max_num_encoder_input_tokens=4,
        cache={"enable_kv_cache_events": True},
        connector=connector,
    )
    scheduler = driver.scheduler
    assert not scheduler.has_unfinished_requests()
    item = MultimodalFeature("a", 2, 4)
    first = driver.add("first", prompt_of(9), max_tokens=3, multimodal=(item,))
    second = driver.add("second", prompt_of(9, 40), max_tokens=3)
    assert scheduler.get_request_counts() == (0, 2)
    driver.plan()
    assert scheduler.get_request_counts() == (1, 1)
    assert scheduler.has_unfinished_requests()
    assert not scheduler.has_finished_requests()
    assert not scheduler.reset_prefix_cache()
    driver.abort(second)
    assert (driver.reason(second), scheduler.get_request_counts()) == (FinishReason.ABORTED, (1, 0))
    driver.answer()
    assert scheduler.reset_connector_cache()
    driver.abort(first)
    assert scheduler.has_finished_requests()  # the workers do not know it yet
    driver.run()
    assert not scheduler.has_finished_requests()
    assert not scheduler.has_unfinished_requests()
    stats = scheduler.make_stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, 39)
    events = scheduler.take_kv_events()
    assert [type(event) for event in events] == [BlockStored, BlockStored, BlockRemoved]
    assert scheduler.reset_prefix_cache()
    assert scheduler.make_stats().encoder_cache_usage == 1.0
    assert scheduler.reset_encoder_cache()
    assert scheduler.make_stats().encoder_cache_usage == 0.0
    again = driver.add("again", prompt_of(9), max_tokens=1)
    driver.run()
    assert driver.finished[again].num_cached_tokens == 0
    scheduler.shutdown()
    assert connector.log[-1] == "shutdown"
    assert "reset" in connector.log


def test_without_a_connector_there_is_no_connector_cache_to_reset() -> None:
    assert not Driver().scheduler.reset_connector_cache()


# An answer


@BOTH
def test_an_answer_brings_tokens_then_ends_then_the_connectors_turn(steps_in_flight: int) -> None:
    """`one` gets a third token that stops it, `two` its last; both ends come after the tokens of
    all, in admission order, and the connector's hook comes last."""
    connector = WatchingConnector()
    driver = Driver(
        sample=lambda name, position: EOS if (name, position) == ("one", 2) else 50 + position,
        max_steps_in_flight=steps_in_flight,
        connector=connector,
    )
    driver.add("one", prompt_of(5))
    driver.add("two", prompt_of(5, 30), max_tokens=3)
    driver.add("three", prompt_of(5, 60), max_tokens=9)
    for _ in range(2 + steps_in_flight - 1):
        driver.step()
    connector.log.clear()
    if not driver.unanswered:
        driver.plan()
    output = driver.take_output()
    assert isinstance(output, ModelRunnerOutput)
    output = msgspec.structs.replace(output, connector_metadata=b"said")
    driver.scheduler.update_from_output(output, driver.now)
    ((client, outputs),) = driver.scheduler.take_outputs()
    assert (client, outputs.handles.tolist()) == (0, [0, 1, 2])
    assert outputs.tokens.tolist() == [EOS, 52, 52]
    assert [(end.handle, end.reason) for end in outputs.finished] == [
        (0, FinishReason.STOPPED),
        (1, FinishReason.LENGTH_CAPPED),
    ]
    assert [end.kv_transfer_params for end in outputs.finished] == [
        {"from": "one"},
        {"from": "two"},
    ]
    assert connector.log == ["end of one", "end of two", "answer 3"]


@pytest.mark.req("FRQ-05")
def test_requests_that_end_in_one_step_free_their_blocks_in_admission_order() -> None:
    driver = Driver()
    sampling = {"repetition": RepetitionDetection(1, 1, 4)}  # such tokens are applied one by one
    keys = [
        driver.add("watched", prompt_of(9), max_tokens=2, sampling=sampling),
        driver.add("plain", prompt_of(9, 30), max_tokens=2),
    ]
    driver.step()
    tables = [driver.table("watched"), driver.table("plain")]
    driver.run()
    assert list(driver.finished) == keys
    free = driver.scheduler.kv_cache.pool.free_block_ids()
    assert free[:2] == [table[2] for table in reversed(tables)]  # partial blocks
    assert free[-4:] == [block_id for table in tables for block_id in table[1::-1]]


@BOTH
def test_an_end_says_what_happened_when_and_why(steps_in_flight: int) -> None:
    driver = pressed(
        enable_prefix_caching=False,
        max_steps_in_flight=steps_in_flight,
        sample=lambda name, position: 77 if position == 9 else steady_token(name, position),
    )
    old = driver.add("old", prompt_of(15, 0), max_tokens=11, sampling={"stop_token_ids": (77,)})
    young = driver.add("young", prompt_of(15, 40), max_tokens=8)
    driver.run()
    end = driver.finished[old]
    assert (end.reason, end.stop_token_id) == (FinishReason.STOPPED, 77)
    assert [event for event, _ in end.events] == [RequestEvent.QUEUED, RequestEvent.SCHEDULED]
    end = driver.finished[young]
    assert (end.reason, end.stop_token_id) == (FinishReason.LENGTH_CAPPED, None)
    assert [event for event, _ in end.events] == [
        RequestEvent.QUEUED,
        RequestEvent.SCHEDULED,
        RequestEvent.PREEMPTED,
        RequestEvent.SCHEDULED,
    ]
    times = [at for _, at in end.events]
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[3] > times[2] > times[1] > 0.0
    nan = driver.add("nan", prompt_of(6, 70))
    driver.plan()
    driver.answer(nan_rows=[0])
    end = driver.finished[nan]
    assert (end.reason, end.num_output_tokens) == (FinishReason.ERROR, 0)
    assert "not finite" in (end.message or "")
    driver.run()


@pytest.mark.req("REQ-10")
@BOTH
def test_every_reason_to_end_reaches_the_client(steps_in_flight: int) -> None:
    driver = Driver(
        max_steps_in_flight=steps_in_flight,
        sample=lambda name, position: {"stop": 33, "eos": EOS, "circles": 44}.get(
            name, 50 + position
        ),
    )
    keys = {
        "stop": driver.add("stop", prompt_of(5), sampling={"stop_token_ids": (33,)}),
        "eos": driver.add("eos", prompt_of(5, 10)),
        "length": driver.add("length", prompt_of(5, 20), max_tokens=2),
        "circles": driver.add(
            "circles", prompt_of(5, 30), sampling={"repetition": RepetitionDetection(1)}
        ),
        "gone": driver.add("gone", prompt_of(5, 40)),
        "found": driver.add("found", prompt_of(5, 50)),
        "long": driver.add("long", prompt_of(65, 60)),
        "bad": driver.add("bad", [100]),
        "nan": driver.add("nan", prompt_of(5, 70), max_tokens=20),
    }
    driver.steps(3)
    driver.abort(keys["gone"])
    driver.stop_found(keys["found"], 1)
    while driver.unanswered:
        driver.answer()
    driver.plan()
    driver.answer(nan_rows=[driver.requests["nan"].row])
    driver.run()
    assert {name: driver.reason(key) for name, key in keys.items()} == {
        "stop": FinishReason.STOPPED,
        "eos": FinishReason.STOPPED,
        "length": FinishReason.LENGTH_CAPPED,
        "circles": FinishReason.REPETITION,
        "gone": FinishReason.ABORTED,
        "found": FinishReason.STOPPED,
        "long": FinishReason.IGNORED,
        "bad": FinishReason.ERROR,
        "nan": FinishReason.ERROR,
    }


@pytest.mark.req("REQ-07")
def test_a_request_carries_what_connector_session_and_agent_need() -> None:
    connector = WatchingConnector()
    driver = Driver(connector=connector, max_steps_in_flight=2)
    key = driver.add(
        "turn",
        prompt_of(5),
        max_tokens=20,
        kv_transfer_params={"lease": 7},
        job_id="job",
        is_last_step=False,
        resumable=True,
    )
    view, request = connector.views["turn"], driver.requests["turn"]
    assert (view.kv_transfer_params, view.job_id) == ({"lease": 7}, "job")
    assert (request.options.job_id, request.options.is_last_step, request.options.resumable) == (
        "job",
        False,
        True,
    )
    driver.steps(4)
    driver.continue_session(key, [70], max_tokens=2, resumable=False)
    assert len(request.next_chunks) == 1
    received = list(driver.received[key])
    driver.stop_found(key, 1)
    assert request.next_chunks == []
    num_stale = driver.scheduler.make_stats().num_stale_tokens
    driver.answer()  # what was in flight for the part that ended is discarded
    assert driver.received[key] == received
    assert driver.scheduler.make_stats().num_stale_tokens == num_stale + 1
    driver.run()
    assert driver.received[key] == received + expected_output("turn", 2)
    assert not request.options.resumable
    assert driver.finished[key].kv_transfer_params == {"from": "turn"}


# What a plan says beside rows and blocks


@pytest.mark.req("OUT-05")
def test_a_plan_says_everything_that_workers_and_gateways_need_of_a_step() -> None:
    compiler, connector = FakeCompiler({"strict"}), WatchingConnector(loads=8)
    own = expected_output("strict", 3)
    driver = Driver(
        num_speculative_tokens=2,
        draft=lambda name, position: [own[1], 6] if (name, position) == ("strict", 1) else [],
        max_num_encoder_input_tokens=4,
        grammars=compiler,
        connector=connector,
    )
    sees = driver.add("sees", prompt_of(9), multimodal=(MultimodalFeature("a", 2, 4),))
    strict = driver.add("strict", prompt_of(10, 40), structured_output=grammar_for("strict"))
    driver.add("loads", prompt_of(12, 60))
    plan = driver.step()
    assert plan is not None
    assert [start.request_id for start in plan.added] == ["strict", "sees"]
    assert (driver.scheduled, plan.num_scheduled_tokens) == ({"strict": 10, "sees": 9}, 19)
    assert plan.encoder_inputs == ((1, 0),)
    assert [load.request_id for load in driver.commands_of(plan).loads] == ["loads"]
    assert plan.has_structured_output
    plan = driver.step()
    assert plan is not None
    assert driver.scheduled == {"strict": 2, "sees": 1}
    assert (plan.draft_rows.tolist(), plan.draft_tokens.tolist()) == ([0], [own[1]])
    assert plan.num_invalid_draft_tokens == 1
    driver.abort(strict)
    failed = driver.transfers.loading["loads"].block_ids[0][1]
    driver.ranks.end_load("loads", failing=[failed])
    driver.add("same", [*prompt_of(12), 20])
    driver.add("other", prompt_of(4, 80), multimodal=(MultimodalFeature("b", 0, 4),))
    plan = driver.step()
    assert plan is not None
    assert plan.finished_rows.tolist() == [0]
    assert failed in plan.zero_block_ids.tolist()
    assert plan.freed_encoder_hashes == ("a",)
    assert not plan.has_structured_output
    driver.run()
    assert driver.received[sees] == expected_output("sees", 8)
    driver = pressed(enable_prefix_caching=False)
    driver.add("old", prompt_of(15, 0), max_tokens=8)
    driver.add("young", prompt_of(16, 40), max_tokens=8)
    driver.steps(2)
    assert driver.plans[-1].preempted_rows.tolist() == [1]
    driver.run()


@pytest.mark.req("OUT-05")
def test_blocks_that_all_rows_share_are_counted_when_membership_changes() -> None:
    driver = Driver(num_blocks=60, num_groups=2)
    driver.add("one", prompt_of(13), max_tokens=4)
    driver.step()
    driver.add("two", prompt_of(12), max_tokens=9)
    driver.step()
    three = driver.add("three", prompt_of(12, 50), max_tokens=2)
    driver.run()
    prefixes = [plan.common_prefix_blocks for plan in driver.plans if plan.common_prefix_blocks]
    assert prefixes[:2] == [(4, 4), (2, 2)]
    assert (0, 0) in prefixes  # with `three`, which shares nothing
    assert three in driver.finished


# Figures


def test_requests_are_counted_by_tenant() -> None:
    driver = Driver(max_num_seqs=2)
    for number, name in enumerate(("b", "", "a", "a")):
        driver.add(f"r{number}", prompt_of(6), max_tokens=4, tenant=Tenant(name))
    assert driver.scheduler.make_stats().tenants == (TenantStats("a", 0, 2), TenantStats("b", 0, 1))
    driver.step()
    assert driver.scheduler.make_stats().tenants == (TenantStats("a", 0, 2), TenantStats("b", 1, 0))
    driver.run()
    assert driver.scheduler.make_stats().tenants == ()


@pytest.mark.req("MET-01")
def test_the_figures_are_those_of_what_has_happened() -> None:
    driver = Driver(
        max_num_seqs=2,
        max_num_encoder_input_tokens=8,
        num_speculative_tokens=2,
        draft=lambda name, position: [steady_token(name, position), 5],
        rules={"match": has_stored({"loads": 11})},
    )
    driver.add("one", prompt_of(14), max_tokens=1, multimodal=(MultimodalFeature("a", 1, 6),))
    driver.step()
    stats = driver.scheduler.make_stats()
    assert (stats.num_running, stats.num_waiting, stats.num_steps) == (0, 0, 1)
    assert stats.encoder_cache_usage == 6 / 8
    assert (stats.num_prefix_queried_tokens, stats.num_prefix_hit_tokens) == (14, 0)
    driver.add("same", prompt_of(14), max_tokens=30)
    driver.step()
    driver.add("loads", prompt_of(12, 30), max_tokens=20)
    driver.add("waits", prompt_of(12, 30), max_tokens=4)
    driver.add("also", prompt_of(12, 30), max_tokens=4)
    driver.step()
    stats = driver.scheduler.make_stats()
    assert (stats.num_running, stats.num_waiting) == (2, 2)
    assert stats.num_external_queried_tokens >= 12
    assert stats.num_external_hit_tokens == 11
    # An item changes the hashes of the same tokens, so `same` has found nothing.
    assert (stats.num_prefix_queried_tokens, stats.num_prefix_hit_tokens) == (14 + 14 + 12 + 12, 0)
    assert stats.num_free_blocks == driver.num_free_blocks
    assert stats.kv_usage == pytest.approx(1 - driver.num_free_blocks / 39)
    # `same` has decoded one step of two drafts, of which one was right.
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (2, 1)
    assert stats.num_invalid_draft_tokens == 0


@pytest.mark.req("MET-01")
def test_what_preempted_requests_find_again_is_counted_apart() -> None:
    driver = pressed()
    driver.add("old", prompt_of(15, 0), max_tokens=8)
    driver.add("young", prompt_of(15, 40), max_tokens=8)
    driver.run()
    stats = driver.scheduler.make_stats()
    assert stats.num_preemptions == 1
    resumed = next(start for plan in driver.plans for start in plan.added if start.resumed)
    assert (stats.num_prefix_queried_tokens, stats.num_prefix_hit_tokens) == (30, 0)
    assert stats.num_prompt_tokens == 30
    assert stats.num_preempted_queried_tokens == resumed.num_known_tokens
    assert stats.num_preempted_hit_tokens == resumed.num_computed_tokens


@BOTH
def test_steps_in_flight_are_averaged_since_the_last_look(steps_in_flight: int) -> None:
    driver = Driver(max_steps_in_flight=steps_in_flight)
    driver.add("r", prompt_of(5), max_tokens=40)
    driver.steps(5)
    driver.scheduler.make_stats()
    driver.steps(10)
    assert driver.scheduler.make_stats().steps_in_flight == steps_in_flight
    assert driver.scheduler.make_stats().steps_in_flight == 0.0  # no step since
    driver.run()


@BOTH
@pytest.mark.req("POO-09", "ERR-40")
def test_the_prefix_cache_is_reset_while_requests_run_which_recompute_everything(
    steps_in_flight: int,
) -> None:
    driver = Driver(max_steps_in_flight=steps_in_flight, max_num_seqs=2, verify_plan=True)
    keys = [driver.add(name, prompt_of(10, 30 * index)) for index, name in enumerate("abc")]
    driver.steps(3)
    while len(driver.unanswered) < steps_in_flight:
        driver.plan()
    assert driver.running == ["a", "b"]
    scheduler = driver.scheduler
    assert not scheduler.reset_prefix_cache()
    assert scheduler.reset_prefix_cache(driver.now, reset_running_requests=True)
    assert driver.num_free_blocks == driver.num_blocks - 1
    assert scheduler.get_request_counts() == (0, 3)
    scheduler.check()
    driver.answer()
    while driver.unanswered:
        driver.answer()
    plan = driver.plan()
    assert plan is not None
    assert [start.request_id for start in plan.added] == ["a", "b"]
    assert [(start.num_computed_tokens, start.resumed) for start in plan.added] == [(0, True)] * 2
    assert scheduler.make_stats().num_preemptions == 2
    driver.run()
    driver.check_complete(*keys)


def test_blocks_that_a_session_holds_are_released_by_a_reset() -> None:
    driver = Driver()
    key = driver.add("s", prompt_of(9), max_tokens=3, resumable=True, keeps_blocks=True)
    while driver.requests["s"].hold is None:
        driver.step()
    assert not driver.scheduler.reset_prefix_cache()
    assert driver.scheduler.reset_prefix_cache(driver.now, reset_running_requests=True)
    assert driver.num_free_blocks == driver.num_blocks - 1
    driver.continue_session(key, [70], max_tokens=1, resumable=False)
    driver.run()
    assert driver.finished[key].num_cached_tokens == 0
