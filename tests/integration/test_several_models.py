"""Several models in one server: real processes, clients of several APIs."""

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.deploy.tiny_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, save_tokenizer
from tests.integration.deployment import PATIENCE_S, Deployment, wait_until
from tests.models import make_tiny_model

PROMPT = [3, 5, 8, 13, 21, 34]
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Another family, with other weights."""
    path = tmp_path_factory.mktemp("other")
    model = make_tiny_model(
        "Qwen3",
        path,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=512,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )
    save_tokenizer(path)
    return path, model


@pytest.fixture(scope="module")
def running(
    tiny_model: tuple[Path, Any],
    other_model: tuple[Path, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("several")
    flags = ("--dtype", "float32", "--idle-sleep-s", "3600", str(other_model[0]))
    with Deployment(tiny_model[0], folder, *flags) as deployment:
        yield deployment.wait_until_ready()
        assert deployment.stop() == 0, deployment.output
        deployment.assert_nothing_is_left()


def ask(deployment: Deployment, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{deployment.url}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def names(deployment: Deployment) -> list[str]:
    return [each["id"] for each in ask(deployment, "/v1/models")[1]["data"]]


def completed(deployment: Deployment, model: str) -> list[int]:
    body = {
        **{"model": model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0},
        **{"ignore_eos": True, "return_token_ids": True},
    }
    status, answer = ask(deployment, "/v1/completions", body)
    assert status == 200, answer
    assert answer["model"] == model
    return list(answer["choices"][0]["token_ids"])


def expected(model: Any) -> list[int]:
    model.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT])
    answer = model.generate(
        ids, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False
    )
    return list(answer[0, len(PROMPT) :].tolist())


def is_loaded(deployment: Deployment, model: str) -> bool:
    listed = ask(deployment, "/api/ps")[1]["models"]
    return model in [each["name"] for each in listed]


def test_each_model_answers_with_its_own_weights(
    running: Deployment, tiny_model: tuple[Path, Any], other_model: tuple[Path, Any]
) -> None:
    small, other = names(running)
    assert (small, other) == (tiny_model[0].name, other_model[0].name)
    assert completed(running, small) == expected(tiny_model[1])
    assert completed(running, other) == expected(other_model[1])
    status, answer = ask(running, "/v1/completions", {"model": "none", "prompt": "a"})
    assert status == 404
    assert f"this server serves {small!r}, {other!r}" in answer["error"]["message"]


def test_a_model_sleeps_when_told_and_wakes_for_a_request(
    running: Deployment, other_model: tuple[Path, Any]
) -> None:
    small, other = names(running)
    loaded = ask(running, "/api/generate", {"model": other, "keep_alive": 0})
    assert loaded[1]["done_reason"] == "unload"
    wait_until(lambda: not is_loaded(running, other))
    assert is_loaded(running, small)
    with urllib.request.urlopen(f"{running.url}/ready", timeout=PATIENCE_S) as response:
        assert response.status == 200
    assert completed(running, other) == expected(other_model[1])
    assert is_loaded(running, other)


def test_a_death_of_one_model_s_worker_costs_the_other_nothing(
    running: Deployment, tiny_model: tuple[Path, Any], other_model: tuple[Path, Any]
) -> None:
    small, other = names(running)
    running.find_members()
    os.kill(running.members["worker-1.0"].pid, signal.SIGKILL)
    assert completed(running, small) == expected(tiny_model[1])
    assert completed(running, other) == expected(other_model[1])
    assert "engine-1" in running.output
    assert "engine-0" not in running.output  # nothing happened to it
