"""Parts of a prompt that change with every request do not end the prompt's cached prefix."""

import json
import time
from typing import Any

import pytest

from longshore.deploy.gateway.api.prompt_nonces import MAX_SEARCHED_CHARACTERS, PromptNonces
from longshore.deploy.gateway.settings import GatewaySettings
from longshore.deploy.requests.chat_messages import ChatMessage
from longshore.protocol.errors import ConfigError
from longshore.protocol.pattern_cost import max_steps
from tests.deploy.gateway.conftest import RunningGateway, StartGateway
from tests.deploy.gateway.http.test_exchange import error_of

HEADER = "x-longshore-ignored-fields"
BILLING = "x-anthropic-billing-header: cc_version=2.1.50.4fa; cc_entrypoint=cli; cch={};"
RULES = "Be brief."
QUESTION = {"role": "user", "content": "Q"}


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def of_messages(*texts: str) -> tuple[str, dict[str, Any]]:
    system = [part(text) for text in texts]
    return "/v1/messages", {"system": system, "messages": [QUESTION], "max_tokens": 1}


def of_chats(*texts: str) -> tuple[str, dict[str, Any]]:
    system = {"role": "system", "content": [part(text) for text in texts]}
    return "/v1/chat/completions", {"messages": [system, QUESTION], "max_tokens": 1}


def of_responses(*texts: str) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {
        "instructions": "\n".join(texts),
        "input": "Q",
        "max_output_tokens": 1,
    }


APIS = (of_messages, of_chats, of_responses)


async def prompts(gateway: RunningGateway, *requests: tuple[str, dict[str, Any]]) -> list[str]:
    """The texts of the prompts of these requests, which are answered."""
    for path, body in requests:
        answer = await gateway.post(path, {"model": "tiny", **body})
        assert answer.status == 200, answer.body
    texts = []
    for request in gateway.engine.requests[-len(requests) :]:
        body = {"tokens": list(map(int, request.prompt_token_ids))}
        texts.append(json.loads((await gateway.post("/detokenize", body)).body)["prompt"])
    return texts


@pytest.mark.parametrize("of", APIS)
async def test_the_billing_header_of_claude_code_is_no_part_of_the_prompt_and_is_named(
    start_gateway: StartGateway, of: Any
) -> None:
    async with start_gateway() as gateway:
        first, second, plain = await prompts(
            gateway,
            of(BILLING.format("a1b2c"), RULES),
            of(BILLING.format("00000"), RULES),
            of(RULES),
        )
        assert first == second == plain
        path, body = of(BILLING.format("a1b2c"), RULES)
        answer = await gateway.post(path, {"model": "tiny", **body})
        assert answer.headers[HEADER] == "prompt.x-anthropic-billing-header"


async def test_what_only_mentions_the_header_stays(start_gateway: StartGateway) -> None:
    """A user may ask about it, and a system prompt may explain it."""
    billing = BILLING[:28]
    async with start_gateway() as gateway:
        path, body = of_messages(f"Why {billing}")
        (shown,) = await prompts(gateway, (path, body))
        assert billing in shown
        asked = {"messages": [{"role": "user", "content": billing}], "max_tokens": 1}
        (shown,) = await prompts(gateway, ("/v1/messages", asked))
        assert billing in shown


async def test_strict_requests_have_no_billing_header(start_gateway: StartGateway) -> None:
    path, body = of_chats(BILLING.format(1), RULES)
    async with start_gateway(strict_requests=True) as gateway:
        answer = await gateway.post(path, {"model": "tiny", **body})
        assert answer.status == 400
        assert "prompt.x-anthropic-billing-header" in error_of(answer)["message"]


@pytest.mark.parametrize("of", APIS)
async def test_a_setting_drops_further_texts_and_names_them(
    start_gateway: StartGateway, of: Any
) -> None:
    async with start_gateway(prompt_nonces=(r"drop:id=\d{1,3}\n?",)) as gateway:
        first, second = await prompts(gateway, of("id=7", RULES), of("id=8", RULES))
        assert first == second
        assert "id=" not in first
        path, body = of("id=7", RULES)
        answer = await gateway.post(path, {"model": "tiny", **body})
        assert answer.headers[HEADER] == "prompt.id??d?1?3??n?"


@pytest.mark.parametrize("of", APIS)
async def test_a_setting_moves_texts_to_the_end_of_the_prompt(
    start_gateway: StartGateway, of: Any
) -> None:
    async with start_gateway(prompt_nonces=("move:Now: [0-9:]{1,5}",)) as gateway:
        first, second = await prompts(gateway, of(f"{RULES} Now: 1:1"), of(f"{RULES} Now: 2:2"))
        assert "Q\nNow: 1:1" in first
        assert first == second.replace("2:2", "1:1")
        assert first.index("Now") > first.index("[user]")
        path, body = of(f"{RULES} Now: 1:1")
        assert HEADER not in (await gateway.post(path, {"model": "tiny", **body})).headers


async def test_a_moved_text_is_in_no_answer_that_is_to_be_continued(
    start_gateway: StartGateway,
) -> None:
    path, body = of_messages("Now: 1", RULES)
    body["messages"] = [QUESTION, {"role": "assistant", "content": "A"}]
    async with start_gateway(prompt_nonces=("move:Now: [0-9]{1,5}",)) as gateway:
        (shown,) = await prompts(gateway, (path, body))
        assert "Q\nNow: 1" in shown
        assert shown.endswith("A")


async def test_tokens_are_counted_alike(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        counts = set()
        for texts in ([BILLING.format(1), RULES], [RULES]):
            _, body = of_messages(*texts)
            del body["max_tokens"]
            answer = await gateway.post("/v1/messages/count_tokens", {"model": "tiny", **body})
            counts.add(answer.body)
        assert len(counts) == 1


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("Now: 1", "is not drop:REGEX or move:REGEX"),
        ("keep:x", "is not drop:REGEX or move:REGEX"),
        ("drop:(", "invalid regular expression"),
        ("move:x{0,9}", "matches the empty text"),
        ("drop:(a+)+b", "repeats something without a limit; a text"),
        ("drop:x[^;]*", "repeats something without a limit"),
        ("drop:(a|a){1,30}b", "repeats a choice more than 16 times"),
        ("drop:(?:[ab]{1,9}c?){1,9}d", r"makes \d+ steps possible"),
        (r"drop:(a{1,9})\1", "refers to a group of its own"),
        (f"drop:{'(' * 5000}", "invalid regular expression"),
    ],
)
def test_a_setting_that_cannot_work_is_rejected(given: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        GatewaySettings(prompt_nonces=(given,))


@pytest.mark.parametrize(
    ("pattern", "num_steps"),
    [
        ("abc", 4),
        (r"The time is [0-9:]{4,8}\.", 40),
        ("cch=[^;]{1,99}+;", 206),
        ("(Mon|Tue|Wed)[a-z]{0,5}, ", 40),
        ("(?:x[0-9a-f]{8}-){1,3}y", 96),
    ],
)
def test_the_steps_of_useful_patterns_have_a_small_bound(pattern: str, num_steps: int) -> None:
    assert len(pattern) / 2 < max_steps(pattern) <= num_steps
    assert PromptNonces((f"drop:{pattern}",))


def test_all_patterns_together_have_a_bound() -> None:
    with pytest.raises(ConfigError, match="for all patterns together"):
        PromptNonces([f"drop:{letter}[^;]{{1,150}};" for letter in "abc"])


def system(text: str) -> ChatMessage:
    return ChatMessage("system", text)


@pytest.mark.parametrize(
    "pattern", ["a{1,300}b", "(?:a|a){1,6}b", "(?:aa?){1,6}b", "a{1,14}a{1,14}b", "[ab]{1,9}?a{8}c"]
)
def test_a_hostile_text_takes_a_bounded_time(pattern: str) -> None:
    """These patterns try all ways to match at each character of the text."""
    nonces = PromptNonces((f"drop:{pattern}",))
    text = "a" * (4 << 20)
    began = time.process_time()
    assert nonces.settle([system(text), system(text)]) == [system(text), system(text)]
    assert time.process_time() - began < 2  # some ten times what it takes


def test_nonces_are_found_in_the_beginning_of_system_messages() -> None:
    nonces = PromptNonces(("drop:id=[0-9]{1,3}",))
    before, after = "x" * (MAX_SEARCHED_CHARACTERS - 100), "y" * 200
    settled = nonces.settle([system(f"{before}id=1{after}id=2"), system("id=3")])
    assert settled == [system(f"{before}{after}id=2"), system("id=3")]
    # One that may go on behind the limit stays as a whole.
    at_limit = f"{'x' * (MAX_SEARCHED_CHARACTERS - 4)}id=123"
    assert nonces.settle([system(at_limit)]) == [system(at_limit)]
