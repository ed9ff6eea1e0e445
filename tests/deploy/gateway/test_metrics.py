"""The metrics that Prometheus scrapes."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from longshore.deploy.gateway.lock_free_metrics import LockFreeCounter, LockFreeHistogram
from longshore.deploy.gateway.metrics import GatewayMetrics
from longshore.protocol.outputs import (
    FinishedRequest,
    FinishReason,
    RequestEvent,
)
from longshore.protocol.statistics import PullStats, TenantStats, TierStats, TransferStats
from tests.deploy.gateway.fake_engine import STATS
from tests.scheduler.worker_reports import report


def samples(metrics: GatewayMetrics) -> dict[str, float]:
    lines = metrics.render().decode().splitlines()
    pairs = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    return {name: float(value) for name, _, value in pairs}


@pytest.mark.req("MET-01")
def test_every_statistic_of_the_scheduler_is_shown_under_its_engine() -> None:
    metrics = GatewayMetrics()
    distinct = {
        name: 1000.0 + i
        for i, name in enumerate(STATS.__struct_fields__)
        if name not in ("accepted_by_position", "workers", "tenants", "tiers", "transfers", "pulls")
    }
    metrics.observe_scheduler("3", msgspec.convert(distinct, type(STATS), strict=False))
    shown = {value for name, value in samples(metrics).items() if name.endswith('{engine="3"}')}
    assert shown == set(distinct.values())


def test_accepted_drafts_are_shown_by_position() -> None:
    metrics = GatewayMetrics()
    stats = msgspec.structs.replace(STATS, accepted_by_position=(5, 3))
    metrics.observe_scheduler("0", stats)
    name = "longshore_scheduler_accepted_by_position_total"
    shown = samples(metrics)
    found = [shown[f'{name}{{engine="0",position="{position}"}}'] for position in (0, 1)]
    assert found == [5, 3]


def test_requests_of_a_key_are_shown_from_its_first_one_on() -> None:
    metrics = GatewayMetrics()
    for tenants in ((TenantStats("alice", 2, 1),), (TenantStats("bob", 0, 3),)):
        metrics.observe_scheduler("0", msgspec.structs.replace(STATS, tenants=tenants))
    shown = samples(metrics)
    found = {
        (state, key): shown[f'longshore_scheduler_key_{state}_requests{{engine="0",key="{key}"}}']
        for state in ("running", "waiting")
        for key in ("alice", "bob")
    }
    assert found == {
        ("running", "alice"): 0,
        ("waiting", "alice"): 0,
        ("running", "bob"): 0,
        ("waiting", "bob"): 3,
    }


def test_every_statistic_of_tiers_and_transfers_is_shown() -> None:
    metrics = GatewayMetrics()
    tiers = (TierStats("CPU", 1, 2, 3, 4), TierStats("DISK", 5, 6, 7, 8, 15, 16, 17, 18))
    by_bytes = (1, 2, *[0] * 8, 3)
    transfers = (
        TransferStats("CPU", "GPU", by_bytes, 9, 10, 0.5, 11, 12, 13),
        TransferStats("CPU", "DISK", by_bytes, num_bytes=14),
    )
    metrics.observe_scheduler("0", msgspec.structs.replace(STATS, tiers=tiers, transfers=transfers))
    shown = samples(metrics)
    for name, value in (
        ('tier_blocks{engine="0",medium="CPU"}', 1),
        ('tier_capacity_blocks{engine="0",medium="CPU"}', 2),
        ('tier_hit_tokens_total{engine="0",medium="CPU"}', 3),
        ('tier_dropped_blocks_total{engine="0",medium="CPU"}', 4),
        ('tier_dropped_blocks_total{engine="0",medium="DISK"}', 8),
        ('tier_failed_operations_total{engine="0",medium="DISK"}', 15),
        ('tier_rejected_operations_total{engine="0",medium="DISK"}', 16),
        ('tier_breaker_openings_total{engine="0",medium="DISK"}', 17),
        ('tier_open_breakers{engine="0",medium="DISK"}', 18),
        ('offload_blocks_total{engine="0",transfer_type="CPU_to_GPU"}', 9),
        ('offload_bytes_total{engine="0",transfer_type="CPU_to_GPU"}', 10),
        ('offload_bytes_total{engine="0",transfer_type="CPU_to_DISK"}', 14),
        ('offload_seconds_total{engine="0",transfer_type="CPU_to_GPU"}', 0.5),
        ('offload_failed_blocks_total{engine="0",transfer_type="CPU_to_GPU"}', 11),
        ('offload_corrupt_blocks_total{engine="0",transfer_type="CPU_to_GPU"}', 12),
        ('offload_queued_blocks{engine="0",transfer_type="CPU_to_GPU"}', 13),
        ('offload_size_bytes_bucket{engine="0",le="4096.0",transfer_type="CPU_to_GPU"}', 1),
        ('offload_size_bytes_bucket{engine="0",le="16384.0",transfer_type="CPU_to_GPU"}', 3),
        ('offload_size_bytes_count{engine="0",transfer_type="CPU_to_GPU"}', 6),
    ):
        assert shown[f"longshore_kv_{name}"] == value


def test_a_lost_engine_holds_nothing_and_keeps_its_counts() -> None:
    metrics = GatewayMetrics()
    metrics.engine_lost("0")  # it has not reported yet
    stats = msgspec.structs.replace(
        STATS,
        num_running=3,
        num_waiting=2,
        num_blocks=10,
        num_free_blocks=4,
        kv_usage=0.5,
        num_preemptions=7,
        tenants=(TenantStats("alice", 2, 1),),
        pulls=PullStats(1, 2, 3, 4, {"complete": 5}),
    )
    metrics.observe_scheduler("0", stats)
    metrics.observe_scheduler("1", stats)
    metrics.engine_lost("0")
    shown = samples(metrics)
    for name, lost in (
        ("scheduler_running_requests{%s}", 0),
        ("scheduler_waiting_requests{%s}", 0),
        ("scheduler_free_blocks{%s}", 9),
        ("scheduler_kv_usage_ratio{%s}", 0),
        ('scheduler_key_running_requests{%s,key="alice"}', 0),
        ("kv_pull_leased_blocks{%s}", 0),
    ):
        full = f"longshore_{name}"
        assert shown[full % 'engine="0"'] == lost
        assert shown[full % 'engine="1"'] != lost
    for name in ("scheduler_preemptions_total{%s}", "kv_pull_refused_leases_total{%s}"):
        full = f"longshore_{name}"
        assert shown[full % 'engine="0"'] == shown[full % 'engine="1"'] > 0


def test_the_states_of_a_lost_engine_are_gone_and_their_counts_stay() -> None:
    metrics = GatewayMetrics()
    stats = msgspec.structs.replace(
        STATS,
        num_kept_states=1,
        num_kept_state_blocks=2,
        num_states_kept=3,
        num_states_found=4,
        num_states_evicted=5,
    )
    for engine in ("0", "1"):
        metrics.observe_scheduler(engine, stats)
    metrics.engine_lost("1")
    shown = samples(metrics)
    for name, value, lost in (
        ("kept_states", 1, 0),
        ("kept_state_blocks", 2, 0),
        ("states_kept_total", 3, 3),
        ("states_found_total", 4, 4),
        ("states_evicted_total", 5, 5),
    ):
        full = f"longshore_scheduler_{name}"
        assert (shown[f'{full}{{engine="0"}}'], shown[f'{full}{{engine="1"}}']) == (value, lost)


def test_every_statistic_of_pulls_is_shown() -> None:
    metrics = GatewayMetrics()
    pulls = PullStats(1, 2, 3, 4, {"complete": 5, "late": 0})
    metrics.observe_scheduler("0", msgspec.structs.replace(STATS, pulls=pulls))
    metrics.observe_scheduler("1", msgspec.structs.replace(STATS, pulls=None))
    shown = samples(metrics)
    assert {key: value for key, value in shown.items() if "_kv_pull" in key} == {
        'longshore_kv_pull_leases{engine="0"}': 1,
        'longshore_kv_pull_leased_blocks{engine="0"}': 2,
        'longshore_kv_pull_refused_leases_total{engine="0"}': 3,
        'longshore_kv_pull_expired_leases_total{engine="0"}': 4,
        'longshore_kv_pulls_total{engine="0",outcome="complete"}': 5,
        'longshore_kv_pulls_total{engine="0",outcome="late"}': 0,
    }


def test_every_statistic_of_a_worker_is_shown_under_its_engine_and_rank() -> None:
    metrics = GatewayMetrics()
    workers = (
        report(num_steps=5, compute_s=0.5, num_tokens=20, longest_step_s=0.25),
        report(rank=1, num_steps=6, resident_bytes=11, device_bytes=12),
    )
    metrics.observe_scheduler("0", msgspec.structs.replace(STATS, workers=workers))
    shown = samples(metrics)
    for name, value in (
        ('step_seconds_count{engine="0",worker="0"}', 5),
        ('step_seconds_sum{engine="0",worker="0"}', 0.5),
        ('step_seconds_bucket{engine="0",le="0.0005",worker="0"}', 5),
        ('step_seconds_bucket{engine="0",le="+Inf",worker="0"}', 5),
        ('step_tokens_count{engine="0",worker="1"}', 6),
        ('step_tokens_sum{engine="0",worker="0"}', 20),
        ('longest_step_seconds{engine="0",worker="0"}', 0.25),
        ('resident_memory_bytes{engine="0",worker="1"}', 11),
        ('device_memory_bytes{engine="0",worker="1"}', 12),
    ):
        assert shown[f"longshore_worker_{name}"] == value


def test_engines_have_series_of_their_own() -> None:
    metrics = GatewayMetrics()
    metrics.observe_scheduler("0", STATS)
    metrics.observe_scheduler("1", msgspec.structs.replace(STATS, num_running=9))
    metrics.observe_scheduler("0", msgspec.structs.replace(STATS, num_running=4))
    shown = samples(metrics)
    running = [shown[f'longshore_scheduler_running_requests{{engine="{name}"}}'] for name in "01"]
    assert running == [4, 9]


def test_the_phases_of_a_request_are_told_apart() -> None:
    metrics = GatewayMetrics()
    events = ((RequestEvent.QUEUED, 0.0), (RequestEvent.SCHEDULED, 0.25))
    again = ((RequestEvent.PREEMPTED, 1.0), (RequestEvent.SCHEDULED, 2.0))
    end = FinishedRequest(
        1, FinishReason.STOPPED, 3, num_cached_tokens=16, events=(*events, *again)
    )
    metrics.phases_known(end, first_token_s=0.75, ended_s=2.5)
    metrics.phases_known(end, first_token_s=None, ended_s=2.5)  # it never had a token
    metrics.phases_known(msgspec.structs.replace(end, events=events[:1]), None, 2.5)  # nor a step
    shown = samples(metrics)
    assert shown["longshore_request_queue_seconds_sum"] == 0.5
    assert shown["longshore_request_queue_seconds_count"] == 2
    assert shown["longshore_request_prefill_seconds_sum"] == 0.5
    assert shown["longshore_request_prefill_seconds_count"] == 1
    assert shown["longshore_request_decode_seconds_sum"] == 1.75
    assert shown["longshore_request_decode_seconds_count"] == 1


def test_every_reason_to_end_is_there_before_a_request_has_ended_for_it() -> None:
    metrics = GatewayMetrics()
    for reason in FinishReason:
        assert samples(metrics)[
            f'longshore_requests_finished_total{{reason="{reason.api_name}"}}'
        ] in (0, 1)
        metrics.request_ended(reason, 0.5)
    assert samples(metrics)['longshore_request_seconds_sum{reason="stop"}'] == 0.5


@given(st.lists(st.floats(0, 20), max_size=30), st.sampled_from([(0.5, 1), (1, 2, 5.5, 10)]))
def test_metrics_for_one_thread_are_rendered_as_those_of_prometheus_client_are(
    values: list[float], bounds: Sequence[float]
) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    hot = LockFreeHistogram("t_seconds", "time", bounds, ours), LockFreeCounter("n", "number", ours)
    known = (
        Histogram("t_seconds", "time", buckets=bounds, registry=theirs),
        Counter("n", "number", registry=theirs),
    )
    for histogram, counter in (hot, known):
        for value in values:
            histogram.observe(value)
            counter.inc(3)
    lines = [line for line in generate_latest(theirs).splitlines() if b"_created" not in line]
    assert generate_latest(ours).splitlines() == lines
