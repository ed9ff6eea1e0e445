"""GET /dashboard and /dashboard/state: the page and its data."""

import asyncio
import base64
import hashlib
import json
import re
import zlib
from typing import Any

import numpy as np
import pytest
from starlette.requests import Request

from longshore.deploy.gateway.api.errors import status_of
from longshore.deploy.gateway.api_keys import plain_keys
from longshore.deploy.gateway.dashboard.dashboard import Dashboard, encode_state
from longshore.deploy.gateway.dashboard.history import History
from longshore.deploy.gateway.metric_samples import Sample
from longshore.deploy.requests.errors import RequestError
from longshore.protocol.outputs import EngineContinues, EnginePaused
from longshore.protocol.statistics import (
    MAX_LISTED_BLOCKS,
    BlockSnapshot,
    BlockState,
)
from tests.deploy.gateway.conftest import PATIENCE_S, RunningGateway, StartGateway
from tests.deploy.gateway.fake_engine import BLOCK_MAP, REPORT


async def no_sample() -> Sample:
    return Sample(0.0, {})


PAGE = Dashboard(lambda: None, 1.0, History(no_sample, lambda: ()))


def unpacked(text: str, dtype: Any) -> np.ndarray:
    """Decode an array of the state."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype)


async def served_page() -> tuple[str, dict[str, str]]:
    """The page and its headers."""
    response = await PAGE.page(Request({"type": "http", "headers": []}))
    return bytes(response.body).decode(), dict(response.headers)


async def test_page_runs_its_own_script_and_style_and_nothing_else() -> None:
    text, headers = await served_page()
    policy = dict(
        each.strip().split(" ", 1) for each in headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for kind in ("script", "style"):
        (content,) = re.findall(f"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        assert len(content) > 1000
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{kind}-src"] == f"'sha256-{digest}'"


async def test_page_asks_no_other_host_for_anything_and_has_no_inline_handlers() -> None:
    text, headers = await served_page()
    assert headers["content-type"].startswith("text/html")
    assert headers["referrer-policy"] == "no-referrer"
    addresses = set(re.findall(r"(?:https?:)?//[\w.]+\.\w+[^\s'\"]*", text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name that is never resolved
    assert not re.search(r"<[^>]+\s(on\w+|style)=", text)
    assert "innerHTML" not in text  # clients choose ids


async def test_page_has_words_for_every_state_of_a_block() -> None:
    text, _ = await served_page()
    (words,) = re.findall(r"STATE_TEXT = \{(.*?)\};", text, re.DOTALL)
    assert re.findall(r"^  (\w+):", words, re.MULTILINE) == [
        each.name.lower() for each in BlockState
    ]
    for number, state in enumerate(BlockState):
        assert f".s{number} {{ background: var(--{state.name.lower()}); }}" in text


async def test_state_is_what_the_ask_scheduler(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        answer = await gateway.get("/dashboard/state?engine=0")
        assert answer.status == 200
        state = json.loads(answer.body)
        np.testing.assert_array_equal(unpacked(state["states"], np.uint8), BLOCK_MAP.states)
        np.testing.assert_array_equal(unpacked(state["block_ids"], "<i4"), BLOCK_MAP.block_ids)
        assert state["state_names"][BLOCK_MAP.holders[1].state] == "kept"
        assert [each["request_id"] for each in state["holders"]] == ["cmpl-0", "a session"]
        assert state["report"]["num_free_blocks"] == REPORT.num_free_blocks
        assert state["report"]["waiting"][0]["waits_for"] == REPORT.waiting[0].waits_for
        assert (state["model"], state["num_steps"]) == ("tiny", 7)


async def test_the_state_says_why_an_engine_that_still_answers_is_restarted(
    start_gateway: StartGateway,
) -> None:
    async def restarting(gateway: RunningGateway) -> str | None:
        reason: str | None = json.loads((await gateway.get("/dashboard/state")).body)["restarting"]
        return reason

    async with start_gateway() as gateway:
        assert await restarting(gateway) is None
        gateway.engine.send(EnginePaused("worker 0 was killed"))
        assert await restarting(gateway) == "worker 0 was killed"
        gateway.engine.send(EngineContinues("engine.2"))
        assert await restarting(gateway) is None


async def test_readers_at_the_same_time_share_one_question(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        gateway.engine.block_snapshot = None
        client = gateway.process._models[0].engines.clients[0]
        asking = [
            asyncio.create_task(client.describe_blocks(timeout_s=PATIENCE_S)) for _ in range(3)
        ]
        await gateway.engine.wait_for(lambda: gateway.engine.num_describes > 0)
        gateway.engine.send(BLOCK_MAP)
        for block_snapshot in await asyncio.gather(*asking):
            np.testing.assert_array_equal(block_snapshot.states, BLOCK_MAP.states)
        assert gateway.engine.num_describes == 1


async def test_nobody_is_asked_while_nobody_looks(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        assert (await gateway.get("/dashboard")).status == 200
        assert (await gateway.get("/metrics")).status == 200
        assert gateway.engine.num_describes == 0


async def test_page_needs_no_key_and_its_data_do(start_gateway: StartGateway) -> None:
    async with start_gateway(api_keys=plain_keys(["secret"], "key")) as gateway:
        assert (await gateway.get("/dashboard")).status == 200
        assert (await gateway.get("/dashboard/state")).status == 401
        assert (await gateway.get("/dashboard/state?api_key=secret")).status == 401


async def test_a_browser_on_the_bare_address_is_led_to_the_page(
    start_gateway: StartGateway,
) -> None:
    async with start_gateway(api_keys=plain_keys(["secret"], "key")) as gateway:
        answer = await gateway.get("/")
        assert (answer.status, answer.headers["location"]) == (307, "dashboard")


async def test_an_engine_that_is_not_there_is_a_404_by_name(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        answer = await gateway.get("/dashboard/state?engine=1")
        assert answer.status == 404
        assert "engine='1' does not exist" in json.loads(answer.body)["error"]["message"]


async def test_state_of_an_engine_that_still_starts_is_a_503() -> None:
    with pytest.raises(RequestError, match="still starting") as raised:
        await PAGE.state(Request({"type": "http", "headers": [], "query_string": b""}))
    assert status_of(raised.value) == 503


async def test_a_silent_scheduler_and_a_dead_one_are_told_apart(
    start_gateway: StartGateway,
) -> None:
    async with start_gateway(report_timeout_s=0.1) as gateway:
        gateway.engine.block_snapshot = None
        answer = await gateway.get("/dashboard/state")
        assert answer.status == 504
        assert json.loads(answer.body)["error"]["code"] == "scheduler_silent"
        gateway.engine.fail("worker 0 was lost")
        await gateway.engine.wait_for(lambda: True)
        answer = await gateway.get("/dashboard/state")
        assert answer.status in (503, 504)  # 504 if the gateway has not noticed the end yet
        answer = await gateway.get("/dashboard/state")
        assert answer.status == 503
        assert "worker 0 was lost" in json.loads(answer.body)["error"]["message"]


def test_a_million_blocks_make_an_answer_of_bounded_size() -> None:
    chance = np.random.default_rng(1)
    block_snapshot = BlockSnapshot(
        REPORT,
        states=chance.choice(np.array([1, 2, 3, 4], np.uint8), 1_000_000),
        groups=(),
        num_steps=0,
        num_preemptions=0,
        num_prefix_queried_tokens=0,
        num_prefix_hit_tokens=0,
        block_ids=chance.permutation(1_000_000)[:MAX_LISTED_BLOCKS].astype(np.int32),
    )
    assert len(encode_state("m", block_snapshot)) < 1_000_000
