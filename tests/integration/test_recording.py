"""A real scheduler process records what it does, and `longshore replay` repeats it."""

import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from longshore.scheduler.recorder.entries import segment_files
from longshore.scheduler.recorder.replay import Replay
from tests.integration.conftest import StartDeployment
from tests.integration.deployment import wait_until
from tests.integration.engine_process import ScriptedWorker, ready_engine, running_engine

NUM_REQUESTS = 200
RING_BYTES = 300_000


def run_replay(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "longshore.deploy", "replay", str(path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_process_that_was_killed_leaves_a_record_that_is_replayed(tmp_path: Path) -> None:
    """With several snapshots, which child processes have written."""
    path = tmp_path / "record"
    with running_engine(record=path, record_bytes=RING_BYTES) as engine:
        client = ready_engine(engine)
        ScriptedWorker(engine)
        for handle in range(1, NUM_REQUESTS + 1):
            client.add(handle, prompt_len=30 + handle % 50, max_tokens=5 + handle % 20)
            client.receive_until(lambda last=handle: last - 8 < 1 or last - 8 in client.finished)
        client.receive_until(lambda: len(client.finished) == NUM_REQUESTS)
        wait_until(lambda: segment_files(path)[0].name > "record.000000")
        engine.process.kill()
        engine.process.wait()
    files = segment_files(path)
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    result = Replay(path).run()
    assert result.is_equal, result
    assert result.num_plans > 50


@pytest.mark.slow
def test_a_thousand_requests_to_a_server_are_replayed_bit_for_bit(
    start_deployment: StartDeployment, tmp_path: Path
) -> None:
    path = tmp_path / "record"
    server = start_deployment("--record", str(path), num_blocks=300)
    server.wait_until_ready()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    model = client.models.list().data[0].id

    def ask(number: int) -> str:
        prompt = "shared words " * (number % 7) + f"request {number}"
        answer = client.completions.create(
            model=model, prompt=prompt, max_tokens=4 + number % 29, temperature=0.0
        )
        return answer.id

    with ThreadPoolExecutor(48) as pool:
        ids = list(pool.map(ask, range(1000)))
    assert server.stop() == 0, server.output
    answer = run_replay(path, "--explain", ids[500])
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "plans are equal" in answer.stdout
    assert "arrived with" in answer.stdout
    assert "ended: FINISHED" in answer.stdout
