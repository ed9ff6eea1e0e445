"""A constraint of a model that reasons holds after its reasoning, in every dialect."""

import json
from pathlib import Path
from typing import Any

import pytest

from longshore.deploy.gateway.text.chat_template import ChatTemplate
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from longshore.deploy.parsers.gemma import GemmaReasoning
from longshore.deploy.parsers.harmony import HarmonyReasoning
from longshore.deploy.parsers.parser import ReasoningParser
from longshore.deploy.parsers.think import ThinkReasoning
from longshore.deploy.requests.thinking import reasoning_before
from longshore.protocol.requests import FreeText
from tests.deploy.gateway.api.test_thinking_budget import tagged
from tests.deploy.gateway.conftest import StartGateway
from tests.deploy.gateway.http.test_exchange import say
from tests.deploy.tiny_tokenizer import save_tokenizer

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
SCHEMA: dict[str, Any] = {"type": "object"}
FORMAT: dict[str, Any] = {"type": "json_schema", "name": "n", "schema": SCHEMA}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": HI,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    },
    "/v1/responses": {"input": HI, "text": {"format": FORMAT}},
    "/v1/messages": {
        "model": "tiny",
        "max_tokens": 99,
        "messages": HI,
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
}
TOOLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "tools": [{"type": "function", "function": {"name": "now"}}],
        "tool_choice": "required",
    },
    "/v1/responses": {"tools": [{"type": "function", "name": "now"}], "tool_choice": "required"},
    "/v1/messages": {
        "tools": [{"name": "now", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any"},
    },
}
TEMPLATE = "{{ tools | length if tools }}{{ messages[0].content }}"
TAGS = ("<think>", "</think>")


def kinds_of(path: str, body: bytes) -> list[str]:
    """What the answer consists of."""
    answer = json.loads(body)
    if path == "/v1/messages":
        return [block["type"] for block in answer["content"]]
    if path == "/v1/responses":
        return [item["type"] for item in answer["output"]]
    message = answer["choices"][0]["message"]
    return [name for name in ("reasoning", "content", "tool_calls") if message.get(name)]


@pytest.mark.parametrize("is_call", [False, True])
@pytest.mark.parametrize(
    ("end", "text", "has_begin", "num_kinds"),
    [
        ("<think>\n", "Hm.</think>\n\n", False, 2),
        ("", "<think>Hm.</think>", True, 2),
        ("<think>\n\n</think>\n\n", "", None, 1),
    ],
)
async def test_a_constraint_holds_after_the_reasoning_in_every_dialect(
    start_gateway: StartGateway,
    tmp_path: Path,
    end: str,
    text: str,
    has_begin: bool | None,
    num_kinds: int,
    is_call: bool,
) -> None:
    tokenizer = tagged(*TAGS)
    save_tokenizer(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (template := tmp_path / "template").write_text(TEMPLATE + end)
    settings: Any = {"reasoning_parser": "think", "chat_template": str(template)}
    text += '[{"name": "now", "parameters": {}}]' if is_call else '{"a": 1}'
    async with start_gateway(say(text), tokenizer=False, **settings) as gateway:
        for path, body in BODIES.items():
            asked = {**body, **(TOOLS[path] if is_call else {})}
            answer = await gateway.post(path, asked)
            assert answer.status == 200, answer.body
            kinds = kinds_of(path, answer.body)
            assert len(kinds) == num_kinds
            assert ("call" in kinds[-1] or "tool" in kinds[-1]) is is_call
            constraint = gateway.engine.requests[-1].options.structured_output
            assert constraint is not None
            marks = ((tokenizer.token_to_id("</think>"),),)
            begin = tokenizer.token_to_id("<think>") if has_begin else None
            assert constraint.free == (None if has_begin is None else FreeText(marks, begin))


@pytest.mark.parametrize("parser", ["hermes", "llama"])
async def test_calls_are_constrained_after_the_reasoning(
    start_gateway: StartGateway, tmp_path: Path, parser: str
) -> None:
    """Markers of calls mean nothing in it; where calls have no marker, the answer begins after
    it."""
    tokenizer = tagged(*TAGS, "<tool_call>")
    save_tokenizer(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (template := tmp_path / "template").write_text(TEMPLATE + "<think>")
    settings: Any = {"tool_call_parser": parser, "chat_template": str(template)}
    tool = {"type": "function", "function": {"name": "now", "strict": True}}
    ids = {tag: ((tokenizer.token_to_id(tag),),) for tag in ("</think>", "<tool_call>")}
    async with start_gateway(
        say("x"), tokenizer=False, reasoning_parser="think", **settings
    ) as gateway:
        body = {"messages": HI, "tools": [tool]}
        assert (await gateway.post("/v1/chat/completions", body)).status == 200
        constraint = gateway.engine.requests[-1].options.structured_output
    assert constraint is not None
    reasoning = FreeText(ids["</think>"])
    if parser == "llama":
        assert constraint.free == reasoning
    else:
        assert constraint.free == FreeText(ids["<tool_call>"], repeats=True, reasoning=reasoning)


async def test_tags_that_are_no_tokens_do_not_delay_the_constraint(
    start_gateway: StartGateway,
) -> None:
    async with start_gateway(say("{}"), reasoning_parser="think") as gateway:
        path = "/v1/chat/completions"
        answer = await gateway.post(path, BODIES[path])
        assert json.loads(answer.body)["choices"][0]["message"]["content"] == "{}"
        constraint = gateway.engine.requests[-1].options.structured_output
        assert constraint is not None
        assert constraint.free is None


@pytest.mark.parametrize(
    ("parser", "prompt", "begin", "marks"),
    [
        (ThinkReasoning(), "a<think>", None, ["</think>"]),
        (GemmaReasoning(), "a", "<|channel>", ["<channel|>"]),
        (GemmaReasoning(), "a<|channel>thought\n", None, ["<channel|>"]),
        (
            HarmonyReasoning(),
            "<|start|>assistant",
            None,
            ["<|channel|>final<|message|>", "<|channel|>final <|constrain|>json<|message|>"],
        ),
    ],
)
def test_every_parser_knows_where_answers_begin(
    parser: ReasoningParser, prompt: str, begin: str | None, marks: list[str]
) -> None:
    tags = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|channel>", "<channel|>")
    tokenizer = tagged(*TAGS, *tags)
    model = ModelTokenizer(tokenizer, ChatTemplate("", {}))
    ids = {text: tuple(tokenizer.encode(text).ids) for text in (prompt, *marks, begin or "a")}
    free = reasoning_before(parser, model, ids[prompt], vocab_size=1000)
    first = None if begin is None else ids[begin][0]
    assert free == FreeText(tuple(ids[mark] for mark in marks), first)
