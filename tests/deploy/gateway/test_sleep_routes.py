"""Sleep and wake at vLLM's paths, with a scripted supervisor."""

import json
from typing import Any

import pytest

from longshore.deploy.bench.sse_client import HttpAnswer, HttpEndpoint
from longshore.deploy.gateway.api_keys import plain_keys
from tests.deploy.gateway.conftest import PATIENCE_S
from tests.deploy.gateway.test_admin_routes import (
    API_KEY,
    DONE,
    KEY,
    Administered,
    start_administered,
)

__all__ = ["start_administered"]  # a fixture


async def send(
    run: Administered, path: str, *, method: str = "POST", key: str | None = KEY
) -> HttpAnswer:
    client = HttpEndpoint(f"http://127.0.0.1:{run.gateway.port}", api_key=key)
    return await client.request(method, path, timeout_s=PATIENCE_S)


@pytest.mark.parametrize(
    ("path", "action"),
    [
        ("/sleep", {"action": "sleep"}),
        ("/sleep?level=1&mode=wait", {"action": "sleep"}),
        ("/sleep?mode=keep", {"action": "sleep", "timeout_s": 0}),
        ("/wake_up", {"action": "wake"}),
    ],
)
async def test_the_paths_are_the_actions_of_an_operator(
    start_administered: Any, path: str, action: dict[str, Any]
) -> None:
    async with start_administered(api_keys=plain_keys([API_KEY], "key")) as run:
        answer = await send(run, path)
        assert (answer.status, answer.body) == (200, DONE)
        assert run.supervisor.actions == [action]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/sleep?level=2", "level=2 is not supported: weights wait in host memory"),
        ("/sleep?mode=abort", "mode=abort is not supported: running requests finish"),
        ("/sleep?tags=weights", "tags is not supported: an engine sleeps and wakes as a whole"),
        ("/wake_up?tags=kv_cache", "tags is not supported: an engine sleeps and wakes as a whole"),
    ],
)
async def test_what_an_engine_cannot_do_is_rejected_by_name(
    start_administered: Any, path: str, message: str
) -> None:
    async with start_administered() as run:
        answer = await send(run, path)
        assert answer.status == 400
        assert message in json.loads(answer.body)["error"]["message"]
        assert run.supervisor.actions == []


@pytest.mark.parametrize(
    ("states", "is_sleeping"),
    [([True, True], True), ([True, False], False), ([], False)],
)
async def test_a_deployment_sleeps_if_all_engines_do(
    start_administered: Any, states: list[bool], is_sleeping: bool
) -> None:
    async with start_administered() as run:
        results = [{"process": "gateway", "ok": True, "message": "ready", "values": {"pid": 1}}]
        results += [
            {"process": "scheduler", "ok": True, "message": "", "values": {"is_sleeping": state}}
            for state in states
        ]
        run.supervisor.answer = json.dumps({"ok": True, "results": results}).encode() + b"\n"
        answer = await send(run, "/is_sleeping", method="GET")
        assert (answer.status, json.loads(answer.body)) == (200, {"is_sleeping": is_sleeping})
        assert run.supervisor.actions == [{"action": "status"}]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"error": "there is no engine 3"}, "there is no engine 3"),
        (
            {
                "results": [
                    {"process": "scheduler 0", "message": "", "values": {"is_sleeping": True}},
                    {"process": "scheduler 1", "message": "not ready: loading", "values": {}},
                ]
            },
            "scheduler 1: not ready: loading",
        ),
    ],
)
async def test_an_engine_that_does_not_say_whether_it_sleeps_is_an_error(
    start_administered: Any, fields: dict[str, Any], reason: str
) -> None:
    async with start_administered() as run:
        run.supervisor.answer = json.dumps({"ok": False, **fields}).encode() + b"\n"
        answer = await send(run, "/is_sleeping", method="GET")
        assert answer.status == 503
        assert reason in json.loads(answer.body)["error"]["message"]


@pytest.mark.parametrize("key", [None, API_KEY])
async def test_only_the_admin_key_opens_them(start_administered: Any, key: str | None) -> None:
    async with start_administered(api_keys=plain_keys([API_KEY], "key")) as run:
        for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")):
            answer = await send(run, path, method=method, key=key)
            assert answer.status == 401
            assert json.loads(answer.body)["error"]["code"] == "invalid_admin_key"
        assert run.supervisor.actions == []


async def test_without_an_admin_key_they_do_not_exist(start_administered: Any) -> None:
    async with start_administered(admin_key=None) as run:
        assert (await send(run, "/sleep")).status == 404
