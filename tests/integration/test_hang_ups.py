"""A client that fills the queue and hangs up, again and again, stops no stream of another key."""

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from longshore.deploy.bench.sse_client import HttpEndpoint
from longshore.scheduler.queue.policies import POLICIES
from tests.integration.conftest import StartDeployment
from tests.integration.deployment import PATIENCE_S, Deployment

KEYS = ("--api-key", "key-of-a", "--api-key", "key-of-b")
NUM_ROUNDS, NUM_CONNECTIONS, PROMPTS = 3, 8, 1000
REASONS: dict[str, tuple[Sequence[str], dict[str, Any]]] = {
    "a row": ((), {"ignore_eos": True}),
    "a grammar": ((), {"structured_outputs": {"regex": "[ab]{3,40}"}}),
    "its connector": (
        (
            *("--kv-connector", "tests.integration.asking_forever:AsksForever"),
            *("--min-load-wait-s", "60", "--load-timeout-s", "60"),
        ),
        {"ignore_eos": True},
    ),
}
"""What the requests wait for: flags, and fields of the requests."""


class Stream:
    """Streams of one key, one after the other. max_gap_s: the longest time between two tokens of
    one of them; the first one waits behind those that are queued before it."""

    def __init__(self, deployment: Deployment) -> None:
        self._endpoint = HttpEndpoint(deployment.url, api_key="key-of-a")
        self.num_tokens, self.max_gap_s, self.answers = 0, 0.0, []
        self._last_s = math.inf

    def _on_event(self, data: bytes) -> None:
        now_s = time.monotonic()
        self.max_gap_s = max(self.max_gap_s, now_s - self._last_s)
        self._last_s = now_s
        self.num_tokens += 1

    async def run(self, model: str) -> None:
        body = {
            "model": model,
            "prompt": "a stream",
            "max_tokens": 1000,
            "ignore_eos": True,
            "stream": True,
        }
        while True:
            self._last_s = math.inf
            answer = await self._endpoint.request(
                "POST",
                "/v1/completions",
                json.dumps(body).encode(),
                timeout_s=PATIENCE_S,
                on_event=self._on_event,
            )
            self.answers.append(answer.status)


async def num_waiting(endpoint: HttpEndpoint) -> int:
    answer = await endpoint.request("GET", "/metrics", timeout_s=PATIENCE_S)
    name = "longshore_scheduler_waiting_requests"
    lines = [line for line in answer.body.decode().splitlines() if line.startswith(name)]
    return sum(int(float(line.split()[-1])) for line in lines)


async def fill_and_hang_up(deployment: Deployment, model: str, fields: dict[str, Any]) -> None:
    """Queue many requests, wait until the engine has most of them, and close the connections."""
    endpoint = HttpEndpoint(deployment.url, api_key="key-of-b")
    body = json.dumps(
        {
            "model": model,
            "prompt": ["? who"] * PROMPTS,
            "max_tokens": 300,
            **fields,
        }
    ).encode()
    calls = [
        asyncio.create_task(endpoint.request("POST", "/v1/completions", body, timeout_s=PATIENCE_S))
        for _ in range(NUM_CONNECTIONS)
    ]
    while await num_waiting(endpoint) < NUM_CONNECTIONS * PROMPTS // 2:
        assert not any(call.done() for call in calls), "the requests were answered"
        await asyncio.sleep(0.2)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    while await num_waiting(endpoint):
        await asyncio.sleep(0.2)


async def attack(deployment: Deployment, fields: dict[str, Any]) -> Stream:
    endpoint = HttpEndpoint(deployment.url, api_key="key-of-a")
    listed = await endpoint.request("GET", "/v1/models", timeout_s=PATIENCE_S)
    model = json.loads(listed.body)["data"][0]["id"]
    stream = Stream(deployment)
    streaming = asyncio.create_task(stream.run(model))
    for _ in range(NUM_ROUNDS):
        await fill_and_hang_up(deployment, model, fields)
    num_tokens = stream.num_tokens
    while stream.num_tokens < num_tokens + 20:
        await asyncio.sleep(0.05)
    streaming.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await streaming
    return stream


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        pytest.param(policy, reason, marks=[] if policy == first else [pytest.mark.long])
        for reason, first in zip(REASONS, ("priority", "fair", "continuum"), strict=True)
        for policy in POLICIES
    ],
)
def test_full_queues_whose_clients_hang_up_stop_no_other_stream(
    start_deployment: StartDeployment, policy: str, reason: str, record_property: Any
) -> None:
    flags, fields = REASONS[reason]
    environment = {
        "LONGSHORE_HANG_TIMEOUT_S": "5",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    settings = ("--scheduling-policy", policy, *flags)
    deployment = start_deployment(*KEYS, *settings, environment=environment).wait_until_ready()
    before = {name: process.pid for name, process in deployment.members.items()}
    stream = asyncio.run(attack(deployment, fields))
    deployment.find_members()
    after = {name: process.pid for name, process in deployment.members.items()}
    assert after == before, deployment.output
    assert set(stream.answers) <= {200}
    record_property("max_gap_s", stream.max_gap_s)
    print(f"{policy}, {reason}: the longest gap was {stream.max_gap_s:.2f} s")
    assert stream.max_gap_s < 5
