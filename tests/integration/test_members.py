"""Engines that are added, drained and removed while streams run, with real processes."""

import itertools
import json
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.integration.conftest import StartDeployment
from tests.integration.deployment import Deployment, wait_until
from tests.integration.test_admin import admin, complete, lines
from tests.integration.test_disaggregation import Pair, Stream, prompt
from tests.integration.test_process_life import assert_same, open_stream, rest_of
from tests.integration.test_replicas import get

NUM_TOKENS = 150

AnswerT = TypeVar("AnswerT")


class Streams(Generic[AnswerT]):
    """Clients that call `ask`, which reads a whole stream, until they are told to stop."""

    def __init__(self, ask: Callable[[], AnswerT], number: int = 4) -> None:
        self.answers: list[AnswerT] = []
        self.failures: list[Exception] = []
        self._ask_once = ask
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(number)]

    def _ask(self) -> None:
        try:
            while not self._is_over.is_set():
                self.answers.append(self._ask_once())
        except Exception as error:  # whatever a client would see
            self.failures.append(error)

    def __enter__(self) -> "Streams[AnswerT]":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive()


def engines_of(deployment: Deployment) -> dict[str, str]:
    """The state of each engine."""
    shown = lines(deployment, "status")
    return {name: state for name, state in shown.items() if name.startswith("engine ")}


def engines_in_metrics(deployment: Deployment) -> set[str]:
    text = get(deployment, "/metrics")
    found = [line for line in text.splitlines() if line.startswith("longshore_scheduler_steps_to")]
    return {line.split('engine="')[1].split('"')[0] for line in found}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_engine_is_added_and_another_one_removed_under_load(
    start_deployment: StartDeployment,
) -> None:
    deployment = start_deployment(
        "--replicas", "2", "--gateways", "2", "--dtype", "float32", "--routing-policy",
        "prefix_aware",
    ).wait_until_ready()  # fmt: skip

    def ask() -> list[tuple[int, float]]:
        return rest_of(open_stream(deployment, NUM_TOKENS), NUM_TOKENS)

    calm = ask()
    with Streams(ask) as streams:
        added = lines(deployment, "add-engine")["engine 2"]
        assert "added as unified engine" in added
        assert engines_of(deployment) == {f"engine {n}": "unified, ready" for n in range(3)}
        assert "drained" in lines(deployment, "drain-engine", "1", "--timeout-s", "300")["engine 1"]
        assert engines_of(deployment)["engine 1"] == "unified, draining"
        # Its streams go on at the new engine, and are moved there in their middle.
        removed = lines(deployment, "remove-engine", "0", "--timeout-s", "0")["engine 0"]
        assert "removed in" in removed
        last = admin(deployment, "remove-engine", "2", status=1)
        assert "it is the last unified engine that is ready" in last
        deployment.find_members()
        assert {name for name in deployment.members if name.startswith(("sch", "wor"))} == {
            "scheduler-1", "scheduler-2", "worker-1.0", "worker-2.0",
        }  # fmt: skip
        admin(deployment, "resume", "--engine", "1")
        wait_until(lambda: engines_in_metrics(deployment) == {"1", "2"})
        reports = json.loads(get(deployment, "/engine/report"))
        assert {each["engine_id"] for each in reports} == {"engine-1.1", "engine-2.1"}
        num_answers = len(streams.answers)
        wait_until(lambda: len(streams.answers) > num_answers or bool(streams.failures))
    assert streams.failures == []
    assert len(streams.answers) >= 4
    for answer in streams.answers:
        assert_same(answer, calm)
    deployment.members["gateway-0"].kill()
    wait_until(lambda: "gateway 0 is ready again" in deployment.output)
    for _ in range(8):  # connections go to both gateways, and requests to both engines
        complete(deployment, [5, 6, 7])
    wait_until(lambda: engines_in_metrics(deployment) == {"1", "2"})  # each reports once a second
    (runtime_dir,) = deployment.runtime_dirs
    assert [path.name for path in runtime_dir.glob("*-0*.sock")] == ["gateway-0.sock"]
    deployment.find_members()
    assert deployment.stop() == 0, deployment.output
    deployment.assert_nothing_is_left()


def assert_clear(model: Any, prompt_ids: list[int], tokens: list[int]) -> None:
    """These are the model's tokens, none of which rounding could decide."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([prompt_ids + tokens])).logits[0, len(prompt_ids) - 1 : -1]
    best = logits.topk(2)
    assert best.indices[:, 0].tolist() == tokens
    assert (best.values[:, 0] - best.values[:, 1]).min() > 1e-3


class SplitStreams(Streams[tuple[int, list[int]]]):
    """Streams of a few prompts, none of which is in a prefix cache. An answer is the number of its
    prompt, and the tokens."""

    PROMPTS = (1, 2, 6, 7)  # whose tokens are clear

    def __init__(self, deployment: Pair) -> None:
        super().__init__(self.ask)
        self._deployment = deployment
        self._numbers = itertools.count()

    def ask(self) -> tuple[int, list[int]]:
        salt = next(self._numbers)
        number = self.PROMPTS[salt % len(self.PROMPTS)]
        body = {"prompt": prompt(number), "cache_salt": str(salt), "max_tokens": NUM_TOKENS}
        return number, Stream(self._deployment, body).rest()

    def wait_for_pulls(self, engine: int) -> None:
        """Wait until the engine has pulled the KV of a few more prompts."""
        deployment = self._deployment
        before = deployment.num_blocks_pulled_by(engine)
        wait_until(
            lambda: deployment.num_blocks_pulled_by(engine) >= before + 40 or bool(self.failures)
        )


@pytest.mark.services
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_prefill_and_decode_engines_are_replaced_under_load(
    tiny_model: tuple[Path, Any], tmp_path: Path
) -> None:
    flags = ["--prefill", "1", "--decode", "2", "--dtype", "float32"]
    with Pair(tiny_model[0], tmp_path, *flags, environment={"UCX_TLS": "tcp"}) as deployment:
        deployment.wait_until_ready()
        streams = SplitStreams(deployment)
        calm = dict(streams.ask() for _ in streams.PROMPTS)
        for number, tokens in calm.items():
            assert_clear(tiny_model[1], prompt(number), tokens)
        with streams:
            streams.wait_for_pulls(1)
            streams.wait_for_pulls(2)
            added = lines(deployment, "add-engine", "--role", "decode")["engine 3"]
            assert added.startswith("added as decode engine")
            streams.wait_for_pulls(3)
            drained = lines(deployment, "drain-engine", "1", "--timeout-s", "300")["engine 1"]
            assert drained.startswith("drained in")
            removed = lines(deployment, "remove-engine", "1", "--timeout-s", "300")["engine 1"]
            assert removed.startswith("removed in")
            # Its streams are moved in their middle, and split again.
            removed = lines(deployment, "remove-engine", "2", "--timeout-s", "0")["engine 2"]
            assert removed.startswith("removed in")
            added = lines(deployment, "add-engine", "--role", "prefill")["engine 4"]
            assert added.startswith("added as prefill engine")
            # It is stopped when the decode engine has pulled what it keeps.
            removed = lines(deployment, "remove-engine", "0", "--timeout-s", "300")["engine 0"]
            assert removed.startswith("removed in")
            assert "others continue" not in removed
            streams.wait_for_pulls(3)
        assert streams.failures == []
        for number, tokens in streams.answers:
            assert tokens == calm[number]
        assert engines_of(deployment) == {
            "engine 0": "prefill, removed",
            "engine 1": "decode, removed",
            "engine 2": "decode, removed",
            "engine 3": "decode, ready",
            "engine 4": "prefill, ready",
        }
        wait_until(lambda: engines_in_metrics(deployment) == {"3", "4"})
        assert not re.search(r'engine="[012]"', get(deployment, "/metrics"))
        # Every prompt was computed by a prefill engine, and its KV was pulled.
        num_prompts = len(calm) + len(streams.answers)
        assert deployment.sample("remote_prefills", outcome="offered") >= num_prompts
        for reason in ("cached_prefix", "too_large", "no_prefill_engine"):
            assert deployment.sample("remote_prefill_skips", reason=reason) == 0
        assert deployment.sample("kv_offload_failed_blocks", engine="3") == 0
        for engine in (3, 4):
            wait_until(lambda engine=engine: deployment.is_free(engine))  # type: ignore[misc]
        assert "leases were not renewed" not in deployment.output
        deployment.find_members()
        assert deployment.stop() == 0, deployment.output
        deployment.assert_nothing_is_left()


@pytest.mark.slow
def test_an_engine_that_cannot_start_leaves_the_deployment_as_it_was(
    start_deployment: StartDeployment, tiny_model: tuple[Path, Any], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model[0], model)
    deployment = start_deployment(model_dir=model).wait_until_ready()
    (weights,) = model.glob("*.safetensors")
    hidden = weights.rename(model / "hidden")
    save_file({"other": np.zeros(1, np.float32)}, weights)
    refused = admin(deployment, "add-engine", status=1)
    assert refused.startswith("engine 1: not added: worker 1.0: ")
    assert engines_of(deployment) == {"engine 0": "unified, ready"}
    complete(deployment, [5, 6, 7])
    assert "without the connector" in admin(deployment, "add-engine", "--role", "decode", status=1)
    hidden.rename(weights)
    assert "added as unified engine" in lines(deployment, "add-engine")["engine 2"]
    assert "removed in" in lines(deployment, "remove-engine", "0", "--timeout-s", "0")["engine 0"]
    assert engines_of(deployment) == {
        "engine 0": "unified, removed",
        "engine 2": "unified, ready",
    }
    complete(deployment, [5, 6, 7])
    (runtime_dir,) = deployment.runtime_dirs
    sockets = {path.name for path in runtime_dir.glob("*.sock")}
    assert sockets == {"admin.sock", "clients-2.sock", "worker-2.0.sock"}
    deployment.find_members()
    assert deployment.stop() == 0, deployment.output
    deployment.assert_nothing_is_left()
