"""OpenAI's Responses API: what reaches the engine, what the client gets, what is stored."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from longshore.deploy.bench.sse_client import HttpAnswer
from longshore.deploy.gateway.api_keys import plain_keys
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import AddRequest
from tests.deploy.gateway.conftest import PATIENCE_S, RunningGateway, StartGateway
from tests.deploy.gateway.fake_engine import FakeEngine, never_answer
from tests.deploy.gateway.http.test_exchange import error_of, ids_of
from tests.deploy.tiny_tokenizer import EOS_ID


def says_hey(engine: FakeEngine, request: AddRequest) -> None:
    for token_id in [*ids_of("hey"), EOS_ID]:
        engine.send_tokens(request, [token_id])
    engine.finish(request, FinishReason.STOPPED, num_output_tokens=4)


def is_cut(engine: FakeEngine, request: AddRequest) -> None:
    engine.send_tokens(request, ids_of("he"))
    engine.finish(request, FinishReason.LENGTH_CAPPED, num_output_tokens=2)


def begins(engine: FakeEngine, request: AddRequest) -> None:
    engine.send_tokens(request, ids_of("ab"))


def events_of(answer: HttpAnswer) -> list[dict[str, Any]]:
    events = []
    for _, event in answer.events:
        name, _, data = event.partition(b"\n")
        events.append(json.loads(data.removeprefix(b"data: ")))
        assert name == b"event: " + events[-1]["type"].encode()
    return events


async def create(gateway: RunningGateway, **body: Any) -> Any:
    answer = await gateway.post("/v1/responses", {"input": "hi", **body})
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


async def get(gateway: RunningGateway, path: str) -> Any:
    answer = await gateway.get(f"/v1/responses/{path}")
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


async def send(gateway: RunningGateway, method: str, path: str, **headers: str) -> HttpAnswer:
    return await gateway.client.request(
        method, f"/v1/responses/{path}", timeout_s=PATIENCE_S, headers=headers
    )


async def when_it_is(gateway: RunningGateway, response_id: str, status: str) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        while (response := await get(gateway, response_id))["status"] != status:
            await asyncio.sleep(0.01)
    return response


async def test_a_text_is_answered_and_the_answer_stored(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    async with start_gateway(says_hey, runtime_dir=str(tmp_path)) as gateway:
        response = await create(gateway, metadata={"a": "b"}, temperature=0.5)
        stored = await get(gateway, response["id"])
        (asked,) = gateway.engine.requests
    assert response == stored
    (message,) = response["output"]
    (content,) = message["content"]
    assert content == {"type": "output_text", "text": "hey", "annotations": [], "logprobs": []}
    assert (message["role"], message["status"]) == ("assistant", "completed")
    assert (response["status"], response["object"]) == ("completed", "response")
    assert (response["metadata"], response["temperature"]) == ({"a": "b"}, 0.5)
    assert response["store"] is True
    num_prompt = len(asked.prompt_token_ids)
    assert response["usage"] == {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": 2},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + 4,
    }


async def test_a_stream_has_the_events_that_clients_expect(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    async with start_gateway(says_hey, runtime_dir=str(tmp_path)) as gateway:
        answer = await gateway.post("/v1/responses", {"input": "hi", "stream": True})
        events = events_of(answer)
        stored = await get(gateway, events[0]["response"]["id"])
    names = [event["type"] for event in events]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert names[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert names[4 + len(deltas) :] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(deltas) == "hey"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["response"]["status"] == "in_progress"
    assert events[-1]["response"] == stored
    assert stored["output"][0]["id"] == events[2]["item"]["id"]


async def test_input_tokens_are_those_of_the_response_s_prompt(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    async with start_gateway(says_hey, runtime_dir=str(tmp_path)) as gateway:
        first = await create(gateway)
        for body in ({"input": "hi"}, {"input": "ho", "previous_response_id": first["id"]}):
            answer = await gateway.post("/v1/responses/input_tokens", body)
            counted = json.loads(answer.body)
            response = await create(gateway, **body)
            assert counted == {
                "object": "response.input_tokens",
                "input_tokens": response["usage"]["input_tokens"],
            }
        wrong = await gateway.post("/v1/responses/input_tokens", {"input": "hi", "model": "other"})
        assert wrong.status == 404


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_answer_that_is_cut_off_is_incomplete(
    start_gateway: StartGateway, is_stream: bool
) -> None:
    body = {"input": "hi", "max_output_tokens": 2, "stream": is_stream}
    async with start_gateway(is_cut) as gateway:
        answer = await gateway.post("/v1/responses", body)
        assert gateway.engine.requests[0].sampling.max_tokens == 2
    if is_stream:
        assert events_of(answer)[-1]["type"] == "response.incomplete"
    response = events_of(answer)[-1]["response"] if is_stream else json.loads(answer.body)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"


async def test_a_conversation_goes_on_without_the_former_instructions(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    chat = [
        {"role": "system", "content": "new"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "hey"},
        {"role": "user", "content": "b"},
    ]
    async with start_gateway(says_hey, runtime_dir=str(tmp_path)) as gateway:
        first = await create(gateway, input="a", instructions="old")
        second = await create(
            gateway, input="b", instructions="new", previous_response_id=first["id"]
        )
        as_items = [{**chat[1], "type": "message"}, first["output"][0], chat[3]]
        await create(gateway, input=as_items, instructions="new", store=False)
        await gateway.post("/v1/chat/completions", {"messages": chat})
        items = await get(gateway, f"{second['id']}/input_items")
        _, *prompts = (r.prompt_token_ids.tolist() for r in gateway.engine.requests)
    assert prompts[0] == prompts[1] == prompts[2]
    assert second["previous_response_id"] == first["id"]
    (item,) = items["data"]
    assert item["content"] == [{"type": "input_text", "text": "b"}]


async def test_the_input_is_listed_in_pages(start_gateway: StartGateway, tmp_path: Path) -> None:
    given = [{"role": "user", "content": text} for text in "abc"]
    async with start_gateway(says_hey, runtime_dir=str(tmp_path)) as gateway:
        response = await create(gateway, input=given)
        path = f"{response['id']}/input_items"
        newest = await get(gateway, f"{path}?limit=2")
        rest = await get(gateway, f"{path}?limit=2&after={newest['last_id']}")
        oldest = await get(gateway, f"{path}?order=asc&limit=1")
        wrong = [
            (await gateway.get(f"/v1/responses/{path}?{query}")).status
            for query in (
                *("limit=0", "limit=x", "limit=1000", "limit=0001000", f"limit={'0' * 5000}1"),
                *("order=up", "after=x", "include=y"),
            )
        ]
    texts = [[i["content"][0]["text"] for i in page["data"]] for page in (newest, rest, oldest)]
    assert texts == [["c", "b"], ["a"], ["a"]]
    assert [page["has_more"] for page in (newest, rest, oldest)] == [True, False, True]
    assert wrong == [400] * 8


async def test_a_deleted_response_and_one_that_was_not_stored_are_not_found(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    async with start_gateway(says_hey, runtime_dir=str(tmp_path)) as gateway:
        stored, unstored = await create(gateway), await create(gateway, store=False)
        deleted = await send(gateway, "DELETE", stored["id"])
        for response_id in (stored["id"], unstored["id"], "resp_1"):
            for answer in (
                await send(gateway, "GET", response_id),
                await send(gateway, "DELETE", response_id),
                await send(gateway, "POST", f"{response_id}/cancel"),
                await send(gateway, "GET", f"{response_id}/input_items"),
            ):
                assert answer.status == 404
                assert error_of(answer)["code"] == "response_not_found"
        followed = await gateway.post(
            "/v1/responses", {"input": "x", "previous_response_id": stored["id"]}
        )
    assert json.loads(deleted.body) == {"id": stored["id"], "object": "response", "deleted": True}
    assert followed.status == 400
    assert error_of(followed)["code"] == "previous_response_not_found"


async def test_a_key_sees_only_its_own_responses(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    keys = plain_keys(["alice", "bob"], "all")
    async with start_gateway(says_hey, runtime_dir=str(tmp_path), api_keys=keys) as gateway:

        async def ask(key: str, **body: Any) -> HttpAnswer:
            return await gateway.client.request(
                "POST",
                "/v1/responses",
                json.dumps({"input": "hi", **body}).encode(),
                timeout_s=PATIENCE_S,
                headers={"authorization": f"Bearer {key}"},
            )

        response_id = json.loads((await ask("alice")).body)["id"]
        theirs = await send(gateway, "GET", response_id, authorization="Bearer bob")
        mine = await send(gateway, "GET", response_id, authorization="Bearer alice")
        followed = await ask("bob", previous_response_id=response_id)
    assert (theirs.status, mine.status, followed.status) == (404, 200, 400)


async def test_a_response_in_the_background_is_completed_later(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    async with start_gateway(never_answer, runtime_dir=str(tmp_path)) as gateway:
        queued = await create(gateway, background=True)
        assert (queued["status"], queued["output"]) == ("queued", [])
        assert await get(gateway, queued["id"]) == queued
        early = await gateway.post(
            "/v1/responses", {"input": "x", "previous_response_id": queued["id"]}
        )
        (asked,) = gateway.engine.requests
        says_hey(gateway.engine, asked)
        done = await when_it_is(gateway, queued["id"], "completed")
        assert gateway.process._models[0].engines.num_own_requests == 0
        cancelled = json.loads((await send(gateway, "POST", f"{queued['id']}/cancel")).body)
    assert done["output"][0]["content"][0]["text"] == "hey"
    assert done["usage"]["output_tokens"] == 4
    assert cancelled == done  # too late
    assert early.status == 400
    assert "queued" in error_of(early)["message"]


async def test_a_cancelled_response_is_aborted(start_gateway: StartGateway, tmp_path: Path) -> None:
    async with start_gateway(never_answer, runtime_dir=str(tmp_path)) as gateway:
        queued = await create(gateway, background=True)
        answer = await send(gateway, "POST", f"{queued['id']}/cancel")
        await gateway.engine.wait_for(lambda: gateway.engine.aborted)
        assert json.loads(answer.body)["status"] == "cancelled"
        assert (await get(gateway, queued["id"]))["status"] == "cancelled"


async def test_a_response_in_the_foreground_cannot_be_cancelled(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    async with start_gateway(says_hey, runtime_dir=str(tmp_path)) as gateway:
        response = await create(gateway)
        answer = await send(gateway, "POST", f"{response['id']}/cancel")
    assert answer.status == 400
    assert "background" in error_of(answer)["message"]


async def test_a_failure_in_the_background_is_stored(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    async with start_gateway(never_answer, runtime_dir=str(tmp_path)) as gateway:
        late = await create(gateway, background=True, deadline_s=0.2)
        failed = await when_it_is(gateway, late["id"], "failed")
    assert failed["error"]["code"] == "server_error"
    assert "deadline_s" in failed["error"]["message"]


async def test_the_access_log_tells_the_end_of_a_response_in_the_background(
    start_gateway: StartGateway, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "longshore.deploy.gateway.request_log")
    async with start_gateway(never_answer, runtime_dir=str(tmp_path)) as gateway:
        done = await create(gateway, background=True)
        await gateway.engine.wait_for(lambda: bool(gateway.engine.requests))
        (asked,) = gateway.engine.requests
        says_hey(gateway.engine, asked)
        await when_it_is(gateway, done["id"], "completed")
        late = await create(gateway, background=True, deadline_s=0.2)
        await when_it_is(gateway, late["id"], "failed")
    ended, failed = (
        vars(record)["fields"]
        for record in caplog.records
        if record.getMessage() == "ended in the background"
    )
    assert (ended["path"], ended["output_tokens"]) == ("/v1/responses", 4)
    assert ended["ttft_ms"] > 0
    assert failed["error"] == "deadline_exceeded"


async def test_a_background_request_counts_for_the_limits(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    async with start_gateway(
        never_answer, runtime_dir=str(tmp_path), max_live_requests=1
    ) as gateway:
        await create(gateway, background=True)
        answer = await gateway.post("/v1/responses", {"input": "hi", "background": True})
    assert answer.status == 429


async def test_a_stream_that_fails_says_so_in_its_last_events(start_gateway: StartGateway) -> None:
    async with start_gateway(begins) as gateway:

        def fail(event: bytes) -> None:
            engine = gateway.engine
            if b"delta" in event:
                engine.finish(
                    engine.requests[0], FinishReason.ERROR, message="logits are not finite"
                )

        answer = await gateway.client.request(
            "POST",
            "/v1/responses",
            json.dumps({"input": "hi", "stream": True}).encode(),
            timeout_s=PATIENCE_S,
            on_event=fail,
        )
    *_, error, failed = events_of(answer)
    assert (error["type"], error["message"]) == ("error", "logits are not finite")
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"]["code"] == "server_error"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "call_id"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "arguments"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "item_reference"),
        ({"input": [{"role": "robot", "content": "x"}]}, "robot"),
        ({"input": [{"role": "user"}]}, "content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        ({"tool_choice": {"type": "web_search"}, "tools": [{"type": "web_search"}]}, "web_search"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "xml"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "x"}}}},
            "text.format: ",
        ),
        ({"reasoning": {"effort": 5}}, "reasoning"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"background": True, "stream": True}, "background"),
        ({"background": True, "store": False}, "background"),
        ({"temperature": -1}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"no_store": True, "cache_salt": "s"}, "no_store"),
        ({"stop": ["x"]}, "stop"),
        ({"guided_regex": "x"}, "guided_regex"),
        ({"n": 2}, "n is not supported"),
    ],
)
async def test_what_is_invalid_or_unsupported_is_rejected_by_name(
    start_gateway: StartGateway, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    async with start_gateway(runtime_dir=str(tmp_path)) as gateway:
        answer = await gateway.post("/v1/responses", {"input": "hi", **change})
        assert gateway.engine.requests == []
    assert answer.status == 400
    assert words in error_of(answer)["message"]


async def test_parameters_without_effect_are_accepted(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    async with start_gateway(says_hey, runtime_dir=str(tmp_path)) as gateway:
        await create(
            gateway,
            tools=[],
            include=[],
            text={"format": {"type": "text"}},
            truncation="disabled",
            prompt_cache_key="k",
            user="u",
            parallel_tool_calls=False,
        )


async def test_a_server_without_a_store_answers_but_stores_nothing(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    async with start_gateway(says_hey, runtime_dir=str(tmp_path), max_stored_bytes=0) as gateway:
        assert (await create(gateway))["store"] is False
        for body in ({"store": True}, {"background": True}):
            answer = await gateway.post("/v1/responses", {"input": "hi", **body})
            assert answer.status == 400
            assert "stored-responses-mib" in error_of(answer)["message"]


LARGE = "x" * (1 << 20)


@pytest.mark.parametrize(
    "given",
    [
        LARGE + "x",
        [{"type": "function_call", "call_id": "c", "name": LARGE, "arguments": ""}],
        [{"type": "function_call_output", "call_id": LARGE, "output": "x"}],
    ],
)
async def test_a_conversation_too_large_to_store_is_rejected_before_it_is_answered(
    start_gateway: StartGateway, tmp_path: Path, given: Any
) -> None:
    async with start_gateway(
        says_hey, runtime_dir=str(tmp_path), max_body_bytes=4 << 20
    ) as gateway:
        answer = await gateway.post("/v1/responses", {"input": given})
    assert answer.status == 400
    assert error_of(answer)["param"] == "store"


async def test_the_number_of_items_is_bounded(start_gateway: StartGateway) -> None:
    async with start_gateway(max_body_bytes=1 << 20) as gateway:
        answer = await gateway.post("/v1/responses", {"input": [{"role": "user"}] * 16_385})
    assert answer.status == 400
    assert "at most 16384" in error_of(answer)["message"]
