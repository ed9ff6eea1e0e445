"""Sessions: a request whose output ends, and which goes on when its client says more."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import PoolingParams
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.features.sessions import MAX_QUEUED_CHUNKS
from longshore.scheduler.request import RequestStatus
from tests.harness.driver import Driver
from tests.harness.grammar import FakeCompiler, grammar_for
from tests.harness.kv_groups import full, state
from tests.harness.tokens import EOS, expected_output, prompt_of

BOTH = pytest.mark.parametrize("steps_in_flight", [1, 2])


def until_it_waits(driver: Driver, name: str) -> None:
    for _ in range(30):
        if driver.requests[name].status is RequestStatus.WAITING_FOR_STREAMING_REQ:
            return
        driver.step()
    raise AssertionError(f"{name} does not come to its end")


@pytest.mark.req("FEA-05")
@BOTH
def test_a_session_waits_for_its_next_input_and_continues_after_all_of_its_tokens(
    steps_in_flight: int,
) -> None:
    driver = Driver(max_steps_in_flight=steps_in_flight, enable_prefix_caching=False)
    key = driver.add("s", prompt_of(6), max_tokens=3, resumable=True)
    until_it_waits(driver, "s")
    (end,) = driver.continued[key]
    assert (end.reason, end.num_output_tokens) == (FinishReason.LENGTH_CAPPED, 3)
    assert driver.scheduler.get_request_counts() == (0, 1)
    while driver.step() is not None or driver.unanswered:
        pass
    assert driver.num_free_blocks == 39  # it holds nothing while it waits
    other = driver.add("other", prompt_of(6, 40))
    driver.step()
    assert driver.running == ["other"]
    driver.continue_session(key, [70, 71], max_tokens=4, resumable=False)
    assert driver.requests["s"].status is RequestStatus.WAITING
    driver.run()
    (start,) = (start for plan in driver.plans for start in plan.added[:1] if start.generation == 3)
    assert start.prompt_token_ids.tolist() == prompt_of(6) + expected_output("s", 3) + [70, 71]
    assert len(start.output_token_ids) == 0
    assert driver.received[key] == expected_output("s", 3) + expected_output("s", 4)
    assert driver.finished[key].num_output_tokens == 4  # counted from the last input on
    assert driver.received[other] == expected_output("other", 8)


@pytest.mark.req("FEA-05")
@BOTH
def test_inputs_that_come_early_wait_their_turn(steps_in_flight: int) -> None:
    driver = Driver(max_steps_in_flight=steps_in_flight)
    key = driver.add("s", prompt_of(6), max_tokens=2, resumable=True)
    driver.continue_session(key, [70], max_tokens=3)
    driver.step()
    driver.continue_session(key, [71, 72], max_tokens=1, resumable=False)
    assert len(driver.requests["s"].next_chunks) == 2
    driver.run()
    outputs = [expected_output("s", count) for count in (2, 3, 1)]
    assert driver.received[key] == [token for output in outputs for token in output]
    assert [end.num_output_tokens for end in driver.continued[key]] == [2, 3]
    assert driver.finished[key].reason is FinishReason.LENGTH_CAPPED
    last = [start for plan in driver.plans for start in plan.added][-1]
    expected = prompt_of(6) + outputs[0] + [70] + outputs[1] + [71, 72]
    assert last.prompt_token_ids.tolist() == expected


@BOTH
def test_a_session_finds_its_own_prefix_again(steps_in_flight: int) -> None:
    driver = Driver(max_steps_in_flight=steps_in_flight)
    key = driver.add("s", prompt_of(13), max_tokens=4, resumable=True)
    until_it_waits(driver, "s")
    driver.continue_session(key, prompt_of(4, 60), max_tokens=1, resumable=False)
    driver.run()
    assert driver.finished[key].num_cached_tokens == 16


def test_a_session_frees_its_blocks_after_those_of_requests_admitted_before_it() -> None:
    driver = Driver()
    driver.add("plain", prompt_of(9), max_tokens=2)
    driver.add("s", prompt_of(9, 30), max_tokens=2, resumable=True)
    driver.step()
    tables = [driver.table("plain"), driver.table("s")]
    until_it_waits(driver, "s")
    free = driver.scheduler.kv_cache.pool.free_block_ids()
    assert free[:2] == [table[2] for table in reversed(tables)]  # partial blocks
    assert free[-4:] == [block_id for table in tables for block_id in table[1::-1]]


@BOTH
def test_a_stop_id_ends_an_output_and_tokens_after_it_are_dropped(steps_in_flight: int) -> None:
    driver = Driver(
        sample=lambda name, position: EOS if position == 2 else 50 + position,
        max_steps_in_flight=steps_in_flight,
    )
    key = driver.add("s", prompt_of(6), max_tokens=20, resumable=True)
    driver.continue_session(key, [70], max_tokens=20, resumable=False)
    driver.run()
    assert driver.received[key] == [50, 51, EOS] * 2
    assert driver.continued[key][0].reason is FinishReason.STOPPED
    assert driver.reason(key) is FinishReason.STOPPED


@BOTH
def test_a_stop_string_cuts_an_output_of_a_session(steps_in_flight: int) -> None:
    driver = Driver(max_steps_in_flight=steps_in_flight)
    key = driver.add("s", prompt_of(6), max_tokens=20, resumable=True)
    driver.steps(6)
    driver.stop_found(key, 2)
    (end,) = driver.continued[key]
    assert (end.reason, end.num_output_tokens) == (FinishReason.STOPPED, 2)
    received = list(driver.received[key])
    driver.continue_session(key, [70], max_tokens=2, resumable=False)
    driver.run()
    last = [start for plan in driver.plans for start in plan.added][-1]
    assert last.prompt_token_ids.tolist() == prompt_of(6) + expected_output("s", 2) + [70]
    assert driver.received[key] == received + expected_output("s", 2)


@BOTH
def test_a_stop_string_before_the_last_input_ends_only_the_output(steps_in_flight: int) -> None:
    driver = Driver(max_steps_in_flight=steps_in_flight)
    key = driver.add("s", prompt_of(6), max_tokens=20, resumable=True)
    driver.steps(4)
    driver.continue_session(key, [70], max_tokens=2, resumable=False)
    driver.stop_found(key, 1)
    assert len(driver.continued[key]) == 1
    assert key not in driver.finished
    driver.run()
    assert driver.finished[key].num_output_tokens == 2


@BOTH
def test_an_empty_last_input_closes_the_session(steps_in_flight: int) -> None:
    driver = Driver(max_steps_in_flight=steps_in_flight)
    key = driver.add("s", prompt_of(6), max_tokens=2, resumable=True)
    until_it_waits(driver, "s")
    driver.continue_session(key, [], resumable=False)
    assert driver.reason(key) is FinishReason.STOPPED
    driver.run()
    assert driver.received[key] == expected_output("s", 2)


@BOTH
@pytest.mark.parametrize("when", ["before", "running", "waiting", "queued"])
def test_a_session_may_be_aborted_in_any_state(steps_in_flight: int, when: str) -> None:
    driver = Driver(max_steps_in_flight=steps_in_flight)
    key = driver.add("s", prompt_of(6), max_tokens=3, resumable=True)
    if when == "running":
        driver.step()
        driver.continue_session(key, [70])
    elif when in ("waiting", "queued"):
        until_it_waits(driver, "s")
    if when == "queued":
        driver.continue_session(key, [70])
    driver.abort(key)
    assert driver.reason(key) is FinishReason.ABORTED
    driver.run()
    assert driver.num_free_blocks == 39
    driver.continue_session(key, [70])  # of a session that has ended: ignored
    assert not driver.scheduler.has_unfinished_requests()


@pytest.mark.parametrize(
    ("chunk", "reason", "words"),
    [
        ([100], FinishReason.ERROR, "token id"),
        ([-1], FinishReason.ERROR, "token id"),
        (prompt_of(60), FinishReason.IGNORED, "limit"),
    ],
)
def test_an_input_that_cannot_be_served_ends_the_session_with_the_reason(
    chunk: list[int], reason: FinishReason, words: str
) -> None:
    driver = Driver()
    key = driver.add("s", prompt_of(6), max_tokens=3, resumable=True)
    until_it_waits(driver, "s")
    driver.continue_session(key, chunk)
    assert driver.reason(key) is reason
    assert words in (driver.finished[key].message or "")
    driver.run()


def test_a_session_that_fills_the_models_length_is_over() -> None:
    driver = Driver(max_model_len=16)
    key = driver.add("s", prompt_of(6), max_tokens=None, resumable=True)
    driver.run()
    assert driver.reason(key) is FinishReason.LENGTH_CAPPED
    assert driver.received[key] == expected_output("s", 10)


def test_inputs_that_wait_are_bounded() -> None:
    driver = Driver()
    key = driver.add("s", prompt_of(6), resumable=True)
    driver.step()
    for _ in range(MAX_QUEUED_CHUNKS):
        driver.continue_session(key, [70])
    assert key not in driver.finished
    driver.continue_session(key, [70])
    assert driver.reason(key) is FinishReason.ERROR
    assert str(MAX_QUEUED_CHUNKS) in (driver.finished[key].message or "")
    driver.run()


def test_a_session_takes_no_pooling_and_no_grammar() -> None:
    driver = Driver(grammars=FakeCompiler({"all"}))
    for fields in ({"pooling": PoolingParams()}, {"structured_output": grammar_for("s")}):
        key = driver.add("s", prompt_of(6), resumable=True, **fields)
        assert driver.reason(key) is FinishReason.ERROR
        assert "resumable" in (driver.finished[key].message or "")


def test_sampling_settings_are_those_of_the_input() -> None:
    driver = Driver()
    key = driver.add("s", prompt_of(6), max_tokens=2, resumable=True)
    until_it_waits(driver, "s")
    driver.continue_session(key, [70], max_tokens=5)
    driver.step()
    (start,) = driver.plans[-1].added
    assert start.sampling == SamplingParams(temperature=0.0, max_tokens=5)
    assert start.last_computed == 6 + 2 + 1 + 5 - 1
    driver.abort(key)
    driver.run()


@settings(max_examples=80)
@given(data=st.data())
def test_a_session_gets_every_output_whole_and_in_order(data: st.DataObject) -> None:
    driver = Driver(
        num_blocks=data.draw(st.integers(17, 22)),
        max_num_seqs=3,
        max_steps_in_flight=data.draw(st.integers(1, 2)),
        max_num_scheduled_tokens=data.draw(st.integers(2, 30)),
        policy=data.draw(st.sampled_from(["fcfs", "priority", "continuum"])),
    )
    outputs: dict[tuple[int, int], list[int]] = {}
    keys = []
    for index in range(data.draw(st.integers(1, 4))):
        name = f"s{index}"
        count = data.draw(st.integers(1, 5))
        resumable = data.draw(st.booleans())
        keys.append(driver.add(name, prompt_of(3 + index), max_tokens=count, resumable=resumable))
        outputs[keys[-1]] = expected_output(name, count)
        num_chunks = data.draw(st.integers(1, 3)) if resumable else 0
        for number in range(num_chunks):
            driver.steps(data.draw(st.integers(0, 4)))
            count = data.draw(st.integers(1, 4))
            chunk = prompt_of(data.draw(st.integers(1, 4)), 7 * number)
            is_last = number == num_chunks - 1
            driver.continue_session(keys[-1], chunk, max_tokens=count, resumable=not is_last)
            outputs[keys[-1]] += expected_output(name, count)
    driver.run()
    for key in keys:
        assert driver.received[key] == outputs[key]
    assert driver.num_free_blocks == driver.num_blocks - 1


def test_tokens_on_their_way_are_void_once_the_output_of_a_preempted_session_has_ended() -> None:
    first, stop = expected_output("s", 2)
    driver = Driver(max_steps_in_flight=2)
    key = driver.add(
        "s", prompt_of(6), max_tokens=9, sampling={"stop_token_ids": (stop,)}, resumable=True
    )
    driver.continue_session(key, [70], max_tokens=2, resumable=False)
    driver.plan()
    driver.plan()
    driver.answer()
    driver.plan()  # the second token, which stops, and a third are on their way
    driver.scheduler._lifecycle.preempt(driver.requests["s"], driver.now)
    driver.run()
    assert driver.received[key] == [first, stop, *expected_output("s", 2)]
    assert driver.scheduler.make_stats().num_stale_tokens == 1


def test_a_session_that_is_stopped_while_it_recomputes_keeps_no_blocks() -> None:
    """Its row has blocks for tokens that are not computed again yet."""
    driver = Driver(max_steps_in_flight=1, max_num_scheduled_tokens=8, enable_prefix_caching=False)
    key = driver.add("s", prompt_of(14), max_tokens=9, resumable=True, keeps_blocks=True)
    while len(driver.received[key]) < 2:
        driver.step()
    request = driver.requests["s"]
    driver.scheduler._lifecycle.preempt(request, driver.now)
    driver.plan()
    assert request.row >= 0
    driver.stop_found(key, 1)
    assert request.status is RequestStatus.WAITING_FOR_STREAMING_REQ
    assert request.hold is None
    driver.continue_session(key, [70], max_tokens=2, resumable=False)
    driver.run()
    assert driver.received[key][2:] == expected_output("s", 2)


def test_a_stop_string_found_too_late_ends_no_session_that_waits() -> None:
    driver = Driver()
    key = driver.add("s", prompt_of(6), max_tokens=2, resumable=True)
    until_it_waits(driver, "s")
    driver.stop_found(key, 1)
    assert (len(driver.continued[key]), key in driver.finished) == (1, False)
    driver.continue_session(key, [70], max_tokens=2, resumable=False)
    driver.run()
    assert driver.finished[key].num_output_tokens == 2


def test_more_input_for_what_is_no_session_ends_it_with_the_reason() -> None:
    driver = Driver()
    key = driver.add("plain", prompt_of(6))
    driver.step()
    driver.continue_session(key, [70])
    assert driver.reason(key) is FinishReason.ERROR
    assert "not a session" in str(driver.finished[key].message)


def test_a_session_whose_client_thinks_is_no_stall() -> None:
    driver = Driver()
    driver.add("s", prompt_of(6), max_tokens=2, resumable=True)
    until_it_waits(driver, "s")
    assert not driver.scheduler.is_waited_for()
    assert driver.scheduler.idle_s(driver.now + 1000) == 0
    driver.add("other", prompt_of(6, 40))
    assert driver.scheduler.is_waited_for()


def test_a_session_that_arrives_with_its_output_complete_waits_for_its_next_chunk() -> None:
    driver = Driver()
    outputs = expected_output("s", 3)
    key = driver.add("s", prompt_of(6), outputs=outputs, max_tokens=3, resumable=True)
    (end,) = driver.continued[key]
    assert (end.reason, end.num_output_tokens) == (FinishReason.LENGTH_CAPPED, 3)
    assert key not in driver.finished
    assert driver.requests["s"].status is RequestStatus.WAITING_FOR_STREAMING_REQ
    driver.continue_session(key, [70], max_tokens=2, resumable=False)
    driver.run()
    (start,) = (start for plan in driver.plans for start in plan.added)
    assert start.prompt_token_ids.tolist() == [*prompt_of(6), *outputs, 70]
    assert driver.received[key] == expected_output("s", 2)
    assert driver.finished[key].num_output_tokens == 2


@pytest.mark.parametrize("groups", [(full(),), (full(), state())], ids=["full", "hybrid"])
def test_the_next_input_of_a_stopped_session_finds_nothing_that_is_not_finite(groups: Any) -> None:
    driver = Driver(*groups, max_steps_in_flight=2)
    key = driver.add("s", prompt_of(14), resumable=True)
    driver.plan()
    driver.stop_found(key, 0)
    driver.answer(nan_rows=[0])
    driver.continue_session(key, [50], max_tokens=2, resumable=False)
    driver.run()
    assert driver.finished[key].num_cached_tokens == 0
    assert driver.reason(key) is FinishReason.LENGTH_CAPPED
