"""The engine in the caller's own process."""

from pathlib import Path

import pytest

from longshore.deploy.cli.options import EngineOptions
from longshore.deploy.llm.in_process_engine import InProcessEngine
from longshore.deploy.model.folder import read_model_folder
from longshore.deploy.supervisor.engine_config import plan_engine
from longshore.protocol.arrays import int32_array
from longshore.protocol.outputs import FinishedRequest
from longshore.protocol.requests import AddRequest, ContinueSession
from longshore.protocol.sampling import SamplingParams
from tests.models import make_tiny_llama


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_tiny_llama(path)
    return path


def test_an_engine_with_sessions_whose_client_has_the_next_word_is_not_stuck(
    model_dir: Path,
) -> None:
    options = EngineOptions(device="cpu", num_blocks=40, threads=1)
    engine = InProcessEngine(plan_engine(options, read_model_folder(model_dir)))
    sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)

    def end_of_output() -> FinishedRequest:
        while True:
            outputs = engine.receive()
            if outputs is not None and outputs.finished:
                return outputs.finished[0]

    try:
        engine.send(AddRequest("talk", 1, int32_array([5, 6, 7]), sampling, resumable=True))
        assert end_of_output().session_continues
        for _ in range(5):
            assert engine.receive() is None
        engine.send(ContinueSession(1, int32_array([8]), sampling, resumable=False))
        assert not end_of_output().session_continues
    finally:
        engine.close()
