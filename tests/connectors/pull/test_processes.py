"""Engines in processes of their own, over TCP: tensor parallel sizes, and processes that die or
stop."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from longshore.deploy.llm.remote_engine import RemoteEngine
from longshore.protocol.arrays import EMPTY_INT32
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import AbortRequests
from longshore.testing.engines import settle
from tests.connectors.engine import Engine
from tests.connectors.pull.test_two_engines import PROMPTS, Pair, wanted

ModelOf = Callable[[str], tuple[Path, Any]]

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]

OPTIONS: Final[dict[str, Any]] = {"lease_s": 5.0}


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")


def processes(
    model: Path, *, prefill: dict[str, Any], decode: dict[str, Any], connector: str = "nixl"
) -> Pair:
    settings = {"in_process": False}
    return Pair(model, connector, OPTIONS, prefill=settings | prefill, decode=settings | decode)


def settle_all(pair: Pair) -> None:
    for engine in (pair.prefill, pair.decode):
        assert settle(engine.engine) == 0


@pytest.mark.req("CRG-06")
@pytest.mark.req("CRG-03")
@pytest.mark.req("CON-11")
@pytest.mark.parametrize(
    ("connector", "kind"),
    [
        pytest.param("nixl", "full", marks=pytest.mark.long),
        ("nixl", "latents"),
        ("nixl", "states"),
        pytest.param("p2p_nccl", "latents", marks=pytest.mark.long),
    ],
)
def test_tensor_parallel_sizes_may_differ(connector: str, kind: str, model_of: ModelOf) -> None:
    """From one shard to two, and on the same engines from two shards to one."""
    model, _ = model_of(kind)
    others = [prompt[::-1] for prompt in PROMPTS]
    expected = wanted(model, *PROMPTS, *others)
    settings = {"decode": {"tensor_parallel_size": 2}}
    with processes(model, prefill={}, **settings, connector=connector) as pair:
        for number, tokens in enumerate(expected):
            if number == len(PROMPTS):
                pair.prefill, pair.decode = pair.decode, pair.prefill
            prompt = [*PROMPTS, *others][number]
            first = pair.begin(prompt)
            answer = pair.go_on(prompt, first)
            pair.until(lambda answer=answer: answer.end is not None)  # type: ignore[misc]
            assert answer.end is not None
            assert answer.end.reason is FinishReason.LENGTH_CAPPED
            assert [*first.token_ids, *answer.token_ids] == tokens
            assert answer.end.num_cached_tokens == len(prompt)
        settle_all(pair)


@pytest.mark.req("CRG-06")
@pytest.mark.req("CRG-11")
@pytest.mark.req("CRG-03")
@pytest.mark.parametrize(
    "connector", ["nixl", pytest.param("mooncake", marks=pytest.mark.long), "p2p_nccl"]
)
def test_pipeline_stages_may_differ(connector: str, model_of: ModelOf) -> None:
    model, _ = model_of("windows")
    (expected,) = wanted(model, PROMPTS[0])
    stages = {"pipeline_parallel_size": 2}
    with processes(model, prefill=stages, decode={}, connector=connector) as pair:
        first = pair.begin(PROMPTS[0])
        answer = pair.go_on(PROMPTS[0], first)
        pair.until(lambda: answer.end is not None)
        assert [*first.token_ids, *answer.token_ids] == expected
        assert answer.end is not None
        assert answer.end.num_cached_tokens == len(PROMPTS[0])
        settle_all(pair)


def signal_all(engine: Engine, number: int) -> None:
    assert isinstance(engine.engine, RemoteEngine)
    for process in engine.engine._processes._supervisor.processes:
        os.kill(process.pid, number)


@pytest.mark.req("CRG-06")
@pytest.mark.req("CRG-03")
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=lambda fault: fault.name)
@pytest.mark.parametrize("connector", ["nixl", pytest.param("p2p_nccl", marks=pytest.mark.long)])
def test_the_prompt_is_computed_if_its_owner_dies_or_hangs(
    connector: str, fault: signal.Signals, model_of: ModelOf
) -> None:
    model, _ = model_of("full")
    (expected,) = wanted(model, PROMPTS[0])
    with processes(model, prefill={}, decode={}, connector=connector) as pair:
        first = pair.begin(PROMPTS[0])
        signal_all(pair.prefill, fault)
        try:
            answer = pair.go_on(PROMPTS[0], first)
            pair.decode.wait(answer)
            assert [*first.token_ids, *answer.token_ids] == expected
            assert settle(pair.decode.engine) == 0
        finally:
            if fault == signal.SIGSTOP:
                signal_all(pair.prefill, signal.SIGCONT)


@pytest.mark.req("CRG-06")
def test_the_owner_frees_the_blocks_of_a_reader_that_dies(model_of: ModelOf) -> None:
    model, _ = model_of("full")
    with processes(model, prefill={}, decode={}) as pair:
        first = pair.begin(PROMPTS[0])
        pair.go_on(PROMPTS[0], first)
        signal_all(pair.decode, signal.SIGKILL)
        assert settle(pair.prefill.engine) == 0


@pytest.mark.req("CON-08")
def test_the_client_of_the_owner_ends_a_lease(model_of: ModelOf) -> None:
    model, _ = model_of("full")
    options = {"lease_s": 1000.0}
    with Engine(model, "nixl", options, in_process=False) as owner:
        first = owner.add(PROMPTS[0], max_tokens=1, kv_transfer_params={"do_remote_decode": True})
        owner.wait(first)
        assert first.end is not None
        assert first.end.kv_transfer_params is not None
        transfer_id = first.end.kv_transfer_params["transfer_id"]
        owner.engine.send(AbortRequests(EMPTY_INT32, transfer_ids=(transfer_id,)))
        assert settle(owner.engine) == 0
