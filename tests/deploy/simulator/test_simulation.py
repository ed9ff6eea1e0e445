"""Simulations: cases that are computed by hand, conservation, determinism, policies and routing."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from longshore.deploy.simulator.options import SimulateOptions
from longshore.deploy.simulator.results import describe, summarize, write_csv, write_json
from longshore.deploy.simulator.simulation import (
    NUM_SAMPLES,
    Simulation,
    load_cost_model,
    load_jobs,
)
from longshore.protocol.errors import ConfigError
from longshore.scheduler.queue.outside_policies import PolicyError
from tests.deploy.simulator.workload_files import (
    ONE_SECOND_PER_STEP,
    REALISTIC,
    agent_job,
    request,
    simulated,
    summary,
    write_lines,
)

OFFLOADING: dict[str, Any] = {
    "connector": "offloading",
    "connector_config": json.dumps({"cpu_bytes_to_use": 4000 * 16 * 64}),
}


def test_a_request_computes_its_prompt_in_chunks_and_then_a_token_per_step(tmp_path: Path) -> None:
    trace = write_lines(tmp_path / "t.jsonl", [request(2000, 250, 3, [1])])
    (record,) = simulated(ONE_SECOND_PER_STEP, trace=trace, max_num_batched_tokens=100).requests
    assert (record.arrival_s, record.queue_s) == (2.0, 0.0)
    assert record.ttft_s == 3.0  # 100, 100 and 50 tokens of the prompt
    assert record.tpot_s == 1.0
    assert record.end_s == 7.0
    assert record.finish_reason == "length"


def test_a_request_waits_for_the_step_that_runs_and_for_the_one_planned_behind_it(
    tmp_path: Path,
) -> None:
    lines = [request(0, 10, 10, [1]), request(3500, 10, 1, [2])]
    trace = write_lines(tmp_path / "t.jsonl", lines)
    _, second = simulated(ONE_SECOND_PER_STEP, trace=trace).requests
    # At 3.5 s, a step runs until 4 s, and the next one is planned already.
    assert (second.queue_s, second.first_token_s) == (0.5, 6.0)
    _, second = simulated(ONE_SECOND_PER_STEP, trace=trace, async_scheduling=False).requests
    assert second.first_token_s == 5.0


def test_host_times_are_added_to_a_request(tmp_path: Path) -> None:
    trace = write_lines(tmp_path / "t.jsonl", [request(0, 10, 1, [1])])
    (record,) = simulated(trace=trace).requests
    # Arrival, plan, a step of 10 tokens that memory limits, a row, and the way back.
    assert record.ttft_s == pytest.approx(0.001 + 0.0002 + 0.01 + 1e-6 + 0.001)


def test_turns_of_a_job_follow_each_other_and_find_their_conversation(tmp_path: Path) -> None:
    job = agent_job(0, 1.0, [(64, 33, 5.0), (31, 1, 0.0)])
    trace = write_lines(tmp_path / "jobs.jsonl", [job])
    result = simulated(ONE_SECOND_PER_STEP, trace=trace)
    first, second = result.requests
    assert first.end_s == 1.0 + 33
    assert second.arrival_s == first.end_s + 5.0
    assert second.num_prompt_tokens == 64 + 33 + 31
    assert second.num_cached_tokens == 96  # whole blocks of the prompt and the output before
    (ended,) = result.jobs
    assert (ended.end_s - ended.arrival_s, ended.num_turns) == (33 + 5 + 1, 2)


def test_jobs_share_the_prefix_that_they_have_in_common(tmp_path: Path) -> None:
    jobs = [agent_job(number, number * 100.0, [(16, 2, 0.0)], num_shared=160) for number in (0, 1)]
    trace = write_lines(tmp_path / "jobs.jsonl", jobs)
    first, second = simulated(ONE_SECOND_PER_STEP, trace=trace).requests
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 160)


def test_requests_of_a_trace_share_whole_blocks_of_equal_ids_only(tmp_path: Path) -> None:
    lines = [request(0, 1100, 1, [1, 2, 3]), request(60_000, 1100, 1, [1, 2, 3])]
    trace = write_lines(tmp_path / "t.jsonl", lines)
    _, second = simulated(trace=trace).requests
    assert second.num_cached_tokens == 1024
    _, second = simulated(trace=trace, shrink=4).requests
    assert (second.num_prompt_tokens, second.num_cached_tokens) == (275, 256)


@pytest.mark.parametrize(
    ("policy", "router"),
    [
        ("fcfs", "prefix_aware"),
        ("priority", "least_loaded"),
        ("continuum", "session_affinity"),
        ("fair", "round_robin"),
    ],
)
def test_every_request_ends_and_no_token_is_lost(policy: str, router: str) -> None:
    result = simulated(
        num_requests=60,
        request_rate=200,
        input_len=300,
        output_len=60,
        shared_prefix=64,
        engines=2,
        policy=policy,
        router=router,
        num_blocks=150,
        max_num_seqs=16,
    )
    options = result.options
    turns = [job.turns[0] for job in load_jobs(options)]
    assert len(result.requests) == 60
    assert {each.finish_reason for each in result.requests} == {"length"}
    assert [each.num_output_tokens for each in result.requests] == [
        each.num_output_tokens for each in turns
    ]
    content = summarize(result)
    # Under `fair`, blocks that are reserved for other tenants are enough for those that run.
    assert content["requests"]["preemptions"] > 0 or policy == "fair"
    assert sum(each["requests"] for each in content["engines"]) == 60
    assert sum(result.route_counts.values()) == 60
    assert describe(content)


@pytest.mark.parametrize("mode", [pytest.param("recompute", marks=pytest.mark.slow), "swap"])
def test_tiers_give_back_what_the_device_has_evicted(mode: str, tmp_path: Path) -> None:
    jobs = [agent_job(n, n * 0.01, [(400, 20, 0.5)] * 4, num_shared=100) for n in range(8)]
    settings: dict[str, Any] = {
        "trace": write_lines(tmp_path / "jobs.jsonl", jobs),
        "num_blocks": 250,
        "max_num_batched_tokens": 512,
        "preemption_mode": mode,
    }
    config = {"cpu_bytes_to_use": 300 * 16 * 64, "disk_path": "unused", "disk_bytes": "1GiB"}
    tiers = summary(**settings, connector="offloading", connector_config=json.dumps(config))
    assert tiers["requests"]["completed"] == 32
    num_swapped = sum(engine["swapped_out"] for engine in tiers["engines"])
    assert (num_swapped > 0) == (mode == "swap")
    assert tiers["hits"]["hit_tokens"]["CPU"] > 0
    assert tiers["hits"]["hit_tokens"]["DISK"] > 0
    settings["preemption_mode"] = "recompute"
    alone = summary(**settings)
    assert set(alone["hits"]["hit_rates"]) == {"GPU"}
    assert sum(tiers["hits"]["hit_tokens"].values()) > sum(alone["hits"]["hit_tokens"].values())


def test_a_load_takes_as_long_as_its_bytes_need(tmp_path: Path) -> None:
    other = [agent_job(1, 20.0, [(3000, 1, 0.0)])]
    jobs = [agent_job(0, 0.0, [(1600, 1, 100.0), (1, 1, 0.0)]), *other]
    trace = write_lines(tmp_path / "jobs.jsonl", jobs)
    result = simulated(trace=trace, num_blocks=200, **OFFLOADING)
    turn = result.requests[1]
    assert turn.turn == 1
    rates = REALISTIC.transfers
    load_s = rates.latency_s + turn.num_cached_tokens * 64 / rates.load_bytes_per_s
    assert turn.num_cached_tokens > 0
    assert turn.queue_s == pytest.approx(load_s + 0.0002, rel=0.5)


def test_prefix_aware_routing_keeps_sessions_together(tmp_path: Path) -> None:
    lines = []
    for n in range(63):
        turn, session = divmod(n, 7)
        first_id = 1000 * session
        ids = [session, *range(first_id, first_id + 3 + turn)]
        lines.append(request(100 * n, 512 * len(ids), 4, ids))
    trace = write_lines(tmp_path / "t.jsonl", lines)
    by_load, by_prefix = (
        summary(trace=trace, engines=4, router=router) for router in ("round_robin", "prefix_aware")
    )
    assert by_prefix["routing"]["prefix"] > 32
    assert by_prefix["hits"]["hit_tokens"]["GPU"] > 1.2 * by_load["hits"]["hit_tokens"]["GPU"]


def test_equal_inputs_give_equal_bytes(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "num_requests": 20,
        "request_rate": 100,
        "engines": 2,
        "router": "prefix_aware",
        **OFFLOADING,
    }
    for name in ("a", "b"):
        result = simulated(**settings)
        write_json(summarize(result), tmp_path / f"{name}.json")
        write_csv(result.requests, tmp_path / f"{name}.csv")
    for suffix in ("json", "csv"):
        first, second = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in ("a", "b"))
        assert first == second
    other = summary(**settings, seed=1)
    assert other["ttft_s"] != json.loads((tmp_path / "a.json").read_text())["ttft_s"]


def test_the_duration_begins_with_the_earliest_arrival_also_in_a_trace_that_is_not_sorted(
    tmp_path: Path,
) -> None:
    lines = [request(at_ms, 10, 2, [at_ms]) for at_ms in (60_000, 20_000)]
    trace = write_lines(tmp_path / "t.jsonl", lines)
    content = summarize(simulated(ONE_SECOND_PER_STEP, trace=trace))
    assert content["duration_s"] == 42.0  # from 20 s to 62 s
    assert content["throughput"]["requests_per_s"] == pytest.approx(2 / 42)
    assert content["engines"][0]["utilization"] == pytest.approx(4 / 42)


def test_a_long_run_has_as_few_samples_as_a_short_one_at_equal_intervals(tmp_path: Path) -> None:
    gaps_s = (10.0, 39.9, 40.0, 5000.0)  # a sample each 0.1 s at first
    for number, gap_s in enumerate(gaps_s):
        job = agent_job(0, 0.0, [(20, 1, gap_s), (20, 1, 0.0)])
        trace = write_lines(tmp_path / f"{number}.jsonl", [job])
        times_s = [each.time_s for each in simulated(trace=trace).samples]
        assert times_s[0] == 0.0
        assert 100 <= len(times_s) <= 2 * NUM_SAMPLES
        every_s = times_s[1]
        assert times_s == pytest.approx([every_s * index for index in range(len(times_s))])
        assert times_s[-1] + every_s > gap_s, "until the end"


def test_requests_that_arrive_all_at_once_give_valid_json(tmp_path: Path) -> None:
    result = simulated(num_requests=5, request_rate=math.inf)
    write_json(summarize(result), tmp_path / "result.json")
    content = msgspec.json.decode((tmp_path / "result.json").read_bytes())
    assert content["settings"]["request_rate"] == "inf"


def test_a_request_that_is_too_long_is_rejected_and_ends_its_job(tmp_path: Path) -> None:
    jobs = [agent_job(0, 0.0, [(100, 10, 1.0), (500, 10, 1.0), (10, 10, 0.0)])]
    trace = write_lines(tmp_path / "jobs.jsonl", jobs)
    result = simulated(trace=trace, max_model_len=400)
    content = summarize(result)
    assert [each.finish_reason for each in result.requests] == ["length", "rejected"]
    assert content["requests"]["rejected"] == 1
    assert content["jobs"] == content["jobs"] | {"completed": 0, "failed": 1}


# Policies of one's own

SHORTEST_FIRST = """
from longshore.scheduler.queue.policies import OrderedPolicy

class ShortestFirst(OrderedPolicy):
    ignores_priority = True

    def order(self, request):
        return request.num_prompt_tokens
"""


def test_a_policy_is_loaded_from_a_file_and_decides(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(SHORTEST_FIRST)
    lines = [request(0, size, 1, [n]) for n, size in enumerate((100, 300, 200))]
    trace = write_lines(tmp_path / "t.jsonl", lines)
    settings: dict[str, Any] = {"trace": trace, "max_num_seqs": 1, "num_blocks": 500}
    ends = {
        policy: [each.end_s for each in simulated(policy=policy, **settings).requests]
        for policy in ("fcfs", f"{path}:ShortestFirst")
    }
    first, second = ends.values()
    assert first[1] < first[2]
    assert second[2] < second[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = (", "SyntaxError"),
        ("class Other: pass", "has no attribute 'Own'|AttributeError"),
        ("class Own: pass", "no SchedulingPolicy"),
    ],
)
def test_a_file_without_the_policy_is_rejected_by_name(
    text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "own.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        simulated(policy=f"{path}:Own")


def test_a_policy_that_raises_is_named(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(SHORTEST_FIRST.replace("return request.num_prompt_tokens", "return None"))
    with pytest.raises(PolicyError, match="ShortestFirst"):
        simulated(policy=f"{path}:ShortestFirst", num_requests=2)


# Settings

INVALID: list[tuple[dict[str, Any], str]] = [
    ({"policy": "nonsense"}, "nonsense"),
    ({"router": "nonsense"}, "router='nonsense'"),
    ({"connector": "nixl"}, "connector='nixl' cannot be simulated"),
    ({"connector": "offloading"}, "cpu_bytes_to_use"),
    (
        {
            "connector": "offloading",
            "connector_config": '{"cpu_bytes_to_use": 1, "remote_url": "redis://a"}',
        },
        "remote_url cannot be simulated",
    ),
    ({"preemption_mode": "swap"}, "needs connector=offloading"),
    ({"engines": 0}, "engines=0"),
    ({"request_rate": 0}, "request_rate=0"),
    ({"thin": 0}, "thin=0"),
    ({"spread_s": -1.0}, "spread_s=-1"),
    ({"shared_prefix": 2000}, "shared_prefix=2000"),
    ({"num_blocks": 2}, "num_blocks=2"),
    ({"trace": Path("missing.jsonl")}, "missing.jsonl cannot be read"),
]


@pytest.mark.parametrize(("settings", "message"), INVALID)
def test_a_setting_that_is_invalid_is_rejected_by_name(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        simulated(**settings)


def test_the_memory_of_the_cost_model_gives_the_number_of_blocks() -> None:
    options = SimulateOptions(num_requests=2)
    cost = load_cost_model("h100-llama-8b")
    result = Simulation(options, load_jobs(options), cost).run()
    assert cost.kv_cache_bytes is not None
    assert result.num_blocks == cost.kv_cache_bytes // (16 * 131_072)
    with pytest.raises(ConfigError, match="Set num_blocks"):
        Simulation(options, load_jobs(options), REALISTIC)


def test_the_policy_continuum_knows_which_tools_the_turns_of_jobs_call(tmp_path: Path) -> None:
    jobs = [agent_job(number, 0.0, [(64, 2, 1.0)] * 3) for number in range(2)]
    options = SimulateOptions(
        trace=write_lines(tmp_path / "jobs.jsonl", jobs), num_blocks=100, policy="continuum"
    )
    simulation = Simulation(options, load_jobs(options), REALISTIC)
    simulation.run()
    pins = simulation._engines[0].scheduler.pins
    assert pins is not None
    assert list(pins._calls._tools) == ["bash"]
    assert pins.num_hits == 4
    simulation.check()
