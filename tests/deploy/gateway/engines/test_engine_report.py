"""GET /engine/report: the scheduler's report, or the reason why there is none."""

import asyncio
import json

import msgspec
import pytest

from longshore.protocol.statistics import EngineReport
from tests.deploy.gateway.conftest import PATIENCE_S, StartGateway
from tests.deploy.gateway.fake_engine import REPORT


async def test_report_is_what_the_ask_scheduler(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        answer = await gateway.get("/engine/report")
        assert answer.status == 200
        assert msgspec.json.decode(answer.body, type=EngineReport) == REPORT
        assert json.loads(answer.body)["waiting"][0]["waits_for"].startswith("blocks")
        gateway.engine.report = msgspec.structs.replace(REPORT, waiting=())
        assert json.loads((await gateway.get("/engine/report")).body)["waiting"] == []


async def test_readers_at_the_same_time_share_one_question(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        gateway.engine.report = None
        client = gateway.process._models[0].engines
        asking = [asyncio.create_task(client.describe(timeout_s=PATIENCE_S)) for _ in range(3)]
        await gateway.engine.wait_for(lambda: gateway.engine.num_describes > 0)
        gateway.engine.send(REPORT)
        assert await asyncio.gather(*asking) == [REPORT] * 3
        assert gateway.engine.num_describes == 1


async def test_a_silent_scheduler_is_a_504_that_says_so(start_gateway: StartGateway) -> None:
    async with start_gateway(report_timeout_s=0.1) as gateway:
        gateway.engine.report = None
        for _ in range(2):
            answer = await gateway.get("/engine/report")
            assert answer.status == 504
            error = json.loads(answer.body)["error"]
            assert error["code"] == "scheduler_silent"
            assert "the scheduler of engine 0 has not answered for 0.1 s" in error["message"]
        gateway.engine.send(REPORT)  # it wakes up and answers the old request
        gateway.engine.report = REPORT
        assert (await gateway.get("/engine/report")).status == 200


async def test_a_report_that_comes_after_the_gateway_gave_up_harms_nobody(
    start_gateway: StartGateway, caplog: pytest.LogCaptureFixture
) -> None:
    async with start_gateway() as gateway:
        gateway.engine.report = None
        asking = asyncio.create_task(gateway.get("/engine/report"))
        await gateway.engine.wait_for(lambda: gateway.engine.num_describes > 0)
        gateway.process._models[0].engines.shut_down("the server is shutting down")
        assert (await asking).status == 503
        gateway.engine.send(REPORT)
        assert (await gateway.get("/health")).status == 200
    assert "Exception" not in caplog.text


async def test_a_dead_engine_is_a_503_with_its_reason(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        gateway.engine.report = None
        asking = asyncio.create_task(gateway.get("/engine/report"))
        await gateway.engine.wait_for(lambda: gateway.engine.num_describes > 0)
        gateway.engine.fail("worker 0 was lost")
        for answer in (await asking, await gateway.get("/engine/report")):
            assert answer.status == 503
            assert "worker 0 was lost" in json.loads(answer.body)["error"]["message"]
