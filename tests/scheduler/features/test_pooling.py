"""Requests for one vector: their prompt is computed as any other, and no token comes of it."""

from typing import Literal

import msgspec
import pytest

from longshore.protocol.arrays import int32_array
from longshore.protocol.errors import MalformedMessage
from longshore.protocol.handshake import ToEngine
from longshore.protocol.outputs import FinishReason, ModelRunnerOutput
from longshore.protocol.requests import (
    AddRequest,
    Malformed,
    PoolingParams,
    RequestOptions,
    read_malformed,
)
from longshore.protocol.sampling import SamplingParams
from longshore.protocol.transport.codec import Decoder, Encoder
from longshore.scheduler.request import RequestStatus
from longshore.scheduler.step.output_validator import InvalidOutput
from tests.harness.driver import Driver
from tests.harness.shared_drivers import pressed
from tests.harness.tokens import expected_output, prompt_of

EMBED = PoolingParams()
BOTH = pytest.mark.parametrize("steps_in_flight", [1, 2])


@pytest.mark.req("FEA-04")
@BOTH
def test_a_pooling_request_ends_with_its_vector_and_without_tokens(steps_in_flight: int) -> None:
    driver = Driver(max_steps_in_flight=steps_in_flight)
    text = driver.add("text", prompt_of(6), max_tokens=4)
    key = driver.add("p", prompt_of(11, 40), pooling=EMBED, max_tokens=20)
    driver.run()
    end = driver.finished[key]
    assert (end.reason, end.num_output_tokens) == (FinishReason.STOPPED, 0)
    assert end.pooled.tolist() == [11.0]
    assert driver.received[key] == []
    assert driver.received[text] == expected_output("text", 4)
    assert len(driver.finished[text].pooled) == 0
    starts = [start for plan in driver.plans for start in plan.added]
    assert [start.pooling for start in starts] == [None, EMBED]
    assert sum(plan.num_scheduled_tokens for plan in driver.plans) == 6 + 3 + 11
    assert driver.num_free_blocks == 39


@pytest.mark.req("FEA-04")
@BOTH
def test_a_long_prompt_is_pooled_after_its_last_chunk(steps_in_flight: int) -> None:
    driver = Driver(max_num_scheduled_tokens=8, max_steps_in_flight=steps_in_flight)
    key = driver.add("p", prompt_of(20), pooling=EMBED)
    driver.run()
    counts = [plan.num_scheduled_tokens for plan in driver.plans if plan.num_scheduled_tokens]
    assert counts == [8, 8, 4]
    assert driver.finished[key].pooled.tolist() == [20.0]


def test_a_prompt_of_the_models_length_but_one_is_pooled() -> None:
    driver = Driver(max_model_len=16)
    key = driver.add("p", prompt_of(15), pooling=EMBED)
    driver.run()
    assert driver.reason(key) is FinishReason.STOPPED


@BOTH
def test_a_pooled_prompt_is_a_prefix_for_others(steps_in_flight: int) -> None:
    driver = Driver(max_steps_in_flight=steps_in_flight)
    driver.add("p", prompt_of(12), pooling=EMBED)
    driver.run()
    key = driver.add("text", prompt_of(14), max_tokens=2)
    driver.run()
    assert driver.finished[key].num_cached_tokens == 12


@pytest.mark.parametrize("kind", ["mean", "cls"])
@BOTH
def test_a_vector_of_all_states_begins_after_no_cached_prefix(
    kind: Literal["mean", "cls"], steps_in_flight: int
) -> None:
    driver = Driver(max_steps_in_flight=steps_in_flight, max_num_scheduled_tokens=8)
    driver.add("text", prompt_of(12), max_tokens=1)
    driver.run()
    last = driver.add("last", prompt_of(12), pooling=EMBED)
    whole = driver.add("whole", prompt_of(12), pooling=PoolingParams(kind))
    driver.run()
    cached = [driver.finished[key].num_cached_tokens for key in (last, whole)]
    assert cached == [8, 0]
    starts = {start.request_id: start for plan in driver.plans for start in plan.added}
    assert starts["whole"].num_computed_tokens == 0
    assert driver.finished[whole].pooled.tolist() == [12.0]


def test_a_preempted_vector_of_all_states_is_computed_from_the_beginning() -> None:
    driver = pressed(max_num_scheduled_tokens=6)
    driver.add("old", prompt_of(10, 0), max_tokens=20)
    key = driver.add("p", prompt_of(22, 40), pooling=PoolingParams("mean"))
    driver.run()
    starts = [start for plan in driver.plans for start in plan.added if start.request_id == "p"]
    assert {start.num_computed_tokens for start in starts} == {0}
    assert driver.finished[key].num_preemptions == len(starts) - 1 > 0
    assert driver.finished[key].pooled.tolist() == [22.0]


def test_pooling_takes_no_drafts() -> None:
    driver = Driver(
        num_speculative_tokens=2, draft=lambda name, position: [9, 9], max_steps_in_flight=2
    )
    key = driver.add("p", prompt_of(6), pooling=EMBED)
    driver.run()
    assert driver.finished[key].num_draft_tokens == 0
    assert not any(len(plan.draft_rows) for plan in driver.plans)


@BOTH
def test_a_vector_that_comes_after_the_abort_is_dropped(steps_in_flight: int) -> None:
    driver = Driver(max_steps_in_flight=steps_in_flight)
    key = driver.add("p", prompt_of(6), pooling=EMBED)
    driver.plan()
    driver.abort(key)
    driver.run()
    assert driver.reason(key) is FinishReason.ABORTED
    assert len(driver.finished[key].pooled) == 0


def test_a_request_preempted_with_its_vector_in_flight_gets_it_all_the_same() -> None:
    driver = pressed(max_steps_in_flight=2, enable_prefix_caching=False)
    driver.add("old", prompt_of(16, 0), max_tokens=8)
    key = driver.add("p", prompt_of(16, 40), pooling=EMBED)
    driver.plan()
    driver.plan()  # the seventeenth token of `old` needs a block
    assert driver.requests["p"].status is RequestStatus.PREEMPTED
    driver.answer()
    assert driver.finished[key].pooled.tolist() == [16.0]
    driver.run()
    assert not any(start.resumed for plan in driver.plans for start in plan.added)


def test_numbers_that_are_not_finite_end_a_pooling_request_with_an_error() -> None:
    driver = Driver()
    key = driver.add("p", prompt_of(6), pooling=EMBED)
    driver.plan()
    driver.answer(nan_rows=[0])
    assert driver.reason(key) is FinishReason.ERROR
    assert len(driver.finished[key].pooled) == 0
    driver.run()


def test_an_output_without_the_vector_is_rejected() -> None:
    driver = Driver()
    driver.add("p", prompt_of(6), pooling=EMBED)
    driver.add("plain", prompt_of(6, 40))
    driver.plan()
    answer = ModelRunnerOutput(1, 1, sampled_tokens=int32_array([0, 5]))
    with pytest.raises(InvalidOutput, match="the vector of row 0 is missing"):
        driver.scheduler.update_from_output(answer, driver.now)
    assert driver.scheduler.take_outputs() == []  # nothing has changed


@pytest.mark.parametrize("dimensions", [0, -1, 2**31, 2**63])
def test_dimensions_that_no_vector_has_make_the_request_malformed_and_answered(
    dimensions: int,
) -> None:
    with pytest.raises(ValueError, match="must lie within"):
        PoolingParams(dimensions=dimensions)
    good = AddRequest(
        "r", 7, int32_array([1]), SamplingParams(), options=RequestOptions(pooling=PoolingParams())
    )
    encoder: Encoder[ToEngine] = Encoder()
    header, *arrays = encoder.encode(good)
    raw = msgspec.msgpack.decode(header)
    raw["options"]["pooling"] = {"dimensions": dimensions}
    header = msgspec.msgpack.encode(raw)
    decoder: Decoder[ToEngine] = Decoder(ToEngine)
    with pytest.raises(MalformedMessage, match="must lie within"):
        decoder.decode([header, *arrays])
    assert read_malformed(header) == Malformed("add", 7)
