"""A served model through the official client: answers, usage, disconnects, statistics."""

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from longshore.deploy.bench.options import ServeBenchOptions
from longshore.deploy.bench.serve import run as run_bench
from tests.integration.conftest import StartDeployment
from tests.integration.deployment import PATIENCE_S, Deployment, wait_until

IN_FLIGHT = 'longshore_scheduler_steps_in_flight{engine="0"}'
CHAT: Any = [{"role": "user", "content": "Which berth holds C417?"}]


@pytest.fixture(scope="module")
def client(deployment: Deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    (served,) = client.models.list().data
    return served.id


def metrics(deployment: Deployment) -> dict[str, float]:
    """By name with labels, without `model_name`, which all have."""
    with urllib.request.urlopen(f"{deployment.url}/metrics", timeout=PATIENCE_S) as response:
        text = re.sub(r'model_name="[^"]*",?', "", response.read().decode()).replace("{}", "")
    lines = [line for line in text.splitlines() if line[0] != "#"]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def reference(tiny_model: tuple[Path, Any], prompt_ids: list[int], num_tokens: int) -> list[int]:
    import torch

    output = tiny_model[1].generate(
        torch.tensor([prompt_ids]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None
    )
    ids: list[int] = output[0, len(prompt_ids) :].tolist()
    return ids


@pytest.mark.req("SYS-01")
def test_worker_alone_loads_a_tensor_library(start_deployment: StartDeployment) -> None:
    deployment = start_deployment(is_forked=False).wait_until_ready()
    loads_torch = {
        name: any("libtorch" in region.path for region in process.memory_maps())
        for name, process in deployment.members.items()
    }
    assert loads_torch == {
        "supervisor": False,
        "worker-0": True,
        "scheduler": False,
        "gateway": False,
    }


def test_official_client_gets_the_tokens_of_transformers(
    client: openai.OpenAI, model: str, tiny_model: tuple[Path, Any]
) -> None:
    prompt_ids = list(range(20, 60))
    completion = client.completions.create(
        model=model,
        prompt=prompt_ids,
        max_tokens=12,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    (choice,) = completion.choices
    assert choice.token_ids == reference(tiny_model, prompt_ids, 12)  # type: ignore[attr-defined]
    assert choice.finish_reason == "length"


def test_official_client_streams_what_it_gets_whole(client: openai.OpenAI, model: str) -> None:
    arguments: dict[str, Any] = {
        "model": model,
        "messages": CHAT,
        "max_tokens": 24,
        "temperature": 0.8,
        "seed": 5,
    }
    whole = client.chat.completions.create(**arguments)
    chunks = list(
        client.chat.completions.create(
            **arguments, stream=True, stream_options={"include_usage": True}
        )
    )
    pieces = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert pieces[0].delta.role == "assistant"
    text = "".join(piece.delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content
    assert pieces[-1].finish_reason == whole.choices[0].finish_reason
    assert whole.usage is not None
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_a_stop_string_ends_the_request_in_the_engine_too(
    client: openai.OpenAI, model: str, deployment: Deployment
) -> None:
    endless: dict[str, Any] = {
        "model": model,
        "prompt": "berth",
        "temperature": 0.8,
        "seed": 7,
        "extra_body": {"ignore_eos": True},
    }
    text = client.completions.create(**endless, max_tokens=64).choices[0].text
    stop = text[20:23]
    before = text[: text.index(stop)]
    num_before = metrics(deployment)["longshore_generated_tokens_total"]
    for is_stream in (False, True):
        answer = client.completions.create(
            **endless, max_tokens=3000, stop=["never said", stop], stream=is_stream
        )
        chunks: list[Any] = list(answer) if is_stream else [answer]
        choices = [chunk.choices[0] for chunk in chunks]
        assert "".join(choice.text for choice in choices) == before
        assert choices[-1].finish_reason == "stop"
        assert is_stream or chunks[0].usage.completion_tokens <= 64
    num_generated = metrics(deployment)["longshore_generated_tokens_total"] - num_before
    assert num_generated < 500  # of 6,000 that it would generate


def test_usage_counts_tokens_found_in_the_prefix_cache(client: openai.OpenAI, model: str) -> None:
    prompt: Any = list(range(100, 180))
    for expected in (0, 64):  # one of five blocks has the last token, which is computed
        completion = client.completions.create(model=model, prompt=prompt, max_tokens=1)
        assert completion.usage is not None
        details = completion.usage.prompt_tokens_details
        assert details is not None
        assert details.cached_tokens == expected


def test_rejections_reach_the_official_client_as_its_own_errors(
    client: openai.OpenAI, model: str
) -> None:
    with pytest.raises(openai.BadRequestError, match="best_of is not supported"):
        client.completions.create(model=model, prompt="x", best_of=2)
    with pytest.raises(openai.BadRequestError, match="4096"):
        client.completions.create(model=model, prompt=[[5] * 5000])
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.chat.completions.create(model="no-such-model", messages=CHAT)


def test_client_that_goes_away_frees_its_row_and_blocks(
    client: openai.OpenAI, model: str, deployment: Deployment
) -> None:
    before = metrics(deployment).get('longshore_requests_finished_total{reason="abort"}', 0.0)
    stream = client.completions.create(
        model=model,
        prompt="an answer that nobody waits for",
        max_tokens=4000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()

    def is_free() -> bool:
        now = metrics(deployment)
        return (
            now.get('longshore_requests_finished_total{reason="abort"}') == before + 1
            and now.get('longshore_scheduler_running_requests{engine="0"}') == 0
            and now.get('longshore_scheduler_kv_usage_ratio{engine="0"}') == 0
        )

    wait_until(is_free)


def test_steady_decode_keeps_two_steps_in_flight(
    client: openai.OpenAI, model: str, deployment: Deployment
) -> None:
    stream = client.completions.create(
        model=model, prompt="x", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    with stream:
        for _ in stream:
            if metrics(deployment).get(IN_FLIGHT) == 2.0:
                break
        else:
            pytest.fail("two steps were never in flight")


def test_serving_benchmark_reports_every_latency(deployment: Deployment, tmp_path: Path) -> None:
    result_file = tmp_path / "result.json"
    run_bench(
        ServeBenchOptions(
            url=deployment.url,
            num_prompts=6,
            request_rate=50,
            max_concurrency=3,
            input_len=20,
            output_len=5,
            json=result_file,
        )
    )
    result = json.loads(result_file.read_text())
    assert (result["completed"], result["failed"], result["output_tokens"]) == (6, 0, 30)
    for name in ("ttft_ms", "e2e_ms"):
        assert 0 < result[name]["p50"] <= result[name]["p99"]
    for name in ("tpot_ms", "itl_ms"):  # tokens may come together
        assert 0 <= result[name]["p50"] <= result[name]["p99"]
    assert result["settings"]["request_rate"] == 50


def test_top_shows_a_server_and_says_when_there_is_none(deployment: Deployment) -> None:
    command = [sys.executable, "-m", "longshore.deploy", "top", "--url"]
    run = subprocess.run(
        [*command, deployment.url, "--num-looks", "2", "--interval-s", "0.1"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert run.returncode == 0, run.stderr
    for part in ("running", "KV blocks", "ready"):
        assert part in run.stdout
    assert f"{deployment.url}" in run.stdout
    run = subprocess.run(
        [*command, "http://127.0.0.1:9"], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert run.returncode == 1
    assert "Is `longshore serve` running there?" in run.stderr
