"""`longshore top`: what it shows of a server, and what happens when the server becomes
unreachable."""

import fcntl
import io
import json
import os
import resource
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest
from rich.console import Console

from longshore.deploy.cli.client_options import TopOptions
from longshore.deploy.cli.top import (
    Keys,
    RecentSamples,
    TopFailed,
    top,
)
from longshore.deploy.cli.top_screen import TopScreen
from longshore.deploy.gateway.metric_samples import (
    Sample,
    Window,
    read_metrics,
)
from longshore.deploy.gateway.metrics import GatewayMetrics
from longshore.deploy.gateway.overview import (
    TIMES,
    Overview,
    overview,
)
from longshore.protocol.outputs import FinishReason
from longshore.protocol.statistics import SchedulerStats
from tests.deploy.gateway.fake_engine import STATS
from tests.scheduler.worker_reports import report


def busy_metrics() -> GatewayMetrics:
    metrics = GatewayMetrics()
    metrics.watch_readiness(lambda: None)
    metrics.observe_scheduler("0", STATS)
    metrics.live_requests.inc(4)
    return metrics


def sample(metrics: GatewayMetrics, taken_s: float) -> Sample:
    return read_metrics(metrics.render().decode(), taken_s)


def with_workers(num_workers: int, *, num_steps: int = 7, **fields: Any) -> SchedulerStats:
    workers = tuple(report(rank=rank, num_steps=num_steps, **fields) for rank in range(num_workers))
    return msgspec.structs.replace(STATS, workers=workers)


def two_samples(num_workers: int = 1) -> Overview:
    """Two samples with an interval of two seconds. In between, a request ended and ten steps
    ran."""
    metrics = busy_metrics()
    metrics.observe_scheduler("0", with_workers(num_workers, compute_s=1.0, num_tokens=10))
    before = sample(metrics, 10.0)
    metrics.request_ended(FinishReason.STOPPED, 0.3)
    metrics.generated_tokens.inc(8)
    metrics.inter_token_latency_s.observe(0.02)
    stats = with_workers(
        num_workers, num_steps=17, compute_s=2.5, num_tokens=50, longest_step_s=0.25
    )
    metrics.observe_scheduler(
        "0",
        msgspec.structs.replace(
            stats,
            num_steps=27,
            num_prompt_tokens=60,
            num_prefix_queried_tokens=100,
            num_prefix_hit_tokens=46,
        ),
    )
    return overview(Window(sample(metrics, 12.0), before))


def drawn(view: Overview, *, width: int = 80, height: int = 24, **settings: Any) -> list[str]:
    console = Console(width=width, height=height, record=True, file=io.StringIO())
    console.print(TopScreen(view, "http://host", **settings))
    return console.export_text().splitlines()


def test_rates_and_shares_are_of_what_lies_between_the_samples() -> None:
    view = two_samples()
    assert view.is_ready
    assert (view.window_s, view.requests_per_s, view.refused_per_s) == (2.0, 0.5, 0.0)
    assert (view.prompt_tokens_per_s, view.generated_tokens_per_s) == (30.0, 4.0)
    assert (view.cached_tokens_per_s, view.prefix_hit_share) == (15.0, 0.5)
    assert view.latencies["between tokens"].p50_s == 0.025
    assert view.latencies["in the queue"].p99_s is None
    (engine,) = view.engines
    assert (engine.num_running, engine.num_waiting, engine.steps_per_s) == (3, 1, 10.0)
    assert (engine.prefix_hit_share, engine.external_hit_share) == (0.5, None)
    assert [(tier.medium, tier.num_blocks, tier.capacity_blocks) for tier in engine.tiers] == [
        ("CPU", 40, 64),
        ("DISK", 90, 1024),
    ]
    assert [tier.hit_tokens_per_s for tier in engine.tiers] == [0.0, 0.0]


def test_a_worker_s_steps_are_those_between_the_samples() -> None:
    (worker,) = two_samples().workers
    assert (worker.engine, worker.worker) == ("0", "0")
    assert (worker.steps_per_s, worker.tokens_per_s) == (5.0, 20.0)
    assert (worker.mean_step_s, worker.longest_step_s) == (pytest.approx(0.15), 0.25)
    assert worker.busy_share == 0.75
    assert worker.resident_bytes == 1 << 20


def test_a_worker_that_took_no_step_has_no_times() -> None:
    now = sample(busy_metrics(), 2.0)
    (worker,) = overview(Window(now, Sample(1.0, now.series))).workers
    assert (worker.mean_step_s, worker.p99_step_s, worker.longest_step_s) == (None, None, None)
    assert worker.busy_share == 0.0


def test_every_time_that_is_shown_is_measured() -> None:
    names = sample(busy_metrics(), 1.0).series.keys()
    assert {f"{metric}_bucket" for _, metric in TIMES} <= names


@pytest.mark.parametrize("width", [80, 100, 140])
def test_a_screen_fits_the_terminal_and_shows_what_matters(width: int) -> None:
    lines = drawn(two_samples(), width=width)
    assert len(lines) < 24
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for part in ("http://host", "ready", "running", "75 free", "24.2%", "50.0%", "150 ms", "75.0%"):
        assert part in text
    assert "engines" not in text


def test_tiers_are_shown_where_there_is_room() -> None:
    text = "\n".join(drawn(two_samples(), height=40))
    assert "40 of 64 blocks   hit tokens per second 0" in text
    assert "90 of 1,024 blocks" in text
    assert "host memory" in text
    for lines in (drawn(two_samples(), height=24), drawn(two_samples(9), height=32)):
        assert "host memory" not in "\n".join(lines)


def test_acceptance_of_drafts_is_shown_by_position() -> None:
    metrics = busy_metrics()
    before = sample(metrics, 10.0)
    stats = msgspec.structs.replace(
        STATS,
        num_drafted_rows=STATS.num_drafted_rows + 10,
        num_draft_tokens=STATS.num_draft_tokens + 40,
        num_accepted_tokens=STATS.num_accepted_tokens + 10,
        accepted_by_position=(3 + 8, 1 + 2, 0),
    )
    metrics.observe_scheduler("0", stats)
    view = overview(Window(sample(metrics, 12.0), before))
    (engine,) = view.engines
    assert engine.draft_acceptance == 0.25
    assert engine.acceptance_by_position == [0.8, 0.2]
    text = "\n".join(drawn(view))
    assert "drafts accepted 25.0%" in text
    assert "80.0%  20.0%" in text
    (engine,) = two_samples().engines
    assert (engine.draft_acceptance, engine.acceptance_by_position) == (None, [])
    assert "drafts" not in "\n".join(drawn(two_samples()))


def test_pins_are_shown_with_the_blocks_of_all_engines() -> None:
    metrics = busy_metrics()
    for engine, num_pins in (("0", 2), ("1", 1)):
        stats = msgspec.structs.replace(STATS, num_pins=num_pins, num_pinned_blocks=9)
        metrics.observe_scheduler(engine, stats)
    text = "\n".join(drawn(overview(Window(sample(metrics, 1.0))), height=30))
    assert "pinned for next turns" in text
    assert "9.1%, 18 blocks of 3 jobs" in text
    assert "pinned" not in "\n".join(drawn(two_samples()))


def test_workers_that_do_not_fit_are_counted() -> None:
    view = two_samples(num_workers=9)
    assert len(drawn(view, height=24)) == 24
    assert "workers, 2 of 9" in "\n".join(drawn(view, height=24))
    assert "workers, 6 of 9" in "\n".join(drawn(view, height=28))
    assert sum("0.00 GiB" in line for line in drawn(view, fills_terminal=False)) == 9


@pytest.mark.parametrize("height", range(23, 30))
def test_workers_have_a_panel_where_a_row_of_it_fits(height: int) -> None:
    metrics = busy_metrics()
    metrics.observe_scheduler("0", with_workers(2))
    metrics.observe_scheduler("1", STATS)
    lines = drawn(overview(Window(sample(metrics, 1.0))), height=height)
    assert len(lines) <= height
    assert lines[-1].startswith("╰")
    assert ("workers" in "\n".join(lines)) == (height >= 27)
    assert sum("0.00 GiB" in line for line in lines) == min(max(height - 26, 0), 3)


@pytest.mark.parametrize("width", [24, 40, 60, 80])
def test_the_head_cuts_the_address_before_the_state(width: int) -> None:
    console = Console(width=width, height=24, record=True, file=io.StringIO())
    console.print(TopScreen(two_samples(), "http://a-long-name.example.org:8000"))
    head, *_ = console.export_text().splitlines()
    assert "ready" in head
    assert head.rstrip().endswith("q ends")
    assert ("longshore" in head) == (width == 80)
    assert ("http://a-long-name.example.org:8000 " in head) == (width >= 60)


def test_several_engines_have_a_row_each_and_a_sum() -> None:
    metrics = busy_metrics()
    metrics.observe_scheduler("1", msgspec.structs.replace(STATS, num_running=9, kv_usage=0.5))
    view = overview(Window(sample(metrics, 1.0)))
    assert (view.num_running, view.num_waiting) == (12, 2)
    text = "\n".join(drawn(view, height=30))
    assert "engines" in text
    assert "150 free" in text
    assert "50.0%" in text


def test_a_server_that_began_again_is_compared_with_nothing() -> None:
    def look(taken_s: float, start_s: float) -> Sample:
        return Sample(taken_s, {"process_start_time_seconds": {frozenset(): start_s}})

    samples = RecentSamples()
    assert samples.add(look(1.0, 50.0)).elapsed_s is None
    assert samples.add(look(2.0, 50.0)).elapsed_s == 1.0
    assert samples.add(look(9.0, 80.0)).elapsed_s is None
    elapsed = [samples.add(look(taken_s, 80.0)).elapsed_s for taken_s in range(10, 20)]
    assert elapsed == [1.0, 2.0, 3.0, 4.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0]


class MetricsServer:
    """Answers every GET with `metrics`, or with an unknown status."""

    def __init__(self) -> None:
        self.metrics = busy_metrics()
        self.statuses: list[int] = []

    @contextmanager
    def running(self) -> Iterator[str]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = outer.metrics.render()
                self.send_response(outer.statuses.pop(0) if outer.statuses else 200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_port}"
            finally:
                server.shutdown()
                thread.join()


def test_a_look_that_fails_is_shown_and_the_next_one_that_does_not_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = MetricsServer()
    server.statuses = [200, 502, 502, 200]
    with server.running() as url:
        top(TopOptions(url=url, interval_s=0.01, num_looks=5, json=True))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ["error" in line for line in lines] == [False, True, True, False, False]
    assert "HTTP 502" in lines[1]["error"]
    assert lines[0]["engines"][0]["num_running"] == 3
    assert lines[0]["window_s"] is None
    assert lines[4]["workers"][0]["steps_per_s"] == 0.0


def test_a_first_look_that_fails_ends_it_with_a_reason() -> None:
    server = MetricsServer()
    server.statuses = [404]
    with (
        server.running() as url,
        pytest.raises(TopFailed, match=r"HTTP 404; is it a Longshore server"),
    ):
        top(TopOptions(url=url, num_looks=1))
    with pytest.raises(TopFailed, match="does not answer"):
        top(TopOptions(url=url, num_looks=1))


def test_one_look_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with MetricsServer().running() as url:
        top(TopOptions(url=url, num_looks=1))
    assert "since start" in capsys.readouterr().out


def test_trouble_stands_above_what_was_seen_last() -> None:
    lines = drawn(two_samples(), trouble="unreachable for 3 s")
    assert lines[0].strip() == "unreachable for 3 s"
    assert "running" in lines[2]


@pytest.mark.parametrize(("pressed", "quits"), [(b"q", True), (b"xQ", True), (b"x", False)])
def test_q_ends_it_and_the_terminal_is_as_before(pressed: bytes, quits: bool) -> None:
    ours, low = os.openpty()
    beyond_select = min(1500, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 1)
    theirs = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, beyond_select)
    os.close(low)
    with os.fdopen(theirs) as terminal:
        before = termios.tcgetattr(theirs)
        with Keys(terminal) as keys:
            os.write(ours, pressed)
            assert keys.quits_within(20.0 if quits else 0.05) is quits
        assert termios.tcgetattr(theirs) == before
    os.close(ours)


def test_without_a_terminal_no_key_is_waited_for() -> None:
    with open(os.devnull) as nothing, Keys(nothing) as keys:
        assert not keys.quits_within(0.01)
