"""Which answers a conversation keeps: complete ones, failed ones, and interrupted ones."""

import asyncio
import io
from typing import Any

import pytest
from rich.console import Console

from longshore.deploy.bench.sse_client import HttpEndpoint
from longshore.deploy.cli.chat import (
    ChatFailed,
    Conversation,
    ServedModel,
    show,
)
from longshore.deploy.cli.client_options import ChatOptions
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import AddRequest
from tests.deploy.gateway.conftest import RunningGateway, StartGateway, start_gateway
from tests.deploy.gateway.fake_engine import FakeEngine
from tests.deploy.gateway.http.test_exchange import ids_of, say

__all__ = ["start_gateway"]  # the fixture


def conversation(
    gateway: RunningGateway,
    shown: list[str],
    notices: list[str] | None = None,
    *,
    size: int | None = None,
    **options: Any,
) -> Conversation:
    """size: of the context, as the server says."""
    return Conversation(
        HttpEndpoint(f"http://127.0.0.1:{gateway.port}"),
        ChatOptions(**{"timeout_s": 60, **options}),
        ServedModel("tiny", size),
        shown.append,
        [].append if notices is None else notices.append,
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


def questions(talk: Conversation) -> list[str]:
    return [message["content"] for message in talk.messages if message["role"] == "user"]


async def test_a_full_context_drops_the_oldest_turns_and_says_so(
    start_gateway: StartGateway,
) -> None:
    """The server's context has 64 tokens; a question that does not fit is asked again without the
    oldest turn."""
    async with start_gateway(say("yes")) as gateway:
        notices: list[str] = []
        talk = conversation(gateway, [], notices)
        talk.set_system("brief")
        for number in range(4):
            await talk.ask(f"question {number}?")
        assert questions(talk)[-1] == "question 3?"
        assert "question 0?" not in questions(talk)
        assert talk.messages[0] == {"role": "system", "content": "brief"}
        assert set(notices) == {"the context is full: dropped the oldest turn"}
        assert talk.total.num_answers == 4
        assert len(talk._turn_tokens) == len(questions(talk))


async def test_turns_are_dropped_while_an_answer_still_fits(start_gateway: StartGateway) -> None:
    async with start_gateway(say("yes"), max_model_len=64) as gateway:
        notices: list[str] = []
        talk = conversation(gateway, [], notices, size=64, max_tokens=60)
        await talk.ask("the first one is long, and so on")
        await talk.ask("two?")
        assert talk._turn_tokens[0] > 64 * 3 // 4 - len("the first one is long, and so on")
        await talk.ask("three?")
        assert questions(talk)[-1] == "three?"
        assert "the first one is long, and so on" not in questions(talk)
        assert notices


async def test_a_question_that_does_not_fit_alone_fails_and_costs_no_turn(
    start_gateway: StartGateway,
) -> None:
    async with start_gateway(say("yes")) as gateway:
        talk = conversation(gateway, [])
        await talk.ask("short?")
        with pytest.raises(ChatFailed, match="maximum context length is 64 tokens"):
            await talk.ask("long? " * 20)
        assert questions(talk) == ["short?"]
        assert len(talk._turn_tokens) == 1


async def test_single_questions_do_not_know_each_other(start_gateway: StartGateway) -> None:
    async with start_gateway(say("yes")) as gateway:
        talk = conversation(gateway, [], single=True)
        talk.set_system("brief")
        await talk.ask("one?")
        alone = talk.last.prompt_tokens
        await talk.ask("two?")
        assert talk.last.prompt_tokens == alone
        assert questions(talk) == ["two?"]
        assert talk.messages[0]["role"] == "system"
