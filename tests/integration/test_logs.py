"""The log of a real deployment, in both formats: the lines that a search for a request's id
finds."""

import asyncio
import json

from longshore.deploy.bench.sse_client import HttpEndpoint
from tests.integration.conftest import StartDeployment
from tests.integration.deployment import Deployment

KEY, PROMPT, ID = "key-that-nobody-may-read", "words that nobody may read", "order-66"


def ask(deployment: Deployment, request_id: str, path: str = "/v1/completions") -> int:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}).encode()
    headers = {"x-request-id": request_id, "authorization": f"Bearer {KEY}"}
    asking = HttpEndpoint(deployment.url).request("POST", path, body, timeout_s=30, headers=headers)
    answer = asyncio.run(asking)
    assert answer.headers["x-request-id"] == request_id
    return answer.status


def use(start_deployment: StartDeployment, *flags: str) -> list[str]:
    """Log lines of a deployment that has answered one request, and one request for an unknown
    path."""
    deployment = start_deployment("--api-key", KEY, "--log-level", "debug", *flags)
    deployment.wait_until_ready()
    assert ask(deployment, ID) == 200
    assert ask(deployment, "order-67", "/no/%0a%1b[2J%0d12:00:00%20[gateway]%20ERROR") == 404
    assert deployment.stop() == 0, deployment.output
    for secret in (KEY, PROMPT, "nobody"):
        assert secret not in deployment.output
    return deployment.output.splitlines()


def test_a_client_s_request_id_is_in_the_lines_of_every_process_for_people(
    start_deployment: StartDeployment,
) -> None:
    lines = use(start_deployment)
    about = [line for line in lines if ID in line]
    for process, words in (
        ("gateway", "received max_tokens=4 client=127.0.0.1:"),
        ("scheduler", "arrived prompt_tokens="),
        ("scheduler", "admitted step_id=1 waited_ms="),
        ("worker 0", "started step_id=1"),
        ("scheduler", "ended finish_reason=LENGTH_CAPPED output_tokens=4"),
        ("gateway", "finished ttft_ms= total_ms="),
        ("gateway", "answered method=POST path=/v1/completions status=200 duration_ms="),
    ):
        assert any(
            f"[{process}]" in line and all(word in line for word in words.split(" "))
            for line in about
        ), (process, words, about)
    for line in lines:  # including the one with the unknown path
        assert line.isprintable()
        assert line[2:3] == line[5:6] == ":" or line.startswith("longshore: "), line


def test_each_line_is_an_object_whose_fields_name_request_and_step(
    start_deployment: StartDeployment,
) -> None:
    lines = use(start_deployment, "--log-format", "json")
    records = [json.loads(line) for line in lines]  # standard output included
    messages = [each["message"] for each in records]
    assert any(message.startswith("ready at http://") for message in messages)
    assert any(message.endswith(" --api-key KEY") for message in messages)
    assert {"supervisor", "worker 0", "scheduler", "gateway"} == {r["process"] for r in records}
    assert all(r["level"] in ("DEBUG", "INFO", "WARNING") and r["logger"] for r in records)
    assert {"time", "process", "level", "logger", "message"} <= set.intersection(*map(set, records))
    about = [each for each in records if ID in each.get("request_id", "")]
    assert {each["process"] for each in about} == {"gateway", "scheduler", "worker 0"}
    (admitted,) = (each for each in about if each["message"] == "admitted")
    assert (admitted["engine"], admitted["step_id"]) == ("engine-0.1", 1)
    (started,) = (each for each in about if each["message"] == "started")
    assert (started["engine"], started["rank"], started["step_id"]) == ("engine-0", 0, 1)
    (answered,) = (each for each in about if each["message"] == "answered")
    assert (answered["status"], answered["output_tokens"]) == (200, 4)
    (other,) = (each for each in records if each.get("request_id") == "order-67")
    assert other["path"] == "/no/\n\x1b[2J\r12:00:00 [gateway] ERROR"
