"""Two deployments of a speech model: the second one transcribes what the first has encoded, over
the real transports."""

import re
import socket
import urllib.request
from pathlib import Path
from typing import Final

import openai
import pytest

from tests.deploy.sounds import as_file, tone
from tests.deploy.tiny_whisper import make_tiny_whisper
from tests.integration.deployment import Deployment

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]

SOUNDS: Final = [tone(0.3 + 0.3 * n, 200.0 + 300 * n, noise=0.02 * n, seed=n) for n in range(3)]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def texts(deployment: Deployment) -> list[str]:
    with openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0) as client:
        (served,) = client.models.list().data
        return [
            client.audio.transcriptions.create(
                model=served.id,
                file=("sound.wav", as_file(sound)),
                language="en",
                temperature=0,
                extra_body={"max_tokens": 8},
            ).text
            for sound in SOUNDS
        ]


def count(deployment: Deployment, name: str) -> float:
    with urllib.request.urlopen(f"{deployment.url}/metrics") as answer:
        page = answer.read().decode()
    found = re.findall(rf"^longshore_scheduler_{name}_total{{.*}} (\S+)$", page, re.MULTILINE)
    return sum(map(float, found))


@pytest.mark.req("FEA-09")
@pytest.mark.parametrize(("connector", "num_ranks"), [("nixl", 2), ("mooncake", 1)])
def test_audio_is_encoded_once(
    connector: str,
    num_ranks: int,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    model = tmp_path / "whisper"
    model.mkdir()
    make_tiny_whisper(model)
    port = free_port()
    settings = ["--dtype", "float32", "--ec-connector", connector]
    owner = [*settings, "--ec-role", "ec_producer", "--ec-connector-config", f'{{"port": {port}}}']
    reader = [*settings, "--ec-role", "ec_consumer", "--tensor-parallel-size", str(num_ranks)]
    reader += ["--ec-connector-config", f'{{"peers": ["127.0.0.1:{port}"]}}']
    folders = [tmp_path_factory.mktemp(name) for name in ("owner", "reader")]
    with (
        Deployment(model, folders[0], *owner) as producer,
        Deployment(model, folders[1], *reader) as consumer,
    ):
        producer.wait_until_ready()
        consumer.wait_until_ready()
        expected = texts(producer)
        assert texts(consumer) == expected
        assert len(set(expected)) == len(SOUNDS)
        assert texts(consumer) == expected  # it has kept them
        assert count(consumer, "encoded_items") == 0
        assert count(consumer, "missed_encoder_outputs") == 0
