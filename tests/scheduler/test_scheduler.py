"""What a request gets in a step, how it comes in, and how it ends.

The driver's worker follows every plan, so each of these also checks that the two row tables are
equal, that blocks are conserved, and that no row reads KV that is not its own.
"""

import pytest

from longshore.protocol.errors import ConfigError
from longshore.protocol.handshake import Feature
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import Malformed, PoolingParams
from longshore.scheduler.request import RequestStatus
from tests.harness.driver import Driver
from tests.harness.shared_drivers import pressed
from tests.harness.tokens import EOS, expected_output, prompt_of

ASYNC = {"max_steps_in_flight": 2}


# What a request gets


def test_each_step_lets_a_request_catch_up_with_its_tokens() -> None:
    driver = Driver(max_num_batched_tokens=6)
    key = driver.add("r", prompt_of(16), max_tokens=4)
    # chunks of a prefill, the chunk that samples, then a gap of one per step
    assert driver.tokens_per_step("r") == [6, 6, 4, 1, 1, 1]
    assert driver.received[key] == expected_output("r", 4)


def test_the_threshold_caps_before_the_budget_and_the_end_caps_last() -> None:
    driver = Driver(max_num_batched_tokens=10, long_prefill_token_threshold=4)
    driver.add("a", prompt_of(9, 0), max_tokens=1)
    driver.add("b", prompt_of(9, 30), max_tokens=1)
    driver.add("c", prompt_of(9, 60), max_tokens=1)
    driver.step()
    assert driver.scheduled == {"a": 4, "b": 4, "c": 2}
    driver.step()
    assert driver.scheduled == {"a": 4, "b": 4, "c": 2}
    driver.step()
    assert driver.scheduled == {"a": 1, "b": 1, "c": 4}


@pytest.mark.req("ERR-33")
def test_prompts_are_sliced_by_the_budget_without_any_threshold() -> None:
    driver = Driver(max_num_batched_tokens=4, long_prefill_token_threshold=0)
    driver.add("r", prompt_of(10), max_tokens=1)
    assert driver.tokens_per_step("r") == [4, 4, 2]


@pytest.mark.req("SCH-02")
def test_one_budget_is_drawn_on_by_running_and_waiting_requests_alike() -> None:
    driver = Driver(max_num_batched_tokens=64, max_num_scheduled_tokens=8)
    driver.add("runs", prompt_of(5, 0))
    driver.step()
    assert driver.scheduled == {"runs": 5}
    driver.add("waits", prompt_of(20, 30))
    driver.step()
    assert driver.scheduled == {"runs": 1, "waits": 7}
    driver.step()
    assert driver.scheduled == {"runs": 1, "waits": 7}
    driver.step()
    assert driver.scheduled == {"runs": 1, "waits": 6}


@pytest.mark.req("SYS-03")
def test_every_step_starts_with_the_whole_budget_and_looks_at_all_queues_again() -> None:
    driver = Driver(max_num_batched_tokens=6)
    driver.add("a", prompt_of(12, 0), max_tokens=1)
    driver.step()
    assert driver.scheduled == {"a": 6}
    driver.add("b", prompt_of(3, 40), max_tokens=1)
    driver.step()
    assert driver.scheduled == {"a": 6}
    driver.step()
    assert driver.scheduled == {"b": 3}


@pytest.mark.req("SCH-03")
def test_running_requests_come_before_waiting_ones_in_admission_order() -> None:
    driver = Driver(max_num_batched_tokens=6)
    driver.add("first", prompt_of(9, 0))
    driver.add("second", prompt_of(9, 30))
    driver.add("third", prompt_of(9, 60))
    served = []
    for _ in range(5):
        driver.step()
        served.append(dict(driver.scheduled))
        assert driver.running == ["first", "second", "third"][: len(driver.running)]
    assert served == [
        {"first": 6},
        {"first": 3, "second": 3},
        {"first": 1, "second": 5},
        {"first": 1, "second": 1, "third": 4},
        {"first": 1, "second": 1, "third": 4},
    ]


@pytest.mark.req("SCH-05", "SPD-06")
def test_a_running_request_with_nothing_to_do_does_not_stop_the_ones_after_it() -> None:
    driver = Driver(**ASYNC)
    done = driver.add("done", prompt_of(5, 0), max_tokens=1)
    driver.add("goes on", prompt_of(5, 30), max_tokens=3)
    driver.plan()
    driver.plan()  # the only token of `done` is still in flight
    assert driver.scheduled == {"goes on": 1}
    assert driver.running == ["done", "goes on"]
    driver.run()
    assert len(driver.received[done]) == 1


@pytest.mark.req("SCH-05")
def test_under_pressure_a_request_with_nothing_to_do_does_not_stop_the_ones_after_it() -> None:
    driver = pressed(enable_prefix_caching=False, **ASYNC)
    driver.add("done", prompt_of(5, 0), max_tokens=1)
    driver.add("old", prompt_of(8, 30), max_tokens=3)
    driver.add("young", prompt_of(16, 60), max_tokens=3)
    driver.plan()
    assert driver.num_free_blocks == 0
    plan = driver.plan()  # the only token of `done` is still in flight, and `old` needs a block
    assert plan is not None
    assert plan.preempted_rows.tolist() == [2]
    assert driver.scheduled == {"old": 1}
    driver.run()
    assert len(driver.finished) == 3


@pytest.mark.req("SCH-05", "SCH-08")
def test_admission_ends_when_nothing_of_the_budget_is_left_for_the_head() -> None:
    driver = Driver(max_num_batched_tokens=5)
    driver.add("all", prompt_of(5, 0))
    driver.add("head", prompt_of(5, 30))
    driver.add("small", prompt_of(1, 60))
    driver.step()
    assert driver.scheduled == {"all": 5}
    assert driver.scheduler.get_request_counts() == (1, 2)


@pytest.mark.req("SCH-08")
def test_admission_ends_at_the_width_the_budget_and_the_empty_queues() -> None:
    driver = Driver(max_num_seqs=2, max_num_batched_tokens=40)
    for index in range(3):
        driver.add(f"r{index}", prompt_of(5, 20 * index), max_tokens=3)
    driver.step()
    assert driver.scheduled == {"r0": 5, "r1": 5}  # width
    driver.steps(2)
    driver.step()
    assert driver.scheduled == {"r2": 5}  # queues
    wide = Driver(max_num_batched_tokens=7)
    wide.add("a", prompt_of(5, 0))
    wide.add("b", prompt_of(5, 30))
    wide.add("c", prompt_of(5, 60))
    wide.step()
    assert wide.scheduled == {"a": 5, "b": 2}  # budget
    wide.run()


def test_a_preempted_request_computes_its_sampled_tokens_again_too() -> None:
    driver = Driver(num_blocks=9, enable_prefix_caching=False, max_model_len=32)
    driver.add("old", prompt_of(14, 0), max_tokens=14)
    young = driver.add("young", prompt_of(14, 40), max_tokens=14)
    while not driver.requests["young"].num_preemptions:
        driver.step()
    num_outputs = len(driver.received[young])
    assert num_outputs > 0
    while driver.requests["young"].row < 0:
        driver.step()
    assert driver.scheduled["young"] == 14 + num_outputs
    driver.run()
    assert driver.received[young] == expected_output("young", 14)
    assert driver.finished[young].num_preemptions == 1


@pytest.mark.req("SCH-14")
def test_without_chunked_prefill_a_prompt_is_computed_whole_or_not_yet() -> None:
    driver = Driver(max_model_len=20, max_num_batched_tokens=20, enable_chunked_prefill=False)
    driver.add("a", prompt_of(12, 0), max_tokens=2)
    driver.add("b", prompt_of(12, 30), max_tokens=2)
    driver.add("fits", prompt_of(3, 60), max_tokens=2)
    driver.step()
    assert driver.scheduled == {"a": 12}  # b ends admission; no request passes it
    driver.step()
    assert driver.scheduled == {"a": 1, "b": 12, "fits": 3}


def test_prompts_whose_tokens_attend_to_later_ones_are_whole_and_share_no_prefix() -> None:
    encoder = {"features": frozenset(Feature)}
    vector = PoolingParams("mean")
    driver = Driver(max_model_len=20, max_num_batched_tokens=20, scheduler=encoder)
    for name in ("a", "b", "c"):
        driver.add(name, prompt_of(12, 0), pooling=vector)
        driver.step()
        assert driver.scheduled == {name: 12}
    with pytest.raises(ConfigError, match="must fit into one step"):
        Driver(max_model_len=20, max_num_batched_tokens=19, scheduler=encoder)
    with pytest.raises(ConfigError, match="Remove kv_connector"):
        Driver(scheduler=encoder, rules={})


def test_a_waiting_request_without_blocks_stops_admission_and_preempts_none() -> None:
    driver = Driver(num_blocks=9, max_model_len=32)
    driver.add("runs", prompt_of(20, 0), max_tokens=2)
    driver.add("big", prompt_of(16, 30))
    driver.add("small", prompt_of(2, 70))
    driver.step()
    assert driver.scheduled == {"runs": 20}
    assert driver.scheduler.get_request_counts() == (1, 2)
    assert driver.scheduler.make_stats().num_preemptions == 0
    driver.run()
    assert len(driver.finished) == 3


def test_at_least_the_last_token_is_computed_although_all_is_cached() -> None:
    driver = Driver()
    driver.add("first", prompt_of(16))
    driver.run()
    key = driver.add("again", prompt_of(16))
    driver.step()
    assert driver.scheduled == {"again": 4}
    driver.run()
    assert driver.finished[key].num_cached_tokens == 12


@pytest.mark.req("SCH-16", "OUT-03")
def test_new_and_resumed_requests_are_distinguished_and_run() -> None:
    driver = Driver(num_blocks=9, max_model_len=32)
    driver.add("old", prompt_of(14, 0), max_tokens=14)
    driver.add("young", prompt_of(14, 40), max_tokens=14)
    driver.run()
    starts = [start for plan in driver.plans for start in plan.added]
    assert [(start.request_id, start.resumed) for start in starts] == [
        ("old", False),
        ("young", False),
        ("young", True),
    ]
    resumed = starts[-1]
    # the whole table: the worker kept nothing of the row that was dropped
    assert len(resumed.block_ids[0]) * 4 >= resumed.num_known_tokens
    assert len(resumed.output_token_ids) > 0


def test_status_and_budget_change_with_admission() -> None:
    driver = Driver(max_num_batched_tokens=7)
    driver.add("a", prompt_of(5, 0))
    driver.add("b", prompt_of(5, 30))
    driver.plan()
    assert driver.requests["a"].status is RequestStatus.RUNNING
    assert driver.requests["b"].status is RequestStatus.RUNNING
    assert driver.plans[0].num_scheduled_tokens == 7


def test_counters_advance_before_the_plan_is_answered() -> None:
    driver = Driver(**ASYNC)
    driver.add("r", prompt_of(5))
    driver.plan()
    running, row = driver.scheduler.running, driver.requests["r"].row
    assert (int(running.num_computed[row]), int(running.num_placeholders[row])) == (5, 1)
    driver.plan()
    assert (int(running.num_computed[row]), int(running.num_placeholders[row])) == (6, 2)
    driver.answer()
    assert (int(running.num_tokens[row]), int(running.num_placeholders[row])) == (6, 1)


def test_the_public_operations_are_there() -> None:
    driver = Driver()
    key = driver.add("r", prompt_of(5), max_tokens=2)
    assert driver.scheduler.get_request_counts() == (0, 1)
    assert driver.scheduler.has_unfinished_requests()
    driver.step()
    assert driver.scheduler.get_request_counts() == (1, 0)
    assert driver.scheduler.reset_prefix_cache() is False
    driver.run()
    assert driver.scheduler.reset_prefix_cache() is True
    assert not driver.scheduler.has_unfinished_requests()
    assert driver.reason(key) is FinishReason.LENGTH_CAPPED
    stats = driver.scheduler.make_stats(num_bad_messages=3)
    assert (stats.num_running, stats.num_waiting, stats.num_bad_messages) == (0, 0, 3)
    assert (stats.num_free_blocks, stats.kv_usage) == (39, 0.0)


# Requests in


def test_counters_start_empty_and_follow_the_request() -> None:
    driver = Driver(**ASYNC)
    driver.add("first", prompt_of(12), max_tokens=2)
    assert driver.requests["first"].num_cached_tokens == -1
    driver.run()
    key = driver.add("second", prompt_of(12), max_tokens=4)
    driver.plan()
    request, running = driver.requests["second"], driver.scheduler.running
    assert request.num_cached_tokens == 8
    assert int(running.num_computed[request.row]) == 12
    assert int(running.num_placeholders[request.row]) == 1
    assert request.num_preemptions == 0
    driver.run()
    assert driver.finished[key].num_cached_tokens == 8


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    driver = pressed()
    driver.add("old", prompt_of(15, 0), max_tokens=2)
    young = driver.add("young", prompt_of(16, 40), max_tokens=8)
    driver.run()
    assert driver.finished[young].num_preemptions == 1
    assert driver.finished[young].num_cached_tokens == 0


@pytest.mark.req("REQ-06")
def test_block_hashes_grow_with_the_verified_tokens() -> None:
    driver = Driver()
    driver.add("r", prompt_of(6), max_tokens=12)
    request = driver.requests["r"]
    driver.step()
    lengths = []
    for _ in range(10):
        before = list(request.block_hashes)
        driver.plan()
        assert request.block_hashes[: len(before)] == before
        row = request.row
        assert len(request.block_hashes) == int(driver.scheduler.running.num_tokens[row]) // 4
        lengths.append(len(request.block_hashes))
        driver.answer()
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (1, 4)


@pytest.mark.req("REQ-06", "KVM-02")
def test_a_request_that_skips_the_prefix_cache_computes_everything_and_is_still_found_itself() -> (
    None
):
    driver = Driver()
    driver.add("first", prompt_of(12), max_tokens=1)
    driver.run()
    key = driver.add("skips", prompt_of(12), max_tokens=1, skip_reading_prefix_cache=True)
    driver.step()
    assert driver.scheduled == {"skips": 12}
    driver.run()
    assert driver.finished[key].num_cached_tokens == 0


def test_priority_requests_are_admitted_by_priority_arrival_and_id() -> None:
    driver = Driver(max_num_seqs=1, policy="priority")
    for name, priority, age_s in (
        ("z", 1, 0.0),
        ("late", 0, 0.0),
        ("old", 0, 50.0),
        ("a", -1, 0.0),
    ):
        driver.add(name, prompt_of(2), max_tokens=1, priority=priority, age_s=age_s)
    driver.run()
    order = [start.request_id for plan in driver.plans for start in plan.added]
    assert order == ["a", "old", "late", "z"]


# Ends


@pytest.mark.req("REQ-10")
def test_every_way_to_end_has_its_reason() -> None:
    driver = Driver(sample=lambda name, position: EOS if name == "eos" else 50 + position)
    eos = driver.add("eos", prompt_of(5))
    token = driver.add("token", prompt_of(5), sampling={"stop_token_ids": (52,)})
    string = driver.add("string", prompt_of(5), max_tokens=30)
    length = driver.add("length", prompt_of(5), max_tokens=2)
    gone = driver.add("gone", prompt_of(5), max_tokens=30)
    long = driver.add("long", prompt_of(64))
    bad = driver.add("nan", prompt_of(5), max_tokens=30)
    driver.plan()
    driver.answer(nan_rows=[driver.requests["nan"].row])
    driver.steps(3)
    driver.stop_found(string, 3)
    driver.abort(gone)
    driver.run()
    assert {key: end.reason for key, end in driver.finished.items()} == {
        eos: FinishReason.STOPPED,
        token: FinishReason.STOPPED,
        string: FinishReason.STOPPED,
        length: FinishReason.LENGTH_CAPPED,
        gone: FinishReason.ABORTED,
        long: FinishReason.IGNORED,
        bad: FinishReason.ERROR,
    }
    assert driver.received[token] == [50, 51, 52]
    assert (driver.finished[token].stop_token_id, driver.finished[eos].stop_token_id) == (52, None)
    assert "not finite" in (driver.finished[bad].message or "")
    assert FinishReason.REPETITION.api_name == "repetition"


def test_the_models_length_ends_a_request_without_max_tokens() -> None:
    driver = Driver(max_model_len=16)
    key = driver.add("r", prompt_of(10), max_tokens=None)
    driver.run()
    assert len(driver.received[key]) == 6
    assert driver.reason(key) is FinishReason.LENGTH_CAPPED


def test_stop_ids_do_not_count_before_min_tokens() -> None:
    driver = Driver(sample=lambda _, position: EOS)
    key = driver.add("r", prompt_of(5), sampling={"min_tokens": 3})
    driver.run()
    assert driver.received[key] == [EOS] * 3


def test_numbers_that_no_request_can_reach_do_not_stop_the_engine() -> None:
    driver = Driver()
    key = driver.add("r", prompt_of(5), max_tokens=None, sampling={"min_tokens": 2**64 - 1})
    driver.run()
    assert driver.reason(key) in (FinishReason.LENGTH_CAPPED, FinishReason.ERROR)


def test_a_resubmitted_request_continues_where_it_was() -> None:
    driver = Driver()
    key = driver.add("r", prompt_of(5), outputs=expected_output("r", 3), max_tokens=5)
    driver.run()
    assert driver.received[key] == expected_output("r", 5)[3:]
    assert driver.finished[key].num_output_tokens == 5


def test_a_resubmitted_request_that_has_all_its_tokens_ends_at_once() -> None:
    driver = Driver()
    key = driver.add("r", prompt_of(5), outputs=[11, 12], max_tokens=2)
    assert driver.reason(key) is FinishReason.LENGTH_CAPPED
    assert driver.finished[key].num_output_tokens == 2
    assert driver.plan() is None


def test_a_request_id_or_handle_can_be_used_again_after_the_end() -> None:
    driver = Driver()
    driver.add("r", prompt_of(5), handle=1, max_tokens=1)
    again = driver.add("r", prompt_of(5), handle=2)
    assert "still running" in (driver.finished.pop(again).message or "")
    driver.run()
    driver.received.clear()
    driver.finished.clear()
    key = driver.add("r", prompt_of(5), handle=1, max_tokens=1)
    driver.run()
    assert driver.reason(key) is FinishReason.LENGTH_CAPPED


@pytest.mark.req("SYS-06")
def test_clients_may_use_the_same_handles() -> None:
    driver = Driver()
    first = driver.add("a", prompt_of(5), client=0, handle=1, max_tokens=3)
    second = driver.add("b", prompt_of(5), client=1, handle=1, max_tokens=3)
    driver.step()
    driver.abort((1, 1), (1, 7), (5, 1))
    driver.run()
    assert driver.received[first] == expected_output("a", 3)
    assert driver.reason(first) is FinishReason.LENGTH_CAPPED
    assert driver.reason(second) is FinishReason.ABORTED


def test_the_requests_of_a_client_that_went_away_all_end() -> None:
    driver = Driver(max_num_seqs=1)
    for name, client in (("a", 0), ("b", 0), ("c", 1)):
        driver.add(name, prompt_of(5), client=client)
    driver.step()
    driver.scheduler.abort_client(0, 0.0)
    driver.run()
    assert {key: end.reason for key, end in driver.finished.items()} == {
        (0, 0): FinishReason.ABORTED,
        (0, 1): FinishReason.ABORTED,
        (1, 2): FinishReason.LENGTH_CAPPED,
    }


def test_a_malformed_add_ends_the_live_request_of_its_handle() -> None:
    driver = Driver()
    client, handle = driver.add("r", prompt_of(5), max_tokens=30)
    driver.plan()
    malformed = Malformed("add", handle)
    driver.scheduler.reject_message(malformed, "no such field", client=client, now=0.0)
    driver.answer()
    driver.run()
    assert driver.finished[client, handle].reason is FinishReason.ERROR
    assert driver.scheduler.get_request_counts() == (0, 0)


def test_blocks_of_requests_with_no_store_are_reused_before_those_of_others() -> None:
    """No later request finds them."""
    driver = Driver(num_blocks=17)
    driver.add("kept", prompt_of(33), max_tokens=1)
    driver.run()
    for index in range(3):
        driver.add(f"private {index}", prompt_of(24, 30 * index), no_store=True, max_tokens=4)
        driver.run()
    again = driver.add("again", prompt_of(33), max_tokens=1)
    driver.run()
    assert driver.finished[again].num_cached_tokens == 32
