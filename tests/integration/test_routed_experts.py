"""The experts of tokens through real processes: memory that worker and scheduler share, messages to
the client, and JSON; on several ranks, and after the death of a worker."""

import base64
import io
import json
import re
import signal
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longshore import LLM, SamplingParams
from tests.conftest import ROOT
from tests.integration.conftest import StartDeployment
from tests.integration.deployment import PATIENCE_S, Deployment, wait_until
from tests.integration.test_worker_deaths import worker_of
from tests.models import make_tiny_model
from tests.reference import assert_experts_are_those_of

PROMPT = [5, 9, 2, 77] * 11
OPTIONS = ("--enable-return-routed-experts", "--dtype", "float32")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model folder, and the same model in transformers."""
    path = tmp_path_factory.mktemp("mixture")
    return path, make_tiny_model("Qwen3Moe", path, num_local_experts=8, num_experts_per_tok=3)


def complete(deployment: Deployment, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"{deployment.url}/v1/completions",
        json.dumps(body | fields).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        whole: dict[str, Any] = json.load(answer)
        return whole


def check(reference: Any, choice: dict[str, Any]) -> None:
    experts = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    assert experts.dtype == np.uint8
    assert_experts_are_those_of(reference, experts, PROMPT + choice["token_ids"])


@pytest.mark.slow
@pytest.mark.req("FEA-08")
def test_answers_over_http_have_the_experts_also_after_a_worker_died(
    mixture: tuple[Path, Any], start_deployment: StartDeployment
) -> None:
    path, reference = mixture
    deployment = start_deployment(*OPTIONS, model_dir=path).wait_until_ready()
    for choice in complete(deployment, n=2, temperature=1.0, seed=3, max_tokens=20)["choices"]:
        check(reference, choice)
    worker = worker_of(deployment)
    assert worker is not None
    worker.send_signal(signal.SIGKILL)
    worker.wait(PATIENCE_S)
    wait_until(lambda: worker_of(deployment) not in (None, worker))
    answer = complete(deployment, max_tokens=30)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32  # it was adopted
    check(reference, answer["choices"][0])


@pytest.mark.slow
@pytest.mark.req("FEA-08")
def test_one_of_two_ranks_captures_for_clients_in_python(mixture: tuple[Path, Any]) -> None:
    path, reference = mixture
    with LLM(
        path,
        tensor_parallel_size=2,
        enable_return_routed_experts=True,
        dtype="float32",
        num_blocks=60,
        threads=1,
        state_dir=path / "state",
    ) as llm:
        params = SamplingParams(n=2, seed=1, max_tokens=12, ignore_eos=True, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params)
    for answer in output.outputs:
        assert answer.routed_experts is not None
        assert answer.routed_experts.flags.writeable
        assert_experts_are_those_of(reference, answer.routed_experts, PROMPT + answer.token_ids)


def test_the_example_of_the_documentation_prints_the_shape(
    mixture: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)
    (code,) = (block for block in blocks if "routed_experts" in block)
    code = code.replace("path/to/mixture", str(mixture[0]))
    exec(compile(code, "docs/python.md", "exec"), {})
    assert "(10, 2, 3)" in capsys.readouterr().out
