"""The Responses API of two gateways, asked by the official client."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.deployment import Deployment, wait_until

QUESTION = "Which berth holds C417?"
KEYS = {"LONGSHORE_API_KEY": "alice bob"}


@pytest.fixture(scope="module")
def shared(
    tiny_model: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    with Deployment(
        tiny_model[0], tmp_path_factory.mktemp("two"), "--gateways", "2", environment=KEYS
    ) as deployment:
        yield deployment.wait_until_ready()
        assert deployment.stop() == 0, deployment.output
        deployment.assert_nothing_is_left()


def connect(shared: Deployment, key: str = "alice") -> openai.OpenAI:
    """A client with its own connections, which the kernel assigns to one of the gateways."""
    return openai.OpenAI(base_url=f"{shared.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(shared: Deployment) -> Iterator[openai.OpenAI]:
    with connect(shared) as client:
        yield client


@pytest.fixture(scope="module")
def asked(client: openai.OpenAI) -> dict[str, Any]:
    (served,) = client.models.list().data
    return {"model": served.id, "max_output_tokens": 12, "temperature": 0}


def test_every_gateway_finds_a_stored_response(
    shared: Deployment, client: openai.OpenAI, asked: dict[str, Any]
) -> None:
    response = client.responses.create(**asked, input=QUESTION)
    assert response.usage is not None
    for _ in range(16):  # connections: all at one gateway is as likely as 1 in 32,768
        with connect(shared) as other:
            assert other.responses.retrieve(response.id) == response
    with connect(shared, "bob") as other, pytest.raises(openai.NotFoundError):
        other.responses.retrieve(response.id)


def test_a_stream_ends_with_the_response(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    whole = client.responses.create(**asked, input=QUESTION)
    with client.responses.stream(**asked, input=QUESTION) as stream:
        events = list(stream)
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == last.response.output_text == whole.output_text != ""
    assert client.responses.retrieve(last.response.id).status == whole.status


def test_a_conversation_is_continued_through_any_gateway(
    shared: Deployment, client: openai.OpenAI, asked: dict[str, Any]
) -> None:
    first = client.responses.create(**asked, input=QUESTION)
    history: Any = [
        {"role": "user", "content": QUESTION},
        *(item.to_dict() for item in first.output),
        {"role": "user", "content": "And C418?"},
    ]
    as_items = client.responses.create(**asked, input=history, store=False)
    for _ in range(4):
        with connect(shared) as other:
            second = other.responses.create(
                **asked, input="And C418?", previous_response_id=first.id
            )
            items = other.responses.input_items.list(second.id).data
        assert second.output_text == as_items.output_text
        assert len(items) == 1


def test_a_deleted_response_is_gone(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    response = client.responses.create(**asked, input=QUESTION)
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_a_background_response_is_completed_or_cancelled_through_any_gateway(
    shared: Deployment, client: openai.OpenAI, asked: dict[str, Any]
) -> None:
    done = client.responses.create(**asked, input=QUESTION, background=True)
    assert done.status == "queued"
    wait_until(lambda: client.responses.retrieve(done.id).status in ("completed", "incomplete"))
    endless: Any = {**asked, "max_output_tokens": 3900}
    for _ in range(4):
        with connect(shared) as one, connect(shared) as other:
            queued = one.responses.create(**endless, input=QUESTION, background=True)
            cancelled = other.responses.cancel(queued.id)
            if cancelled.status != "cancelled":  # the answer has ended by itself
                assert cancelled.status in ("completed", "incomplete")
            assert other.responses.retrieve(queued.id).status == cancelled.status
