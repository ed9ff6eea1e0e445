"""Deadlines, and which prefixes requests share."""

import asyncio
from typing import Any

import pytest

from longshore.protocol.requests import AddRequest, CacheHint, CachePrefix
from tests.deploy.gateway.conftest import PATIENCE_S, StartGateway
from tests.deploy.gateway.fake_engine import FakeEngine, never_answer
from tests.deploy.gateway.http.test_exchange import error_of


def one_token_and_no_end(engine: FakeEngine, request: AddRequest) -> None:
    engine.send_tokens(request, [70])


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_answer_is_given_up_at_its_deadline_and_aborted(
    start_gateway: StartGateway, is_stream: bool
) -> None:
    async with start_gateway(one_token_and_no_end) as gateway:
        body = {"prompt": "p", "deadline_s": 0.2, "stream": is_stream}
        answer = await gateway.post("/v1/completions", body)
        await gateway.engine.wait_for(lambda: bool(gateway.engine.aborted))
        assert gateway.engine.aborted == [request.handle for request in gateway.engine.requests]
        if is_stream:
            assert answer.status == 200
            assert b"deadline_exceeded" in answer.events[-1][1]
        else:
            assert answer.status == 504
            assert error_of(answer)["code"] == "deadline_exceeded"


async def test_an_answer_in_time_knows_of_no_deadline(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        answer = await gateway.post("/v1/completions", {"prompt": "p", "deadline_s": 60})
        assert answer.status == 200


async def test_no_store_shares_with_nobody_not_even_with_another_of_its_kind(
    start_gateway: StartGateway,
) -> None:
    async with start_gateway() as gateway:
        for extra in ({}, {"no_store": True}, {"no_store": True}, {"no_store": False}):
            await gateway.post("/v1/completions", {"prompt": "p", "max_tokens": 1, **extra})
        salts = [request.options.cache_salt for request in gateway.engine.requests]
        assert salts[0] is None is salts[3]
        assert salts[1] is not None
        assert salts[2] is not None
        assert salts[1] != salts[2]
        stored = [not request.options.no_store for request in gateway.engine.requests]
        assert stored == [True, False, False, True]


async def test_the_beams_of_a_request_with_no_store_are_not_stored(
    start_gateway: StartGateway,
) -> None:
    async with start_gateway(never_answer) as gateway:
        body = {"prompt": "p", "max_tokens": 2, "temperature": 0, "use_beam_search": True}
        await gateway.post(
            "/v1/completions", {**body, "best_of": 2, "no_store": True, "deadline_s": 0.2}
        )
        assert [request.options.no_store for request in gateway.engine.requests] == [True]


async def test_reading_alone_can_be_left_out(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        for skips in (False, True):
            body = {"prompt": "p", "max_tokens": 1, "skip_reading_prefix_cache": skips}
            await gateway.post("/v1/completions", body)
        skipping = [
            request.options.skip_reading_prefix_cache for request in gateway.engine.requests
        ]
        assert skipping == [False, True]


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"deadline_s": 0}, "deadline_s"),
        ({"deadline_s": -1.5}, "deadline_s"),
        ({"deadline_s": "soon"}, "deadline_s"),
        ({"no_store": True, "cache_salt": "ours"}, "no_store"),
        ({"no_store": True, "prompt_cache_retention": "24h"}, "no_store"),
        ({"no_store": True, "prompt_cache_options": {"ttl": "30m"}}, "no_store"),
        ({"no_store": True, "kv_cache_retention": {"ttl_s": 60}}, "no_store"),
        (
            {"skip_reading_prefix_cache": True, "use_beam_search": True, "temperature": 0},
            "skip_reading_prefix_cache",
        ),
    ],
)
async def test_what_contradicts_is_rejected_by_name(
    start_gateway: StartGateway, extra: dict[str, Any], param: str
) -> None:
    async with start_gateway(never_answer) as gateway:
        async with asyncio.timeout(PATIENCE_S):
            answer = await gateway.post("/v1/completions", {"prompt": "p", **extra})
        assert answer.status == 400
        assert error_of(answer)["param"] == param


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({}, None),
        ({"prompt_cache_key": "s"}, CacheHint(300.0, "s")),
        ({"prompt_cache_retention": "in_memory"}, CacheHint(300.0)),
        ({"prompt_cache_key": "s", "prompt_cache_retention": "24h"}, CacheHint(86_400.0, "s")),
        ({"prompt_cache_options": {"ttl": "30m", "mode": "implicit"}}, CacheHint(1800.0)),
        ({"prompt_cache_options": {}}, None),
        (
            {"kv_cache_retention": {"ttl_s": 60, "priority": 2}, "prompt_cache_key": "s"},
            CacheHint(60.0, "s", 2),
        ),
        (
            {"kv_cache_retention": {"prefixes": [{"num_tokens": 9, "ttl_s": 5, "priority": 3}]}},
            CacheHint(0.0, prefixes=(CachePrefix(9, 5.0, 3),)),
        ),
        ({"prompt_cache_key": "s", "no_store": True}, None),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_the_scheduler_gets_the_hint_of_openais_parameters(
    start_gateway: StartGateway, path: str, change: dict[str, Any], hint: CacheHint | None
) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "p"}]},
        "/v1/completions": {"prompt": "p"},
        "/v1/responses": {"input": "p"},
    }
    async with start_gateway() as gateway:
        answer = await gateway.post(path, {**bodies[path], **change})
        assert answer.status == 200, answer.body
        assert gateway.engine.requests[0].options.cache_hint == hint


async def test_the_longest_cache_control_is_the_hint(start_gateway: StartGateway) -> None:
    def block(**control: str) -> dict[str, Any]:
        return {"type": "text", "text": "p", "cache_control": {"type": "ephemeral", **control}}

    body: dict[str, Any] = {"model": "tiny", "max_tokens": 2}
    async with start_gateway() as gateway:
        for content in ("p", [block()], [block(ttl="1h"), block(ttl="5m")]):
            messages = [{"role": "user", "content": content}]
            answer = await gateway.post("/v1/messages", {**body, "messages": messages})
            assert answer.status == 200, answer.body
        hints = [request.options.cache_hint for request in gateway.engine.requests]
    assert hints == [None, CacheHint(300.0), CacheHint(3600.0)]


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_cache_key": ""},
        {"prompt_cache_key": "x" * 1025},
        {"prompt_cache_retention": "48h"},
        {"prompt_cache_options": {"prewarm": True}},
        {"prompt_cache_options": {"ttl": "2h"}},
        {"kv_cache_retention": {}},
        {"kv_cache_retention": {"priority": 2, "prefixes": [{"num_tokens": 9, "ttl_s": 5}]}},
        {"kv_cache_retention": {"ttl_s": 0}},
        {"kv_cache_retention": {"ttl_s": 1e9}},
        {"kv_cache_retention": {"ttl_s": 60, "priority": 4}},
        {"kv_cache_retention": {"prefixes": [{"num_tokens": 0, "ttl_s": 5}]}},
        {"kv_cache_retention": {"ttl_s": 60}, "prompt_cache_retention": "24h"},
    ],
)
async def test_hints_out_of_bounds_are_rejected(
    start_gateway: StartGateway, change: dict[str, Any]
) -> None:
    async with start_gateway() as gateway:
        answer = await gateway.post("/v1/completions", {"prompt": "p", **change})
    assert answer.status == 400
    assert error_of(answer)["param"] == next(iter(change))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "p"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "p"}]}),
        ("/v1/responses", {"input": "p"}),
        (
            "/v1/messages",
            {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "p"}]},
        ),
    ],
)
async def test_the_scheduler_gets_the_job_of_a_turn(
    start_gateway: StartGateway, path: str, body: dict[str, Any]
) -> None:
    async with start_gateway() as gateway:
        for job in ({}, {"job_id": "j"}, {"job_id": "j", "is_last_step": True}):
            answer = await gateway.post(path, {**body, **job})
            assert answer.status == 200, answer.body
        requests = [
            (each.options.job_id, each.options.is_last_step) for each in gateway.engine.requests
        ]
        assert requests == [(None, False), ("j", False), ("j", True)]
        for wrong, param in (
            ({"is_last_step": True}, "is_last_step"),
            ({"job_id": ""}, "job_id"),
            ({"job_id": "x" * 257}, "job_id"),
            ({"job_id": 7}, "job_id"),
        ):
            answer = await gateway.post(path, {**body, **wrong})
            assert answer.status == 400
            assert param in answer.body.decode()
