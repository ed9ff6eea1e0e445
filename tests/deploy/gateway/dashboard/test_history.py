"""The last hour of the dashboard's charts."""

import json
import re

from longshore.deploy.gateway.dashboard import history
from longshore.deploy.gateway.dashboard.history import History, chart_values
from longshore.deploy.gateway.metric_samples import Sample, Window, read_metrics
from tests.conftest import ROOT
from tests.deploy.gateway.conftest import StartGateway

PAGE = (ROOT / "deploy" / "gateway" / "dashboard" / "dashboard.js").read_text()


def sample(taken_s: float, factor: int = 1) -> Sample:
    """Counters grow with the factor."""
    return read_metrics(
        f"""
longshore_scheduler_kv_usage_ratio{{engine="0"}} 0.25
longshore_scheduler_kv_usage_ratio{{engine="1"}} 0.75
longshore_scheduler_running_requests{{engine="0"}} 3
longshore_scheduler_waiting_requests{{engine="0"}} 1
longshore_generated_tokens_total {100 * factor}
longshore_scheduler_prompt_tokens_total{{engine="0"}} {50 * factor}
longshore_scheduler_prompt_tokens_total{{engine="1"}} {500 * factor}
longshore_time_to_first_token_seconds_bucket{{le="0.5"}} {3 * factor}
longshore_time_to_first_token_seconds_bucket{{le="+Inf"}} {4 * factor}
longshore_scheduler_steps_total{{engine="0"}} {20 * factor}
longshore_scheduler_prefix_queried_tokens_total{{engine="0"}} {40 * factor}
longshore_scheduler_prefix_hit_tokens_total{{engine="0"}} {10 * factor}
longshore_requests_finished_total{{reason="stop"}} {10 * factor}
longshore_requests_finished_total{{reason="repetition"}} {5 * factor}
longshore_requests_finished_total{{reason="error"}} {5 * factor}
longshore_http_responses_total{{endpoint="/v1/completions",status="429"}} {5 * factor}
longshore_http_responses_total{{endpoint="/ready",status="503"}} {900 * factor}
longshore_http_responses_total{{endpoint="/v1/completions",status="503"}} {10 * factor}
longshore_http_responses_total{{endpoint="/v1/completions",status="400"}} {15 * factor}
longshore_http_responses_total{{endpoint="/v1/completions",status="500"}} {20 * factor}
longshore_http_responses_total{{endpoint="/v1/completions",status="gone"}} {25 * factor}
""",
        taken_s,
    )


def test_values_are_those_that_the_page_computes() -> None:
    values = chart_values(Window(sample(10.0, 2), sample(5.0)), "0")
    assert values == [
        [0.25],
        [3, 1],
        [20],
        [10],
        [0.5, 0.5],
        [None, None],
        [4],
        [0.25],
        [3, 0],
        [0, 1],
        [1, 2],
        [3, 4],
    ]
    assert chart_values(Window(sample(10.0, 2), sample(5.0)), "1")[3] == [100]


def test_there_is_a_value_for_each_line_of_the_page() -> None:
    charts = PAGE.partition("const CHARTS = [\n")[2].partition("\n];")[0].splitlines()
    lines = [len(re.findall(r'\["\w*", ', chart.partition(", [[")[2])) + 1 for chart in charts]
    values = chart_values(Window(sample(10.0), sample(5.0)), "0")
    assert [len(line) for line in values] == lines
    (window,) = re.findall(r"WINDOW_S = (\d+)", PAGE)
    assert float(window) == history.INTERVAL_S


def test_the_last_hour_is_kept_of_the_engines_that_there_are() -> None:
    engines = [0, 1]

    async def none() -> Sample:
        raise AssertionError

    kept = History(none, lambda: engines)
    for number in range(history.MAX_POINTS + 9):
        kept.add(sample(5.0 * number, number), 1e9 + 5 * number)
    assert len(kept.of(0)) == len(kept.of(1)) == history.MAX_POINTS
    first, *_, last = (s for s, _ in kept.of(0))
    assert (first, last) == (1e9 + 5 * 9, 1e9 + 5 * (history.MAX_POINTS + 8))
    engines.pop()
    kept.add(sample(9e4), 2e9)
    assert kept.of(1) == []


async def test_the_page_gets_the_points_of_an_engine(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        kept = gateway.process.history
        for unix_s in (1e9, 1e9 + 5):
            kept.add(await kept._take_sample(), unix_s)
        answer = json.loads((await gateway.get("/dashboard/history?engine=0")).body)
        (values,) = answer["values"]
        assert (answer["times"], len(values)) == ([1e9 + 5], 12)
        assert (await gateway.get("/dashboard/history?engine=7")).status == 404
