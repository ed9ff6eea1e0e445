"""The line about the load of the last seconds."""

import msgspec

from longshore.deploy.gateway.load_log import LoadLog
from longshore.deploy.gateway.metrics import GatewayMetrics
from longshore.protocol.outputs import FinishReason
from tests.deploy.gateway.conftest import StartGateway
from tests.deploy.gateway.fake_engine import STATS

IDLE = msgspec.structs.replace(STATS, num_running=0, num_waiting=0, num_free_blocks=99)
BODY = {"prompt": "a secret", "max_tokens": 3}


def start(metrics: GatewayMetrics) -> LoadLog:
    """A log whose last interval ended at 100 s."""
    log = LoadLog(metrics.sample)
    log.line(100.0)
    return log


def test_a_busy_server_is_one_line_with_rates_requests_cache_and_rejections() -> None:
    metrics = GatewayMetrics()
    metrics.observe_scheduler("0", IDLE)
    log = start(metrics)
    metrics.generated_tokens.inc(678)
    metrics.responses.labels("/v1/completions", "429").inc(88)
    metrics.responses.labels("/v1/completions", "503").inc(2)
    metrics.responses.labels("/ready", "503").inc(7)
    metrics.responses.labels("/v1/completions", "400").inc(5)
    metrics.observe_scheduler(
        "0",
        msgspec.structs.replace(
            STATS,
            num_running=12,
            num_waiting=3,
            num_prompt_tokens=12_345,
            num_prefix_queried_tokens=IDLE.num_prefix_queried_tokens + 200,
            num_prefix_hit_tokens=IDLE.num_prefix_hit_tokens + 135,
        ),
    )
    assert log.line(110.0) == (
        "last 10 s: 1,234.5 prompt tokens/s, 67.8 output tokens/s; 12 running, 3 waiting; "
        "KV cache 24.2% in use, prefix cache hits 67.5%; 90 rejected (88 with 429, 2 with 503)"
    )


def test_engines_are_added_up() -> None:
    metrics = GatewayMetrics()
    log = start(metrics)
    for engine in "01":
        metrics.observe_scheduler(engine, STATS)
    line = log.line(110.0)
    assert line is not None
    assert "; 6 running, 2 waiting; KV cache 24.2% in use, prefix cache hits 40.0%; 0 rej" in line
    metrics.observe_scheduler(
        "1", msgspec.structs.replace(STATS, num_pins=2, num_pinned_blocks=1200)
    )
    line = log.line(120.0)
    assert line is not None
    assert "KV cache 24.2% in use (1,200 blocks pinned for 2 jobs), prefix" in line


def test_an_idle_server_is_silent_after_the_line_with_its_last_request() -> None:
    metrics = GatewayMetrics()
    metrics.observe_scheduler("0", IDLE)
    log = start(metrics)
    assert log.line(110.0) is None
    metrics.request_ended(FinishReason.STOPPED, 0.5)
    assert log.line(120.0) is not None
    assert log.line(130.0) is None


async def test_a_gateway_s_log_counts_what_it_serves(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        log = gateway.process.load_log
        assert (await gateway.post("/v1/completions", BODY)).status == 200
        line = log.line(log._before.taken_s + 2.0)
        assert line is not None
        assert line.startswith("last 2 s: 0.0 prompt tokens/s, 1.5 output tokens/s; ")
