"""The benchmarks run at a tiny size and write the figures that they promise. The values are not
asserted."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from longshore.deploy.gateway.router.policies import POLICY_NAMES
from longshore.deploy.model.demo import DEMO_MODEL_DIR
from tests.conftest import ROOT
from tests.integration.forks import template
from tests.models import make_tiny_model
from tests.worker.kernels.variants import NATIVE

NO_PEER = ("--peer-python", "/nonexistent/python")


class Result:
    """What one run of a benchmark wrote to its file and printed."""

    def __init__(self, tmp_path: Path, *command: str) -> None:
        path = tmp_path / "result.json"
        program = str(ROOT / "benchmarks" / command[0])
        arguments = [program, *command[1:], "--json", str(path)]
        status, self.output = template().run(arguments, dict(os.environ), 100)
        assert status == 0, self.output
        self.all: dict[str, Any] = json.loads(path.read_text())
        self.rows: list[dict[str, Any]] = self.all["rows"]
        assert self.all["conditions"]["versions"]["numpy"]


@pytest.mark.slow
def test_the_step_benchmark_has_a_row_per_size_and_mode(tmp_path: Path) -> None:
    sizes = ("--running", "1", "8", "--steps", "10", "--turns", "2")
    result = Result(tmp_path, "scheduler_step.py", *sizes, *NO_PEER)
    assert [(row["running"], row["mode"]) for row in result.rows] == [
        (1, "sync"),
        (1, "async"),
        (8, "sync"),
        (8, "async"),
    ]
    for row in result.rows:
        assert 0 < row["step_us"] <= row["p99_us"]
        assert row["mean_us"] > 0
        assert row["plan_bytes"] > 0
        assert len(row["step_us_each"]) == 2
    # A missing peer causes a clear warning and leaves no ratio.
    assert "NO PEER: /nonexistent/python" in result.output
    assert result.all["peer"] is None
    assert all(row["peer"] is None and row["ratio"] is None for row in result.rows)


FAKE_PEER = """#!{python}
import json, sys
print(json.dumps({{"name": "a fake"}}), flush=True)
for line in sys.stdin:
    steps = json.loads(line)["steps"]
    parts = {{"intake_us": [0.0] * steps, "plan_us": [4e9] * steps, "apply_us": [2e9] * steps}}
    print(json.dumps({{**parts, "cpu_share": 1.0}}), flush=True)
"""


def test_a_peer_is_measured_in_the_same_run_and_compared(tmp_path: Path) -> None:
    peer = tmp_path / "python"
    peer.write_text(FAKE_PEER.format(python=sys.executable))
    peer.chmod(0o755)
    sizes = ("--running", "4", "--steps", "3", "--turns", "2")
    result = Result(tmp_path, "scheduler_step.py", *sizes, "--peer-python", str(peer))
    assert result.all["peer"] == {"name": "a fake"}
    for row in result.rows:
        assert row["peer"]["step_us"] == 6e9
        assert row["ratio"] == pytest.approx(6e9 / row["step_us"])


@pytest.mark.slow
def test_the_mixed_load_ends_a_tenth_per_step_and_preempts_under_pressure(tmp_path: Path) -> None:
    sizes = ("--running", "20", "--steps", "60", "--turns", "2")
    result = Result(tmp_path, "mixed_load.py", *sizes, *NO_PEER)
    churn = [row for row in result.rows if row["load"] == "churn"]
    pressure = [row for row in result.rows if row["load"] == "pressure"]
    assert {row["mode"] for row in churn} == {row["mode"] for row in pressure} == {"sync", "async"}
    assert all(1.5 < row["finished"] <= 2.5 and row["preempted"] == 0 for row in churn)
    assert all(row["preempted"] > 0 and row["finished"] > 0 for row in pressure)


@pytest.mark.long
@pytest.mark.parametrize("kinds", ["windows", "mixed"])
def test_steps_are_measured_with_several_kinds_of_groups(tmp_path: Path, kinds: str) -> None:
    groups = ("--groups", "4", "1", "2", "--kinds", kinds)
    sizes = ("--running", "8", "--steps", "10", "--turns", "2")
    result = Result(tmp_path, "scheduler_step.py", *sizes, *groups, *NO_PEER)
    assert [row["groups"] for row in result.rows] == [1, 2, 4, 1, 2, 4]
    for fewest, row in ((result.rows[0], result.rows[2]), (result.rows[3], result.rows[5])):
        assert fewest["growth"] == {"step": 1.0, "mean": 1.0}
        assert row["growth"]["step"] == pytest.approx(row["step_us"] / fewest["step_us"])
        assert row["plan_bytes"] > fewest["plan_bytes"]


@pytest.mark.slow
def test_the_mixed_load_does_the_same_work_with_more_groups(tmp_path: Path) -> None:
    sizes = ("--running", "10", "--steps", "20", "--groups", "1", "2")
    result = Result(tmp_path, "mixed_load.py", *sizes, *NO_PEER)
    assert [row["groups"] for row in result.rows] == 4 * [1, 2]
    for one, two in zip(result.rows[::2], result.rows[1::2], strict=True):
        assert one["load"] == "pressure" or one["finished"] == two["finished"]
        assert two["growth"]["total"] == pytest.approx(two["total_us"] / one["total_us"])


@pytest.mark.parametrize("kinds", ["windows", "mixed"])
def test_the_lookup_benchmark_adds_up_its_parts(tmp_path: Path, kinds: str) -> None:
    sizes = ("--tokens", "64", "512", "--repeats", "3", "--groups", "1", "2", "4")
    result = Result(tmp_path, "prefix_lookup.py", *sizes, "--kinds", kinds, *NO_PEER)
    assert [(row["tokens"], row["groups"]) for row in result.rows] == [
        (tokens, groups) for tokens in (64, 64, 512, 512) for groups in (1, 2, 4)
    ]
    for row in result.rows:
        parts = (row[f"{part}_us"] for part in ("hash", "lookup", "allocate", "free"))
        assert row["all_us"] == pytest.approx(sum(parts))
        assert set(row["growth"]) == {"all", "lookup", "allocate", "free"}


def test_the_collector_benchmark_counts_every_generation(tmp_path: Path) -> None:
    result = Result(tmp_path, "gc_pauses.py", "--running", "10", "--steps", "300")
    for row in result.rows:
        assert row["steps"] == 300
        assert {row[f"gen{number}"]["collections"] >= 0 for number in range(3)} == {True}


@pytest.mark.slow
def test_the_round_trip_is_measured_beside_both_ping_pongs(tmp_path: Path) -> None:
    sizes = ("--round-trips", "50", "--repeats", "1")
    result = Result(tmp_path, "engine_round_trip.py", *sizes)
    assert [row["mode"] for row in result.rows] == ["sync", "async"]
    for row in result.rows:
        bare_us = row["echo"]["round_trip_us"]
        assert row["ratio"] == pytest.approx(row["round_trip_us"] / bare_us)
        assert row["watcher"]["round_trip_us"] > 0
    for parts in result.all["parts"]:
        assert parts["plan"]["calls"] >= 50
        assert parts["apply the answer"]["calls"] >= 50


def test_routing_policies_are_compared_with_one_pool(tmp_path: Path) -> None:
    sizes = ("--requests", "60", "--engines", "2", "--blocks", "1200", "--restart-every-s", "5")
    result = Result(tmp_path, "routing.py", *sizes)
    assert [row["policy"] for row in result.rows] == 2 * list(POLICY_NAMES)
    for row in result.rows:
        assert 0 <= row["hit_rate"] < 1
        assert 1 <= row["imbalance"] <= 2
        assert ("unknown" in row) == (row["policy"] == "prefix_aware")


@pytest.mark.long
def test_a_restarted_router_makes_few_decisions_without_knowledge(tmp_path: Path) -> None:
    """It restarts once a minute of simulated time and does not wait for snapshots."""
    sizes = ("--requests", "1000", "--engines", "4", "--policies", "prefix_aware")
    result = Result(tmp_path, "routing.py", *sizes, "--restart-every-s", "60")
    unknown = {row["trace"]: row["unknown"] for row in result.rows}
    assert unknown.keys() == {"conversation", "synthetic"}
    assert 0 < max(unknown.values()) <= 0.006


def test_routing_decisions_and_events_are_measured(tmp_path: Path) -> None:
    result = Result(tmp_path, "routing_cost.py", "--repeats", "3", "--max-blocks", "10000")
    assert [row["found"] for row in result.rows] == [0, 64]
    assert all(row["hash_us"] > 0 and row["p99_us"] > 0 for row in result.rows)
    (events,) = result.all["events"]
    assert events["bytes_per_block"] > 100


@pytest.mark.skipif(not NATIVE, reason="the CPU kernels are not built")
def test_a_gateway_is_measured_in_turns_with_that_of_another_checkout(tmp_path: Path) -> None:
    case = ("--kinds", "chat", "--streams", "2", "--steps-per-s", "100", "--seconds", "0.1")
    sides = ("--baseline", str(ROOT), "--repeats", "1")
    result = Result(tmp_path, "gateway_capacity.py", *case, *sides)
    assert [(row["side"], row["streams"]) for row in result.rows] == [("this", 2), ("baseline", 2)]
    assert all(row["tokens_per_event"] > 0 and row["late_p99_us"] > 0 for row in result.rows)


@pytest.mark.slow
def test_a_whole_server_is_measured_without_its_peer(tmp_path: Path) -> None:
    case = ("--streams", "2", "--tokens", "4", "--repeats", "1")
    result = Result(tmp_path, "gateway_peer.py", *case, *NO_PEER)
    assert [row["kind"] for row in result.rows] == ["chat", "completions"]
    assert "NO PEER" in result.output


@pytest.mark.slow
def test_fp8_halves_a_token_and_is_measured_beside_bfloat16(tmp_path: Path) -> None:
    result = Result(tmp_path, "fp8_cache.py", "--shapes", "tiny", "--repeats", "1")
    assert result.rows
    for row in result.rows:
        assert row["bf16_token_bytes"] == 2 * row["fp8_token_bytes"] == 2 * 4 * 2 * 32 * 2
        assert row["fp8/bf16"] == pytest.approx(row["fp8_us"] / row["bf16_us"])


MASKS: Final = ("--vocabularies", "32000", "--running", "2", "--steps", "20", "--repeats", "1")


@pytest.mark.long
@pytest.mark.services
def test_structured_output_is_measured_per_mask_and_per_step(tmp_path: Path) -> None:
    parts = ("compile", "fill", "apply", "steps")
    result = Result(tmp_path, "structured_output.py", *MASKS, "--parts", *parts)
    rows_of = {part: [row for row in result.rows if row["part"] == part] for part in parts}
    assert [row["properties"] for row in rows_of["compile"]] == 2 * [5, 50, 500]
    assert [row["backend"] for row in rows_of["fill"]] == [
        "llguidance",
        "xgrammar",
        "xgrammar, as vLLM",
    ]
    (apply,), (step,) = rows_of["apply"], rows_of["steps"]
    assert apply["ours_us"] > 0
    assert step["masked_us"] > 0


@pytest.mark.long
@pytest.mark.services
def test_structured_output_is_measured_with_the_demo_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEER_DIR", str(tmp_path))
    result = Result(tmp_path, "structured_output.py", *MASKS, "--parts", "model")
    assert [row["system"] for row in result.rows] == ["ours, llguidance", "ours, xgrammar"]
    assert all(row["half_ms"] > 0 and row["all_ms"] > 0 for row in result.rows)
    assert "NO PEER" in result.output


@pytest.mark.services
@pytest.mark.parametrize(
    "case",
    [
        "nixl over tcp",
        *(
            pytest.param(case, marks=pytest.mark.long)
            for case in ("mooncake over tcp", "p2p_nccl with gloo")
        ),
    ],
)
def test_pulls_are_compared_with_the_library(case: str, tmp_path: Path) -> None:
    sizes = ("--tokens", "64", "256", "--repeats", "2")
    result = Result(tmp_path, "pull_transfer.py", "--cases", case, *sizes)
    assert [(row["tokens"], row["descriptors"]) for row in result.rows] == [(64, 4), (256, 16)]
    for row in result.rows:
        assert min(row["gb_s"].values()) > 0
        assert row["ratio"] > 0
        assert 0 < row["handover_ms"] < row["first_ms"] * 100
        assert len(row["handover_ms_each"]) == 2


@pytest.mark.services
@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "length"), [("idle", "--prompt-tokens"), ("handover", "--lengths")]
)
def test_separate_engines_are_compared_with_one(kind: str, length: str, tmp_path: Path) -> None:
    sizes = (length, "64", "--requests", "1")
    (row,) = Result(tmp_path, "disaggregation.py", kind, *sizes).rows
    assert row["prompt_tokens"] == 64
    assert row["added_ttft_ms"] == pytest.approx(row["split_ttft_ms"] - row["unified_ttft_ms"])
    rest_ms = row["gap_ms"] - row["transfer_ms"] - row["step_ms"]
    assert row["gap_beyond_ms"] == pytest.approx(rest_ms)
    assert row["transfer_ms"] > 0


@pytest.mark.services
@pytest.mark.long
def test_separate_engines_are_compared_with_two_for_each_chunk_size(tmp_path: Path) -> None:
    prompts = ("--rate", "20", "--seconds", "0.2", "--prompt-tokens", "64", "--output-tokens", "4")
    result = Result(tmp_path, "disaggregation.py", "mixed", *prompts, "--chunks", "64")
    assert [row["engines"] for row in result.rows] == [
        "1 prefill, 1 decode",
        "two unified, chunk 64",
    ]
    for row in result.rows:
        assert row["requests"] == 4
        assert 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"]
        assert 0 <= row["itl_p50_ms"] <= row["itl_p99_ms"]  # 0: tokens of one event
        assert 0 <= row["itl_p99_from_second_ms"] <= row["itl_p999_from_second_ms"]


@pytest.mark.services
@pytest.mark.long
def test_an_overload_counts_the_tokens_that_each_engine_computes(tmp_path: Path) -> None:
    load = ("--seconds", "1", "--clients", "1", "--factor", "1")
    lengths = ("--prompt-tokens", "64", "--output-tokens", "4")
    (row,) = Result(tmp_path, "disaggregation.py", "overload", *load, *lengths).rows
    assert row["requests"] == sum(row["statuses"].values()) >= 10
    assert row["pulls"]["complete"] > 0
    computed = row["computed_prompt_tokens"]
    assert computed["prefill"] > 0
    assert row["accepted_prompt_tokens"] == 64 * row["statuses"]["200"]
    excess = computed["prefill"] + computed["decode"] - row["accepted_prompt_tokens"]
    assert row["reprefilled_tokens"] == excess
    assert row["ttft_p50_ms"] > 0


@pytest.mark.slow
def test_the_kernels_of_a_step_grow_with_the_layers_and_not_with_the_rows(
    tmp_path: Path, long_run: bool
) -> None:
    for num_layers in (1, 2) if long_run else (2,):  # a fresh process each
        size = ("--models", "Qwen3 0.6B", "--layers", str(num_layers))
        rows = Result(tmp_path, "kernels_per_step.py", *size).rows
        assert [row["step"] for row in rows] == [
            "decode of 1",
            "decode of 256",
            "8k after 16k cached",
        ]
        for row in rows:
            others = row["kernels"] - num_layers * row["per_layer"]
            assert 0 < others < 30
        one, many, chunk = rows
        assert one["copies"] == many["copies"] == 0  # of the driver: kernels copy what steps need
        assert one["kernels"] == many["kernels"]
        # The logits of 256 rows in float32, and the hidden states of the chunk in bfloat16.
        assert many["peak_mib"] > 256 * 151_936 * 4 / 2**20
        assert chunk["peak_mib"] > 8192 * 3072 * 2 / 2**20


def test_the_metrics_that_benchmarks_read_exist() -> None:
    documented = (ROOT / "docs/metrics.md").read_text()
    read = {
        name
        for path in (ROOT / "benchmarks").glob("*.py")
        for name in re.findall(r"longshore_\w+_total|longshore_\w+(?=_sum)", path.read_text())
    }
    assert read
    assert {name for name in read if f"`{name}`" not in documented} == set()


DEPLOYMENTS = [  # the arguments of a small run, and a field of its first row
    (
        (
            *("simulator_validation.py", "--requests", "5", "--speed", "10"),
            *("--traces", "conversation", "--policies", "fcfs"),
            *("--fit-batch-sizes", "1", "2", "--fit-prompt-lens", "16", "64"),
            *("--fit-repeats", "1"),
        ),
        "fit_error",
    ),
    (
        (
            *("fairness.py", "--flood", "4", "--requests", "2"),
            *("--rows", "4", "--policies", "fair"),
        ),
        "step_p99_ms",
    ),
    (
        ("recovery.py", "--victims", "scheduler", "--turns", "1", "--tokens", "400"),
        "p50_s",
    ),
]
SMALLEST = [
    pytest.param(("block_pool.py", "--at-a-time", "16", *NO_PEER), "allocate_us"),
    pytest.param(("block_pool.py", "--manager", *NO_PEER), "append_each"),
    pytest.param(("pool_memory.py", "--blocks", "1000"), "cached_rss_mb"),
    pytest.param(("scheduler_process.py", "--num-blocks", "1000", "--repeats", "1"), "start_s"),
    pytest.param(("hops.py", *NO_PEER), "functions"),
    *(
        pytest.param(command, field, marks=pytest.mark.slow)
        for command, field in (
            (("recording.py", "--running", "8", "--turns", "2", "--steps", "8"), "thread_ratio"),
            (("host_copies.py", "--seconds", "0.02"), "ratio_with_checksums"),
            (("disk_store.py", "--megabytes", "8", "--pairs", "1"), "store_gb_s"),
            (("windows.py", "--tokens", "256", "--window", "64", "--step", "64"), "step_ms"),
            (("retention.py", "--jobs", "12", "--capacities", "1100"), "way_hints"),
            (("simulator_speed.py", "--requests", "5", "--engines", "2"), "steps_per_minute"),
            (("stack_overhead.py", "--requests", "1", "--output-len", "4"), "added_p50_ms"),
            (
                (
                    *("known_models.py", "--models", str(DEMO_MODEL_DIR)),
                    *("--output-len", "4", "--repeats", "1"),
                ),
                "tokens_per_s",
            ),
        )
    ),
    *(pytest.param(command, field, marks=pytest.mark.long) for command, field in DEPLOYMENTS),
]


@pytest.mark.parametrize(
    ("command", "field"), SMALLEST, ids=lambda each: each[0] if isinstance(each, tuple) else ""
)
def test_a_benchmark_runs_at_its_smallest_size(
    command: tuple[str, ...], field: str, tmp_path: Path
) -> None:
    result = Result(tmp_path, *command)
    assert result.rows
    assert field in result.rows[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with one KV head, and the token ids that benchmarks draw."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(
        "Llama", path, vocab_size=4096, num_key_value_heads=1, max_position_embeddings=2048
    )
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "field"),
    [
        pytest.param(
            (
                *("offloading.py", "--length", "128", "--prompts", "1", "--pairs", "1"),
                *("--output-len", "2", "--host-bytes", "16MiB", "--model"),
            ),
            "times_faster",
            marks=pytest.mark.long,
        ),
        (
            (
                *("parallel.py", "--workloads", "decode", "--layouts", "2 stages"),
                *("--prompts", "1", "--rounds", "1"),
            ),
            "ratio",
        ),
        pytest.param(
            (
                *("context_parallel.py", "--contexts", "32", "--layouts", "2 shards that share"),
                *("--prompts", "1", "--rounds", "1"),
            ),
            "decode_plain",
            marks=pytest.mark.long,
        ),
    ],
    ids=lambda each: each[0] if isinstance(each, tuple) else "",
)
def test_a_benchmark_of_a_model_runs_at_its_smallest_size(
    command: tuple[str, ...], field: str, model: Path, tmp_path: Path
) -> None:
    result = Result(tmp_path, *command, str(model))
    assert result.rows
    assert field in result.rows[0]


@pytest.mark.slow
@pytest.mark.skipif(not NATIVE, reason="the CPU kernels are not built")
def test_attention_is_measured_beside_torch_and_differs_little(tmp_path: Path) -> None:
    sizes = ("--shapes", "tiny", "--max-tokens", "1024", "--repeats", "1", "--threads", "1")
    result = Result(tmp_path, "attention.py", *sizes)
    assert {row["kind"] for row in result.rows} == {"decode", "prefill", "limited"}
    assert all(0 <= row["error"] < 0.1 for row in result.rows)


@pytest.mark.slow
@pytest.mark.skipif(not NATIVE, reason="the CPU kernels are not built")
def test_a_long_request_is_measured_in_chunks_from_the_cache_and_from_disk(tmp_path: Path) -> None:
    sizes = ("--tokens", "1024", "512", "--chunk", "64", "--repeats", "1")
    result = Result(tmp_path, "long_request.py", *sizes, "--kinds", "windows", "gated DeltaNet")
    assert [(row["kind"], row["phase"], row["tokens"]) for row in result.rows] == [
        (kind, phase, tokens)
        for kind in ("windows", "gated DeltaNet")
        for phase in ("cold", "hit", "disk")
        for tokens in (512, 1024)
    ]
    for short, long in zip(result.rows[::2], result.rows[1::2], strict=True):
        assert long["growth"]["host"] == pytest.approx(long["host_ms"] / short["host_ms"])
        assert 0 < long["engine_ms"] < long["host_ms"]
        assert long["attention_ms"] > 0
    for row in result.rows:
        assert ("eighths" in row) == (row["phase"] == "cold")
    first, *_, last = result.rows[1]["eighths"]["engine"]
    assert result.rows[1]["last_first"]["engine"] == pytest.approx(last / first)


@pytest.mark.slow
def test_a_study_draws_its_picture(tmp_path: Path) -> None:
    sizes = ("tiers", "--requests", "40", "--out", str(tmp_path))
    result = Result(tmp_path, "studies.py", *sizes)
    assert [row["host_gib"] for row in result.rows] == [0, 16, 32, 64, 128, 256, 512, 1024]
    assert (tmp_path / "study-tiers.png").stat().st_size > 0


@pytest.mark.slow
def test_chats_with_a_hybrid_model_find_their_earlier_turns(tmp_path: Path) -> None:
    sizes = ("--turns", "3", "--chats", "1", "--size", "tiny", "--blocks", "400")
    first, second, third = Result(tmp_path, "hybrid_turns.py", *sizes).rows
    for row in (first, second, third):
        assert row["hybrid_ms"] > 0
        assert row["full_ms"] > 0
    assert first["hybrid_cached"] == first["full_cached"] == 0
    assert 800 < second["full_cached"] <= second["hybrid_cached"] < third["full_cached"]


@pytest.mark.slow
def test_preserved_thinking_keeps_the_prefix_at_the_next_question(tmp_path: Path) -> None:
    sizes = ("--questions", "2", "--calls", "1")
    off, off_next, on, on_next = Result(tmp_path, "preserved_thinking.py", *sizes).rows
    assert [row["requests"] for row in (off, off_next, on, on_next)] == [4, 1, 4, 1]
    block = 16
    # What is computed anew: the question, and without the variable all from the first answer on.
    assert on_next["computed_tokens"] <= 100 + 2 * block
    assert off_next["computed_tokens"] >= 50 + 300 + 100 + 100
    assert on["computed_tokens"] < off["computed_tokens"]


@pytest.mark.slow
def test_the_benchmark_of_speculation_has_a_row_per_load_and_system(tmp_path: Path) -> None:
    loads = ("--workloads", "story", "--requests", "1", "2", "--rounds", "1")
    systems = ("--systems", "none", "suffix")
    result = Result(tmp_path, "speculation.py", str(DEMO_MODEL_DIR), *loads, *systems)
    assert [(row["requests"], row["system"]) for row in result.rows] == [
        (1, "none"),
        (1, "suffix"),
        (2, "none"),
        (2, "suffix"),
    ]
    for row in result.rows:
        assert row["output_tokens_per_s"] > 0
        assert row["per_step"] >= 1
        assert 0 <= row["accepted"] <= 1
        assert (row["ratio"] == 1) or row["system"] == "suffix"
