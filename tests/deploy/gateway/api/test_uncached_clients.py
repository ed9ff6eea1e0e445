"""Clients whose long prompts always differ in their first blocks are named."""

import json
import logging

import pytest

from longshore.deploy.gateway.api import uncached_clients
from longshore.deploy.gateway.api.uncached_clients import (
    FIRST_TOKENS,
    LONG_TOKENS,
    MAX_CLIENTS,
    MAX_NAME_CHARACTERS,
    NUM_PROMPTS,
    UncachedClient,
    UncachedClients,
)
from tests.deploy.gateway.conftest import PATIENCE_S, RunningGateway, StartGateway


def prompt(nonce: int, *, at: int = 70, length: int = LONG_TOKENS) -> list[int]:
    return [*range(at), 5000 + nonce, *range(at + 1, length)]


def observe(clients: UncachedClients, *nonces: int, agent: str = "agent/1") -> None:
    for nonce in nonces:
        clients.observe(agent, "team", prompt(nonce))


def test_a_client_is_named_once_when_enough_of_its_prompts_differ(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, uncached_clients.__name__)
    clients = UncachedClients()
    observe(clients, *range(NUM_PROMPTS - 1))
    assert clients.found().data == []
    assert not caplog.records
    observe(clients, *range(NUM_PROMPTS, NUM_PROMPTS + 3))
    assert clients.found().data == [UncachedClient("agent/1", "team", NUM_PROMPTS + 2, 70)]
    (record,) = caplog.records
    assert "'agent/1' all differ from token 70 on" in record.getMessage()


def test_a_prompt_that_begins_as_one_before_counts_anew() -> None:
    clients = UncachedClients()
    observe(clients, *range(NUM_PROMPTS))
    observe(clients, 0)
    assert clients.found().data == []
    observe(clients, *range(20, 20 + NUM_PROMPTS - 1))
    assert clients.found().data == []


def test_short_prompts_and_late_differences_do_not_count() -> None:
    clients = UncachedClients()
    for nonce in range(NUM_PROMPTS + 1):
        clients.observe("short", None, prompt(nonce, length=LONG_TOKENS - 1))
        clients.observe("late", None, prompt(nonce, at=FIRST_TOKENS))
    assert clients.found().data == []


def test_clients_are_told_apart_and_their_number_and_names_are_limited() -> None:
    clients = UncachedClients()
    for number in range(MAX_CLIENTS + NUM_PROMPTS):
        observe(clients, number, agent=f"{number}")
    assert clients.found().data == []
    observe(clients, *range(NUM_PROMPTS), agent="a\x1b\n" + "b" * 200)
    (found,) = clients.found().data
    assert found.user_agent == ("a??" + "b" * 200)[:MAX_NAME_CHARACTERS]


async def ask(gateway: RunningGateway, nonce: str) -> None:
    messages = [{"role": "user", "content": f"{nonce} and the same rest of it"}]
    answer = await gateway.client.request(
        "POST",
        "/v1/chat/completions",
        json.dumps({"messages": messages, "max_tokens": 1}).encode(),
        timeout_s=PATIENCE_S,
        headers={"user-agent": "agent/1"},
    )
    assert answer.status == 200


async def test_the_gateway_says_which_clients_they_are(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uncached_clients, "LONG_TOKENS", 16)
    monkeypatch.setattr(uncached_clients, "FIRST_TOKENS", 16)
    async with start_gateway() as gateway:
        for nonce in "abcdefgh":
            empty = await gateway.get("/engine/uncached-clients")
            await ask(gateway, nonce)
        assert json.loads(empty.body) == {"data": []}
        (found,) = json.loads((await gateway.get("/engine/uncached-clients")).body)["data"]
        assert (found["user_agent"], found["num_prompts"]) == ("agent/1", NUM_PROMPTS)
