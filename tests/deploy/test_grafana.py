"""The Grafana dashboard and the alerts use metrics that exist."""

import itertools

from prometheus_client.parser import text_string_to_metric_families

from longshore.deploy.gateway.metrics import GatewayMetrics
from longshore.deploy.supervisor.restart_history import RestartRecord
from tests.deploy.gateway.fake_engine import STATS
from tests.deploy.grafana_board import ALERTS, BOARD, PANELS, expressions, metric_names


def served_names() -> set[str]:
    metrics = GatewayMetrics()
    metrics.observe_scheduler("0", STATS)
    metrics.responses.labels("/v1/models", "200").inc()
    metrics.watch_restarts(lambda: RestartRecord({"gateway": {"death": 0}}))
    families = text_string_to_metric_families(metrics.render().decode())
    return {sample.name for family in families for sample in family.samples}


def test_every_expression_of_the_board_and_the_alerts_uses_metrics_that_are_served() -> None:
    queries = [
        variable["definition"]
        for variable in BOARD["templating"]["list"]
        if variable["type"] == "query"
    ]
    named = metric_names("\n".join([*expressions(), *queries, ALERTS.read_text()]))
    assert named - served_names() == set()
    assert len(named) > 40


def test_every_panel_asks_the_chosen_source_for_the_chosen_servers() -> None:
    for panel in PANELS:
        assert panel["targets"], panel["title"]
        for target in (panel, *panel["targets"]):
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for target in panel["targets"]:
            num_metrics = target["expr"].count("longshore_") + target["expr"].count("process_")
            assert target["expr"].count('{job=~"$job", instance=~"$instance"') == num_metrics


def test_panels_have_ids_and_places_of_their_own() -> None:
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in itertools.combinations([panel["gridPos"] for panel in panels], 2):
        is_apart = any(
            first[start] + first[size] <= second[start]
            for first, second in ((one, other), (other, one))
            for start, size in (("x", "w"), ("y", "h"))
        )
        assert is_apart, (one, other)
