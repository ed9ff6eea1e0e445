"""llama-index with OpenAILike, its class for servers with OpenAI's API."""

import asyncio
from typing import Any

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
from llama_index.core import PromptTemplate
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

SETTINGS: dict[str, Any] = {
    "api_base": f"{URL}/v1",
    "api_key": "none",
    "model": MODEL,
    "max_retries": 0,
    "context_window": 2048,
    "max_tokens": 256,
    "temperature": 0,
}
CHAT = OpenAILike(**SETTINGS, is_chat_model=True)
MESSAGES = [ChatMessage(role="user", content=QUESTION)]


@feature
def chat() -> None:
    assert CHAT.chat(MESSAGES).message.content == ANSWER
    assert CHAT.complete(QUESTION).text == ANSWER
    assert asyncio.run(CHAT.achat(MESSAGES)).message.content == ANSWER


@feature
def chat_streamed() -> None:
    assert "".join(chunk.delta or "" for chunk in CHAT.stream_chat(MESSAGES)) == ANSWER


@feature
def chat_with_history() -> None:
    first = CHAT.chat(MESSAGES).message  # an answer is sent back as it came
    system = ChatMessage(role="system", content="You are a clerk.")
    after = ChatMessage(role="user", content="And C009?")
    assert CHAT.chat([system, *MESSAGES, first, after]).message.content


@feature
def log_probabilities() -> None:
    asked = OpenAILike(**SETTINGS, is_chat_model=True, logprobs=True, top_logprobs=2)
    lines = asked.chat(MESSAGES).logprobs
    assert lines is not None
    assert "".join(line[0].token for line in lines[:3]) == ANSWER


AGENT = OpenAILike(**SETTINGS, is_chat_model=True, is_function_calling_model=True)


@feature
def tools() -> None:
    tool = FunctionTool.from_defaults(lookup)
    first = AGENT.chat_with_tools([tool], user_msg=UNLISTED)
    (call,) = AGENT.get_tool_calls_from_response(first)
    result = ChatMessage(
        role="tool",
        content=lookup(**call.tool_kwargs),
        additional_kwargs={"tool_call_id": call.tool_id},
    )
    history = [ChatMessage(role="user", content=UNLISTED), first.message, result]
    assert AGENT.chat_with_tools([tool], chat_history=history).message.content == ANSWER


@feature
def forced_tool_calls() -> None:
    assert AGENT.structured_predict(Record, PromptTemplate(QUESTION)) == RECORD


@feature
def structured_output() -> None:
    llm = OpenAILike(**SETTINGS, is_chat_model=True, should_use_structured_outputs=True)
    assert llm.structured_predict(Record, PromptTemplate(QUESTION)) == RECORD


@feature
def completions() -> None:
    completion = OpenAILike(**SETTINGS, is_chat_model=False)
    text = completion.complete("C417 B42").text
    assert text
    assert "".join(chunk.delta or "" for chunk in completion.stream_complete("C417 B42")) == text


@feature
def embeddings() -> None:
    model = OpenAILikeEmbedding(
        model_name=MODEL, api_base=f"{URL}/v1", api_key="none", embed_batch_size=2, max_retries=0
    )
    vectors = model.get_text_embedding_batch(["berth", "crane", "ship"])
    assert [len(vector) for vector in vectors] == [256] * 3
    assert len(asyncio.run(model.aget_query_embedding("berth"))) == 256


use_all("llama-index-llms-openai-like")
