"""The dashboard and the rules in deploy/grafana, read without Grafana."""

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "grafana"
BOARD: dict[str, Any] = json.loads((FOLDER / "longshore.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
ALERTS = FOLDER / "alerts.yml"


def expressions(*, interval: str = "1m") -> list[str]:
    """The expressions of all panels with the initial values of the variables, which select
    everything.
    interval: of rates.
    """
    return [
        target["expr"]
        .replace("$__rate_interval", interval)
        .replace('"$job"', '".*"')
        .replace('"$instance"', '".*"')
        for panel in PANELS
        for target in panel["targets"]
    ]


def metric_names(text: str) -> set[str]:
    """The names of the server's own metrics in expressions."""
    return set(re.findall(r"\b(?:longshore|process)_\w+", text))
