"""A live stream of one API key goes on while the client of another one sends the largest requests
that the gateway accepts, and hangs up. Through real processes."""

import http.client
import json
import threading
import time
from typing import Any, Final

import pytest

from longshore.deploy.gateway.api.pooled_inputs import MAX_INPUTS
from longshore.deploy.gateway.api.requests import MAX_PROMPTS, MAX_STOPS
from tests.integration.conftest import StartDeployment
from tests.integration.deployment import PATIENCE_S, Deployment, wait_until

KEYS: Final = ("--api-key", "key-of-a", "--api-key", "key-of-b")
MAX_GAP_S: Final = 10.0
"""Not a measure of speed: other tests may use the processors. A loop that does all of such requests
at once exceeds it."""


class Client:
    """One request of a key."""

    def __init__(self, deployment: Deployment, key: str, path: str, body: dict[str, Any]) -> None:
        host = deployment.url.removeprefix("http://")
        self._connection = http.client.HTTPConnection(host, timeout=PATIENCE_S)
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        self._connection.request("POST", path, json.dumps(body), headers)

    def answer(self) -> http.client.HTTPResponse:
        return self._connection.getresponse()

    def hang_up(self) -> None:
        self._connection.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()


class LiveStreams:
    """Streams of one key, one after the other, and the longest wait for an event of one."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._is_over = False
        self.num_events = 0
        self.longest_gap_s = 0.0
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._is_over:
                self._read_one()
        except BaseException as error:
            self.failure = error

    def _read_one(self) -> None:
        body = {"prompt": "x", "max_tokens": 3000, "stream": True, "ignore_eos": True}
        with Client(self._deployment, "key-of-a", "/v1/completions", body) as client:
            answer, at_s = client.answer(), time.monotonic()
            assert answer.status == 200
            while not self._is_over and (line := answer.readline()):
                if line.startswith(b"data: "):
                    now_s = time.monotonic()
                    self.longest_gap_s = max(self.longest_gap_s, now_s - at_s)
                    at_s = now_s
                    self.num_events += 1

    def wait_for_more(self) -> None:
        """Until the stream has gone on, or has failed."""
        before = self.num_events
        wait_until(lambda: self.num_events > before + 5 or self.failure is not None)

    def close(self) -> None:
        self._is_over = True
        self._thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("num_large", [3, pytest.param(15, marks=pytest.mark.long)])
def test_a_stream_goes_on_beside_the_largest_requests_and_their_hang_ups(
    start_deployment: StartDeployment, num_large: int
) -> None:
    deployment = start_deployment(*KEYS).wait_until_ready()
    stops = [f"{letter} never comes {letter}" * 8 for letter in "abcdefghijklmnop"]
    assert len(stops) == MAX_STOPS
    large = {"prompt": ["a prompt"] * MAX_PROMPTS, "stop": stops, "max_tokens": 64}
    documents = {"query": "x", "documents": [f"document {n}" for n in range(MAX_INPUTS)]}
    streams = LiveStreams(deployment)
    try:
        streams.wait_for_more()
        for is_stream in (False, True):
            body = {**large, "stream": is_stream}
            clients = [
                Client(deployment, "key-of-b", "/v1/completions", body) for _ in range(num_large)
            ]
            wait_until(lambda: num_live(deployment) > num_large * MAX_PROMPTS * 0.9)
            streams.wait_for_more()
            for client in clients:
                client.hang_up()
            wait_until(lambda: num_live(deployment) <= 1)
            streams.wait_for_more()
        with Client(deployment, "key-of-b", "/v1/rerank", documents) as ranking:
            answer = ranking.answer()
            assert answer.status == 200
            assert len(json.load(answer)["results"]) == MAX_INPUTS
        with Client(deployment, "key-of-b", "/v1/rerank", documents):
            streams.wait_for_more()
        wait_until(lambda: num_live(deployment) <= 1)
        streams.wait_for_more()
    finally:
        streams.close()
    assert streams.failure is None
    assert streams.longest_gap_s < MAX_GAP_S
    assert deployment.stop() == 0, deployment.output
    assert "killed" not in deployment.output


def num_live(deployment: Deployment) -> float:
    host = deployment.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=PATIENCE_S)
    connection.request("GET", "/metrics", headers={"authorization": "Bearer key-of-a"})
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    (value,) = (
        line.rsplit(" ", 1)[1] for line in lines if line.startswith("longshore_live_requests")
    )
    return float(value)
