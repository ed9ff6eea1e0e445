"""/tokenize and /detokenize give the tokens that the generating endpoints would send."""

import json
from typing import Any

import pytest

from longshore.deploy.gateway.text.tokenizer import SLICE_CHARACTERS
from longshore.deploy.requests.chat_messages import MAX_MESSAGES
from tests.deploy.gateway.conftest import RunningGateway, StartGateway
from tests.deploy.gateway.http.test_exchange import error_of
from tests.deploy.tiny_tokenizer import BOS_ID

CHAT = [{"role": "user", "content": "the 🚢?"}]


async def tokenize(gateway: RunningGateway, **body: Any) -> dict[str, Any]:
    answer = await gateway.post("/tokenize", body)
    assert answer.status == 200, answer.body
    content: dict[str, Any] = json.loads(answer.body)
    return content


async def test_ids_are_those_that_a_generation_would_send(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        text = await tokenize(gateway, prompt="the 🚢", model="tiny")
        chat = await tokenize(gateway, messages=CHAT)
        await gateway.post("/v1/completions", {"prompt": "the 🚢", "max_tokens": 1})
        await gateway.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1})
        sent = [request.prompt_token_ids.tolist() for request in gateway.engine.requests]
        assert [text["tokens"], chat["tokens"]] == sent
        assert text["count"] == len(sent[0])
        assert text["max_model_len"] == 64
        assert text["token_strs"] is None
        assert chat["tokens"][0] == BOS_ID  # from the template; a second one only on request
        entries = await tokenize(gateway, prompt="x the", return_token_strs=True)
        assert entries["token_strs"] == ["x", "Ġthe"]  # as in the vocabulary


async def test_detokenize_undoes_it(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        for text in ("the 🚢 there", "", "x" * 500):
            tokens = (await tokenize(gateway, prompt=text, add_special_tokens=False))["tokens"]
            answer = await gateway.post("/detokenize", {"tokens": tokens})
            assert json.loads(answer.body) == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/tokenize", {}, "prompt", "either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt", "either"),
        ("/tokenize", {"messages": []}, "messages", "empty"),
        ("/tokenize", {"prompt": 5}, "prompt", "Expected `str"),
        ("/tokenize", {"messages": CHAT, "functions": [{}]}, "functions", "not supported"),
        ("/detokenize", {}, "tokens", "required"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "-1"),
        ("/detokenize", {"tokens": [2**31]}, "tokens", "2147483648"),
        ("/detokenize", {"tokens": "x"}, "tokens", "Expected `array`"),
    ],
)
async def test_what_makes_no_sense_is_rejected_by_name(
    start_gateway: StartGateway, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    async with start_gateway() as gateway:
        answer = await gateway.post(path, body)
        assert answer.status == 400
        assert error_of(answer)["param"] == param
        assert words in error_of(answer)["message"]


async def test_another_model_and_a_broken_body_are_rejected(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        other = await gateway.post("/tokenize", {"prompt": "a", "model": "large"})
        assert other.status == 404
        assert (await gateway.post("/tokenize", b"{")).status == 400


async def test_a_model_without_a_tokenizer_has_no_text(start_gateway: StartGateway) -> None:
    async with start_gateway(tokenizer=False) as gateway:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            answer = await gateway.post(path, body)
            assert answer.status == 400
            assert "needs a tokenizer, but the model folder has none" in error_of(answer)["message"]


@pytest.mark.parametrize("messages", [False, True])
async def test_a_text_that_the_model_can_never_take_is_rejected(
    start_gateway: StartGateway, messages: bool
) -> None:
    text = "x " * SLICE_CHARACTERS
    body = {"messages": [{"role": "user", "content": text}]} if messages else {"prompt": text}
    async with start_gateway(max_body_bytes=1 << 20) as gateway:
        answer = await gateway.post("/tokenize", body)
        assert answer.status == 400
        assert error_of(answer)["code"] == "context_length_exceeded"
        assert error_of(answer)["param"] == next(iter(body))


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
async def test_more_messages_than_any_chat_has_are_rejected(
    start_gateway: StartGateway, path: str
) -> None:
    async with start_gateway(max_body_bytes=1 << 20) as gateway:
        answer = await gateway.post(path, {"messages": CHAT * (MAX_MESSAGES + 1)})
        assert answer.status == 400
        assert error_of(answer)["param"] == "messages"
        assert "at most 16384 are allowed" in error_of(answer)["message"]
