"""A thinking budget, as every dialect says it, reaches the engine with the tags of the model."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from longshore.deploy.gateway.text.chat_template import ChatTemplate
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from longshore.deploy.parsers.harmony import HarmonyReasoning
from longshore.deploy.parsers.think import ThinkReasoning
from longshore.deploy.requests.thinking import thinking_budget
from longshore.protocol.sampling import ThinkingBudget
from tests.deploy.gateway.conftest import StartGateway
from tests.deploy.gateway.http.test_exchange import error_of, say
from tests.deploy.tiny_tokenizer import byte_level_tokenizer, save_tokenizer

HEADER = "x-longshore-ignored-fields"
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
MESSAGES: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": HI}
DIALECTS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "p"}, "thinking_token_budget"),
    ("/v1/chat/completions", {"messages": HI}, "thinking_token_budget"),
    ("/v1/responses", {"input": HI}, "thinking_token_budget"),
    ("/v1/messages", MESSAGES, "thinking.budget_tokens"),
]


def with_budget(body: dict[str, Any], name: str, budget: Any) -> dict[str, Any]:
    if name == "thinking.budget_tokens":
        return {**body, "thinking": {"type": "enabled", "budget_tokens": budget}}
    return {**body, name: budget}


def tagged(*tags: str) -> Any:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken(tag, special=False) for tag in tags])
    return tokenizer


async def test_every_dialect_has_a_budget(start_gateway: StartGateway, tmp_path: Path) -> None:
    tokenizer = tagged("<think>", "</think>")
    save_tokenizer(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    begin, end = (tokenizer.token_to_id(tag) for tag in ("<think>", "</think>"))
    settings: Any = {"reasoning_parser": "think", "runtime_dir": str(tmp_path)}
    async with start_gateway(say("x"), tokenizer=False, **settings) as gateway:
        for path, body, name in DIALECTS:
            answer = await gateway.post(path, with_budget(body, name, 7))
            assert (answer.status, answer.headers.get(HEADER)) == (200, None), answer.body
            asked = gateway.engine.requests[-1].sampling
            assert asked.thinking == ThinkingBudget(7, (begin,), (end,), (end,))
            for none in (None, -1):
                assert (await gateway.post(path, with_budget(body, name, none))).status == 200
                assert gateway.engine.requests[-1].sampling.thinking is None
            answer = await gateway.post(path, with_budget(body, name, -2))
            assert answer.status == 400
            assert "must be at least 0" in json.loads(answer.body)["error"]["message"]
        beams = {"prompt": "p", "use_beam_search": True, "thinking_token_budget": 7}
        assert error_of(await gateway.post("/v1/completions", beams))["param"] == (
            "thinking_token_budget"
        )


@pytest.mark.parametrize("parser", ["none", "think"])
async def test_a_budget_that_the_model_cannot_have_is_named(
    start_gateway: StartGateway, tmp_path: Path, parser: str
) -> None:
    """It does not reason, or its tags are no tokens of their own."""
    settings: Any = {"reasoning_parser": parser, "runtime_dir": str(tmp_path)}
    async with start_gateway(say("x"), **settings) as gateway:
        for path, body, name in DIALECTS:
            answer = await gateway.post(path, with_budget(body, name, 7))
            assert (answer.status, answer.headers[HEADER]) == (200, name)
            assert gateway.engine.requests[-1].sampling.thinking is None


def test_the_tags_of_gpt_oss_lead_to_the_final_message() -> None:
    tags = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")
    tokenizer = ModelTokenizer(tagged(*tags), ChatTemplate("", {}))
    budget = thinking_budget(5, HarmonyReasoning(), tokenizer, vocab_size=1000)
    assert budget is not None
    assert tokenizer.decode(budget.begin_token_ids) == "<|channel|>analysis<|message|>"
    assert tokenizer.decode(budget.mark_token_ids) == "<|end|>"
    end = "<|end|><|start|>assistant<|channel|>final<|message|>"
    assert tokenizer.decode(budget.end_token_ids) == end
    assert thinking_budget(5, HarmonyReasoning(), tokenizer, vocab_size=100) is None
    assert thinking_budget(5, ThinkReasoning(), tokenizer, vocab_size=1000) is None
    assert thinking_budget(5, None, tokenizer, vocab_size=1000) is None
