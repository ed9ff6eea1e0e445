"""`longshore node`: one deployment on two nodes, which are two loopback addresses."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from longshore.deploy.admin.actions import DrainOneEngine, RemoveEngine, ResumeEngine
from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.deploy.topology.keys import create_node_keys
from tests.integration.deployment import wait_until
from tests.integration.topologies import NodeProcess, TwoNodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def post(url: str, prompt: str, **fields: object) -> HTTPResponse:
    body = {"model": "demo_model", "prompt": prompt, "temperature": 0, **fields}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), headers=headers
    )
    response: HTTPResponse = urllib.request.urlopen(request, timeout=180)
    return response


def complete(url: str, prompt: str, num_tokens: int = 4, **fields: object) -> str:
    with post(url, prompt, max_tokens=num_tokens, ignore_eos=True, **fields) as response:
        answer: dict[str, Any] = json.load(response)
    assert answer["usage"]["completion_tokens"] == num_tokens
    text: str = answer["choices"][0]["text"]
    return text


def metrics(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        text: str = response.read().decode()
    return text


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=60):
            return True
    except urllib.error.HTTPError:
        return False


def has_engine(url: str, engine: int) -> bool:
    """Whether the engine is ready for the gateway."""
    try:
        with urllib.request.urlopen(f"{url}/engine/report?engine={engine}", timeout=60):
            return True
    except urllib.error.HTTPError:
        return False


def num_pulled_blocks(url: str) -> float:
    """From other engines, as the gateway knows."""
    return sum(
        float(line.rpartition(" ")[2])
        for line in metrics(url).splitlines()
        if line.startswith("longshore_kv_offload_blocks_total{") and "REMOTE_to_GPU" in line
    )


def decisions(url: str) -> dict[str, float]:
    """Prompts that a gateway has sent, by engine; those without any are left out."""
    found: dict[str, float] = {}
    for line in metrics(url).splitlines():
        if line.startswith("longshore_routing_decisions_total{"):
            engine = line.partition('engine="')[2].partition('"')[0]
            found[engine] = found.get(engine, 0.0) + float(line.rpartition(" ")[2])
    return {engine: count for engine, count in found.items() if count}


@pytest.fixture
def topology(tmp_path: Path) -> TwoNodes:
    return TwoNodes(tmp_path, DEMO_MODEL_DIR, more='routing_policy = "prefix_aware"\n')


@pytest.fixture
def nodes(topology: TwoNodes) -> Iterator[dict[str, NodeProcess]]:
    with ExitStack() as stack:
        yield {name: stack.enter_context(NodeProcess(topology, name)) for name in topology.urls}


def test_both_nodes_serve_and_a_lost_one_returns_under_its_name(
    topology: TwoNodes, nodes: dict[str, NodeProcess]
) -> None:
    for node in nodes.values():
        node.wait_until_ready()
    url = topology.urls["a"]
    wait_until(lambda: is_ready(url))
    wait_until(lambda: len(decisions_after_one(url)) == 2)
    prompt = "The quick brown fox jumps over the lazy dog. " * 8
    wanted = complete(url, prompt)
    # The gateway of the other node finds the prefix where it is: the engine's events have told it.
    wait_until(lambda: reuses(topology.urls["b"], prompt, wanted))

    drained = nodes["b"].admin(DrainOneEngine(engine=1))
    assert (drained.ok, "drained in" in drained.message) == (True, True), drained
    wait_until(lambda: has_no_more_decisions(url, "1"))
    refused = nodes["b"].admin(RemoveEngine(engine=1))
    assert "the topology says which engines there are" in refused.message
    assert nodes["b"].admin(ResumeEngine(engine=1)).ok
    before = decisions(url)["1"]
    wait_until(lambda: decisions_after_one(url)["1"] > before)

    long: dict[str, object] = {"max_tokens": 600, "ignore_eos": True, "stream": True}
    with ExitStack() as stack:
        streams = [stack.enter_context(post(url, f"{n} goes on", **long)) for n in range(4)]
        for stream in streams:
            assert stream.readline().startswith(b"data: ")
        nodes["b"].kill()
        for stream in streams:  # those of the lost engine go on where they were
            assert b'"finish_reason":"length"' in stream.read()
    assert "lost the engine" in nodes["a"].output
    assert complete(url, prompt) == wanted

    before = decisions(url)["1"]
    with NodeProcess(topology, "b", 1) as returned:
        returned.wait_until_ready()
        wait_until(lambda: "is ready; " in nodes["a"].output)
        wait_until(lambda: decisions_after_one(url)["1"] > before)
        for node in (returned, nodes["a"]):
            assert node.stop() == 0, node.output


def decisions_after_one(url: str) -> dict[str, float]:
    complete(url, f"{decisions(url)} are the decisions")
    return decisions(url)


def has_no_more_decisions(url: str, engine: str) -> bool:
    """Whether the gateway sends no requests to an engine."""
    before = decisions(url)[engine]
    return all(decisions_after_one(url)[engine] == before for _ in range(4))


def reuses(url: str, prompt: str, wanted: str) -> bool:
    """Whether the gateway has sent the prompt to the engine because of its prefix."""
    assert complete(url, prompt) == wanted
    return 'reason="prefix"' in metrics(url)


@pytest.mark.services
def test_a_decode_engine_pulls_from_a_prefill_engine_on_another_node(tmp_path: Path) -> None:
    topology = TwoNodes(
        tmp_path, DEMO_MODEL_DIR, roles=("prefill", "decode"), more='dtype = "float32"\n'
    )
    with NodeProcess(topology, "a") as prefill, NodeProcess(topology, "b") as decode:
        prefill.wait_until_ready()
        decode.wait_until_ready()
        answers: dict[str, str] = {}
        for name, url in topology.urls.items():
            for engine in (0, 1):
                wait_until(lambda url=url, engine=engine: has_engine(url, engine))  # type: ignore[misc]
            before = num_pulled_blocks(url)
            prompt = f"The gateway of node {name} divides this request. " * 8
            answers[prompt] = complete(url, prompt, 16)
            wait_until(lambda url=url, before=before: num_pulled_blocks(url) > before)  # type: ignore[misc]

        prefill.kill()
        url = topology.urls["b"]
        wait_until(lambda: not has_engine(url, 0))
        before = num_pulled_blocks(url)
        for prompt, answer in answers.items():  # computed as a whole, without a cached prefix
            assert complete(url, prompt, 16, cache_salt="alone") == answer
        assert num_pulled_blocks(url) == before
        assert decode.stop() == 0, decode.output


def test_a_node_with_another_key_is_not_served(topology: TwoNodes, tmp_path: Path) -> None:
    text = topology.path.read_text()
    (tmp_path / "b.json").unlink()
    own_key = create_node_keys(tmp_path / "b.json")
    listed = text.split('public_key = "')[2].partition('"')[0]
    other = TwoNodes.__new__(TwoNodes)
    other.path, other.urls = tmp_path / "other" / "topology.toml", topology.urls
    other.path.parent.mkdir()
    other.path.write_text(text.replace(listed, own_key))  # as an intruder would write it
    with NodeProcess(topology, "a") as a, NodeProcess(other, "b") as b:
        a.wait_until_ready()
        b.wait_until_ready()
        wait_until(lambda: "was rejected" in a.output)
        for name, engine in (("a", "0"), ("b", "1")):
            for number in range(4):
                complete(topology.urls[name], f"{number} stays here")
            assert set(decisions(topology.urls[name])) == {engine}
