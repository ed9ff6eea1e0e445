"""The official client of Anthropic's API with a real server."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from longshore.deploy.gateway.anthropic.requests import MessagesRequest
from longshore.deploy.gateway.api.field_rules import FIELD_RULES
from longshore.deploy.model.demo import DEMO_MODEL_DIR
from tests.conftest import ROOT
from tests.integration.deployment import Deployment

anthropic = pytest.importorskip("anthropic")

ASKED: dict[str, Any] = {
    "max_tokens": 16,
    "messages": [{"role": "user", "content": "Which berth holds C417?"}],
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(DEMO_MODEL_DIR, tmp_path_factory.mktemp("demo"), num_blocks=None) as server:
        yield server.wait_until_ready()


@pytest.fixture(scope="module")
def client(demo: Deployment) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=demo.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def model() -> str:
    return DEMO_MODEL_DIR.name


def test_a_message_and_its_stream_are_the_same(client: Any, model: str) -> None:
    asked = {**ASKED, "model": model, "extra_body": {"temperature": 0}}
    message = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert message.content[0].text == text == streamed.content[0].text
    assert message.stop_reason == streamed.stop_reason
    assert message.usage.output_tokens == streamed.usage.output_tokens > 0
    assert message._request_id is not None


def test_the_count_is_what_the_answer_was_asked_with(client: Any, model: str) -> None:
    asked = {**ASKED, "model": model, "system": "Answer briefly. " * 20}
    usages = [client.messages.create(**asked).usage for _ in range(2)]
    asked.pop("max_tokens")
    count = client.messages.count_tokens(**asked).input_tokens
    for usage in usages:
        assert usage.input_tokens + usage.cache_read_input_tokens == count
    assert usages[1].cache_read_input_tokens > 0


def test_a_stop_sequence_is_named(client: Any, model: str) -> None:
    whole = (
        client.messages.create(**ASKED, model=model, extra_body={"temperature": 0}).content[0].text
    )
    stop = whole[2:4]
    cut = client.messages.create(
        **ASKED, model=model, extra_body={"temperature": 0}, stop_sequences=[stop]
    )
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in cut.content) == whole.partition(stop)[0]


def test_invalid_requests_raise_the_clients_errors(client: Any, model: str) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    with pytest.raises(anthropic.BadRequestError, match="image") as rejected:
        client.messages.create(
            model=model, max_tokens=1, messages=[{"role": "user", "content": [image]}]
        )
    assert rejected.value.request_id is not None
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(**ASKED, model=model, extra_body={"temperature": -1})
    with pytest.raises(anthropic.NotFoundError, match=model):
        client.messages.create(**ASKED, model="other")


@pytest.mark.parametrize("folder", ["types", "types.beta"])
def test_every_parameter_of_the_client_is_known(folder: str) -> None:
    params = pytest.importorskip(f"anthropic.{folder}.message_create_params")
    known = FIELD_RULES["anthropic"].keys() | set(MessagesRequest.__struct_fields__)
    assert params.MessageCreateParamsBase.__annotations__.keys() - known == set()


def test_the_example_of_docs_api_md_works(
    demo: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(
        r"```python\n(import anthropic.*?)```", (ROOT / "docs/api.md").read_text(), re.DOTALL
    )
    code = code.replace("http://127.0.0.1:8000", demo.url)
    exec(compile(code, "docs/api.md", "exec"), {})
    assert "input_tokens=" in capsys.readouterr().out
