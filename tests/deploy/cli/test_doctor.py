"""The verdict of `longshore doctor` on an engine's report, or on a missing report."""

import asyncio
import io
import json
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from longshore.deploy.cli.client_options import DoctorOptions
from longshore.deploy.cli.doctor import (
    Health,
    examine,
    judge,
    judge_all,
    tables,
)
from longshore.deploy.gateway.api.uncached_clients import LONG_TOKENS, NUM_PROMPTS
from longshore.protocol.statistics import EngineReport, WaitingReport
from longshore.scheduler.step.planner import PauseState
from tests.deploy.gateway.conftest import RunningGateway, StartGateway, start_gateway
from tests.deploy.gateway.fake_engine import REPORT

__all__ = ["start_gateway"]  # the fixture

PAUSED_NEW, PAUSED_ALL = PauseState.PAUSED_NEW.value, PauseState.PAUSED_ALL.value
GRAMMAR = WaitingReport("r2", "WAITING", "its grammar", 40.0, 10)
BLOCKS = WaitingReport("r1", "WAITING", "9 blocks; 3 are free", 50.0, 140)


async def doctor(gateway: RunningGateway, **options: Any) -> Health:
    url = f"http://127.0.0.1:{gateway.port}"
    return await asyncio.to_thread(examine, DoctorOptions(url=url, **options))


@pytest.mark.parametrize(
    ("changes", "state", "words"),
    [
        ({"num_running": 0, "num_waiting": 0, "idle_s": 500.0}, "idle", []),
        ({"idle_s": 9.9}, "serving", ["3 running, 1 waiting"]),
        ({"idle_s": 9.9, "pause": PAUSED_NEW}, "serving", []),
        ({"idle_s": 10.0}, "stalled", ["10.0 s", "worker has not answered 2 planned steps"]),
        ({"idle_s": 11.0, "steps_in_flight": 1}, "stalled", ["1 planned step.", "restart"]),
        ({"idle_s": 11.0, "pause": PAUSED_NEW}, "stalled", ["worker"]),
        ({"idle_s": 0.0, "steps_in_flight": 0, "pause": PAUSED_ALL}, "paused", ["Resume it"]),
        (
            {"idle_s": 11.0, "steps_in_flight": 0, "num_running": 0, "num_waiting": 1},
            "stalled",
            ["0 running, 1 waiting", "worker is free", "9 are needed", "--num-blocks"],
        ),
        (
            {
                "idle_s": 11.0,
                "steps_in_flight": 0,
                "num_waiting": 3,
                "waiting": (BLOCKS, GRAMMAR, GRAMMAR),
            },
            "stalled",
            ["The most frequent reason for waiting: its grammar"],
        ),
    ],
)
def test_verdict_says_in_words_how_the_engine_is(
    changes: dict[str, Any], state: str, words: list[str]
) -> None:
    verdict = judge(replace(REPORT, **changes), stall_after_s=10.0)
    assert verdict.state == state
    assert verdict.health == (Health.STALLED if state == "stalled" else Health.HEALTHY)
    assert [word for word in words if word not in str(verdict)] == [], str(verdict)


async def test_table_names_every_waiting_request_and_what_it_waits_for(
    start_gateway: StartGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    async with start_gateway() as gateway:
        gateway.engine.report = replace(REPORT, num_waiting=2, waiting=(BLOCKS, GRAMMAR))
        assert await doctor(gateway) is Health.HEALTHY
    printed = " ".join(capsys.readouterr().out.split())
    for word in ("engine-0.1", "r1", "9 blocks; 3 are free", "50.0 s", "r2", "its grammar"):
        assert word in printed
    assert "24 of 99 in use (25%)" in printed
    assert printed.endswith("serving: 3 running, 2 waiting.")


@pytest.mark.parametrize("num_pins", [0, 3])
async def test_table_has_a_row_for_pins_if_there_are_some(
    start_gateway: StartGateway, capsys: pytest.CaptureFixture[str], num_pins: int
) -> None:
    async with start_gateway() as gateway:
        gateway.engine.report = replace(REPORT, num_pins=num_pins, num_pinned_blocks=12)
        await doctor(gateway)
    printed = " ".join(capsys.readouterr().out.split())
    assert ("pinned for next turns │ 12 blocks of 3 jobs" in printed) == bool(num_pins)


async def test_long_queue_is_cut_and_the_rest_is_counted(
    start_gateway: StartGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    async with start_gateway() as gateway:
        gateway.engine.report = replace(REPORT, num_waiting=5000, waiting=(BLOCKS,) * 200)
        await doctor(gateway)
    printed = capsys.readouterr().out
    assert printed.count("9 blocks; 3 are free") == 10
    assert "and 4,990 more (--json has 200)" in printed


def test_a_waiting_request_is_one_row_of_80_columns_with_the_end_of_its_id() -> None:
    name = "chatcmpl-order-66-0123456789abcdef80873a64-0"
    long = replace(GRAMMAR, request_id=name)
    console = Console(width=80, file=io.StringIO())
    for table in tables(replace(REPORT, num_waiting=12, waiting=(long,) * 12)):
        console.print(table)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert sum("its grammar" in line for line in printed.splitlines()) == 10
    assert printed.count(f"…{name[-16:]} ") == 10
    assert "and 2 more (--json has all)" in printed
    assert len(printed.splitlines()) < 30


async def test_json_holds_the_report_and_the_verdict(
    start_gateway: StartGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    async with start_gateway() as gateway:
        assert await doctor(gateway, json=True, stall_after_s=0.5) is Health.STALLED
    printed = json.loads(capsys.readouterr().out)
    assert printed["state"] == "stalled"
    assert printed["verdict"].startswith("stalled: ")
    assert printed["report"]["waiting"][0]["request_id"] == "cmpl-1"
    assert set(printed["report"]) == set(EngineReport.__struct_fields__)


async def test_silent_scheduler_is_stalled(
    start_gateway: StartGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    async with start_gateway(report_timeout_s=0.1) as gateway:
        gateway.engine.report = None
        assert await doctor(gateway) is Health.STALLED
    assert "the scheduler of engine 0 has not answered for 0.1 s" in " ".join(
        capsys.readouterr().out.split()
    )


async def test_dead_engine_is_unreachable_with_its_reason(
    start_gateway: StartGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    async with start_gateway() as gateway:
        gateway.engine.fail("worker 0 was lost")
        assert await doctor(gateway, json=True) is Health.UNREACHABLE
    printed = json.loads(capsys.readouterr().out)
    assert printed["state"] == "unreachable"
    assert "HTTP 503: the engine is being restarted: worker 0 was lost" in printed["verdict"]
    assert printed["report"] is None


@pytest.mark.parametrize("answer", [b"<html>", b"{}", b'{"hello": 1}'])
async def test_something_else_at_the_address_is_no_engine(
    answer: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(answer), answer))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        options = DoctorOptions(url=f"http://127.0.0.1:{port}")
        assert await asyncio.to_thread(examine, options) is Health.UNREACHABLE
    assert "not a Longshore gateway" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("second", "state", "words"),
    [
        ({"num_running": 0, "num_waiting": 0}, "serving", ["engine-1.1 is idle"]),
        ({"idle_s": 60.0}, "stalled", ["engine-1.1 is stalled: 3 running", "restart"]),
    ],
)
def test_of_several_engines_the_worst_decides_and_each_is_named(
    second: dict[str, Any], state: str, words: list[str]
) -> None:
    reports = [REPORT, replace(REPORT, engine_id="engine-1.1", **second)]
    verdict = judge_all(reports, stall_after_s=10.0)
    assert verdict.state == state
    assert verdict.health == (Health.STALLED if state == "stalled" else Health.HEALTHY)
    for word in ("engine-0.1 is serving: 3 running", *words):
        assert word in str(verdict)


@pytest.mark.parametrize("text", ["cmpl-[/x]-0", "[bold]x", "[link=a]"])
def test_what_clients_call_their_requests_is_shown_as_it_is(text: str) -> None:
    waiting = (WaitingReport(text, "WAITING", f"its {text}", 40.0, 10),)
    console = Console(width=100, file=io.StringIO())
    for each in tables(replace(REPORT, engine_id=text, waiting=waiting, pause=text)):
        console.print(each)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert printed.count(text) == 4


async def test_a_client_whose_prompts_are_never_cached_is_named(
    start_gateway: StartGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    async with start_gateway() as gateway:
        services = gateway.process._gateway._endpoints[0].services
        assert services is not None
        for nonce in range(NUM_PROMPTS):
            services.first.uncached.observe("agent/1", "team", [nonce] * LONG_TOKENS)
        await doctor(gateway)
        printed = " ".join(capsys.readouterr().out.split())
        assert "8 long prompts of the client agent/1 with the key team differ from" in printed
        assert "--prompt-nonces" in printed
        await doctor(gateway, json=True)
        (client,) = json.loads(capsys.readouterr().out)["uncached_clients"]
        assert client["user_agent"] == "agent/1"
