"""What a request is and what of it reaches the workers: requirements REQ and OUT-01."""

import numpy as np
import pytest

from longshore.protocol.outputs import RequestEvent
from longshore.protocol.requests import (
    LoRARequest,
    MultimodalFeature,
    PoolingParams,
    PromptEmbeds,
    StructuredOutput,
)
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.request import Request
from tests.harness.driver import Driver
from tests.harness.grammar import FakeCompiler
from tests.harness.tokens import expected_output, prompt_of
from tests.scheduler.test_request import make_request

IMAGES = (MultimodalFeature("a", 0, 2), MultimodalFeature("b", 3, 4, "audio"))
EMBEDS = PromptEmbeds(np.arange(6 * 2 * 4, dtype=np.uint8), 2, "float32")
GRAMMAR = StructuredOutput("json_schema", "{}")


@pytest.mark.req("REQ-01")
def test_a_request_keeps_its_identity_and_its_parameters() -> None:
    driver = Driver(max_loras=1, policy="priority", max_num_seqs=1)
    driver.add(
        "r",
        prompt_of(5),
        client=3,
        handle=9,
        priority=-2,
        age_s=0.25,
        lora=LoRARequest("adapter", "/a"),
        cache_salt="salt",
        trace_headers={"traceparent": "00-1"},
    )
    request = driver.requests["r"]
    assert (request.request_id, request.client_index, request.handle) == ("r", 3, 9)
    assert (request.options.priority, request.arrival_time) == (-2, driver.now - 0.25)
    assert request.options.lora == LoRARequest("adapter", "/a")
    assert (request.options.cache_salt, request.options.trace_headers) == (
        "salt",
        {"traceparent": "00-1"},
    )
    driver.add("plain", prompt_of(5))
    plain = driver.requests["plain"].options
    assert (plain.priority, plain.lora, plain.cache_salt, plain.trace_headers) == (
        0, None, None, None
    )  # fmt: skip
    driver.add("urgent", prompt_of(5), priority=-3)
    driver.run()
    order = [start.request_id for plan in driver.plans for start in plan.added]
    assert order == ["urgent", "r", "plain"]


@pytest.mark.req("REQ-02", "OUT-01")
def test_every_kind_of_input_reaches_the_workers_once_with_its_parameters() -> None:
    driver = Driver(max_num_encoder_input_tokens=8, max_loras=1, grammars=FakeCompiler({"{}"}))
    sampling = {"top_k": 3, "seed": 7, "stop_token_ids": (9,)}
    driver.add("text", prompt_of(6), max_tokens=5, sampling=sampling, lora=LoRARequest("x", "/x"))
    driver.add("images", prompt_of(8, 20), max_tokens=2, multimodal=IMAGES)
    driver.add("embeds", [0] * 6, max_tokens=2, prompt_embeds=EMBEDS)
    driver.add("pools", prompt_of(7, 40), pooling=PoolingParams("cls"))
    driver.add("json", prompt_of(5, 60), max_tokens=2, structured_output=GRAMMAR)
    requests = dict(driver.requests)
    assert {name: request.num_prompt_tokens for name, request in requests.items()} == {
        "text": 6, "images": 8, "embeds": 6, "pools": 7, "json": 5
    }  # fmt: skip
    assert requests["json"].options.structured_output == GRAMMAR
    driver.run()
    starts = {start.request_id: start for plan in driver.plans for start in plan.added}
    assert sum(len(plan.added) for plan in driver.plans) == len(starts) == 5
    text = starts["text"]
    assert text.prompt_token_ids.tolist() == prompt_of(6)
    assert text.sampling == SamplingParams(temperature=0.0, max_tokens=5, **sampling)
    assert (text.last_computed, text.lora) == (6 + 5 - 1, LoRARequest("x", "/x"))
    assert (len(text.block_ids[0]), text.num_computed_tokens) == (2, 0)
    images = starts["images"].multimodal
    assert [(each.hash, each.offset, each.num_tokens, each.modality) for each in images] == [
        ("a", 0, 2, "image"), ("b", 3, 4, "audio")
    ]  # fmt: skip
    embeds = starts["embeds"].prompt_embeds
    assert embeds is not None
    assert (embeds.data.tolist(), embeds.hidden_size) == (EMBEDS.data.tolist(), 2)
    assert starts["pools"].pooling == PoolingParams("cls")
    assert [start.has_structured_output for start in starts.values()].count(True) == 1
    assert starts["json"].has_structured_output
    for name, start in starts.items():
        assert (start.pooling is None) == (name != "pools")
        assert (start.prompt_embeds is None) == (name != "embeds")
        assert bool(start.multimodal) == (name == "images")


@pytest.mark.req("OUT-01", "OUT-03")
def test_a_resumed_row_is_sent_whole_again_with_all_that_belongs_to_it() -> None:
    driver = Driver(
        num_blocks=9,
        max_model_len=32,
        max_num_encoder_input_tokens=8,
        max_loras=1,
        enable_prefix_caching=False,
        cache={"preempt_threshold": 1.0},
    )
    driver.add("old", prompt_of(14, 0), max_tokens=14)
    key = driver.add(
        "young", prompt_of(14, 40), max_tokens=14, multimodal=IMAGES, lora=LoRARequest("x")
    )
    driver.run()
    first, again = [
        start for plan in driver.plans for start in plan.added if start.request_id == "young"
    ]
    assert (first.resumed, again.resumed) == (False, True)
    assert again.generation > first.generation
    assert again.prompt_token_ids.tolist() == first.prompt_token_ids.tolist()
    assert (again.sampling, again.lora) == (first.sampling, first.lora)
    assert [each.hash for each in again.multimodal] == ["a", "b"]
    num_outputs = len(again.output_token_ids)
    assert again.output_token_ids.tolist() == expected_output("young", num_outputs) != []
    assert len(again.block_ids[0]) == -(-(14 + num_outputs) // 4)
    assert driver.received[key] == expected_output("young", 14)


@pytest.mark.req("REQ-03", "REQ-05")
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_verified_tokens_all_tokens_and_drafts_are_three_streams(steps_in_flight: int) -> None:
    driver = Driver(
        max_steps_in_flight=steps_in_flight,
        num_speculative_tokens=2,
        # The first draft is right, the second is not.
        draft=lambda name, position: [expected_output(name, position + 1)[-1], 5],
    )
    prompt = prompt_of(6)
    key = driver.add("r", prompt, max_tokens=9)
    driver.plan()
    running, row = driver.scheduler.running, driver.requests["r"].row
    num_outputs = 0
    while driver.requests["r"].row >= 0:
        tokens = running.tokens_of(row).tolist()
        num_outputs = len(driver.received[key])
        assert tokens == prompt + driver.received[key]
        assert driver.received[key] == expected_output("r", num_outputs)
        assert int(running.num_tokens[row]) == 6 + num_outputs
        num_drafts = int(running.num_drafts[row])
        with_drafts = int(running.num_tokens[row] + running.num_placeholders[row]) + num_drafts
        gap = min(with_drafts, int(running.last_computed[row])) - int(running.num_computed[row])
        assert int(running.wanted()[row]) == gap
        drafts = running.drafts[row, :num_drafts].tolist()
        if steps_in_flight == 1 and num_drafts:
            assert drafts == [expected_output("r", num_outputs + 1)[-1], 5]
        elif num_drafts:
            assert drafts == [-1, -1]  # only the worker knows them
        driver.plan()
        if driver.unanswered:
            driver.answer()
    assert num_outputs >= 7
    driver.run()
    assert driver.received[key] == expected_output("r", 9)


@pytest.mark.req("REQ-05")
def test_derived_numbers_of_a_waiting_request_follow_its_tokens() -> None:
    request: Request = make_request(prompt=5, outputs=3)
    assert (request.num_tokens, request.num_output_tokens) == (8, 3)
    request.append_token(9)
    assert (request.num_tokens, request.num_output_tokens) == (9, 4)
    assert not request.options.multimodal
    assert make_request(prompt=8, multimodal=IMAGES).options.multimodal == IMAGES


@pytest.mark.req("REQ-05")
def test_only_requests_with_items_ahead_of_them_need_the_encoder() -> None:
    driver = Driver(max_num_encoder_input_tokens=8, max_num_batched_tokens=12)
    driver.add("text", prompt_of(4), max_tokens=4)
    driver.add("images", prompt_of(16, 30), max_tokens=4, multimodal=IMAGES)
    pending = driver.scheduler._encoder.pending
    assert list(pending) == []
    driver.step()  # eight tokens of `images`, past both items
    assert driver.scheduled == {"text": 4, "images": 8}
    assert list(pending) == []
    plans = [len(plan.encoder_inputs) for plan in driver.plans]
    assert plans == [2]
    driver.run()
    assert sum(len(plan.encoder_inputs) for plan in driver.plans) == 2


@pytest.mark.req("REQ-08")
def test_events_stop_reason_and_nans_are_on_the_request_and_in_its_end() -> None:
    driver = Driver(
        num_blocks=10,
        max_model_len=32,
        cache={"preempt_threshold": 1.0},
        sample=lambda name, position: 7 if (name, position) == ("b", 12) else 11,
    )
    a = driver.add("a", prompt_of(14), max_tokens=14)
    b = driver.add("b", prompt_of(14, 40), max_tokens=14, sampling={"stop_token_ids": (7, 8)})
    bad = driver.add("bad", prompt_of(2, 80))
    driver.plan()
    started = driver.now
    driver.answer(nan_rows=[driver.requests["bad"].row])
    driver.run()
    queued, scheduled, preempted, *_ = RequestEvent
    requests = driver.requests
    for key, name, kinds in (
        (a, "a", [queued, scheduled]),
        (b, "b", [queued, scheduled, preempted, scheduled]),
        (bad, "bad", [queued, scheduled]),
    ):
        end, request = driver.finished[key], requests[name]
        assert [event for event, _ in request.events] == kinds
        assert request.events[1] == (scheduled, started)
        first = request.events[0][1]
        assert end.events == tuple((event, at - first) for event, at in request.events)
        assert list(end.events) == sorted(end.events, key=lambda event: event[1])
        assert (end.stop_token_id, end.num_nans_in_logits) == (
            request.stop_reason,
            request.num_nans_in_logits,
        )
    assert [requests[name].stop_reason for name in ("a", "b", "bad")] == [None, 7, None]
    assert [requests[name].num_nans_in_logits for name in ("a", "b", "bad")] == [0, 0, 3]
