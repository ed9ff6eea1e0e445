"""Client libraries with a real server. Each has a program that uses its features."""

import re

import pytest

from longshore.deploy.model.demo import DEMO_MODEL_DIR
from tests.clients.conftest import HERE, RunClient
from tests.integration.deployment import Deployment


@pytest.mark.parametrize("name", ["langchain", "litellm", "llama_index"])
def test_a_library_gets_what_it_asks_for(
    server: Deployment, run_client: RunClient, name: str
) -> None:
    program = HERE / f"{name}_client.py"
    output = run_client(name, "python", program, server.url, DEMO_MODEL_DIR.name)
    features = re.findall(r"^@feature\ndef (\w+)", program.read_text(), re.MULTILINE)
    assert [line for line in output.splitlines() if line in features] == features
