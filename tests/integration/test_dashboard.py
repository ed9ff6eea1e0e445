"""The dashboard in a real browser, on a real server."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest
from selenium.webdriver import ActionChains, Keys

from tests.integration.browser import Page, open_page, resize
from tests.integration.conftest import StartDeployment
from tests.integration.deployment import PATIENCE_S, Deployment, wait_until
from tests.integration.test_offloading import ask
from tests.integration.test_process_life import open_stream

pytestmark = pytest.mark.services


@pytest.fixture
def page(deployment: Deployment, tmp_path: Path) -> Iterator[Page]:
    """The dashboard of the shared deployment."""
    with open_page(deployment.url, tmp_path) as opened:
        yield opened


def test_counts_are_those_of_the_report_and_the_console_is_silent(
    deployment: Deployment, page: Page
) -> None:
    for _ in open_stream(deployment, 40):
        pass
    page.wait_for_status("idle")
    page.wait_for_polls()
    with urlopen(f"{deployment.url}/engine/report") as answer:
        report = json.load(answer)
    counts = page.counts()
    assert sum(counts.values()) == report["num_blocks"] == 600
    assert counts["free"] + counts["cached"] == report["num_free_blocks"]
    assert counts["cached"] > 0
    assert counts["held"] == 0
    assert "No request holds blocks" in page.text("holders-scroll")
    assert page.complaints == []


def test_a_running_request_has_a_row_and_its_blocks_stand_out(
    deployment: Deployment, page: Page
) -> None:
    stream = open_stream(deployment, 4000)
    page.wait_for_status("serving")
    page.wait(lambda: page.run("return document.querySelectorAll('#holders tr').length") == 1)
    page.driver.find_element("id", "freeze").click()
    page.wait_for_status("frozen")
    row = page.driver.find_element("css selector", "#holders tr")
    name, tokens, num_blocks, _ = _cells(page)
    assert stream.response.headers["x-request-id"] in name
    held = page.counts()["held"]
    assert int(num_blocks) == held > 0
    assert int(tokens.replace(",", "")) > 1
    assert _num_marked(page) == 0
    ActionChains(page.driver).move_to_element(row).perform()
    page.wait(lambda: _num_marked(page) == held)
    ActionChains(page.driver).move_to_element(page.driver.find_element("id", "status")).perform()
    page.wait(lambda: _num_marked(page) == 0)
    stream.close()


def test_a_block_says_who_holds_it_by_mouse_and_by_keys(deployment: Deployment, page: Page) -> None:
    stream = open_stream(deployment, 4000)
    page.wait_for_status("serving")
    page.wait(lambda: page.counts()["held"] > 0)
    page.driver.find_element("id", "freeze").click()
    page.wait_for_status("frozen")
    held = page.counts()["held"]
    block = page.run("return map.state.states.indexOf(3)")
    x, y = page.run(
        "const box = map.canvas.getBoundingClientRect(), block = arguments[0];"
        "return [box.left + (block % map.columns + 0.5) * map.cell,"
        " box.top + (Math.floor(block / map.columns) + 0.5) * map.cell];",
        block,
    )
    mouse = ActionChains(page.driver)
    mouse.w3c_actions.pointer_action.move_to_location(int(x), int(y))
    mouse.perform()
    assert f"Block {block}: held" in page.text("picked")
    assert stream.response.headers["x-request-id"] in page.text("picked")
    ActionChains(page.driver).click().perform()
    assert _num_marked(page) == held
    assert page.run("return document.querySelector('#holders tr').ariaSelected") == "true"
    canvas = page.driver.find_element("id", "map")
    canvas.send_keys(Keys.ESCAPE)
    assert _num_marked(page) == 0
    canvas.send_keys(Keys.ARROW_RIGHT)
    assert "Block 0: reserved" in page.text("picked")
    canvas.send_keys(*[Keys.ARROW_RIGHT] * block, Keys.ENTER)
    assert _num_marked(page) == held
    stream.close()


def test_a_state_stands_out_when_its_name_is_pressed(page: Page) -> None:
    page.wait_for_polls()
    page.driver.find_element("css selector", "[data-state=reserved]").click()
    assert _num_marked(page) == 1
    assert "permanently reserved" in page.text("picked")
    page.driver.find_element("css selector", "[data-state=reserved]").click()
    assert _num_marked(page) == 0


@pytest.mark.long
def test_a_narrow_window_shows_everything_one_below_the_other(
    deployment: Deployment, tmp_path: Path
) -> None:
    with open_page(deployment.url, tmp_path, size=(400, 800), is_dark=True) as narrow:
        narrow.wait_for_polls()
        assert narrow.run("return document.documentElement.scrollWidth") <= 400
        boxes = (
            "return ['map', 'holders-title'].map("
            "(id) => document.getElementById(id).getBoundingClientRect().top)"
        )
        above, below = narrow.run(boxes)
        assert above < below
        cut = (
            "return [...document.querySelectorAll('.wide')].filter("
            "(table) => table.scrollWidth > table.clientWidth).map((table) => table.innerText)"
        )
        assert narrow.run(cut) == []
        assert narrow.complaints == []


@pytest.mark.long
def test_a_page_without_a_size_is_drawn_when_it_has_one_again(page: Page) -> None:
    page.wait_for_polls()
    page.run("document.body.style.width = '0'; document.body.style.padding = '0'")
    page.wait_for_polls()
    page.run("document.body.style = ''")
    page.wait_for_polls()
    assert page.run("return document.getElementById('map').width") > 0
    assert page.complaints == []


FILL_WITH_WIDE_NUMBERS = """
for (const scope of document.querySelectorAll('.scope')) scope.hidden = false;
for (const number of document.querySelectorAll('.values b')) number.textContent = '1,234 ms';
for (const top of document.querySelectorAll('.top')) top.textContent = 'to 100 ms';
const isNumber = (column) => column > 0;
fill($('workers'), [['0', '12,345', '999 ms', '999 ms', '100 %', '123,456', '79.9 GiB']], isNumber);
fill($('tiers'), [['device', ...Array(4).fill('123,456'), '79.9 GiB']], isNumber);
$('offload-panel').hidden = false;
const tier = ['host memory', '123,456', '123,456', '100 %', '123,456,789', '12,345'];
const transfer = ['host memory → device', '99.9 MiB/s', '99.99 GB/s', '79.9 GiB', '12,345', '234'];
fill($('offload-tiers'), [tier], isNumber);
fill($('transfers'), [transfer], isNumber);
"""
FIND_WHAT_IS_CUT = """
const all = (where, of = document) => [...of.querySelectorAll(where)];
const box = (element) => element.getBoundingClientRect();
const cut = all('.chart').filter((tile) => all('span, h2', tile).some((each) =>
  box(each).right > box(tile).right || (!each.closest('.axis') &&
  box(each).bottom > box(tile.querySelector('canvas')).top + 1)));
const scroll = all('.wide').filter((each) => each.scrollWidth > each.clientWidth);
return [...cut, ...(innerWidth < 768 ? [] : scroll)].map((each) => each.innerText);
"""


def test_no_number_is_cut_however_wide_the_window(page: Page) -> None:
    page.wait_for_polls()
    page.driver.find_element("id", "freeze").click()
    page.wait_for_status("frozen")
    cut = {}
    for width in (400, 768, 1001, 1024, 1280, 1281, 1440, 1461, 1920):
        resize(page.driver, width, 900)
        cut[width] = page.run(FILL_WITH_WIDE_NUMBERS + FIND_WHAT_IS_CUT)
    assert {width: what for width, what in cut.items() if what} == {}


def test_the_tiers_and_their_transfers_are_shown(
    start_deployment: StartDeployment, tmp_path: Path
) -> None:
    """Prompts that do not fit the pool together are asked for in turn, so that they are loaded."""
    options = {
        "cpu_bytes_to_use": "64MiB",
        "disk_path": str(tmp_path / "tier"),
        "disk_bytes": "64MiB",
    }
    deployment = start_deployment(
        *("--kv-connector", "offloading", "--kv-connector-config", json.dumps(options)),
        num_blocks=60,
    ).wait_until_ready()
    for place in ("harbour", "island", "village") * 2:
        ask(deployment, f"The {place} has ships, and every ship has a name. " * 10)
    with open_page(deployment.url, tmp_path / "profile") as page:
        page.wait_for_status("idle")

        def rows(body: str) -> dict[str, list[str]]:
            cells = f"return [...document.getElementById('{body}').rows].map((row) => "
            texts = page.run(cells + "[...row.cells].map((cell) => cell.textContent))")
            return {name: values for name, *values in texts}

        names = ("device → host memory", "host memory → device", "host memory → disk")

        def have_ended() -> bool:
            """All blocks that are to be moved have been."""
            found = rows("transfers")
            return all(name in found for name in names) and all(
                found[name][-3] != "0 B" and found[name][-2] == "0" for name in names
            )

        wait_until(have_ended)
        tiers, transfers = rows("offload-tiers"), rows("transfers")
        assert set(tiers) == {"host memory", "disk"}
        for blocks, room, _, _, dropped in tiers.values():
            assert 0 < number(blocks) <= number(room)
            assert dropped == "0"
        assert number(tiers["host memory"][3]) > 0, "tokens were loaded"
        for name in names:
            _, speed, moved, queued, failed = transfers[name]
            assert speed.endswith(" GB/s")
            assert moved != "0 B"
            assert (queued, failed) == ("0", "0")
        assert page.complaints == []


def number(text: str) -> int:
    return int(text.replace(",", ""))


@pytest.mark.long
def test_of_several_engines_the_page_says_what_it_shows_of_which(
    start_deployment: StartDeployment, tmp_path: Path
) -> None:
    shown = "return [...document.querySelectorAll('.scope')].filter((each) => !each.hidden)"
    deployment = start_deployment("--replicas", "2").wait_until_ready()
    with open_page(deployment.url, tmp_path / "profile") as page:
        page.wait_for_status("idle")
        of_all = page.run(f"{shown}.map((each) => each.parentElement.textContent)")
        page.driver.get(f"{deployment.url}/?engine=0")  # as a user types it
        page.wait_for_status("idle")
        assert page.driver.current_url.startswith(f"{deployment.url}/dashboard")
    assert of_all == [
        "Tokens out / s all engines",
        "First token all engines",
        "Between tokens all engines",
        "Finished / s all engines",
        "Ended early / s all engines",
        "Rejected / s all engines",
        "HTTP errors / s all engines",
    ]


def test_the_data_need_a_key_which_stays_in_the_tab(
    start_deployment: StartDeployment, tmp_path: Path
) -> None:
    deployment = start_deployment("--api-key", "sesame").wait_until_ready()
    with open_page(deployment.url, tmp_path / "profile") as page:
        page.wait_for_status("locked")
        field = page.driver.find_element("id", "key")
        field.send_keys("wrong", Keys.ENTER)
        page.wait(lambda: "Unknown API key" in page.text("refused"))
        field.send_keys("sesame", Keys.ENTER)
        page.wait_for_status("idle")
        assert not field.is_displayed()
        assert page.driver.current_url == f"{deployment.url}/dashboard"
        assert page.run("return Object.values(sessionStorage)") == ["sesame"]
        assert page.run("return localStorage.length") == 0
        page.driver.refresh()
        page.wait_for_status("idle")


@pytest.mark.long
def test_the_page_says_what_is_waited_for_while_the_engine_starts(
    start_deployment: StartDeployment, tmp_path: Path
) -> None:
    deployment = start_deployment()

    def workers() -> list[psutil.Process]:
        children = deployment.process.children()
        return [child for child in children if "worker-0" in "".join(child.cmdline()[-1:])]

    wait_until(lambda: bool(workers()), 30)
    (worker,) = workers()
    worker.send_signal(signal.SIGSTOP)
    wait_until(lambda: "starting at" in deployment.output, 30)
    (url,) = re.findall(r"starting at (\S+) ", deployment.output)
    wait_until(lambda: _answers(f"{url}/health"), 30)
    with open_page(url, tmp_path / "profile") as page:
        page.wait_for_status("starting")
        page.wait(lambda: "worker 0" in page.text("detail"))
        worker.send_signal(signal.SIGCONT)
        deployment.wait_until_ready()
        page.wait_for_status("idle")


def test_a_restart_is_shown_until_the_engine_is_back(
    start_deployment: StartDeployment, tmp_path: Path
) -> None:
    deployment = start_deployment().wait_until_ready()
    with open_page(deployment.url, tmp_path / "profile") as page:
        page.wait_for_status("idle")
        assert deployment.fork_server is not None
        deployment.fork_server.send_signal(signal.SIGSTOP)  # the next worker starts 5 s later
        deployment.members["worker-0"].kill()
        page.wait_for_status("restarting")
        assert "the engine is being restarted" in page.text("detail")
        page.wait_for_status("idle")


def test_a_silent_scheduler_and_the_end_of_a_server_are_shown(
    start_deployment: StartDeployment, tmp_path: Path
) -> None:
    deployment = start_deployment("--max-restarts", "0").wait_until_ready()
    with open_page(deployment.url, tmp_path / "profile") as page:
        page.wait_for_status("idle")
        scheduler = deployment.members["scheduler"]
        scheduler.send_signal(signal.SIGSTOP)
        page.wait_for_status("silent")
        assert "the scheduler of engine 0 has not answered for 5 s" in page.text("detail")
        scheduler.send_signal(signal.SIGCONT)
        page.wait_for_status("idle")
        deployment.members["worker-0"].kill()
        page.wait(lambda: page.text("status") in ("gone", "unreachable"))
        assert deployment.process.wait(timeout=PATIENCE_S) == 1
        page.wait_for_status("unreachable")
        assert "The gateway does not answer" in page.text("detail")
        assert page.run("return document.getElementById('all').classList.contains('stale')")


@pytest.mark.parametrize("num_blocks", [100_000, 1_000_000])
def test_a_big_pool_is_drawn_in_less_than_the_time_between_two_pictures(
    deployment: Deployment, page: Page, num_blocks: int
) -> None:
    page.wait_for_polls()
    page.driver.find_element("id", "freeze").click()
    page.wait_for_status("frozen")
    spent_ms = page.run(
        "const states = new Uint8Array(arguments[0]).map((_, block) => 1 + (block * 7919) % 7);"
        "map.state = { ...map.state, states };"
        "const began = performance.now();"
        "showLegend(map.state); drawMap(); map.only = 3; drawMap();"
        "map.canvas.getContext('2d').getImageData(0, 0, 1, 1);"
        "return performance.now() - began;",
        num_blocks,
    )
    assert spent_ms < 500  # milliseconds; about 10 on an idle machine
    assert sum(page.counts().values()) == num_blocks
    assert _num_marked(page) == page.counts()["held"]
    capacity = "return map.columns * map.rows * map.perCell"
    assert (
        num_blocks <= page.run(capacity) < num_blocks + page.run("return map.columns * map.perCell")
    )
    assert page.run("return map.canvas.height") <= 540


@pytest.mark.long
def test_a_server_of_100_000_blocks_shows_them(
    start_deployment: StartDeployment, tmp_path: Path
) -> None:
    deployment = start_deployment(num_blocks=100_000).wait_until_ready()
    stream = open_stream(deployment, 4000)
    with open_page(deployment.url, tmp_path / "profile") as page:
        page.wait_for_status("serving")
        page.wait_for_polls()
        assert sum(page.counts().values()) == 100_000
        assert page.complaints == []
    stream.close()


def _answers(url: str) -> bool:
    """Whether a server listens there and is ready."""
    try:
        with urlopen(url, timeout=PATIENCE_S):
            return True
    except OSError:
        return False


def _cells(page: Page) -> list[str]:
    """The text of the first row of the requests."""
    cells: list[str] = page.run(
        "return [...document.querySelector('#holders tr').children].map((each) => each.textContent)"
    )
    return cells


def _num_marked(page: Page) -> int:
    """The number of highlighted blocks."""
    return int(page.run("return map.canvas.dataset.marked"))
