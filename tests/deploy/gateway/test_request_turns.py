"""Turns of API keys: how many requests of which key go on in an iteration of the event loop."""

import asyncio
import itertools
import json

import pytest

from longshore.deploy.gateway.api_keys import plain_keys
from longshore.deploy.gateway.request_turns import REQUESTS_PER_TURN, RequestTurns
from tests.deploy.gateway.conftest import PATIENCE_S, StartGateway


class Order:
    """Requests in the order in which their turn comes."""

    def __init__(self) -> None:
        self.turns = RequestTurns()
        self.keys: list[str] = []

    def ask(self, *keys: str) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self._wait(key)) for key in keys]

    async def _wait(self, key: str) -> None:
        await self.turns.wait(key)
        self.keys.append(key)


async def test_an_iteration_of_the_loop_begins_a_bounded_number_of_requests() -> None:
    order = Order()
    tasks = order.ask(*["flood"] * 50)
    num_begun = [0]
    while len(order.keys) < 50:
        await asyncio.sleep(0)
        num_begun.append(len(order.keys))
    steps = [later - earlier for earlier, later in itertools.pairwise(num_begun)]
    assert max(steps) == REQUESTS_PER_TURN
    await asyncio.gather(*tasks)


async def test_a_request_of_another_key_waits_for_no_more_than_a_turn() -> None:
    order = Order()
    tasks = order.ask(*["flood"] * 200)
    await asyncio.sleep(0)
    tasks += order.ask("other", "other")
    await asyncio.gather(*tasks)
    first, second = (at for at, key in enumerate(order.keys) if key == "other")
    assert first <= 3 * REQUESTS_PER_TURN
    assert second <= first + 2


async def test_keys_take_turns() -> None:
    order = Order()
    await asyncio.gather(*order.ask(*["a"] * 20, *["b"] * 20, *["c"] * 20))
    assert set(map(order.keys.count, "abc")) == {20}
    later = order.keys[REQUESTS_PER_TURN:][: 3 * 10]
    assert set(map(later.count, "abc")) == {10}


async def test_a_request_that_is_cancelled_takes_no_turn() -> None:
    order = Order()
    tasks = order.ask(*["flood"] * 40)
    await asyncio.sleep(0)
    for task in tasks[REQUESTS_PER_TURN:-1]:
        task.cancel()
    await asyncio.wait_for(tasks[-1], PATIENCE_S)
    assert len(order.keys) == REQUESTS_PER_TURN + 1
    await order.turns.wait("later")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "p", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "p"}]}),
        ("/v1/embeddings", {"input": "p"}),
        ("/tokenize", {"prompt": "p"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
async def test_every_request_with_a_body_waits_for_the_turn_of_its_key(
    start_gateway: StartGateway,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, object],
) -> None:
    waited: list[str] = []

    async def wait(turns: RequestTurns, key: str) -> None:
        waited.append(key)

    monkeypatch.setattr(RequestTurns, "wait", wait)
    async with start_gateway(api_keys=plain_keys(["one", "two"], "all")) as gateway:
        await gateway.client.request(
            "POST",
            path,
            json.dumps(body).encode(),
            timeout_s=PATIENCE_S,
            headers={"authorization": "Bearer two"},
        )
    assert waited == ["key-2"]
