"""`longshore doctor --bandwidth`: what is measured, in which units, and what that means."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from longshore.deploy.cli.client_options import DoctorOptions
from longshore.deploy.cli.doctor import examine_bandwidth
from longshore.deploy.machine import bandwidth as module
from longshore.deploy.machine.bandwidth import (
    Bandwidth,
    Rate,
    bandwidth_table,
    measure_bandwidth,
)
from longshore.protocol.errors import ConfigError

HOST = [
    "memcpy",
    "store in host memory",
    "load from host memory",
    "swap out and in",
    "checksum",
]
DISK = ["write to disk", "load from disk"]


@pytest.fixture(autouse=True)
def little_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MEASURED_BYTES", 1 << 18)
    monkeypatch.setattr(module, "NUM_REPEATS", 1)


@pytest.mark.req("ERR-01", "ERR-02")
@pytest.mark.parametrize("has_disk", [False, True])
def test_each_direction_is_measured_and_given_in_decimal_units(
    has_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measurement that takes a second: its rate in 10^9 bytes is the number of bytes."""
    monkeypatch.setattr(module, "_median_s", lambda move: (move(), 1.0)[1])
    found = measure_bandwidth(5000, 16, tmp_path if has_disk else None)
    assert [rate.what for rate in found.rates] == HOST + (DISK if has_disk else [])
    num_bytes = (1 << 18) // 5000 * 5000
    by_name = {rate.what: rate for rate in found.rates}
    swap = by_name.pop("swap out and in")
    assert swap.gb_per_s == pytest.approx(num_bytes / 2 / 1e9), "there and back"
    assert all(rate.gb_per_s == num_bytes / 1e9 for rate in by_name.values())
    tokens = num_bytes // 5000 * 16
    assert by_name["load from host memory"].tokens_per_s == pytest.approx(tokens)
    assert swap.tokens_per_s == pytest.approx(tokens / 2)
    assert by_name["memcpy"].tokens_per_s is None
    assert list(tmp_path.iterdir()) == [], "the store that was measured is removed"


def test_what_is_measured_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = DoctorOptions(bandwidth=True, path=tmp_path, block_bytes="8KiB", json=True)
    assert examine_bandwidth(options) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (printed["block_bytes"], printed["block_tokens"]) == (8192, 16)
    assert all(rate["gb_per_s"] > 0 and rate["method"] for rate in printed["rates"])
    assert [rate["what"] for rate in printed["rates"]] == HOST + DISK


def test_the_table_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    rates = (Rate("memcpy", "one", 9.876), Rate("load from disk", "threads", 0.5, 3814.7))
    Console(width=80).print(bandwidth_table(Bandwidth(1 << 21, 16, rates)))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    for text in ("2,097,152 bytes, 16 tokens", "9.88", "0.50", "3,815"):
        assert text in shown


def test_a_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the disk at .*nowhere cannot be measured.*--path"):
        measure_bandwidth(4096, 16, tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"machine": True, "bandwidth": True}, "select one"),
        ({"path": Path("/tmp")}, "bandwidth is not"),
        ({"block_bytes": "some"}, "block_bytes='some' is not a size"),
        ({"block_bytes": "2GiB"}, "more than 1GiB"),
        ({"block_tokens": 0}, "block_tokens=0"),
    ],
)
def test_options_that_do_not_fit_are_rejected(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        DoctorOptions(**options)
