"""A headless Chromium, and the dashboard of a running server in it."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.support.wait import WebDriverWait

FLAGS: Final = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
WAIT_S: Final = 60.0


class Page:
    """The dashboard in a tab. `url` is the server's."""

    def __init__(self, driver: Chrome, url: str) -> None:
        self.driver = driver
        driver.get(f"{url}/dashboard")

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a function body in the page, and return its result."""
        return self.driver.execute_script(script, *arguments)

    def text(self, element_id: str) -> str:
        """The text of an element."""
        return str(self.run("return document.getElementById(arguments[0]).innerText", element_id))

    def wait(self, condition: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
        """Wait until the condition is true, and return its value. On a timeout, the error has the
        page's status."""
        wait = WebDriverWait(self.driver, timeout_s, poll_frequency=0.05)
        return wait.until(lambda _: condition(), f"{self.text('status')}: {self.text('detail')}")

    def wait_for_status(self, status: str, timeout_s: float = WAIT_S) -> None:
        """Wait until the page shows this status."""
        self.wait(lambda: self.text("status") == status, timeout_s)

    def wait_for_polls(self, count: int = 2) -> None:
        """Wait until the page has shown `count` more updates."""
        first = self.num_polls
        self.wait(lambda: self.num_polls >= first + count)

    @property
    def num_polls(self) -> int:
        return int(self.run("return document.getElementById('all').dataset.polls ?? 0"))

    def counts(self) -> dict[str, int]:
        """Blocks by state, from the legend."""
        shown = self.run(
            "return [...document.querySelectorAll('#legend button')]"
            ".map((each) => [each.dataset.state, each.lastChild.textContent])"
        )
        return {state: int(number.replace(",", "")) for state, number in shown}

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings on the console since the last call."""
        return [json.dumps(entry) for entry in self.driver.get_log("browser")]  # type: ignore[no-untyped-call]


@contextmanager
def open_browser(
    profile_dir: Path, *, size: tuple[int, int] = (1280, 1000), is_dark: bool = False
) -> Iterator[Chrome]:
    """A browser with an empty tab. Fails if Chromium is missing."""
    options = ChromeOptions()
    for flag in (*FLAGS, f"--user-data-dir={profile_dir}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options, ChromeService("/usr/bin/chromedriver"))
    try:
        resize(driver, *size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        yield driver
    finally:
        driver.quit()


def resize(driver: Chrome, width: int, height: int) -> None:
    """Resize the page to this number of CSS pixels."""
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
    )


@contextmanager
def open_page(
    url: str, profile_dir: Path, *, size: tuple[int, int] = (1280, 1000), is_dark: bool = False
) -> Iterator[Page]:
    """The dashboard of the server at `url`."""
    with open_browser(profile_dir, size=size, is_dark=is_dark) as driver:
        yield Page(driver, url)
