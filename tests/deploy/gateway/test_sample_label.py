"""Labels that are added to samples."""

from prometheus_client.parser import text_string_to_metric_families

from longshore.deploy.gateway.metrics import GatewayMetrics
from tests.deploy.gateway.fake_engine import STATS

NAME = 'a "model"\\of, {mine}'


def test_all_metrics_but_those_of_the_process_have_the_model_s_name() -> None:
    metrics = GatewayMetrics(NAME)
    metrics.observe_scheduler("0", STATS)
    metrics.responses.labels("/v1/models", "200").inc()
    text = metrics.render().decode()
    of_process = set()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "model_name" not in sample.labels:
                of_process.add(sample.name.split("_")[0])
            else:
                assert sample.labels["model_name"] == NAME
    assert of_process == {"process"}
    assert metrics.sample(1.0).total("longshore_http_responses_total", {"status": "200"}) == 1
