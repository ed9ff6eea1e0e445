"""Structured output through a real server: answers of the official client follow their constraint,
and answers without one stay as they are."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from longshore import LLM, SamplingParams, StructuredOutputsParams
from longshore.deploy.llm.outputs import RequestOutput
from longshore.deploy.model.demo import DEMO_MODEL_DIR
from tests.integration.conftest import StartDeployment
from tests.integration.deployment import Deployment

CHAT: Any = [{"role": "user", "content": "Tell me a story about a bird."}]
MAX_TOKENS = 120


class Order(BaseModel):
    size: Literal["small", "large"]
    count: int = Field(ge=0, le=99)
    paid: bool


SCHEMAS: list[dict[str, Any]] = [
    Order.model_json_schema(),
    {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}, "maxItems": 3},
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "inner": {"type": "array", "items": {"enum": ["x", None, 3]}, "maxItems": 2},
        },
        "required": ["name"],
        "additionalProperties": False,
    },
    {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"const": "fixed text"}]},
]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(DEMO_MODEL_DIR, tmp_path_factory.mktemp("run")) as own:
        yield own.wait_until_ready()
        assert own.stop() == 0, own.output
        own.assert_nothing_is_left()


def client_of(deployment: Deployment) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(deployment: Deployment) -> Iterator[openai.OpenAI]:
    with client_of(deployment) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def of_schema(schema: dict[str, Any]) -> Any:
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }


def test_parse_gives_an_object_of_the_class(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(
        model=model, messages=CHAT, response_format=Order, max_tokens=MAX_TOKENS, seed=1
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Order)


@pytest.mark.req("FEA-01")
@pytest.mark.parametrize("schema", SCHEMAS, ids=["object", "array", "nested", "any of"])
def test_every_answer_that_stopped_conforms_to_its_schema(
    schema: dict[str, Any], client: openai.OpenAI, model: str
) -> None:
    asked: dict[str, Any] = {
        "model": model,
        "messages": CHAT,
        "response_format": of_schema(schema),
        "max_tokens": MAX_TOKENS,
        "temperature": 1.2,
        "n": 6,
    }
    texts = []
    for seed in (3, 3, 4):
        choices = client.chat.completions.create(seed=seed, **asked).choices
        stopped = [choice for choice in choices if choice.finish_reason == "stop"]
        assert len(stopped) >= 3
        for choice in stopped:
            jsonschema.validate(json.loads(choice.message.content or ""), schema)
        texts.append([choice.message.content for choice in choices])
    assert texts[0] == texts[1]  # the same seed


def test_a_stream_has_the_text_and_the_scores_of_the_whole_answer(
    client: openai.OpenAI, model: str
) -> None:
    asked: dict[str, Any] = {
        "model": model,
        "messages": CHAT,
        "response_format": of_schema(SCHEMAS[0]),
        "max_tokens": MAX_TOKENS,
        "seed": 5,
        "logprobs": True,
        "top_logprobs": 2,
    }
    (whole,) = client.chat.completions.create(**asked).choices
    text, scores = "", []
    for chunk in client.chat.completions.create(stream=True, **asked):
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        scores += (choice.logprobs and choice.logprobs.content) or []
    assert text == whole.message.content
    assert whole.logprobs is not None
    assert scores == whole.logprobs.content


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"structured_outputs": {"choice": ["yes", "no", "perhaps"]}}, "yes|no|perhaps"),
        ({"guided_choice": ["one way", "or another"]}, "one way|or another"),
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}}, "[0-9]{3}-[a-f]{2}"),
        ({"guided_regex": "(ab|cd){2}"}, "(ab|cd){2}"),
        ({"guided_grammar": 'root ::= "<" [a-c] [a-c] ">"'}, "<[a-c]{2}>"),
    ],
)
def test_completions_follow_choices_expressions_and_grammars(
    constraint: dict[str, Any], pattern: str, client: openai.OpenAI, model: str
) -> None:
    answer = client.completions.create(
        model=model, prompt="Once", max_tokens=40, n=4, seed=2, extra_body=constraint
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert re.fullmatch(pattern, choice.text), choice.text


def test_an_answer_cut_at_its_length_is_the_beginning_of_a_valid_one(
    client: openai.OpenAI, model: str
) -> None:
    answer = client.completions.create(
        model=model, prompt="Once", max_tokens=3, extra_body={"guided_regex": "[0-9]{60}"}
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert re.fullmatch("[0-9]{1,59}", choice.text)


def test_a_complete_answer_ends_before_min_tokens(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model,
        prompt="Once",
        max_tokens=30,
        extra_body={"guided_choice": ["yes"], "min_tokens": 20},
    )
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("yes", "stop")


@pytest.mark.parametrize(
    "constraint",
    [
        {"guided_regex": "(unclosed"},
        {"guided_grammar": "root ::= missing"},
        {"guided_json": {"$ref": "#"}},
    ],
    ids=["regex", "grammar", "schema without output"],
)
def test_what_cannot_be_compiled_is_a_bad_request(
    constraint: dict[str, Any], client: openai.OpenAI, model: str
) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=model, prompt="Once", extra_body=constraint)


async def test_plain_streams_keep_their_tokens_beside_constrained_answers(
    deployment: Deployment, model: str
) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{deployment.url}/v1", api_key="none", max_retries=0
    ) as asks:

        async def plain(seed: int) -> str:
            chunks = await asks.completions.create(
                model=model, prompt="The bird", max_tokens=60, seed=seed, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in chunks])

        async def constrained(seed: int) -> str | None:
            answer = await asks.chat.completions.create(
                model=model,
                messages=CHAT,
                max_tokens=MAX_TOKENS,
                seed=seed,
                response_format=of_schema(SCHEMAS[seed % len(SCHEMAS)]),
            )
            return answer.choices[0].message.content

        alone = [await plain(seed) for seed in range(2)]
        alone_constrained = [await constrained(seed) for seed in range(8)]
        together = await asyncio.gather(
            plain(0), *(constrained(seed) for seed in range(8)), plain(1)
        )
    assert [together[0], together[-1]] == alone
    assert list(together[1:-1]) == alone_constrained


@pytest.mark.slow
def test_two_tensor_parallel_ranks_give_the_answers_of_one(
    client: openai.OpenAI, model: str, start_deployment: StartDeployment
) -> None:
    def answers(client: openai.OpenAI) -> list[str | None]:
        texts = []
        for schema in SCHEMAS:
            answer = client.chat.completions.create(
                model=model,
                messages=CHAT,
                max_tokens=MAX_TOKENS,
                temperature=0,
                response_format=of_schema(schema),
            )
            texts.append(answer.choices[0].message.content)
        return texts

    flags = ["--tensor-parallel-size", "2"]
    two = start_deployment(*flags, model_dir=DEMO_MODEL_DIR).wait_until_ready()
    with client_of(two) as other:
        assert answers(other) == answers(client)


@pytest.mark.slow
@pytest.mark.req("FEA-01")
def test_prefix_hits_and_preemptions_leave_constrained_answers_as_they_are() -> None:
    lines = StructuredOutputsParams(regex="([a-z]{3} [0-9]{2},){14}")
    items = StructuredOutputsParams(json={**SCHEMAS[2], "required": ["name", "inner"]})
    common = "The bird sat on the quay and looked at the ships. " * 5
    prompts = [f"{common}{index} " * 2 for index in range(9)]
    params = [
        SamplingParams(
            seed=index,
            max_tokens=100,
            ignore_eos=constraint is None,
            structured_outputs=constraint,
        )
        for index, constraint in enumerate([lines, items, None] * 3)
    ]

    def make_llm(num_blocks: int) -> LLM:
        return LLM(
            DEMO_MODEL_DIR,
            device="cpu",
            dtype="float32",
            threads=1,
            num_blocks=num_blocks,
            max_model_len=512,
            max_num_seqs=9,
            verify_plan=True,
            watermark=0.0,
            preempt_threshold=1.0,
            admit_threshold=1.0,
        )

    def generate(llm: LLM) -> list[RequestOutput]:
        return llm.generate(prompts, params, use_tqdm=False)

    with make_llm(600) as llm:
        first, again = generate(llm), generate(llm)
    with make_llm(40) as llm:
        preempted = generate(llm)
    assert all(output.num_cached_tokens > 0 for output in again)
    for output in first:
        assert output.outputs[0].num_preemptions == 0
    constrained = preempted[::3] + preempted[1::3]
    assert sum(output.outputs[0].num_preemptions for output in constrained) > 1
    texts = [output.outputs[0].text for output in first]
    for others in (again, preempted):
        assert [output.outputs[0].text for output in others] == texts
    for text in texts[::3]:
        assert re.match("([a-z]{3} [0-9]{2},)+", text)
    for text in texts[1::3]:
        jsonschema.validate(json.loads(text), SCHEMAS[2])
