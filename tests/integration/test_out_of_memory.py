"""A device that has no memory for large steps: they are computed again in smaller parts, and the
tokens are those of a calm run."""

import json
import logging
import threading
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
import torch

from longshore import LLM, SamplingParams
from longshore.deploy.llm.in_process_engine import InProcessEngine
from longshore.protocol.errors import EngineDead
from tests.deploy.tiny_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, save_tokenizer
from tests.integration.conftest import StartDeployment
from tests.integration.deployment import PATIENCE_S, Deployment, wait_until
from tests.models import make_tiny_llama

PROMPTS: Final = [[20 + (7 * i + 3 * n) % 90 for i in range(40 + 30 * n)] for n in range(6)]
GREEDY: Final = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SETTINGS: Final[dict[str, Any]] = {
    "num_blocks": 600,
    "max_num_seqs": 8,
    "max_num_scheduled_tokens": 256,
    "threads": 1,
    "dtype": "float32",
    "device": "cpu",
    "verify_plan": True,
    "in_process": True,
}
FAILURES: Final[dict[str, Callable[[], object]]] = {
    "gpu": lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory")),
    "cpu": lambda: torch.empty(10**9, 10**9),
    "host": lambda: bytearray(1 << 62),
}


def lack_memory(llm: LLM, max_tokens: int, fail: Callable[[], object]) -> list[int]:
    """From now on, steps of more tokens fail. Returns a list that gets the sizes of all steps."""
    engine = llm._engine
    assert isinstance(engine, InProcessEngine)
    model, sizes = engine.worker.model, []
    run_layers = model.run_layers

    def run(x: Any, *args: Any) -> Any:
        sizes.append(len(x))
        result = run_layers(x, *args)  # what has been written is not valid
        if len(x) > max_tokens:
            fail()
        return result

    model.run_layers = run  # type: ignore[method-assign]
    return sizes


def generate(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], GREEDY, use_tqdm=False)


@pytest.fixture(scope="module")
def calm(tiny_model: tuple[Path, Any]) -> list[list[int]]:
    with LLM(tiny_model[0], **SETTINGS) as llm:
        return [list(output.outputs[0].token_ids) for output in generate(llm, PROMPTS)]


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("is_cached", [True, False], ids=["cached", "not cached"])
def test_steps_that_do_not_fit_are_computed_in_smaller_parts(
    tiny_model: tuple[Path, Any],
    calm: list[list[int]],
    failure: str,
    is_cached: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LLM(tiny_model[0], enable_prefix_caching=is_cached, **SETTINGS) as llm:
        sizes = lack_memory(llm, 70, FAILURES[failure])
        outputs = generate(llm, PROMPTS)
        assert [list(output.outputs[0].token_ids) for output in outputs] == calm
        assert max(sizes) > 128
        del sizes[:]
        assert [list(output.outputs[0].token_ids) for output in generate(llm, PROMPTS)] == calm
        assert max(sizes) <= 64  # it stays lower
    limits = [r.getMessage() for r in caplog.records if "no memory for a step" in r.getMessage()]
    assert [("128 tokens" in limit, "64 tokens" in limit) for limit in limits] == [
        (True, False),
        (False, True),
    ]


def test_memory_that_is_lacking_while_others_decode_does_not_change_their_tokens(
    tiny_model: tuple[Path, Any], calm: list[list[int]]
) -> None:
    """Later prompts are admitted beside decodes, which are in flight when the step fails."""
    settings = {**SETTINGS, "max_num_seqs": 2}
    with LLM(tiny_model[0], **settings) as llm:
        sizes = lack_memory(llm, 100, FAILURES["gpu"])
        assert [list(output.outputs[0].token_ids) for output in generate(llm, PROMPTS)] == calm
        assert max(sizes) > 100


def test_requests_that_do_not_fit_alone_end_with_an_error_and_the_engine_goes_on(
    tiny_model: tuple[Path, Any], calm: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(tiny_model[0], **SETTINGS) as llm:
        engine: Any = llm._engine
        run_layers = engine.worker.model.run_layers
        lack_memory(llm, 0, FAILURES["gpu"])
        for output in generate(llm, PROMPTS):
            assert output.outputs[0].finish_reason == "error"
            assert "no memory to compute this request" in str(output.outputs[0].error)
        engine.worker.model.run_layers = run_layers
        assert [list(output.outputs[0].token_ids) for output in generate(llm, PROMPTS)] == calm
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_other_failures_still_end_the_engine(tiny_model: tuple[Path, Any]) -> None:
    def fail() -> None:
        raise RuntimeError("the device is on fire")

    with LLM(tiny_model[0], **SETTINGS) as llm:
        lack_memory(llm, 70, fail)
        with pytest.raises(EngineDead, match="on fire"):
            generate(llm, PROMPTS)


OFFLOADING: Final = [
    *("--kv-connector", "offloading"),
    *("--kv-connector-config", '{"cpu_bytes_to_use": "64MiB"}'),
]
LONG_PROMPT: Final = [20 + 11 * i % 90 for i in range(3500)]


class Client:
    """Completions by a deployment's gateway, greedy and with token ids."""

    def __init__(self, deployment: Deployment) -> None:
        self._url = f"{deployment.url}/v1/completions"

    def complete(self, prompt: list[int]) -> list[int]:
        body = {"prompt": prompt, "max_tokens": 20, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        request = urllib.request.Request(
            self._url, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=4 * PATIENCE_S) as response:
            token_ids: list[int] = json.load(response)["choices"][0]["token_ids"]
        return token_ids

    def begin(self, prompt: list[int]) -> Future[list[int]]:
        """`complete` on a thread."""
        future: Future[list[int]] = Future()

        def run() -> None:
            try:
                future.set_result(self.complete(prompt))
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future


def limit_memory(process: psutil.Process, spare_bytes: int) -> None:
    """From now on, the process can have this much memory more."""
    process.rlimit(psutil.RLIMIT_AS, 2 * (process.memory_info().vms + spare_bytes,))


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose MLP needs 200 MB for a step of 3500 tokens."""
    path = tmp_path_factory.mktemp("wide") / "model"
    make_tiny_llama(
        path,
        vocab_size=VOCAB_SIZE,
        intermediate_size=4096,
        max_position_embeddings=4096,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )
    save_tokenizer(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "rank"),
    [
        pytest.param(["--tensor-parallel-size", "2"], 1, id="shard"),
        pytest.param(
            ["--pipeline-parallel-size", "2"], 0, id="first stage", marks=pytest.mark.long
        ),
        pytest.param(["--pipeline-parallel-size", "2", *OFFLOADING], 1, id="last stage"),
        pytest.param(
            ["--tensor-parallel-size", "2"], 0, id="sampling shard", marks=pytest.mark.long
        ),
    ],
)
def test_a_rank_without_memory_makes_the_steps_of_its_engine_smaller(
    start_deployment: StartDeployment, wide_model: Path, flags: list[str], rank: int
) -> None:
    """Other ranks wait for it in the middle of a step."""
    deployment = start_deployment(
        *("--dtype", "float32", "--verify-plan", "--max-num-batched-tokens", "4096"),
        *("--startup-timeout-s", "120", "--max-restarts", "1", *flags),
        model_dir=wide_model,
    ).wait_until_ready()
    client = Client(deployment)
    calm = [client.complete(prompt) for prompt in PROMPTS]
    worker = deployment.members[f"worker-{rank}"]
    limit_memory(worker, 8 << 20)
    long = client.begin(LONG_PROMPT)
    wait_until(lambda: "the device had no memory for a step" in deployment.output, 2 * PATIENCE_S)
    beside = [client.begin(prompt) for prompt in PROMPTS]
    assert [future.result(4 * PATIENCE_S) for future in beside] == calm
    assert len(long.result(4 * PATIENCE_S)) == 20
    assert "from now on a step has at most 2048 tokens" in deployment.output
    assert "Traceback" not in deployment.output
    deployment.find_members()
    assert deployment.stop() == 0, deployment.output
    deployment.assert_nothing_is_left()
