"""Metrics under vLLM's names."""

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from longshore.deploy.gateway.engines.peers import merged_metrics
from longshore.deploy.gateway.metrics import GatewayMetrics
from longshore.deploy.gateway.vllm_metrics import ALWAYS, COMPUTED, NAMES, PREFIX
from longshore.protocol.handshake import EngineReady
from longshore.protocol.outputs import FinishReason
from tests.deploy.gateway.conftest import StartGateway
from tests.deploy.gateway.fake_engine import CAPACITY, IDENTITY, STATS

MODEL = 'a "model"\\of mine'


def used() -> GatewayMetrics:
    metrics = GatewayMetrics(MODEL, vllm_names=True)
    metrics.observe_scheduler("0", msgspec.structs.replace(STATS, num_prompt_tokens=60))
    metrics.time_to_first_token_s.observe(0.02)
    metrics.inter_token_latency_s.observe(0.001, 7)
    metrics.request_ended(FinishReason.STOPPED, 0.3)
    metrics.request_ended(FinishReason.ABORTED, 0.4)
    return metrics


def series(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(text: str, name: str, **labels: str) -> float:
    return series(text)[PREFIX + name, frozenset({"model_name": MODEL, **labels}.items())]


def test_each_name_has_its_values_with_the_model_s_name() -> None:
    text = used().render().decode()
    for name, labels, wanted in (
        ("num_requests_running", {"engine": "0"}, 3),
        ("num_requests_waiting", {"engine": "0"}, 1),
        ("kv_cache_usage_perc", {"engine": "0"}, 0.25),
        ("prefix_cache_queries_total", {"engine": "0"}, 40),
        ("prefix_cache_hits_total", {"engine": "0"}, 16),
        ("num_preemptions_total", {"engine": "0"}, 0),
        ("prompt_tokens_total", {"engine": "0"}, 60),
        ("generation_tokens_total", {}, 0),
        ("request_success_total", {"finished_reason": "stop"}, 1),
        ("request_success_total", {"finished_reason": "length"}, 0),
        ("time_to_first_token_seconds_count", {}, 1),
        ("inter_token_latency_seconds_count", {}, 7),
        ("time_per_output_token_seconds_count", {}, 7),
        ("e2e_request_latency_seconds_count", {}, 2),
        ("e2e_request_latency_seconds_bucket", {"le": "0.25"}, 0),
        ("e2e_request_latency_seconds_bucket", {"le": "0.5"}, 2),
    ):
        assert value(text, name, **labels) == wanted, name


def test_types_are_those_of_our_metrics() -> None:
    families = {f.name: f for f in text_string_to_metric_families(used().render().decode())}
    for name, ours in NAMES.items():
        assert families[PREFIX + name].type == families[ours].type


def test_without_the_setting_there_are_those_that_scale_and_balance() -> None:
    """Before a step was computed, too."""
    metrics = GatewayMetrics(MODEL)
    metrics.observe_scheduler("0", msgspec.structs.replace(STATS, workers=()))
    metrics.engine_ready("0", EngineReady("engine-0.1", IDENTITY, 100, CAPACITY))
    text = metrics.render().decode()
    for name, labels, wanted in (
        ("num_requests_running", {"engine": "0"}, 3),
        ("num_requests_waiting", {"engine": "0"}, 1),
        ("kv_cache_usage_perc", {"engine": "0"}, 0.25),
        (
            "cache_config_info",
            {
                "engine": "0",
                "block_size": str(IDENTITY.block_size),
                "num_gpu_blocks": "100",
                "cache_dtype": IDENTITY.kv_cache_dtype,
            },
            1,
        ),
        ("iteration_tokens_total_count", {"engine": "0"}, 0),
        ("iteration_tokens_total_bucket", {"engine": "0", "le": "+Inf"}, 0),
    ):
        assert value(text, name, **labels) == wanted, name
    lora = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert value(text, "lora_requests_info", **lora) > 0
    names = {f.name for f in text_string_to_metric_families(text) if f.name.startswith(PREFIX)}
    assert names == {PREFIX + name for name in (*ALWAYS, *COMPUTED)}
    metrics.remove_engine("0")
    assert "cache_config_info{" not in metrics.render().decode()


def test_the_tokens_of_an_iteration_are_those_of_one_rank() -> None:
    (worker,) = STATS.workers
    metrics = GatewayMetrics()
    workers = (worker, msgspec.structs.replace(worker, rank=1))
    metrics.observe_scheduler("0", msgspec.structs.replace(STATS, workers=workers))
    metrics.engine_ready("0", EngineReady("engine-0.1", IDENTITY, 100, CAPACITY))
    found = series(metrics.render().decode())
    labels = frozenset({"engine": "0"}.items())
    assert found["vllm:iteration_tokens_total_sum", labels] == worker.num_tokens
    assert found["vllm:iteration_tokens_total_count", labels] == sum(worker.steps_by_tokens)


async def test_a_gateway_that_is_ready_shows_its_cache(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        text = (await gateway.get("/metrics")).body.decode()
    assert "vllm:cache_config_info{" in text


def test_of_several_gateways_engines_count_once() -> None:
    text = used().render()
    merged = merged_metrics([text, text], 0).decode()
    running = [key for key in series(merged) if key[0] == "vllm:num_requests_running"]
    assert len(running) == 1
    tokens = [key for key in series(merged) if key[0] == "vllm:generation_tokens_total"]
    assert {dict(labels)["gateway"] for _, labels in tokens} == {"0", "1"}


async def test_a_gateway_names_the_served_model(start_gateway: StartGateway) -> None:
    async with start_gateway(metrics_names="vllm") as gateway:
        text = (await gateway.get("/metrics")).body.decode()
    assert 'vllm:generation_tokens_total{model_name="tiny"} 0.0' in text
