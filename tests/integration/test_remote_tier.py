"""The remote tier through real processes: servers that share a store, and stores that fail."""

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.offloading.remote.servers import (
    Liar,
    RedisServer,
    RemoteServer,
    S3Server,
    SharedFolder,
    SlowLink,
    sends,
    slow_redis,
    slow_s3,
)
from tests.connectors.offloading.remote.stores import value_names
from tests.integration.deployment import Deployment, wait_until
from tests.integration.test_offloading import (
    BLOCK_SIZE,
    LONG,
    ask,
    metric,
    num_hit_tokens,
    stop,
)

Start = Callable[..., Deployment]

NUM_FULL = len(LONG) // BLOCK_SIZE  # one token per byte


@pytest.fixture
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("r")) as server:
        yield server


@pytest.fixture
def start(
    tiny_model: tuple[Path, Any], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Start]:
    """Starts a deployment with a store. All of them have the same seed of block hashes."""
    with ExitStack() as stack:

        def make(server: RemoteServer, *flags: str, **options: Any) -> Deployment:
            own = tmp_path_factory.mktemp("own")
            settings = {"cpu_bytes_to_use": "8MiB", "remote_url": server.url, **options}
            environment = {}
            if "endpoint" in server.options:
                settings["remote_options"] = server.options
            if "password" in server.options:
                settings["remote_options"] = {"password": "${REDIS_PASSWORD}"}
                environment["REDIS_PASSWORD"] = server.options["password"]
            flags = (
                *("--kv-connector", "offloading", "--kv-connector-config", json.dumps(settings)),
                *("--state-dir", str(tmp_path / "state")),
                *flags,
            )
            deployment = Deployment(tiny_model[0], own, *flags, environment=environment)
            return stack.enter_context(deployment).wait_until_ready()

        yield make


def assert_shared(start: Start, server: RemoteServer, *flags: str, num_ranks: int = 1) -> None:
    first, second = start(server, *flags), start(server, *flags)
    answer, num_cached = ask(first, LONG)
    assert num_cached == 0
    wait_until(lambda: len(value_names(server)) >= NUM_FULL * num_ranks)
    again, num_cached = ask(second, LONG)
    assert again == answer
    assert num_cached >= (NUM_FULL - 1) * BLOCK_SIZE
    wait_until(lambda: num_hit_tokens(second) >= (NUM_FULL - 1) * BLOCK_SIZE)
    stop(first)
    stop(second)
    assert server.options.get("password", "no password") not in first.output + second.output


@pytest.mark.services
def test_servers_that_share_a_redis_see_each_others_blocks(
    start: Start, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It needs a password, which comes from the environment."""
    with RedisServer(tmp_path_factory.mktemp("r"), "--requirepass", "a-s3cret-word") as server:
        assert_shared(start, server)


@pytest.mark.long
def test_servers_that_share_a_folder_see_each_others_blocks(start: Start, tmp_path: Path) -> None:
    assert_shared(start, SharedFolder(tmp_path / "shared"))


@pytest.mark.services
def test_a_block_of_which_one_rank_has_lost_its_share_is_a_miss(
    start: Start, redis: RedisServer
) -> None:
    shards = ("--tensor-parallel-size", "2")
    assert_shared(start, redis, *shards, num_ranks=2)
    num_lost = 0
    for name in value_names(redis):
        if "/1/" in name:
            redis.client.delete(name)
            num_lost += 1
    assert num_lost >= NUM_FULL
    third = start(redis, *shards)
    answer, num_cached = ask(third, LONG)
    assert num_cached == 0
    assert ask(third, LONG)[0] == answer
    stop(third)


def prompts() -> list[str]:
    return [f"{number} ships sail. {LONG}" for number in range(12)]


def ask_all(deployment: Deployment, at_work: Callable[[], None] = lambda: None) -> list[str]:
    """The answers to all prompts, asked at the same time. at_work: called meanwhile."""
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(ask, deployment, prompt) for prompt in prompts()]
        answers[2].result()
        at_work()
        return [answer.result()[0] for answer in answers]


@pytest.mark.services
@pytest.mark.parametrize(
    "fault",
    [
        "hang",
        "garbage",
        *(pytest.param(fault, marks=pytest.mark.long) for fault in ("die", "full")),
    ],
)
def test_a_store_that_fails_under_load_costs_no_request(
    start: Start, redis: RedisServer, fault: str
) -> None:
    first = start(redis)
    expected = ask_all(first)
    wait_until(lambda: len(value_names(redis)) >= len(prompts()) * NUM_FULL)
    stop(first)

    def damage() -> None:
        match fault:
            case "hang":
                redis.stop()
            case "die":
                redis.kill()
            case "garbage":
                for name in value_names(redis):
                    redis.client.setrange(name, 60, b"garbage")
            case "full":
                redis.client.config_set("maxmemory", "1mb")

    if fault == "garbage":
        damage()
    options = {"remote_timeout_ms": 300, "remote_retry_s": 600}
    second = start(redis, **options)
    assert ask_all(second, damage) == expected
    if fault in ("hang", "die"):
        new = ask(second, f"Something new. {LONG}")  # has to be asked for, and to be stored
        assert new[1] < BLOCK_SIZE
        wait_until(lambda: "is not asked for a while" in second.output)

        def count(name: str) -> float:
            return metric(second, f'kv_tier_{name}{{engine="0",medium="STORAGE"}}')

        def asked_in_vain() -> bool:
            ask(second, f"{count('rejected_operations_total')} more. {LONG}")
            return count("rejected_operations_total") > 0

        wait_until(asked_in_vain)
        assert count("open_breakers") >= 1
        assert count("breaker_openings_total") >= 1
        assert count("failed_operations_total") >= 3
    elif fault == "garbage":
        assert re.search(r"block \S+ is not intact: its checksum does not match", second.output)
        name = 'kv_offload_corrupt_blocks_total{engine="0",transfer_type="STORAGE_to_CPU"}'
        wait_until(lambda: metric(second, name) > 0)
    else:
        ask(second, f"Something new. {LONG}")
        wait_until(lambda: "writes fail: RedisRefused: OOM " in second.output)
    assert ask_all(second) == expected
    stop(second)


@pytest.mark.services
def test_a_server_without_its_store_starts_and_answers(start: Start, redis: RedisServer) -> None:
    redis.kill()
    deployment = start(redis, remote_timeout_ms=300)
    assert f"remote tier {redis.url}: writes fail: FileNotFoundError" in deployment.output
    answer, _ = ask(deployment, LONG)
    assert ask(deployment, LONG)[0] == answer
    stop(deployment)


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(b"*2147483647\r\n", id="a huge array"),
        pytest.param(b"$2147483647\r\n", id="a huge string", marks=pytest.mark.long),
        pytest.param(b"*1\r\n" * 10_000, id="arrays in arrays", marks=pytest.mark.long),
    ],
)
def test_a_store_that_sends_hostile_replies_stops_no_worker(start: Start, reply: bytes) -> None:
    liar = Liar(sends(reply), "redis")
    try:
        deployment = start(liar, remote_timeout_ms=300, remote_retry_s=0.1)
        answer, _ = ask(deployment, LONG)
        for number in range(4):  # each is looked up, while probes find out what the store does
            ask(deployment, f"{number}. {LONG}")
        assert ask(deployment, LONG)[0] == answer
        assert metric(deployment, "process_restarts_total") == 0
        assert "writes fail: RedisProtocolError" in deployment.output
        stop(deployment)
    finally:
        liar.close()


@contextmanager
def slow_store(kind: str, folder: Path) -> Iterator[tuple[RemoteServer, SlowLink, RemoteServer]]:
    """A server, a link to it, and the server as it is seen through this link."""
    with ExitStack() as stack:
        if kind == "redis":
            redis = stack.enter_context(RedisServer(folder))
            link = stack.enter_context(slow_redis(redis))
            yield redis, link, Through(redis, f"redis://{link.address}/0", {})
        else:
            s3 = stack.enter_context(S3Server())
            link = stack.enter_context(slow_s3(s3))
            options = s3.options | {"endpoint": f"http://{link.address}"}
            yield s3, link, Through(s3, s3.url, options)


class Through:
    """A server, seen through a link."""

    def __init__(self, server: RemoteServer, url: str, options: dict[str, str]) -> None:
        self.url, self.options = url, options
        self.names, self.read, self.write = server.names, server.read, server.write


@pytest.mark.parametrize(
    ("kind", "delay_s"),
    [
        pytest.param("redis", 0.6, marks=pytest.mark.services),  # some blocks come in time
        ("s3", 0.9),  # none is known in time
    ],
)
def test_a_store_that_is_slower_than_computing_is_not_waited_for_and_then_not_asked(
    start: Start, tmp_path_factory: pytest.TempPathFactory, kind: str, delay_s: float
) -> None:
    """Every answer takes less than the timeout of an operation, and a prompt has 38 blocks: each
    request would wait for seconds."""
    asked = prompts()[:5]
    with slow_store(kind, tmp_path_factory.mktemp("r")) as (server, link, seen):
        first = start(seen)
        expected = [ask(first, prompt)[0] for prompt in asked]
        wait_until(lambda: len(value_names(server)) >= len(asked) * NUM_FULL)
        stop(first)
        second = start(seen, remote_timeout_ms=2000)
        link.delay_s = delay_s
        assert [ask(second, prompt)[0] for prompt in asked] == expected
        wait_until(lambda: is_slow(second))
        assert metric(second, 'kv_tier_open_breakers{engine="0",medium="STORAGE"}') == 0
        stop(second)


def is_slow(deployment: Deployment) -> bool:
    return "take longer than computing the tokens would" in deployment.output
