"""File descriptors of a gateway run out while a stream runs."""

import contextlib
import json
import resource
import threading
import time

import psutil
import pytest

from tests.integration.conftest import StartDeployment
from tests.integration.deployment import Deployment, wait_until
from tests.integration.test_hostile_http import Client, post, say

NUM_TOKENS = 800
NUM_CONNECTIONS = 100
STREAM = json.dumps(
    {
        "prompt": "x",
        "max_tokens": NUM_TOKENS,
        "stream": True,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
).encode()


class Stream(threading.Thread):
    """One stream; its response has begun."""

    def __init__(self, deployment: Deployment) -> None:
        super().__init__()
        self._client = Client(deployment)
        self._data = b""
        self._client.send(post(STREAM, b"Connection: close"))
        assert self._client.answer(has_body=False)[0] == 200
        self.start()

    def run(self) -> None:
        with self._client:
            self._data = self._client.rest()

    def token_ids(self) -> list[int]:
        """All tokens, once the stream has ended."""
        self.join()
        events = [line[6:] for line in self._data.split(b"\r\n") if line.startswith(b"data: ")]
        assert events[-1].strip() == b"[DONE]", self._data[-200:]
        choices = [json.loads(event)["choices"][0] for event in events[:-1]]
        return [token_id for choice in choices for token_id in choice["token_ids"] or ()]


@pytest.mark.slow
@pytest.mark.parametrize("spare", [None, 3], ids=["few connections", "few descriptors"])
def test_streams_go_on_when_descriptors_run_out_and_the_log_says_so(
    start_deployment: StartDeployment, spare: int | None
) -> None:
    deployment = start_deployment().wait_until_ready()
    calm = Stream(deployment).token_ids()
    stream = Stream(deployment)
    gateway: psutil.Process = deployment.members["gateway"]
    former = resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE)
    limit = 64 + 8 * 3 + 5 if spare is None else gateway.num_fds() + spare
    resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, (limit, former[1]))
    begin_s = time.monotonic()
    with contextlib.ExitStack() as held:
        for _ in range(NUM_CONNECTIONS):
            with contextlib.suppress(ConnectionError):
                held.enter_context(Client(deployment))
        wait_until(lambda: "refusing connections" in deployment.output)
        assert stream.token_ids() == calm
    assert len(calm) == NUM_TOKENS
    lines = deployment.output.count("refusing connections")
    assert lines <= 2 + (time.monotonic() - begin_s)
    resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, former)
    assert say(deployment, post(b'{"prompt": "x", "max_tokens": 2}'))[0] == 200
    assert deployment.stop() == 0, deployment.output
