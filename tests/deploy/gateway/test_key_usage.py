"""Limits of API keys: what several gateways count together."""

import asyncio
import json
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import msgspec
import pytest

from longshore.deploy.bench.sse_client import HttpAnswer
from longshore.deploy.gateway.api.errors import headers_of, status_of
from longshore.deploy.gateway.api_keys import NO_KEY, ApiKey, digest_of
from longshore.deploy.gateway.key_usage import KeyUsage
from longshore.deploy.gateway.metrics import GatewayMetrics
from longshore.deploy.requests.errors import RequestError
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import AddRequest, Tenant
from tests.deploy.gateway.conftest import PATIENCE_S, RunningGateway, StartGateway
from tests.deploy.gateway.fake_engine import FakeEngine, never_answer
from tests.deploy.gateway.http.test_exchange import error_of
from tests.deploy.gateway.openai.test_embeddings import MODEL, pooled

_slots = count()


def make_key(name: str, **limits: int) -> ApiKey:
    return ApiKey(name=name, digest=digest_of(name.encode()), slot=next(_slots) % 1000, **limits)


class Gateways:
    """The counts of `number` gateways, on one clock."""

    def __init__(self, *keys: ApiKey, number: int = 2) -> None:
        self.now_s = 1000.0
        self.keys = keys
        self.number = number
        self.fd = os.memfd_create("usage")
        self.usages = [self.start(gateway) for gateway in range(number)]

    def start(self, gateway: int) -> KeyUsage:
        return KeyUsage(
            self.keys,
            GatewayMetrics(),
            number=gateway,
            num_gateways=self.number,
            memory_fd=self.fd,
            now_s=lambda: self.now_s,
        )


def rejected(usage: KeyUsage, key: ApiKey, num_live: int = 1, num_tokens: int = 0) -> RequestError:
    with pytest.raises(RequestError) as rejection:
        usage.admit(key, num_live=num_live, num_tokens=num_tokens)
    return rejection.value


def test_keys_come_and_go_while_requests_run() -> None:
    alice, bob = make_key("alice", max_live_requests=2), make_key("bob", max_live_requests=1)
    one, other = Gateways(alice).usages
    with one.admit(alice, num_live=1, num_tokens=5) as running:
        changed = msgspec.structs.replace(alice, max_live_requests=1)
        for usage in (one, other):
            usage.use((changed, bob))
        assert rejected(other, changed).code == "key_live_requests"
        for usage in (one, other):
            usage.use((bob,))
        running.charge(3)
        assert one.num_live(alice) == 1
        with other.admit(bob, num_live=1, num_tokens=0):
            assert rejected(one, bob).code == "key_live_requests"
    assert one.num_live(alice) == one.num_live(bob) == 0


def test_live_requests_count_in_all_gateways() -> None:
    alice, bob = make_key("alice", max_live_requests=3), make_key("bob")
    one, other = Gateways(alice, bob).usages
    with one.admit(alice, num_live=2, num_tokens=5), other.admit(alice, num_live=1, num_tokens=5):
        for usage in (one, other):
            assert usage.num_live(alice) == 3
            error = rejected(usage, alice)
            assert (status_of(error), error.code) == (429, "key_live_requests")
            assert (b"retry-after", b"1") in headers_of(error)
            assert usage.num_live(alice) == 3  # what is rejected leaves no trace
            assert usage.num_at_a_time(16, alice) == 1
        with other.admit(bob, num_live=100, num_tokens=5):  # its own limit, and it has none
            assert one.num_live(bob) == 100
    assert one.num_live(alice) == one.num_live(bob) == 0
    assert one.num_at_a_time(16, alice) == 3
    assert one.num_at_a_time(16, bob) == 16


def test_a_request_above_the_limit_by_itself_is_not_told_to_retry() -> None:
    key = make_key("a", max_live_requests=2, tokens_per_minute=10)
    usage = Gateways(key).usages[0]
    for num_live, num_tokens, code in (
        (3, 1, "key_live_requests"),
        (1, 11, "key_tokens_per_minute"),
    ):
        error = rejected(usage, key, num_live, num_tokens)
        assert (status_of(error), error.code) == (400, code)
    with usage.admit(key, num_live=2, num_tokens=10):
        assert usage.num_tokens(key) == 10


def test_tokens_count_for_a_minute_in_all_gateways() -> None:
    key = make_key("a", tokens_per_minute=100)
    gateways = Gateways(key)
    one, other = gateways.usages
    one.admit(key, num_live=1, num_tokens=30)
    gateways.now_s += 20
    admitted = other.admit(key, num_live=1, num_tokens=30)
    admitted.charge(40)
    for usage in (one, other):
        assert usage.num_tokens(key) == 100
        error = rejected(usage, key, num_tokens=1)
        assert (status_of(error), error.code) == (429, "key_tokens_per_minute")
        assert (b"retry-after", b"41") in headers_of(error)
        assert usage.num_tokens(key) == 100
        assert (b"retry-after", b"61") in headers_of(rejected(usage, key, num_tokens=31))
    gateways.now_s += 41
    assert one.num_tokens(key) == 70
    one.admit(key, num_live=1, num_tokens=30)
    gateways.now_s += 1000
    assert one.num_tokens(key) == other.num_tokens(key) == 0


def test_what_a_gateway_counted_before_its_restart_is_dropped() -> None:
    key = make_key("a", max_live_requests=4, tokens_per_minute=100)
    gateways = Gateways(key)
    one, other = gateways.usages
    one.admit(key, num_live=3, num_tokens=30)
    other.admit(key, num_live=1, num_tokens=30)
    again = gateways.start(0)
    assert again.num_live(key) == other.num_live(key) == 1
    assert again.num_tokens(key) == 60  # they were computed


def test_gateways_that_admit_at_the_same_moment_never_exceed_a_limit() -> None:
    key = make_key("a", max_live_requests=2)
    gateways = Gateways(key, number=4)
    is_live = [0] * 4

    def flood(number: int) -> int:
        most = 0
        for _ in range(500):
            try:
                with gateways.usages[number].admit(key, num_live=1, num_tokens=1):
                    is_live[number] = 1
                    most = max(most, sum(is_live))
                    is_live[number] = 0
            except RequestError:
                pass
        return most

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(flood, range(4))) <= 2
    assert gateways.usages[0].num_live(key) == 0


def test_without_keys_nothing_is_counted() -> None:
    usage = KeyUsage((), GatewayMetrics())
    with usage.admit(NO_KEY, num_live=10**6, num_tokens=10**9) as admitted:
        admitted.charge(10**9)
        assert usage.num_at_a_time(16, NO_KEY) == 16
    assert usage.num_live(NO_KEY) == 0


# Through HTTP


async def post(gateway: RunningGateway, path: str, key: str, **body: Any) -> HttpAnswer:
    return await gateway.client.request(
        "POST",
        path,
        json.dumps(body).encode(),
        timeout_s=PATIENCE_S,
        headers={"authorization": f"Bearer {key}"},
    )


def end(engine: FakeEngine, request: AddRequest) -> None:
    engine.send_tokens(request, [70, 71])
    engine.finish(request, FinishReason.LENGTH_CAPPED, num_output_tokens=2)


async def test_a_key_at_its_limit_gets_a_429_and_others_an_answer(
    start_gateway: StartGateway,
) -> None:
    keys = (make_key("alice", max_live_requests=1), make_key("bob"))
    ask = {"prompt": "p", "max_tokens": 2}
    async with start_gateway(never_answer, api_keys=keys) as gateway:
        engine = gateway.engine
        waiting = asyncio.create_task(post(gateway, "/v1/completions", "alice", **ask))
        await engine.wait_for(lambda: len(engine.requests) == 1)
        answer = await post(gateway, "/v1/completions", "alice", **ask)
        assert answer.status == 429
        assert answer.headers["retry-after"] == "1"
        assert error_of(answer)["code"] == "key_live_requests"
        metrics = await gateway.metrics()
        assert 'longshore_key_live_requests{key="alice"} 1.0' in metrics
        assert 'longshore_key_live_requests{key="bob"} 0.0' in metrics
        rejected = 'longshore_key_rejected_requests_total{key="alice",reason="key_live_requests"}'
        assert f"{rejected} 1.0" in metrics
        engine.script = end
        assert (await post(gateway, "/v1/completions", "bob", **ask)).status == 200
        end(engine, engine.requests[0])
        assert (await waiting).status == 200
        assert (await post(gateway, "/v1/completions", "alice", **ask)).status == 200


async def test_prompts_and_answers_use_up_the_tokens_of_a_minute(
    start_gateway: StartGateway,
) -> None:
    keys = (make_key("alice", tokens_per_minute=9),)
    async with start_gateway(end, api_keys=keys) as gateway:
        for _ in range(2):  # 3 tokens of prompt and 2 of answer
            answer = await post(gateway, "/v1/completions", "alice", prompt=[5, 6, 7])
            assert answer.status == 200
        answer = await post(gateway, "/v1/completions", "alice", prompt=[5, 6, 7])
        assert answer.status == 429
        assert 0 < int(answer.headers["retry-after"]) <= 61
        assert error_of(answer)["code"] == "key_tokens_per_minute"
        metrics = await gateway.metrics()
        assert 'longshore_key_tokens_total{key="alice"} 10.0' in metrics


@pytest.mark.parametrize("priority", [-1, 0, 3])
async def test_a_key_cannot_be_more_urgent_than_the_operator_allows(
    start_gateway: StartGateway, priority: int
) -> None:
    keys = (make_key("alice", min_priority=0),)
    async with start_gateway(end, api_keys=keys) as gateway:
        answer = await post(gateway, "/v1/completions", "alice", prompt="p", priority=priority)
        if priority < 0:
            assert answer.status == 400
            assert error_of(answer)["param"] == "priority"
        else:
            assert answer.status == 200
            assert gateway.engine.requests[0].options.priority == priority


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [5], "max_tokens": 2}),
        ("/v1/embeddings", {"input": [[5]]}),
    ],
)
async def test_the_engine_learns_whose_request_it_is(
    start_gateway: StartGateway, path: str, body: dict[str, Any]
) -> None:
    alice = ApiKey(name="alice", digest=digest_of(b"alice"), weight=3, cache_id="alice")
    script = pooled if path == "/v1/embeddings" else end
    async with start_gateway(script, api_keys=(alice,), embedding=MODEL) as gateway:
        assert (await post(gateway, path, "alice", **body, cache_salt="s")).status == 200
        (request,) = gateway.engine.requests
        assert request.options.tenant == Tenant("alice", 3)
        assert request.options.cache_salt == alice.cache_salt("s")
