"""Simulations with engines for prefill and for decode."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from longshore.deploy.simulator.cost_model import CostModel, HostTimes, TransferRates
from longshore.deploy.simulator.results import describe, summarize, write_csv, write_json
from longshore.deploy.simulator.simulation import load_jobs
from longshore.protocol.errors import ConfigError
from tests.deploy.simulator.workload_files import (
    ONE_SECOND_PER_STEP,
    agent_job,
    request,
    simulated,
    summary,
    write_lines,
)

BLOCK_BYTES = 16 * ONE_SECOND_PER_STEP.kv_bytes_per_token


def pulling(blocks_per_s: float, latency_s: float = 0.0, **host: float) -> CostModel:
    """A second per step, and so many blocks are pulled per second."""
    rates = TransferRates(pull_bytes_per_s=blocks_per_s * BLOCK_BYTES, pull_latency_s=latency_s)
    return msgspec.structs.replace(ONE_SECOND_PER_STEP, transfers=rates, host=HostTimes(**host))


def split(num_prefill: int = 1, num_decode: int = 1) -> dict[str, Any]:
    engines = {"prefill_engines": num_prefill, "decode_engines": num_decode}
    return engines | {"min_load_wait_s": 60.0}  # steps are so slow that pulls would be too late


def test_a_pull_is_between_the_first_token_and_the_second(tmp_path: Path) -> None:
    trace = write_lines(tmp_path / "t.jsonl", [request(0, 160, 4, [1])])
    (record,) = simulated(pulling(2.0, latency_s=3.0), trace=trace, **split()).requests
    assert record.ttft_s == 1.0
    assert record.end_s == 1.0 + 3.0 + 10 / 2.0 + 3
    assert record.tpot_s == (3.0 + 10 / 2.0 + 3) / 3
    assert (record.prefill_engine, record.engine) == (0, 1)


def test_the_host_of_both_engines_takes_time(tmp_path: Path) -> None:
    trace = write_lines(tmp_path / "t.jsonl", [request(0, 160, 2, [1])])
    cost = pulling(10.0, arrival_s=0.1, plan_s=0.01, output_s=0.001)
    (record,) = simulated(cost, trace=trace, **split()).requests
    assert record.ttft_s == pytest.approx(0.1 + 0.01 + 1 + 0.001)
    gap_s = 0.1 + 0.01 + 1 + 0.01 + 1 + 0.001  # arrival, plan, pull, plan, step, output
    assert record.e2e_s == pytest.approx(record.ttft_s + gap_s)


@pytest.mark.parametrize(
    ("engines", "gaps_s"),
    [
        (split(1, 2), [11.0, 20.0]),  # its token came a second later, and it waits for the link
        (split(2, 1), [11.0, 21.0]),
        (split(2, 2), [11.0, 11.0]),
    ],
)
def test_pulls_follow_each_other_if_they_share_an_engine(
    engines: dict[str, Any], gaps_s: list[float], tmp_path: Path
) -> None:
    lines = [request(0, 160, 2, [n]) for n in range(2)]
    trace = write_lines(tmp_path / "t.jsonl", lines)
    result = simulated(pulling(1.0), trace=trace, **engines)
    assert result.split is not None
    assert sorted(result.split.gaps_s) == gaps_s


def test_a_decode_engine_pulls_only_what_it_does_not_have(tmp_path: Path) -> None:
    job = agent_job(0, 0.0, [(160, 17, 1.0), (159, 2, 0.0)])
    trace = write_lines(tmp_path / "jobs.jsonl", [job])
    result = simulated(pulling(1.0), trace=trace, **split())
    first, second = result.requests
    # 336 tokens of the second prompt, of which it has 176, and the prefill engine 160.
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 160)
    assert result.split is not None
    assert result.split.gaps_s == [10 + 1, 10 + 1]
    assert summarize(result)["split"]["pulled_bytes"] == 20 * BLOCK_BYTES
    assert summarize(result)["hits"] == {
        "prompt_tokens": 160 + 336,
        "hit_tokens": {"GPU": 160},
        "hit_rates": {"GPU": pytest.approx(160 / 496)},
    }


def test_a_decode_engine_computes_the_prompt_if_a_pull_takes_too_long(tmp_path: Path) -> None:
    trace = write_lines(tmp_path / "t.jsonl", [request(0, 160, 2, [1])])
    (record,) = simulated(pulling(0.1), trace=trace, **split()).requests  # 100 s
    load_timeout_s = 60.0
    assert record.end_s == pytest.approx(1.0 + load_timeout_s + 1.0, abs=0.1)


def test_a_pull_is_waited_for_as_long_as_computing_takes(tmp_path: Path) -> None:
    """Nothing has been measured yet, and 160 tokens are few: that is 5 s, as for all pulls."""
    trace = write_lines(tmp_path / "t.jsonl", [request(0, 160, 2, [1])])
    engines = split() | {"min_load_wait_s": 1.0}
    (record,) = simulated(pulling(0.1), trace=trace, **engines).requests
    assert record.end_s == pytest.approx(1.0 + 5.0 + 1.0, abs=0.1)


def test_what_gains_nothing_from_a_prefill_engine_is_not_split(tmp_path: Path) -> None:
    job = agent_job(0, 0.0, [(160, 2, 1.0), (10, 2, 0.0)])  # it has all but 11 of 172 tokens
    others = [agent_job(n, 50.0, [size]) for n, size in enumerate(((63, 5, 0.0), (500, 1, 0.0)), 1)]
    trace = write_lines(tmp_path / "jobs.jsonl", [job, *others])
    result = simulated(pulling(1e3), trace=trace, router="prefix_aware", **split())
    parts = [(each.prefill_engine, each.engine) for each in result.requests]
    assert parts == [(0, 1), (None, 1), (None, 1), (None, 0)]
    assert result.split is not None
    assert result.split.outcomes == {"offered": 1}
    assert result.split.skips == {"cached_prefix": 1, "short_prompt": 1}
    assert result.requests[1].num_cached_tokens == 160


@pytest.mark.parametrize("router", ["least_loaded", "prefix_aware", "session_affinity"])
def test_every_request_ends_and_no_token_is_lost(router: str) -> None:
    settings: dict[str, Any] = {
        "num_requests": 60,
        "request_rate": 100,
        "input_len": 300,
        "output_len": 60,
        "shared_prefix": 64,
        "num_blocks": 150,
        "max_num_seqs": 16,
        "router": router,
        **split(2, 2),
    }
    result = simulated(**settings)
    content = summarize(result)
    turns = [job.turns[0] for job in load_jobs(result.options)]
    assert {each.finish_reason for each in result.requests} == {"length"}
    outputs = [each.num_output_tokens for each in result.requests]
    assert outputs == [each.num_output_tokens for each in turns]
    assert sum(each["output_tokens"] for each in content["engines"]) == sum(outputs)
    assert [each["role"] for each in content["engines"]] == ["prefill"] * 2 + ["decode"] * 2
    num_split = content["split"]["outcomes"]["offered"]
    num_whole = sum(content["split"]["skips"].values()) + outputs.count(1)
    assert num_split + num_whole == 60
    assert sum(each["requests"] for each in content["engines"]) == 60 + num_split
    assert "split " in describe(content)


@pytest.mark.slow
def test_equal_inputs_give_equal_bytes(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"num_requests": 40, "request_rate": 100, "input_len": 2000}
    for name in ("a", "b"):
        result = simulated(router="prefix_aware", **settings, **split(2, 2))
        write_json(summarize(result), tmp_path / f"{name}.json")
        write_csv(result.requests, tmp_path / f"{name}.csv")
    for suffix in ("json", "csv"):
        first, second = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in ("a", "b"))
        assert first == second


def test_prompts_that_arrive_do_not_delay_tokens_of_split_requests(tmp_path: Path) -> None:
    """What prefill engines are for."""
    lines = [request(0, 100, 20, [0]), *(request(20 * n, 4000, 2, [n]) for n in range(1, 12))]
    trace = write_lines(tmp_path / "t.jsonl", lines)
    settings: dict[str, Any] = {"trace": trace, "router": "round_robin"}
    apart, together = (simulated(**settings, **each) for each in (split(), {"engines": 2}))
    first, second = apart.requests[0].tpot_s, together.requests[0].tpot_s
    assert first is not None
    assert second is not None
    assert first < 0.7 * second


def test_a_request_that_is_too_long_is_rejected() -> None:
    content = summary(num_requests=5, input_len=2000, max_model_len=100, seed=1, **split())
    assert content["requests"]["rejected"] > 0
    assert content["requests"]["rejected"] + content["requests"]["completed"] == 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefill_engines": 1}, "prefill_engines=1 and decode_engines=0: both kinds"),
        ({"decode_engines": 2}, "prefill_engines=0 and decode_engines=2: both kinds"),
        ({**split(), "engines": 2}, "engines=2 are engines for whole requests"),
        ({**split(), "connector": "offloading"}, "connector='offloading' cannot be simulated with"),
        ({**split(), "preemption_mode": "swap"}, "needs connector=offloading"),
        ({"prefill_engines": -1, "decode_engines": 1}, "prefill_engines=-1"),
    ],
)
def test_a_setting_that_does_not_combine_is_rejected_by_name(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        simulated(**settings)
