"""Several API keys on one deployment: what each sees of the others."""

import asyncio
import hashlib
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from longshore.deploy.bench.sse_client import HttpAnswer, HttpEndpoint
from tests.integration.deployment import PATIENCE_S, Deployment, wait_until

LONG = "The harbour has ships, and every ship has a name. " * 6
KEYS = ("--api-key", "key-of-a", "--api-key", "key-of-b")

Start = Callable[..., Deployment]


@pytest.fixture
def start(
    tiny_model: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Start]:
    """Starts a deployment in a directory of its own, whose path is short enough for sockets."""
    with ExitStack() as stack:

        def make(*flags: str, **settings: Any) -> Deployment:
            own = tmp_path_factory.mktemp("keys")
            deployment = Deployment(tiny_model[0], own, *flags, **settings)
            return stack.enter_context(deployment).wait_until_ready()

        yield make


def client_of(deployment: Deployment, key: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{deployment.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S
    )


def num_cached(deployment: Deployment, key: str, **extra: Any) -> int:
    """Tokens of `LONG` that were cached when this key asked."""
    with client_of(deployment, key) as client:
        (served,) = client.models.list().data
        answer = client.completions.create(
            model=served.id, prompt=LONG, max_tokens=1, extra_body=extra
        )
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    return 0 if details is None else details.cached_tokens or 0


@pytest.mark.slow
def test_a_key_does_not_learn_what_another_sent_not_even_from_a_tier(
    start: Start, tmp_path: Path
) -> None:
    settings = {"cpu_bytes_to_use": "8MiB", "disk_path": str(tmp_path / "t"), "disk_bytes": "32MiB"}
    flags = [
        *("--kv-connector", "offloading", "--kv-connector-config", json.dumps(settings)),
        *("--state-dir", str(tmp_path / "state"), "--gateways", "2"),
    ]
    first = start(*KEYS, *flags)
    assert num_cached(first, "key-of-a") == 0
    assert num_cached(first, "key-of-b") == 0
    found = num_cached(first, "key-of-a")
    assert found > len(LONG) // 2
    assert num_cached(first, "key-of-a", cache_salt="mine") == 0
    assert num_cached(first, "key-of-a", cache_salt="mine") == found
    assert num_cached(first, "key-of-b", cache_salt="mine") == 0
    assert first.stop() == 0, first.output

    second = start("--api-key", "key-of-a", "--api-key", "key-of-c", *flags)
    assert num_cached(second, "key-of-c") == 0
    assert num_cached(second, "key-of-a") == found  # from disk: its salt has not changed


def test_keys_share_prefixes_if_the_operator_says_so(start: Start) -> None:
    shared = start(*KEYS, "--share-prefix-cache", "all")
    assert num_cached(shared, "key-of-a") == 0
    assert num_cached(shared, "key-of-b") > len(LONG) // 2


def write_keys(folder: Path, text: str) -> Path:
    path = folder / "keys.toml"
    path.touch(mode=0o600)
    path.write_text(text)
    return path


@pytest.mark.slow
def test_the_limits_of_a_key_file_hold_across_gateways(start: Start, tmp_path: Path) -> None:
    digest = hashlib.sha256(b"of-alice").hexdigest()
    path = write_keys(
        tmp_path,
        f"""
        [[key]]
        name = "alice"
        sha256 = "{digest}"
        max_live_requests = 2

        [[key]]
        name = "bob"
        key = "of-bob"
        """,
    )
    deployment = start("--api-key-file", str(path), "--gateways", "2")
    with client_of(deployment, "of-bob") as client:
        (served,) = client.models.list().data
    ask: dict[str, Any] = {"model": served.id, "prompt": "x", "extra_body": {"ignore_eos": True}}
    with ExitStack() as stack:
        for _ in range(2):  # each client has a connection of its own, to one of the gateways
            client = stack.enter_context(client_of(deployment, "of-alice"))
            stream = client.completions.create(**ask, max_tokens=4000, stream=True)
            stack.callback(stream.close)
            next(iter(stream))
        for _ in range(8):
            client = stack.enter_context(client_of(deployment, "of-alice"))
            with pytest.raises(openai.RateLimitError) as rejection:
                client.completions.create(**ask, max_tokens=1)
            assert rejection.value.code == "key_live_requests"
        with client_of(deployment, "of-bob") as client:
            assert client.completions.create(**ask, max_tokens=1).choices


def reload_keys(deployment: Deployment) -> tuple[int, dict[str, Any]]:
    (runtime_dir,) = deployment.runtime_dirs
    command = [sys.executable, "-m", "longshore.deploy", "admin", "reload-keys", "--json"]
    ended = subprocess.run(
        [*command, "--socket", str(runtime_dir / "admin.sock")], capture_output=True, text=True
    )
    answer: dict[str, Any] = json.loads(ended.stdout)
    return ended.returncode, answer


@pytest.mark.slow
def test_keys_that_are_read_again_are_valid_in_every_gateway(start: Start, tmp_path: Path) -> None:
    def entries(*names: str) -> str:
        return "".join(f'[[key]]\nname = "{name}"\nkey = "of-{name}"\n' for name in names)

    path = write_keys(tmp_path, entries("alice", "bob"))
    deployment = start("--api-key-file", str(path), "--gateways", "2")
    with client_of(deployment, "of-bob") as client:
        (served,) = client.models.list().data
    ask: dict[str, Any] = {"model": served.id, "prompt": "x", "extra_body": {"ignore_eos": True}}

    def works(key: str) -> set[bool]:
        """Of connections to both gateways."""
        found = set()
        for _ in range(8):
            with client_of(deployment, key) as client:
                try:
                    found.add(bool(client.completions.create(**ask, max_tokens=1).choices))
                except openai.AuthenticationError:
                    found.add(False)
        return found

    with client_of(deployment, "of-alice") as client:
        stream = client.completions.create(**ask, max_tokens=400, stream=True)
        next(iter(stream))
        write_keys(tmp_path, entries("carol", "bob"))
        status, answer = reload_keys(deployment)
        assert status == 0, answer
        counts = {"keys": 2, "added": 1, "removed": 1, "changed": 0}
        assert answer["results"][0]["values"] == counts
        expected = {"of-alice": {False}, "of-bob": {True}, "of-carol": {True}}
        assert {key: works(key) for key in expected} == expected
        assert list(stream)[-1].choices[0].finish_reason == "length"

    write_keys(tmp_path, entries("bob", "bob"))
    status, answer = reload_keys(deployment)
    assert status == 1
    assert "the API keys are as before" in answer["results"][0]["message"]
    assert "name of another entry" in answer["results"][0]["message"]

    former = deployment.members["gateway-1"]
    former.kill()

    def is_replaced() -> bool:
        deployment.find_members()
        if deployment.members.get("gateway-1", former).pid == former.pid:
            return False
        with suppress(urllib.error.HTTPError), urllib.request.urlopen(f"{deployment.url}/ready"):
            return True
        return False

    wait_until(is_replaced)
    assert {key: works(key) for key in expected} == expected


def test_a_key_file_that_others_can_read_ends_the_start(
    tiny_model: tuple[Path, Any], tmp_path: Path
) -> None:
    path = write_keys(tmp_path, '[[key]]\nname = "a"\nkey = "b"\n')
    path.chmod(0o644)
    command = [sys.executable, "-m", "longshore.deploy", "serve", str(tiny_model[0])]
    ended = subprocess.run(
        [*command, "--api-key-file", str(path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 2
    assert "chmod 600" in ended.stderr
    assert "Traceback" not in ended.stderr


async def test_a_flood_of_one_key_does_not_keep_another_key_waiting(
    start: Start, tmp_path: Path
) -> None:
    keys = "".join(f'[[key]]\nname = "{name}"\nkey = "{name}"\n' for name in ("flood", "short"))
    # The deployment has 32 rows, two of which are kept for keys with less than their share, and
    # blocks for whole answers in all of them.
    path = str(write_keys(tmp_path, keys))
    deployment = start("--api-key-file", path, num_blocks=9000)

    async def ask(key: str, max_tokens: int) -> HttpAnswer:
        body = {"prompt": "x", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        return await HttpEndpoint(deployment.url, api_key=key).request(
            "POST", "/v1/completions", json.dumps(body).encode(), timeout_s=PATIENCE_S
        )

    async def num_running() -> float:
        answer = await HttpEndpoint(deployment.url).request("GET", "/metrics", timeout_s=PATIENCE_S)
        # none before the engine's first report
        values = re.findall(rb"\nlongshore_scheduler_running_requests\S* (\S+)", answer.body)
        return sum(map(float, values))

    flood = [asyncio.create_task(ask("flood", 4000)) for _ in range(60)]
    try:
        async with asyncio.timeout(PATIENCE_S):
            while await num_running() < 30:
                await asyncio.sleep(0.05)
        assert (await ask("short", 2)).status == 200
        assert not any(request.done() for request in flood)
        assert await num_running() <= 31
    finally:
        for request in flood:
            request.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
