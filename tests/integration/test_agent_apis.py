"""The official clients of the Responses and Messages APIs with a model that calls a tool."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.integration.deployment import Deployment
from tests.integration.test_tools import ANSWERS, LOOKUP, QUESTION, TEMPLATE
from tests.scripted_model import make_scripted_model

FUNCTION: Any = {"type": "function", **LOOKUP["function"]}
ARGUMENTS = {"container": "C417"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("scripted")
    make_scripted_model(folder, ANSWERS, TEMPLATE)
    with Deployment(folder, tmp_path_factory.mktemp("run"), "--served-model-name", "s") as server:
        yield server.wait_until_ready()


@pytest.fixture(scope="module")
def client(server: Deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_an_agent_of_the_responses_api_calls_the_tool(client: openai.OpenAI) -> None:
    asked: Any = {"model": "s", "tools": [FUNCTION], "temperature": 0, "prompt_cache_key": "a"}
    first = client.responses.create(**asked, input=[QUESTION])
    reasoning, message, call = first.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert reasoning.content[0].text == "I have to look it up."
    assert message.type == "message"
    assert first.output_text == "One moment."
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("lookup", '{"container": "C417"}')
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "B42"}
    last = client.responses.create(**asked, input=[result], previous_response_id=first.id)
    assert last.output_text == "C417 is at B42."
    assert last.usage is not None
    history: Any = [QUESTION, *(item.to_dict() for item in first.output), result]
    again = client.responses.create(**asked, input=history)
    assert again.output_text == "C417 is at B42."
    assert again.usage is not None
    assert again.usage.input_tokens == last.usage.input_tokens


def test_a_stream_of_the_responses_api_is_put_together_by_the_client(
    client: openai.OpenAI,
) -> None:
    strict: Any = {**FUNCTION, "strict": True}
    with client.responses.stream(
        model="s", input=[QUESTION], tools=[strict], temperature=0
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert {
        "response.reasoning_text.delta",
        "response.output_text.delta",
        "response.function_call_arguments.done",
    } <= kinds
    assert final.output_text == "One moment."
    (call,) = (item for item in final.output if item.type == "function_call")
    assert call.parsed_arguments == ARGUMENTS


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_agent_of_the_messages_api_calls_the_tool(server: Deployment, is_stream: bool) -> None:
    anthropic = pytest.importorskip("anthropic")
    tool = {
        "name": "lookup",
        "description": "Where a container is",
        "input_schema": LOOKUP["function"]["parameters"],
        "cache_control": {"type": "ephemeral"},
    }
    asked: Any = {
        "model": "s",
        "max_tokens": 100,
        "tools": [tool],
        "extra_body": {"temperature": 0},
    }
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:

        def answer(messages: list[Any]) -> Any:
            if not is_stream:
                return client.messages.create(**asked, messages=messages)
            with client.messages.stream(**asked, messages=messages) as stream:
                return stream.get_final_message()

        first = answer([QUESTION])
        thinking, text, call = first.content
        assert thinking.thinking == "I have to look it up."
        assert text.text == "One moment."
        assert (call.name, call.input) == ("lookup", ARGUMENTS)
        assert first.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "B42"}
        content = [block.to_dict() for block in first.content]
        last = answer(
            [
                QUESTION,
                {"role": "assistant", "content": content},
                {"role": "user", "content": [result]},
            ]
        )
        assert last.content[0].text == "C417 is at B42."
        assert last.stop_reason == "end_turn"


def test_an_agent_that_stores_nothing_sends_its_reasoning_back_sealed(
    client: openai.OpenAI,
) -> None:
    asked: Any = {"model": "s", "tools": [FUNCTION], "temperature": 0, "store": False}
    asked["include"] = ["reasoning.encrypted_content"]
    asked["reasoning"] = {"effort": "low", "summary": "auto"}
    first = client.responses.create(**asked, input=[QUESTION])
    reasoning, message, call = (item.to_dict() for item in first.output)
    assert reasoning.pop("content")
    result: Any = {"type": "function_call_output", "call_id": call["call_id"], "output": "B42"}
    history: Any = [QUESTION, reasoning, message, call, result]
    last = client.responses.create(**asked, input=history)
    assert last.output_text == "C417 is at B42."
    assert last.usage is not None
    assert last.usage.input_tokens_details.cached_tokens > 0


def test_the_tool_runner_of_anthropics_client_finishes_its_task(server: Deployment) -> None:
    """By default it asks for a thread and sends only the new turn."""
    anthropic = pytest.importorskip("anthropic")
    places = []

    def lookup(container: str) -> str:
        """Where a container is."""
        places.append(container)
        return "B42"

    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        last = client.beta.messages.tool_runner(
            model="s",
            max_tokens=100,
            tools=[anthropic.beta_tool(lookup)],
            messages=[QUESTION],
        ).until_done()
    assert places == ["C417"]
    assert last.content[0].text == "C417 is at B42."


def test_a_thinking_budget_ends_the_reasoning_and_the_answer_follows(client: openai.OpenAI) -> None:
    messages: Any = [QUESTION]
    tools: Any = [LOOKUP]

    def answer(budget: int) -> dict[str, Any]:
        (choice,) = client.chat.completions.create(
            model="s",
            messages=messages,
            tools=tools,
            temperature=0,
            extra_body={"thinking_token_budget": budget},
        ).choices
        return choice.message.to_dict()

    for budget, reasoning in ((-1, "I have to look it up."), (1, "I have to")):
        message = answer(budget)
        assert message["reasoning_content"] == reasoning
        assert message["content"] == "One moment."
        assert message["tool_calls"]


def test_the_second_request_of_claude_code_is_cached_although_its_first_block_differs(
    server: Deployment,
) -> None:
    """As it sends them: the nonce is in the first of three blocks of `system`."""
    anthropic = pytest.importorskip("anthropic")
    rules: Any = {"type": "text", "text": "You are a careful clerk. " * 120}
    rules["cache_control"] = {"type": "ephemeral"}
    messages: list[Any] = [QUESTION]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:

        def ask(nonce: str) -> Any:
            billing = f"x-anthropic-billing-header: cc_version=2.1; cch={nonce};"
            system = [{"type": "text", "text": text} for text in (billing, "You are an agent.")]
            return client.messages.create(
                model="s",
                max_tokens=100,
                system=[*system, rules],
                messages=messages,
                extra_body={"temperature": 0},
            )

        messages.append({"role": "assistant", "content": ask("a3f21").content})
        messages.append({"role": "user", "content": "And C009?"})
        usage = ask("77c0e").usage
    num_tokens = usage.input_tokens + usage.cache_read_input_tokens
    assert usage.cache_read_input_tokens >= 0.95 * num_tokens > 2500
