"""What an answer of an `LLM` says about its request, with scripted outputs of an engine."""

import time

from longshore.deploy.llm.answer import Answer, request_output
from longshore.deploy.llm.prompts import PromptInput
from longshore.deploy.requests.live_requests import LiveRequests
from longshore.protocol.arrays import int32_array
from longshore.protocol.outputs import EngineOutputs, FinishedRequest, FinishReason, RequestEvent
from longshore.protocol.sampling import SamplingParams


def test_metrics_say_when_a_request_got_how_far() -> None:
    requests, before_s, before = LiveRequests(), time.monotonic(), time.time()
    answer = Answer("a", PromptInput([1, 2]), SamplingParams())
    metrics = request_output("a", [answer]).metrics
    assert metrics is not None
    assert before <= metrics.arrival_time <= time.time()
    assert metrics.first_token_ts == metrics.num_generation_tokens == 0

    answer.live, _ = requests.open("a", [1, 2], answer.sampling, on_change=answer.note_change)
    handles = int32_array([answer.live.handle])
    requests.apply(EngineOutputs(handles=handles, tokens=int32_array([5])))
    began = request_output("a", [answer]).metrics
    assert began is not None
    assert before_s <= began.queued_ts <= began.first_token_ts == began.last_token_ts
    assert 0 <= began.first_token_latency <= began.first_token_ts - before_s
    assert (began.num_generation_tokens, began.scheduled_ts) == (1, 0)

    end = FinishedRequest(
        answer.live.handle,
        FinishReason.STOPPED,
        2,
        events=((RequestEvent.QUEUED, 0.0), (RequestEvent.SCHEDULED, 0.5)),
    )
    requests.apply(EngineOutputs(handles=handles, tokens=int32_array([6]), finished=(end,)))
    ended = request_output("a", [answer]).metrics
    assert ended is not None
    assert ended.num_generation_tokens == 2
    assert ended.first_token_ts == began.first_token_ts <= ended.last_token_ts
    assert ended.scheduled_ts == ended.queued_ts + 0.5
    assert began.num_generation_tokens == 1  # an output that was returned does not change
