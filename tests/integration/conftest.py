"""What the tests with real processes share: one checkpoint and one running deployment."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.deploy.tiny_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, save_tokenizer
from tests.integration.deployment import Deployment
from tests.integration.forks import forked_engines as forked_engines  # a fixture
from tests.models import make_tiny_llama

HERE = Path(__file__).parent
TIMEOUT_S = 300  # a test starts several processes, and other tests may use the processors


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(autouse=True)
def close_clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The clients of OpenAI's and Anthropic's libraries that a test made are closed when it ends.
    Otherwise the garbage collector finds them during a later test, perhaps a socket before the
    client that would close it, which is a warning."""
    clients: list[httpx2.Client] = []
    create = httpx2.Client.__init__

    def init(client: httpx2.Client, *args: Any, **options: Any) -> None:
        create(client, *args, **options)
        clients.append(client)

    monkeypatch.setattr(httpx2.Client, "__init__", init)
    yield
    for client in clients:
        client.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A random Llama with a byte tokenizer: its folder, and the transformers model."""
    path = tmp_path_factory.mktemp("tiny")
    model = make_tiny_llama(
        path,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=4096,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )
    save_tokenizer(path)
    return path, model


@pytest.fixture(scope="session")
def deployment(
    tiny_model: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """A deployment that all tests share. Tests that end a deployment start their own."""
    with Deployment(tiny_model[0], tmp_path_factory.mktemp("run")) as shared:
        yield shared.wait_until_ready()
        assert shared.stop() == 0, shared.output
        shared.assert_nothing_is_left()


StartDeployment = Callable[..., Deployment]


@pytest.fixture
def start_deployment(tiny_model: tuple[Path, Any], tmp_path: Path) -> Iterator[StartDeployment]:
    """`start_deployment(*flags)` starts a separate deployment; no part of it remains after the
    test."""
    started = []

    def start(*arguments: str, model_dir: Path | None = None, **settings: Any) -> Deployment:
        own = Deployment(model_dir or tiny_model[0], tmp_path, *arguments, **settings)
        started.append(own)
        return own

    yield start
    for own in started:
        own.__exit__()
