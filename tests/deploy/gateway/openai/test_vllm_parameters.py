"""Parameters of vLLM's API: usage in every chunk, token ids, special tokens, truncation, suffix."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from longshore.deploy.gateway.text.infilling import can_infill, infilling_prompt
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer, load_tokenizer
from longshore.deploy.model.embedding import EmbeddingModel
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import AddRequest
from tests.deploy.gateway.conftest import PATIENCE_S, RunningGateway, StartGateway
from tests.deploy.gateway.fake_engine import FakeEngine, scored_echo
from tests.deploy.gateway.http.test_exchange import chunks_of, error_of, ids_of, say
from tests.deploy.tiny_tokenizer import BOS_ID, EOS_ID, byte_level_tokenizer, save_tokenizer

CHAT: list[dict[str, Any]] = [{"role": "user", "content": "Where?"}]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "p"}, CHATS: {"messages": CHAT}}


async def answer_to(gateway: RunningGateway, path: str, **parameters: Any) -> dict[str, Any]:
    answer = await gateway.post(path, BODIES[path] | parameters)
    assert answer.status == 200, answer.body
    content: dict[str, Any] = json.loads(answer.body)
    return content


async def chunks_to(gateway: RunningGateway, path: str, **parameters: Any) -> list[dict[str, Any]]:
    return chunks_of(await gateway.post(path, BODIES[path] | {"stream": True} | parameters))


def texts_of(path: str, content: dict[str, Any]) -> list[str]:
    if path == COMPLETIONS:
        return [choice["text"] for choice in content["choices"]]
    return [choice["message"]["content"] for choice in content["choices"]]


def sends(*token_ids: int, reason: FinishReason = FinishReason.STOPPED) -> Any:
    def script(engine: FakeEngine, request: AddRequest) -> None:
        for token_id in token_ids[:-1]:
            engine.send_tokens(request, [token_id])
        engine.finish(request, reason, num_output_tokens=len(token_ids), token_ids=token_ids[-1:])

    return script


@pytest.mark.parametrize("path", BODIES)
async def test_every_chunk_has_the_usage_so_far(start_gateway: StartGateway, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with start_gateway(say("the berth")) as gateway:
        *chunks, last = await chunks_to(gateway, path, stream_options=options)
        counted = [chunk["usage"] for chunk in chunks if chunk["usage"] is not None]
        assert counted
        numbers = [usage["completion_tokens"] for usage in counted]
        assert numbers == sorted(numbers)
        total = last["usage"]
        assert counted[-1] == {key: total[key] for key in total if key.endswith("_tokens")}
        assert all(usage["prompt_tokens"] == total["prompt_tokens"] for usage in counted)
        # Alone it has no effect, as in vLLM.
        options = {"continuous_usage_stats": True}
        for chunk in await chunks_to(gateway, path, stream_options=options):
            assert "usage" not in chunk


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("n", [1, 2])
async def test_token_ids_of_prompt_and_answer(
    start_gateway: StartGateway, path: str, n: int
) -> None:
    async with start_gateway(say("a 🚢")) as gateway:
        whole = await answer_to(gateway, path, return_token_ids=True, n=n)
        sent = gateway.engine.requests[0].prompt_token_ids.tolist()
        chunks = await chunks_to(gateway, path, return_token_ids=True, n=n)
        assert "token_ids" not in (await answer_to(gateway, path))["choices"][0]
    token_ids = [*ids_of("a 🚢"), EOS_ID]
    assert [choice["token_ids"] for choice in whole["choices"]] == [token_ids] * n
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index in range(n):
        parts = [c.get("token_ids", []) for c in choices if c["index"] == index]
        assert [i for part in parts for i in part] == token_ids
    if path == COMPLETIONS:
        assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [sent] * n
        assert [c["prompt_token_ids"] for c in choices if "prompt_token_ids" in c] == [sent] * n
    else:
        assert whole["prompt_token_ids"] == sent
        assert [c["prompt_token_ids"] for c in chunks if "prompt_token_ids" in c] == [sent]


@pytest.mark.parametrize("path", BODIES)
async def test_tokens_of_log_probabilities_are_named_by_their_ids(
    start_gateway: StartGateway, path: str
) -> None:
    wanted: Any = 1 if path == COMPLETIONS else True
    async with start_gateway(scored_echo) as gateway:
        answer = await answer_to(
            gateway, path, logprobs=wanted, max_tokens=1, return_tokens_as_token_ids=True
        )
        logprobs = answer["choices"][0]["logprobs"]
        first = gateway.engine.requests[0].prompt_token_ids.tolist()[0]
    tokens = logprobs["tokens"] if path == COMPLETIONS else [logprobs["content"][0]["token"]]
    assert tokens == [f"token_id:{first}"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_special_tokens_are_shown_on_request(
    start_gateway: StartGateway, path: str, is_stream: bool
) -> None:
    async def text(**parameters: Any) -> str:
        if not is_stream:
            return texts_of(path, await answer_to(gateway, path, **parameters))[0]
        chunks = await chunks_to(gateway, path, **parameters)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        if path == COMPLETIONS:
            return "".join(choice["text"] for choice in choices)
        return "".join(choice["delta"].get("content", "") for choice in choices)

    script = sends(*ids_of("a"), BOS_ID, BOS_ID, *ids_of("b"), EOS_ID)
    async with start_gateway(script) as gateway:
        assert await text() == "ab"
        assert await text(skip_special_tokens=True) == "ab"
        for spaces in (True, False):
            shown = await text(skip_special_tokens=False, spaces_between_special_tokens=spaces)
            assert shown == "a<s><s>b"
        assert await text(skip_special_tokens=False, include_stop_str_in_output=True) == (
            "a<s><s>b</s>"
        )


async def test_a_stop_token_is_part_of_the_text_on_request(start_gateway: StartGateway) -> None:
    async with start_gateway(sends(*ids_of("ab!"))) as gateway:
        stops = {"stop_token_ids": ids_of("!")}
        assert texts_of(COMPLETIONS, await answer_to(gateway, COMPLETIONS, **stops)) == ["ab"]
        shown = await answer_to(gateway, COMPLETIONS, **stops, include_stop_str_in_output=True)
        assert texts_of(COMPLETIONS, shown) == ["ab!"]


@pytest.mark.parametrize("path", [*BODIES, "/v1/embeddings"])
async def test_the_body_may_have_the_request_id(start_gateway: StartGateway, path: str) -> None:
    body = BODIES.get(path, {"input": "p"}) | {"request_id": "crane-7"}
    async with start_gateway(embedding=EmbeddingModel(4)) as gateway:
        if path == "/v1/embeddings":
            gateway.engine.script = sends(reason=FinishReason.ERROR)
        answer = await gateway.post(path, body)
        assert answer.headers["x-request-id"] == "crane-7"
        assert "-crane-7-" in gateway.engine.requests[-1].request_id
        header = {"x-request-id": "ship-1"}
        answer = await gateway.client.request(
            "POST", path, json.dumps(body).encode(), timeout_s=PATIENCE_S, headers=header
        )
        assert answer.headers["x-request-id"] == "ship-1"
        for bad in ("", "two words", "x" * 129):
            answer = await gateway.post(path, body | {"request_id": bad})
            assert (answer.status, error_of(answer)["param"]) == (400, "request_id")


async def sent(gateway: RunningGateway, path: str, **parameters: Any) -> list[int]:
    await answer_to(gateway, path, max_tokens=1, **parameters)
    prompt: list[int] = gateway.engine.requests[-1].prompt_token_ids.tolist()
    return prompt


@pytest.mark.parametrize("path", BODIES)
async def test_prompts_are_truncated_on_request(start_gateway: StartGateway, path: str) -> None:
    async with start_gateway() as gateway:
        whole = await sent(gateway, path, add_special_tokens=False, **long_prompt(path, 30))
        for number in (1, 5, len(whole), 63):
            cut = await sent(gateway, path, truncate_prompt_tokens=number, **long_prompt(path, 30))
            assert cut == whole[-number:]
            cut = await sent(
                gateway,
                path,
                truncate_prompt_tokens=number,
                truncation_side="right",
                **long_prompt(path, 30),
            )
            assert cut == whole[:number]
        longer = long_prompt(path, 3000)
        assert len(await sent(gateway, path, truncate_prompt_tokens=-1, **longer)) == 63
        answer = await gateway.post(
            path, {**longer, "truncate_prompt_tokens": -1, "max_tokens": 20}
        )
        assert answer.status == 200
        assert len(gateway.engine.requests[-1].prompt_token_ids) == 64 - 20
        for number in (0, -2, 64):
            body = {**longer, "truncate_prompt_tokens": number}
            answer = await gateway.post(path, body)
            assert (answer.status, error_of(answer)["param"]) == (400, "truncate_prompt_tokens")
        answer = await gateway.post(path, {**longer, "truncation_side": "left"})
        assert error_of(answer)["param"] == "truncation_side"


def long_prompt(path: str, length: int) -> dict[str, Any]:
    text = "".join("abcdefghij"[i % 10] for i in range(length))
    if path == COMPLETIONS:
        return {"prompt": text}
    return {"messages": [{"role": "user", "content": text}]}


async def test_token_ids_and_echoes_are_truncated_too(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        prompt = list(range(5, 20))
        assert (
            await sent(gateway, COMPLETIONS, prompt=prompt, truncate_prompt_tokens=3)
            == (prompt[-3:])
        )
        answer = await answer_to(
            gateway,
            COMPLETIONS,
            prompt="the berth",
            echo=True,
            truncate_prompt_tokens=3,
            max_tokens=0,
        )
        assert texts_of(COMPLETIONS, answer) == ["erth"]


async def test_special_tokens_are_added_on_request(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    save_tokenizer(tmp_path)
    tokenizer = byte_level_tokenizer()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS_ID)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    async with start_gateway(tokenizer=False) as gateway:
        assert await sent(gateway, COMPLETIONS) == [BOS_ID, *ids_of("p")]
        assert await sent(gateway, COMPLETIONS, add_special_tokens=False) == ids_of("p")
        chat = await sent(gateway, CHATS)  # its template adds one
        assert await sent(gateway, CHATS, add_special_tokens=True) == [BOS_ID, *chat]
        cut = await sent(gateway, COMPLETIONS, prompt="the berth", truncate_prompt_tokens=3)
        assert cut == [BOS_ID, *ids_of("rth")]  # kept, as in transformers


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_chat_echoes_its_last_message(start_gateway: StartGateway, is_stream: bool) -> None:
    begun = [*CHAT, {"role": "assistant", "content": [{"type": "text", "text": "Berth "}]}]

    async def texts(**parameters: Any) -> list[str]:
        if not is_stream:
            return texts_of(CHATS, await answer_to(gateway, CHATS, n=2, **parameters))
        choices = [
            choice
            for chunk in await chunks_to(gateway, CHATS, n=2, **parameters)
            for choice in chunk["choices"]
        ]
        return [
            "".join(c["delta"].get("content", "") for c in choices if c["index"] == index)
            for index in range(2)
        ]

    async with start_gateway(say("seven")) as gateway:
        assert await texts(messages=begun, echo=True, continue_final_message=True) == (
            ["Berth seven"] * 2
        )
        assert await texts(messages=begun, continue_final_message=True) == ["seven"] * 2
        assert await texts(echo=True) == ["seven"] * 2  # the last message is the user's
        assert await texts(echo=True, add_generation_prompt=False) == ["Where?seven"] * 2


@pytest.mark.parametrize(
    ("markers", "expected"),
    [
        (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), "{0}def a{1}end{2}"),
        (
            ("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),
            "{0}def a{1}end{2}",
        ),
        (("[PREFIX]", "[SUFFIX]"), "{1}end{0}def a"),
    ],
)
def test_the_middle_is_filled_in_the_order_of_the_family(
    markers: tuple[str, ...], expected: str
) -> None:
    plain = byte_level_tokenizer()
    template: Any = None
    assert not can_infill(ModelTokenizer(plain, template))
    plain.add_special_tokens(list(markers))
    tokenizer = ModelTokenizer(plain, template)
    assert can_infill(tokenizer)
    prompt = infilling_prompt(tokenizer, "def a", "end", with_special=True)
    assert tokenizer.decode(prompt) == expected.format(*markers)


async def test_a_suffix_needs_a_model_for_it(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        answer = await gateway.post(COMPLETIONS, {"prompt": "p", "suffix": "q"})
        assert (answer.status, error_of(answer)["param"]) == (400, "suffix")
        assert "fim_suffix" in error_of(answer)["message"]
        assert await sent(gateway, COMPLETIONS, suffix="") == ids_of("p")


async def test_a_suffix_is_part_of_the_prompt(start_gateway: StartGateway, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    with_markers = byte_level_tokenizer()
    with_markers.add_special_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>"])
    with_markers.save(str(tmp_path / "tokenizer.json"))
    async with start_gateway(tokenizer=False) as gateway:
        prompt = await sent(gateway, COMPLETIONS, suffix="q")
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer is not None
        assert tokenizer.decode(prompt) == "<fim_prefix>p<fim_suffix>q<fim_middle>"
        for changes, param in (
            ({"prompt": [5]}, "suffix"),
            ({"echo": True}, "echo"),
            ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
            ({"suffix": "x" * 64}, "prompt"),  # together they do not fit
        ):
            answer = await gateway.post(COMPLETIONS, {"prompt": "p", "suffix": "q"} | changes)
            assert (answer.status, error_of(answer)["param"]) == (400, param)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("store", True),
        ("service_tier", "flex"),
        ("prediction", {"type": "content", "content": "x"}),
    ],
)
async def test_what_does_not_change_the_answer_is_ignored_and_named(
    start_gateway: StartGateway, name: str, value: Any
) -> None:
    async with start_gateway() as gateway:
        answer = await gateway.post(CHATS, {"messages": CHAT, name: value})
        assert answer.status == 200
        assert answer.headers["x-longshore-ignored-fields"] == name
    async with start_gateway(strict_requests=True) as gateway:
        answer = await gateway.post(CHATS, {"messages": CHAT, name: value})
        assert (answer.status, error_of(answer)["param"]) == (400, name)
        assert error_of(answer)["code"] == "unsupported_parameter"
