"""Error messages of commands for a server that requires an API key, and the forms of its
address."""

import asyncio
import subprocess
import sys

import pytest

from longshore.deploy.bench.error_message import error_message
from longshore.deploy.bench.sse_client import HttpAnswer, HttpEndpoint
from longshore.deploy.gateway.api_keys import plain_keys
from tests.deploy.gateway.conftest import PATIENCE_S, StartGateway, start_gateway

__all__ = ["start_gateway"]  # the fixture


@pytest.mark.parametrize("command", [["chat"], ["doctor"], ["bench", "serve"]])
async def test_a_command_without_the_key_says_how_it_takes_one(
    start_gateway: StartGateway, command: list[str]
) -> None:
    async with start_gateway(api_keys=plain_keys(["right"], "key")) as gateway:
        run = await longshore(*command, "--url", f"http://127.0.0.1:{gateway.port}")
        wrong = await longshore(
            *command, "--url", f"http://127.0.0.1:{gateway.port}", "--api-key", "wrong"
        )
    for printed in (run, wrong):
        assert "API key" in printed
        assert "(use --api-key KEY or LONGSHORE_API_KEY)" in printed
        assert "Is a server running" not in printed


async def test_an_address_with_v1_at_its_end_is_the_server_s(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        for end in ("", "/", "/v1", "/v1/"):
            endpoint = HttpEndpoint(f"http://127.0.0.1:{gateway.port}{end}")
            assert (await endpoint.request("GET", "/v1/models", timeout_s=PATIENCE_S)).status == 200
            assert (await endpoint.request("GET", "/metrics", timeout_s=PATIENCE_S)).status == 200


async def test_who_talks_to_a_model_without_a_tokenizer_is_told_what_is_missing(
    start_gateway: StartGateway,
) -> None:
    async with start_gateway(tokenizer=False) as gateway:
        printed = await longshore(
            "chat", "--url", f"http://127.0.0.1:{gateway.port}", said="hello\n"
        )
    assert "tokenizer.json" in printed
    assert "bad_words" not in printed


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"error": "no"}'])
def test_an_answer_without_a_message_has_none(body: bytes) -> None:
    assert error_message(HttpAnswer(0.0, status=401, body=body)) is None


async def longshore(*arguments: str, said: str = "") -> str:
    """The output of the command, in one line."""
    run = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "longshore.deploy", *arguments],
        input=said,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return " ".join((run.stdout + run.stderr).split())
