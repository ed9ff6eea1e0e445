"""The charts and the counts of the dashboard: in a real browser, on a real server."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from selenium.webdriver import ActionChains

from longshore.deploy.model.demo import DEMO_MODEL_DIR
from tests.integration.browser import Page, open_page
from tests.integration.conftest import StartDeployment
from tests.integration.deployment import PATIENCE_S, Deployment, wait_until
from tests.integration.test_process_life import open_stream

pytestmark = pytest.mark.services

NUM_CHARTS = 12


@pytest.fixture
def page(deployment: Deployment, tmp_path: Path) -> Iterator[Page]:
    with open_page(deployment.url, tmp_path) as opened:
        yield opened


def post(deployment: Deployment, path: str, **body: Any) -> int:
    request = Request(
        f"{deployment.url}{path}",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urlopen(request, timeout=PATIENCE_S) as response:
            response.read()
            return int(response.status)
    except HTTPError as error:
        with error:
            return error.code


def rows(page: Page, body: str) -> dict[str, str]:
    """The two columns of a table."""
    cells = f"return [...document.getElementById('{body}').rows].map("
    pairs = page.run(cells + "(row) => [...row.cells].map((cell) => cell.textContent))")
    return {name: value for name, value in pairs}


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_a_page_begins_with_what_the_server_has(deployment: Deployment, tmp_path: Path) -> None:
    def points() -> list[Any]:
        with urlopen(f"{deployment.url}/dashboard/history", timeout=PATIENCE_S) as response:
            return list(json.load(response)["times"])

    wait_until(lambda: len(points()) >= 2)
    with open_page(deployment.url, tmp_path) as page:
        page.wait(lambda: page.run("return samples.length") > 0)
        times = page.run("return samples.map((sample) => sample.s)")
        assert times[-1] - times[0] > 4
        assert page.complaints == []


def test_hits_are_the_same_in_metrics_top_and_dashboard(deployment: Deployment, page: Page) -> None:
    prompt = "The harbour has ships, and every ship has a name. " * 6
    for _ in range(3):
        assert post(deployment, "/v1/completions", prompt=prompt, max_tokens=4, n=2) == 200

    def metrics() -> list[int]:
        with urlopen(f"{deployment.url}/metrics", timeout=PATIENCE_S) as response:
            text = response.read().decode()
        names = ("prefix_hit", "prefix_queried", "prompt")
        found = [
            re.search(rf"^longshore_scheduler_{name}_tokens_total{{.*}} (\S+)$", text, re.M)
            for name in names
        ]
        return [0 if each is None else int(float(each[1])) for each in found]

    def state() -> list[int]:
        with urlopen(f"{deployment.url}/dashboard/state", timeout=PATIENCE_S) as response:
            content = json.load(response)
        return [content["num_prefix_hit_tokens"], content["num_prefix_queried_tokens"]]

    def top() -> list[float]:
        command = [sys.executable, "-m", "longshore.deploy", "top", "--url", deployment.url]
        ended = subprocess.run(
            [*command, "--num-looks", "1", "--json"],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
        content = json.loads(ended.stdout)
        (engine,) = content["engines"]
        return [engine["prefix_hit_share"], content["prefix_hit_share"]]

    def all_agree() -> bool:  # once the engine has reported, which it does each second
        hits, queried, num_prompt_tokens = metrics()
        if not 0 < hits < queried <= num_prompt_tokens or state() != [hits, queried]:
            return False
        shown = {
            "all": f"{num_prompt_tokens:,}",
            "looked up": f"{queried:,}",
            "found": f"{hits:,}",
            "hits": f"{100 * hits / queried:.1f} %",
        }
        return rows(page, "prefixes") == shown and top() == [hits / queried] * 2

    wait_until(all_agree)


def test_drafts_are_shown_by_position(start_deployment: StartDeployment, tmp_path: Path) -> None:
    """The model itself drafts."""
    config = {"method": "draft_model", "model": str(DEMO_MODEL_DIR), "num_speculative_tokens": 3}
    deployment = start_deployment(
        "--speculative-config", json.dumps(config), model_dir=DEMO_MODEL_DIR
    ).wait_until_ready()
    for _ in range(3):
        prompt = "The harbour has ships, and every ship has a name."
        assert post(deployment, "/v1/completions", prompt=prompt, max_tokens=60) == 200

    def shown() -> dict[str, str]:
        with urlopen(f"{deployment.url}/metrics", timeout=PATIENCE_S) as response:
            text = response.read().decode()

        def values(name: str) -> list[float]:
            found = re.findall(rf"^longshore_scheduler_{name}_total{{.*}} (\S+)$", text, re.M)
            return list(map(float, found))

        (drafts,), (accepted,) = values("draft_tokens"), values("accepted_draft_tokens")
        (num_rows,), by_position = values("drafted_rows"), values("accepted_by_position")
        if not accepted:
            return {}
        rows = {"all": f"{drafts:,.0f}, {100 * accepted / drafts:.1f} %"}
        for position, count in enumerate(filter(None, by_position), start=1):
            rows[f"no. {position}"] = f"{100 * count / num_rows:.1f} %"
        return rows

    wait_until(shown)
    with open_page(deployment.url, tmp_path) as page:
        wait_until(lambda: rows(page, "drafts") == shown())
        assert not page.run("return document.getElementById('drafts-part').hidden")
        assert page.complaints == []


def test_states_are_shown_of_models_that_have_them(page: Page) -> None:
    page.wait_for_polls(1)
    page.driver.find_element("id", "freeze").click()
    page.wait_for_status("frozen")
    is_hidden = "return document.getElementById('states-part').hidden"
    assert page.run(is_hidden)
    assert page.run("return document.getElementById('drafts-part').hidden")
    names = ("kept_states", "kept_state_blocks")
    names += tuple(f"states_{event}_total" for event in ("kept", "found", "evicted"))
    lines = [
        f'longshore_scheduler_{name}{{engine="{engine}"}} {1000 * engine + 1005 + index}.0'
        for engine in (0, 1)
        for index, name in enumerate(names)
    ]
    page.run("showEnds(readMetrics(arguments[0]))", "\n".join(lines))
    assert not page.run(is_hidden)
    assert rows(page, "states") == {
        "now": "1,005",
        "blocks": "1,006",
        "kept": "1,007",
        "found": "1,008",
        "evicted": "1,009",
    }
    assert page.complaints == []


def test_errors_rejections_and_finish_reasons_are_counted_and_drawn(
    start_deployment: StartDeployment, tmp_path: Path
) -> None:
    deployment = start_deployment("--max-live-requests", "1").wait_until_ready()
    stream = open_stream(deployment, 4000)
    with open_page(deployment.url, tmp_path / "profile") as page:
        page.wait_for_status("serving")
        for _ in range(5):
            assert post(deployment, "/v1/completions", prompt="x", max_tokens=4) == 429
        assert post(deployment, "/v1/completions", prompt=17) == 400
        stream.close()
        page.wait(lambda: rows(page, "reasons").get("abort") == "1")
        page.wait(lambda: rows(page, "statuses").get("429") == "5")
        assert rows(page, "statuses")["400"] == "1"
        assert set(rows(page, "reasons")) == {"stop", "length", "abort", "error", "repetition"}
        highest = (
            "return CHARTS.map(([title], index) => [title, Math.max("
            "...samples.map((sample) => Math.max(...sample.values[index])))])"
        )
        drawn = dict(page.run(highest))
        for title in ("Ended early / s", "Rejected / s", "HTTP errors / s"):
            assert drawn[title] > 0, title
        assert page.complaints == []
    assert deployment.stop() == 0
    one_each = deployment.output.count("request rejected: 1 requests are running or waiting")
    more = re.findall(r"rejected (\d+) more requests for this reason", deployment.output)
    assert one_each + sum(map(int, more)) == 5, deployment.output


def test_every_chart_has_axes_a_name_and_the_values_of_the_time_pointed_at(
    page: Page,
) -> None:
    page.wait_for_polls(4)
    page.driver.find_element("id", "freeze").click()
    page.wait_for_status("frozen")
    axes = page.run(
        "return [...document.querySelectorAll('.axis')].map("
        "(axis) => [...axis.children].map((each) => each.textContent))"
    )
    assert len(axes) == NUM_CHARTS
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d", tick) for axis in axes for tick in axis), axes
    assert axes[0][0] != axes[0][2]
    first = page.run(
        "samples.splice(1, samples.length - 2);"  # or another may be nearer to where we point
        "samples[0].values[0] = [0.123]; samples[0].s = samples.at(-1).s - rangeS + 1;"
        "return clock(samples[0].s)"
    )
    canvas = page.driver.find_element("css selector", ".chart canvas")
    left = -canvas.rect["width"] // 2 + 3
    ActionChains(page.driver).move_to_element_with_offset(canvas, left, 0).perform()
    chart = "return document.querySelector('.chart').innerText"
    page.wait(lambda: first in page.run(chart))
    assert "12 %" in page.run(chart)
    canvases = "return [...document.querySelectorAll('.chart canvas')].map(({dataset, ariaLabel})"
    named = page.run(f"{canvases} => [ariaLabel, dataset.scale])")
    assert len(named) == NUM_CHARTS
    assert re.fullmatch("KV blocks in use: 12 %; the axis ends at 100 %", named[0][0])
    assert re.fullmatch("100 %,50 %,0 %", named[0][1])
    assert all(re.match("[A-Z][^:]+: ", name) for name, _ in named), named
    tops = "return [...document.querySelectorAll('.top')].map((each) => each.textContent)"
    assert page.run(tops) == [first] * NUM_CHARTS
    ActionChains(page.driver).move_to_element(page.driver.find_element("id", "status")).perform()
    page.wait(lambda: first not in page.run(chart))


def test_the_range_and_what_was_drawn_survive_a_reload(page: Page) -> None:
    page.wait_for_polls(3)
    page.driver.find_element("css selector", "[data-range='600']").click()
    assert page.driver.current_url.endswith("/dashboard?range=600")
    before = page.run("return samples.map((sample) => sample.s)")
    page.driver.refresh()
    page.wait_for_polls(1)
    after = page.run("return samples.map((sample) => sample.s)")
    assert len(after) > len(before) >= 3
    assert after[: len(before)] == pytest.approx(before, abs=0.1)
    assert page.run("return rangeS") == 600
    pressed = "return document.querySelector('#ranges [aria-pressed=true]').textContent"
    assert page.run(pressed) == "10 min"
    assert page.complaints == []
