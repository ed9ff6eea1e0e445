"""What the gateways of one deployment exchange."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from longshore.deploy.gateway.engines.peers import (
    READY,
    PeerGateways,
    merged_metrics,
)
from longshore.deploy.gateway.metrics import GatewayMetrics
from longshore.deploy.supervisor.restart_history import RestartRecord
from longshore.protocol.logs.limits import MAX_PER_SECOND
from longshore.protocol.statistics import TierStats, TransferStats
from tests.deploy.gateway.fake_engine import STATS

Answer = Callable[[], bytes]


@asynccontextmanager
async def gateways(
    folder: Path, *, ready: list[Answer], metrics: list[Answer] | None = None
) -> AsyncIterator[list[PeerGateways]]:
    paths = [str(folder / f"{number}.sock") for number in range(len(ready))]
    metrics = metrics or [lambda: READY] * len(ready)
    all_of_them = [
        PeerGateways(number, paths, {"ready": reason, "metrics": text})
        for number, (reason, text) in enumerate(zip(ready, metrics, strict=True))
    ]
    for peers in all_of_them:
        await peers.listen()
    try:
        yield all_of_them
    finally:
        for peers in all_of_them:
            peers.close()


OF_ENGINES = (
    "longshore_scheduler_",
    "longshore_worker_",
    "longshore_kv_",
    "longshore_process_restarts",
    "vllm:",
)


def metrics_of(*, num_answers: int, running: int) -> GatewayMetrics:
    metrics = GatewayMetrics()
    metrics.responses.labels("/v1/a {b} c", "200").inc(num_answers)
    metrics.generated_tokens.inc(10 * num_answers)
    metrics.time_to_first_token_s.observe(0.02 * num_answers)
    tiers, transfers = (
        (TierStats("CPU", 1, 2, 3, 4),),
        (TransferStats("CPU", "GPU", (1, *[0] * 10)),),
    )
    stats = msgspec.structs.replace(STATS, tiers=tiers, transfers=transfers)
    metrics.observe_scheduler("0", stats)
    metrics.watch_restarts(lambda: RestartRecord({"worker 0": {"death": 2}}))
    metrics.observe_scheduler("1", type(STATS)(**{**_fields(), "num_running": running}))
    return metrics


def _fields() -> dict[str, float]:
    return {name: getattr(STATS, name) for name in STATS.__struct_fields__}


def samples(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def test_merged_metrics_name_the_gateway_and_have_those_of_engines_once() -> None:
    texts = [metrics_of(num_answers=n + 1, running=5 + n).render() for n in range(3)]
    merged = samples(merged_metrics([texts[0], None, texts[2]], own=2))
    for number, up in enumerate((1, 0, 1)):
        assert merged["longshore_gateway_up", (("gateway", str(number)),)] == up
    alone = {number: samples(texts[number]) for number in (0, 2)}
    assert merged.keys() == {
        *(("longshore_gateway_up", (("gateway", str(number)),)) for number in range(3)),
        *(key for key in alone[2] if key[0].startswith(OF_ENGINES)),
        *(
            (name, tuple(sorted([*labels, ("gateway", str(number))])))
            for number, own in alone.items()
            for name, labels in own
            if not name.startswith(OF_ENGINES)
        ),
    }
    assert merged["longshore_kv_tier_blocks", (("engine", "0"), ("medium", "CPU"))] == 1
    death = (("process", "worker 0"), ("reason", "death"))
    assert merged["longshore_process_restarts_total", death] == 2
    assert merged["longshore_scheduler_running_requests", (("engine", "1"),)] == 7
    endpoint = ("endpoint", "/v1/a {b} c")
    key = (endpoint, ("gateway", "2"), ("status", "200"))
    assert merged["longshore_http_responses_total", key] == 3


async def test_a_gateway_that_is_alone_gives_its_metrics_as_they_are() -> None:
    alone = PeerGateways(0, ["/nowhere"], {"metrics": lambda: b"own", "ready": lambda: b"tired"})
    await alone.listen()
    assert await alone.metrics() == b"own"
    assert await alone.not_ready_reason() == "tired"
    alone.close()


async def test_the_first_gateway_that_is_ready_is_named(tmp_path: Path) -> None:
    reasons = [READY, READY, b"draining"]
    async with gateways(tmp_path, ready=[lambda n=n: reasons[n] for n in range(3)]) as all_of_them:
        for peers in all_of_them:
            assert await peers.not_ready_reason() == "gateway 2: draining"
        reasons[2] = READY
        assert await all_of_them[0].not_ready_reason() is None


async def test_one_that_has_not_started_or_hangs_is_said_not_to_answer(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("own", "hung", "absent")]
    own = PeerGateways(0, paths, {"ready": lambda: READY, "metrics": lambda: READY})
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(paths[1])
        hung.listen()
        assert await own.ask("ready") == [READY, None, None]
        assert await own.not_ready_reason() == "gateway 1 does not answer"
        assert b'longshore_gateway_up{gateway="1"} 0' in await own.metrics()


async def test_probes_cannot_fill_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = [str(tmp_path / name) for name in ("own", "absent")]
    own = PeerGateways(0, paths, {"ready": lambda: READY})
    for _ in range(5 * MAX_PER_SECOND):
        assert await own.ask("ready") == [READY, None]
    assert 0 < caplog.text.count("query `ready` to gateway 1 failed") < 4 * MAX_PER_SECOND


async def test_a_peer_that_asks_for_nothing_known_is_only_hung_up_on(tmp_path: Path) -> None:
    async with gateways(tmp_path, ready=[lambda: READY, lambda: READY]) as (first, _):
        for said in (b"what else\n", b""):
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "1.sock"))
            writer.write(said)
            if said:
                assert await reader.read() == b""
            writer.close()
        assert await first.not_ready_reason() is None
