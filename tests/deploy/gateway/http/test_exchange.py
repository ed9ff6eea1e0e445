"""The API as a client sees it, over a real connection, with a scripted engine."""

import asyncio
import json
from typing import Any

import pytest

from longshore.deploy.bench.sse_client import HttpAnswer
from longshore.deploy.model.folder import SamplingDefaults
from longshore.deploy.supervisor.runtime_dir import RuntimeDir
from longshore.protocol.errors import HandshakeRejected
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import AddRequest
from tests.deploy.gateway.conftest import StartGateway
from tests.deploy.gateway.fake_engine import FakeEngine, echo, never_answer
from tests.deploy.tiny_tokenizer import byte_level_tokenizer

CHAT = [{"role": "user", "content": "Where?"}]


def ids_of(text: str) -> list[int]:
    ids: list[int] = byte_level_tokenizer().encode(text).ids
    return ids


def error_of(answer: HttpAnswer) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(answer.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def chunks_of(answer: HttpAnswer) -> list[dict[str, Any]]:
    events = [data for _, data in answer.events]
    assert events[-1] == b"[DONE]"
    return [json.loads(data) for data in events[:-1]]


def say(text: str, reason: FinishReason = FinishReason.STOPPED) -> Any:
    """A script that answers with `text`, one token at a time, and an end token."""

    def script(engine: FakeEngine, request: AddRequest) -> None:
        token_ids = [*ids_of(text), 1]
        for token_id in token_ids:
            engine.send_tokens(request, [token_id])
        engine.finish(request, reason, num_output_tokens=len(token_ids))

    return script


async def test_completion_answers_every_prompt_in_order(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        answer = await gateway.post(
            "/v1/completions", {"model": "tiny", "prompt": ["one", "two 🚢"], "max_tokens": 9}
        )
        response = json.loads(answer.body)
        assert [choice["text"] for choice in response["choices"]] == ["one", "two 🚢"]
        assert [choice["finish_reason"] for choice in response["choices"]] == ["length"] * 2
        assert response["object"] == "text_completion"
        assert response["usage"] == {
            "prompt_tokens": 11,
            "completion_tokens": 11,
            "total_tokens": 22,
            "prompt_tokens_details": {"cached_tokens": 4},
        }


async def test_streamed_completion_joins_to_the_whole(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        body = {"prompt": "a 🚢!", "max_tokens": 20, "stream": True, "return_token_ids": True}
        chunks = chunks_of(await gateway.post("/v1/completions", body))
        choices = [chunk["choices"][0] for chunk in chunks]
        assert "".join(choice["text"] for choice in choices) == "a 🚢!"
        assert [i for choice in choices for i in choice["token_ids"]] == ids_of("a 🚢!")
        assert [choice["finish_reason"] for choice in choices][-1] == "length"
        assert all("usage" not in chunk for chunk in chunks)


async def test_streamed_chat_has_role_text_end_and_usage(start_gateway: StartGateway) -> None:
    async with start_gateway(say("the berth")) as gateway:
        body = {"messages": CHAT, "stream": True, "stream_options": {"include_usage": True}}
        chunks = chunks_of(await gateway.post("/v1/chat/completions", body))
        *pieces, usage = chunks
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == len(ids_of("the berth")) + 1
        assert all(piece["usage"] is None for piece in pieces)
        deltas = [piece["choices"][0]["delta"] for piece in pieces]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta["content"] for delta in deltas[1:-1]) == "the berth"
        assert deltas[-1] == {}
        ends = [piece["choices"][0]["finish_reason"] for piece in pieces]
        assert ends == [None] * (len(ends) - 1) + ["stop"]


async def test_whole_chat_has_the_answer_without_what_stopped_it(
    start_gateway: StartGateway,
) -> None:
    async with start_gateway(say("the berth")) as gateway:
        answer = await gateway.post("/v1/chat/completions", {"messages": CHAT})
        (choice,) = json.loads(answer.body)["choices"]
        assert choice["message"] == {
            "role": "assistant",
            "content": "the berth",
            "refusal": None,
        }
        assert choice["finish_reason"] == "stop"


async def test_request_carries_every_setting_to_the_engine(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        await gateway.post(
            "/v1/completions",
            {
                "prompt": [5, 6, 7],
                "max_tokens": 3,
                "min_tokens": 2,
                "temperature": 0.5,
                "top_p": 0.9,
                "top_k": 4,
                "seed": 11,
                "stop_token_ids": [9],
                "ignore_eos": True,
                "priority": -2,
                "cache_salt": "mine",
            },
        )
        (request,) = gateway.engine.requests
        sampling = request.sampling
        assert request.prompt_token_ids.tolist() == [5, 6, 7]
        assert (request.options.priority, request.options.cache_salt) == (-2, "mine")
        assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (3, 2, 11)
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 4)
        assert (sampling.stop_token_ids, sampling.ignore_eos) == ((9,), True)


async def test_what_is_not_said_comes_from_the_model_and_the_api(
    start_gateway: StartGateway,
) -> None:
    defaults = SamplingDefaults(
        temperature=0.25, top_p=0.5, top_k=3, min_p=0.1, repetition_penalty=1.5
    )
    async with start_gateway(sampling_defaults=defaults, seed=7) as gateway:
        await gateway.post("/v1/completions", {"prompt": "x", "top_k": -1, "min_p": 0})
        await gateway.post("/v1/chat/completions", {"messages": CHAT})
        completion, chat = (request.sampling for request in gateway.engine.requests)
        assert (completion.min_p, completion.repetition_penalty) == (0.0, 1.5)
        assert (chat.min_p, chat.presence_penalty) == (0.1, 0.0)
        assert (completion.temperature, completion.top_p, completion.top_k) == (0.25, 0.5, 0)
        assert (completion.max_tokens, chat.max_tokens) == (16, None)
        assert chat.top_k == 3
        assert completion.seed is not None
        assert completion.seed != chat.seed


async def test_length_of_an_answer_may_come_from_the_model(start_gateway: StartGateway) -> None:
    async with start_gateway(sampling_defaults=SamplingDefaults(max_tokens=5)) as gateway:
        await gateway.post("/v1/completions", {"prompt": "x"})
        await gateway.post("/v1/chat/completions", {"messages": CHAT})
        await gateway.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 7})
        assert [request.sampling.max_tokens for request in gateway.engine.requests] == [5, 5, 7]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/completions", b"{", 400, ["not JSON"]),
        ("/v1/completions", {"prompt": "x", "model": "other"}, 404, ["'other'", "'tiny'"]),
        ("/v1/completions", {"prompt": "x", "best_of": 3}, 400, ["best_of is not supported"]),
        ("/v1/completions", {"prompt": ["x"] * 99, "n": 99}, 400, ["n=99 with 99 prompts"]),
        ("/v1/completions", {"prompt": [5] * 64}, 400, ["64 tokens", "length is 64"]),
        ("/v1/completions", {"prompt": [320]}, 400, ["320", "0 to 319"]),
        ("/v1/completions", {"prompt": [-1]}, 400, ["-1"]),
        ("/v1/completions", {"prompt": ""}, 400, ["no tokens"]),
        ("/v1/completions", {"prompt": "x", "temperature": -1}, 400, ["temperature=-1"]),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, ["max_tokens=0"]),
        ("/v1/completions", b" " * 5000, 413, ["4096"]),
        ("/v1/chat/completions", {"messages": []}, 400, ["messages"]),
        ("/v1/moderations", {}, 404, ["/v1/moderations"]),
        ("/health", {}, 405, ["/health"]),
    ],
)
async def test_bad_request_is_rejected_in_the_api_s_own_shape(
    start_gateway: StartGateway, path: str, body: Any, status: int, words: list[str]
) -> None:
    async with start_gateway() as gateway:
        answer = await gateway.post(path, body)
        assert answer.status == status
        message = error_of(answer)["message"]
        assert all(word in message for word in words), message
        assert gateway.engine.requests == []


async def test_folder_without_tokenizer_takes_token_ids_only(start_gateway: StartGateway) -> None:
    async with start_gateway(tokenizer=False) as gateway:
        served = await gateway.post("/v1/completions", {"prompt": [5, 6]})
        (choice,) = json.loads(served.body)["choices"]
        assert (choice["text"], choice["token_ids"]) == ("", [5, 6])
        for path, body in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": CHAT}),
        ):
            answer = await gateway.post(path, body)
            assert answer.status == 400
            assert "the model folder has none" in error_of(answer)["message"]


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_goes_away_is_aborted(start_gateway: StartGateway, stream: bool) -> None:
    async with start_gateway(never_answer) as gateway:
        body = {"prompt": ["one", "two"], "stream": stream}
        asking = asyncio.create_task(gateway.post("/v1/completions", body))
        engine = gateway.engine
        await engine.wait_for(lambda: len(engine.requests) == 2)
        asking.cancel()
        await engine.wait_for(lambda: len(engine.aborted) == 2)
        assert sorted(engine.aborted) == [request.handle for request in engine.requests]
        metrics = await gateway.metrics()
        assert 'longshore_requests_finished_total{reason="abort"} 2.0' in metrics
        assert "longshore_live_requests 0.0" in metrics


@pytest.mark.parametrize(
    ("reason", "status"), [(FinishReason.IGNORED, 400), (FinishReason.ERROR, 500)]
)
async def test_engine_s_rejection_has_a_status_even_for_a_stream(
    start_gateway: StartGateway, reason: FinishReason, status: int
) -> None:
    def refuse(engine: FakeEngine, request: AddRequest) -> None:
        engine.finish(request, reason, message="the engine says why")

    async with start_gateway(refuse) as gateway:
        answer = await gateway.post("/v1/completions", {"prompt": "x", "stream": True})
        assert answer.status == status
        assert error_of(answer)["message"] == "the engine says why"


async def test_streams_go_on_after_their_last_token_when_the_engine_returns(
    start_gateway: StartGateway,
) -> None:
    def echo_in_two_lives(engine: FakeEngine, request: AddRequest) -> None:
        done = len(request.output_token_ids)
        engine.send_tokens(request, request.prompt_token_ids.tolist()[done : done + 2])
        if done:
            engine.finish(request, FinishReason.LENGTH_CAPPED, num_output_tokens=4)

    async with start_gateway(echo_in_two_lives) as gateway:
        body = {"prompt": [5, 6, 7, 8], "stream": True, "return_token_ids": True, "seed": 3}
        asking = asyncio.create_task(gateway.post("/v1/completions", body))
        await gateway.engine.wait_for(lambda: bool(gateway.engine.requests))
        gateway.engine.fail("worker 0 was lost")
        while (answer := await gateway.get("/ready")).status == 200:
            await asyncio.sleep(0.01)
        assert b"the engine is being restarted: worker 0 was lost" in answer.body
        health = await gateway.get("/health")
        assert (health.status, health.body) == (200, b"alive; not ready: " + answer.body)
        later = asyncio.create_task(gateway.post("/v1/completions", body | {"max_tokens": 2}))
        await gateway.engine.return_to_life()
        chunks = [json.loads(event[1]) for event in (await asking).events[:-1]]
        ids = [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]]
        assert ids == [5, 6, 7, 8]
        first, resumed = gateway.engine.requests[:2]
        assert resumed.output_token_ids.tolist() == [5, 6]
        assert (resumed.request_id, resumed.sampling) == (first.request_id, first.sampling)
        assert (await gateway.get("/ready")).status == 200
        await gateway.engine.wait_for(lambda: len(gateway.engine.requests) == 3)
        gateway.engine.finish(gateway.engine.requests[2], FinishReason.LENGTH_CAPPED)
        assert (await later).status == 200


async def test_an_engine_that_does_not_return_before_the_end_fails_its_streams(
    start_gateway: StartGateway,
) -> None:
    def begin(engine: FakeEngine, request: AddRequest) -> None:
        engine.send_tokens(request, ids_of("x"))

    async with start_gateway(begin) as gateway:
        body = {"prompt": "x", "stream": True}
        asking = asyncio.create_task(gateway.post("/v1/completions", body))
        await gateway.engine.wait_for(lambda: bool(gateway.engine.requests))
        gateway.process.stop()
        gateway.engine.fail("worker 0 was lost")
        answer = await asking
        message = json.loads(answer.events[-1][1])["error"]["message"]
        assert message == "the engine has stopped: worker 0 was lost"


async def test_clients_are_told_which_process_died_not_that_the_engine_was_told_to_stop(
    start_gateway: StartGateway,
) -> None:
    def begin(engine: FakeEngine, request: AddRequest) -> None:
        engine.send_tokens(request, ids_of("x"))

    runtime_dir = RuntimeDir()
    async with start_gateway(begin, runtime_dir=str(runtime_dir.path)) as gateway:
        asking = [
            asyncio.create_task(gateway.post("/v1/completions", {"prompt": "x", "stream": stream}))
            for stream in (True, False)
        ]
        await gateway.engine.wait_for(lambda: len(gateway.engine.requests) == 2)
        runtime_dir.note_death("worker 0 was killed (SIGKILL).")
        gateway.engine.fail("the engine is shutting down")
        streamed, whole = await asyncio.gather(*asking)
        later = await gateway.post("/v1/completions", {"prompt": "x"})
        for body in (streamed.events[-1][1], whole.body, later.body):
            message = json.loads(body)["error"]["message"]
            assert message == "the engine has stopped: worker 0 was killed (SIGKILL)."
        assert (whole.status, later.status) == (503, 503)
    runtime_dir.remove()


async def test_broken_connection_to_the_engine_is_noticed(start_gateway: StartGateway) -> None:
    async with start_gateway(never_answer) as gateway:
        asking = asyncio.create_task(gateway.post("/v1/completions", {"prompt": "x"}))
        await gateway.engine.wait_for(lambda: bool(gateway.engine.requests))
        gateway.engine.close()
        while (await gateway.get("/ready")).status == 200:
            await asyncio.sleep(0.01)
        gateway.process.stop()
        answer = await asking
        assert answer.status == 503
        assert "its scheduler process has ended" in error_of(answer)["message"]


async def test_gateway_of_another_model_is_rejected_by_the_engine(
    start_gateway: StartGateway,
) -> None:
    with pytest.raises(HandshakeRejected, match="another"):
        async with start_gateway(fingerprint="some other model"):
            pass


async def test_models_metrics_and_probes_answer(start_gateway: StartGateway) -> None:
    async with start_gateway(echo) as gateway:
        (model,) = json.loads((await gateway.get("/v1/models")).body)["data"]
        assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 64)
        assert json.loads((await gateway.get("/v1/models/tiny")).body) == model
        assert (await gateway.get("/v1/models/other")).status == 404
        assert (await gateway.get("/health")).status == 200
        assert (await gateway.get("/ready")).status == 200
        await gateway.post("/v1/completions", {"prompt": "xyz"})
        metrics = await gateway.metrics()
        for line in (
            'longshore_scheduler_steps_in_flight{engine="0"} 2.0',
            'longshore_scheduler_running_requests{engine="0"} 3.0',
            'longshore_scheduler_kv_usage_ratio{engine="0"} 0.25',
            'longshore_scheduler_prefix_hit_tokens_total{engine="0"} 16.0',
            'longshore_worker_step_seconds_count{engine="0",worker="0"} 7.0',
            "longshore_ready 1.0",
            "longshore_request_prompt_tokens_sum 3.0",
            "longshore_request_generated_tokens_sum 3.0",
            'longshore_request_seconds_count{reason="length"} 1.0',
            "longshore_generated_tokens_total 3.0",
            "longshore_time_to_first_token_seconds_count 1.0",
            "longshore_inter_token_latency_seconds_count 2.0",
            'longshore_http_responses_total{endpoint="/v1/completions",status="200"} 1.0',
            'longshore_http_responses_total{endpoint="/v1/models",status="200"} 1.0',
            'longshore_http_responses_total{endpoint="other",status="404"} 1.0',
        ):
            assert line in metrics.splitlines(), line


async def test_live_stream_is_finished_when_the_gateway_is_told_to_stop(
    start_gateway: StartGateway,
) -> None:
    async with start_gateway(never_answer) as gateway:
        body = {"prompt": "x", "stream": True}
        asking = asyncio.create_task(gateway.post("/v1/completions", body))
        await gateway.engine.wait_for(lambda: bool(gateway.engine.requests))
        gateway.process.stop()
        for token_id in ids_of("late"):
            gateway.engine.send_tokens(gateway.engine.requests[0], [token_id])
        gateway.engine.finish(gateway.engine.requests[0], FinishReason.LENGTH_CAPPED)
        chunks = chunks_of(await asking)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "late"


async def test_stop_token_that_the_model_does_not_have_is_rejected_by_name(
    start_gateway: StartGateway,
) -> None:
    async with start_gateway() as gateway:
        body = {"model": "tiny", "prompt": "one", "stop_token_ids": [1 << 20]}
        answer = await gateway.post("/v1/completions", body)
        assert answer.status == 400
        assert error_of(answer)["param"] == "stop_token_ids"


async def test_answer_can_be_sent_back_as_the_client_got_it(start_gateway: StartGateway) -> None:
    turn = {
        "role": "assistant",
        "content": "B42",
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": [],
    }
    async with start_gateway(say("yes")) as gateway:
        body = {"model": "tiny", "messages": [*CHAT, turn, *CHAT]}
        assert (await gateway.post("/v1/chat/completions", body)).status == 200
        called = {**turn, "tool_calls": [{"id": "1", "type": "function"}]}
        answer = await gateway.post("/v1/chat/completions", {**body, "messages": [called]})
        assert answer.status == 400
        assert "messages[0].tool_calls" in error_of(answer)["message"].replace("$.", "")
