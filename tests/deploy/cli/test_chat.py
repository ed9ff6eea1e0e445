"""Which answers a conversation keeps: complete ones, failed ones, and interrupted ones."""

import asyncio
import io

import pytest
from rich.console import Console

from longshore.deploy.bench.sse_client import HttpEndpoint
from longshore.deploy.cli.chat import (
    ChatFailed,
    Conversation,
    show,
)
from longshore.deploy.cli.client_options import ChatOptions
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import AddRequest
from tests.deploy.gateway.conftest import RunningGateway, StartGateway, start_gateway
from tests.deploy.gateway.fake_engine import FakeEngine
from tests.deploy.gateway.http.test_exchange import ids_of, say

__all__ = ["start_gateway"]  # the fixture


def conversation(gateway: RunningGateway, shown: list[str]) -> Conversation:
    options = ChatOptions(timeout_s=5)
    return Conversation(
        HttpEndpoint(f"http://127.0.0.1:{gateway.port}"), options, "tiny", shown.append
    )


def dies(engine: FakeEngine, request: AddRequest) -> None:
    engine.send_tokens(request, ids_of("half"))
    engine.finish(request, FinishReason.ERROR, message="worker 0 has ended")


def stays_silent_after_a_word(engine: FakeEngine, request: AddRequest) -> None:
    engine.send_tokens(request, ids_of("half"))


async def test_an_answer_stands_after_its_question_and_is_counted(
    start_gateway: StartGateway,
) -> None:
    async with start_gateway(say("the berth")) as gateway:
        shown: list[str] = []
        talk = conversation(gateway, shown)
        talk.set_system("be brief")
        await talk.ask("where?")
        assert "".join(shown) == "the berth"
        assert [message["role"] for message in talk.messages] == ["system", "user", "assistant"]
        assert talk.messages[-1]["content"] == "the berth"
        assert talk.total.output_tokens == len(ids_of("the berth")) + 1
        talk.reset()
        assert [message["role"] for message in talk.messages] == ["system"]


async def test_what_failed_half_way_has_not_been_said(start_gateway: StartGateway) -> None:
    async with start_gateway(dies) as gateway:
        talk = conversation(gateway, [])
        with pytest.raises(ChatFailed, match="worker 0 has ended"):
            await talk.ask("where?")
        assert talk.messages == []
        assert talk.total.num_answers == 0


async def test_what_was_cut_off_has_been_said(start_gateway: StartGateway) -> None:
    async with start_gateway(stays_silent_after_a_word) as gateway:
        shown: list[str] = []
        talk = conversation(gateway, shown)
        asked = asyncio.create_task(talk.ask("where?"))
        while not shown:
            await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert [message["content"] for message in talk.messages] == ["where?", "half"]


def test_text_is_shown_as_it_is_but_commands_the_terminal_nothing() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    show(console, ":key:\t[/INST] [red]\x1b[2J\u202e\r")
    assert console.file.getvalue() == ":key:\t[/INST] [red][2J"  # type: ignore[attr-defined]
