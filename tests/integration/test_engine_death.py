"""What the clients of a deployment read when one of its processes dies."""

import openai
import pytest

from tests.integration.conftest import StartDeployment
from tests.integration.test_process_life import open_stream


def test_clients_of_a_killed_worker_are_told_so(start_deployment: StartDeployment) -> None:
    deployment = start_deployment().wait_until_ready()
    stream = open_stream(deployment, 4000)
    deployment.members["worker-0"].kill()
    with pytest.raises(openai.APIError, match=r"the engine has stopped: worker 0 was killed"):
        list(stream)
    assert deployment.process.wait(timeout=20) == 1
    deployment.assert_nothing_is_left()
