"""pydantic-ai: agents whose model is served with OpenAI's API."""

from features import (
    ANSWER,
    MODEL,
    QUESTION,
    RECORD,
    UNLISTED,
    URL,
    Record,
    feature,
    lookup,
    use_all,
)
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

PROVIDER = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
CHAT = OpenAIChatModel(MODEL, provider=PROVIDER)
SETTINGS = ModelSettings(temperature=0, max_tokens=256)


@feature
def chat() -> None:
    assert Agent(CHAT, model_settings=SETTINGS).run_sync(QUESTION).output == ANSWER


@feature
def chat_streamed() -> None:
    stream = Agent(CHAT, model_settings=SETTINGS).run_stream_sync(QUESTION)
    assert "".join(stream.stream_text(delta=True)) == ANSWER


@feature
def chat_with_history() -> None:
    agent = Agent(CHAT, model_settings=SETTINGS)
    first = agent.run_sync(QUESTION)
    after = agent.run_sync("And C009?", message_history=first.all_messages())
    assert after.output == "C009 B07 blue"


@feature
def tools() -> None:
    agent = Agent(CHAT, tools=[lookup], model_settings=SETTINGS)
    assert agent.run_sync(UNLISTED).output == ANSWER


@feature
def forced_tool_calls() -> None:
    agent = Agent(CHAT, output_type=ToolOutput(Record), model_settings=SETTINGS)
    assert agent.run_sync(QUESTION).output == RECORD


@feature
def structured_output() -> None:
    agent = Agent(CHAT, output_type=NativeOutput(Record), model_settings=SETTINGS)
    assert agent.run_sync(QUESTION).output == RECORD


@feature
def responses() -> None:
    model = OpenAIResponsesModel(MODEL, provider=PROVIDER)
    assert Agent(model, model_settings=SETTINGS).run_sync(QUESTION).output == ANSWER


@feature
def responses_with_tools() -> None:
    model = OpenAIResponsesModel(MODEL, provider=PROVIDER)
    agent = Agent(model, tools=[lookup], model_settings=SETTINGS)
    assert agent.run_sync(UNLISTED).output == ANSWER


use_all("pydantic-ai-slim")
