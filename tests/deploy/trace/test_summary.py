"""The figures of a scheduler trace."""

import json
from pathlib import Path

import pytest

from longshore.deploy.trace.reading import read_trace
from longshore.deploy.trace.summary import print_json, print_summary, spread, summarize
from tests.deploy.trace.traces import driven, short_of_blocks
from tests.harness.tokens import prompt_of


def test_the_figures_are_those_of_the_scheduler(tmp_path: Path) -> None:
    driver = short_of_blocks(tmp_path / "t")
    summary = summarize(read_trace(tmp_path / "t"))
    stats = driver.scheduler.make_stats()
    assert summary.num_steps == stats.num_steps
    assert summary.num_preemptions == stats.num_preemptions > 0
    assert summary.num_tokens == sum(plan.num_scheduled_tokens for plan in driver.plans)
    assert summary.finish_reasons == {"length_capped": 4}
    queried = stats.num_prefix_queried_tokens + stats.num_preempted_queried_tokens
    hits = stats.num_prefix_hit_tokens + stats.num_preempted_hit_tokens
    assert (summary.num_queried_tokens, summary.num_local_hit_tokens) == (queried, hits)
    assert hits > 0
    assert summary.mean_occupancy is not None
    assert 0.5 < summary.mean_occupancy <= 1


def test_times_of_requests_have_percentiles(tmp_path: Path) -> None:
    driver = driven(tmp_path / "t", max_num_seqs=1)
    for number in range(3):
        driver.add(f"r{number}", prompt_of(5, number), max_tokens=2)
    driver.run()
    queue = summarize(read_trace(tmp_path / "t")).queue_s
    assert queue == spread([3.0, 4.0, 5.0])
    assert queue is not None
    assert (queue.count, queue.p50, queue.max) == (3, 4.0, 5.0)


def test_a_trace_without_steps_has_a_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driven(tmp_path / "t")
    summary = summarize(read_trace(tmp_path / "t"))
    assert (summary.num_steps, summary.queue_s, summary.mean_occupancy) == (0, None, None)
    print_summary(summary)
    assert "no lookups" in capsys.readouterr().out


def test_the_summary_is_printed_as_tables_or_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short_of_blocks(tmp_path / "t")
    summary = summarize(read_trace(tmp_path / "t"))
    print_summary(summary)
    shown = capsys.readouterr().out
    assert "4 length_capped" in shown
    assert "first token, ms" in shown
    print_json(summary)
    assert json.loads(capsys.readouterr().out)["num_preemptions"] == summary.num_preemptions
