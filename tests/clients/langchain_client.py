"""langchain-openai: chats, completions and embeddings."""

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
    empty_object_bias,
    feature,
    lookup,
    use_all,
)
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from openai import NotFoundError

SERVER: dict[str, Any] = {
    "base_url": f"{URL}/v1",
    "api_key": "none",
    "model": MODEL,
    "max_retries": 0,
}
CHAT = ChatOpenAI(**SERVER, temperature=0, max_tokens=256)


@feature
def chat() -> None:
    answer = CHAT.invoke(QUESTION)
    assert answer.content == ANSWER
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 4
    assert answer.response_metadata["finish_reason"] == "stop"


@feature
def chat_streamed() -> None:
    chunks = list(CHAT.stream(QUESTION, stream_usage=True))
    assert "".join(str(chunk.content) for chunk in chunks) == ANSWER
    (usage,) = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert usage["output_tokens"] == 4


@feature
def chat_with_history() -> None:
    parts: list[str | dict[Any, Any]] = [{"type": "text", "text": QUESTION}]
    history = [SystemMessage("You are a clerk."), HumanMessage("Hello"), AIMessage("Yes?")]
    assert CHAT.invoke([*history, HumanMessage(parts)]).content
    first = CHAT.invoke(QUESTION)  # an answer is sent back as it came
    assert CHAT.invoke([HumanMessage(QUESTION), first, HumanMessage("And C009?")]).content


@feature
def chats_at_the_same_time() -> None:
    assert [answer.content for answer in CHAT.batch([QUESTION] * 3)] == [ANSWER] * 3
    assert asyncio.run(CHAT.ainvoke(QUESTION)).content == ANSWER


@feature
def sampling_parameters() -> None:
    assert CHAT.invoke(QUESTION, stop=["B42"], seed=3).content == "C417 "
    several = ChatOpenAI(**SERVER, n=2, temperature=1, max_tokens=4)
    assert len(several.generate([[HumanMessage(QUESTION)]]).generations[0]) == 2
    of_server = ChatOpenAI(**SERVER, temperature=1, extra_body={"top_k": 1, "spare": True})
    assert of_server.invoke(QUESTION).content == ANSWER


@feature
def log_probabilities() -> None:
    asked = ChatOpenAI(**SERVER, temperature=0, logprobs=True, top_logprobs=3)
    lines = asked.invoke(QUESTION).response_metadata["logprobs"]["content"]
    assert "".join(line["token"] for line in lines[:3]) == ANSWER
    assert all(len(line["top_logprobs"]) == 3 for line in lines)


@feature
def tools() -> None:
    agent = CHAT.bind_tools([lookup])
    messages: list[Any] = [HumanMessage(UNLISTED)]
    first = agent.invoke(messages)
    (call,) = first.tool_calls
    assert call["name"] == "lookup"
    messages += [first, ToolMessage(lookup(**call["args"]), tool_call_id=call["id"])]
    assert agent.invoke(messages).content == ANSWER


@feature
def tools_streamed() -> None:
    gathered: Any = None
    for chunk in CHAT.bind_tools([lookup]).stream(UNLISTED):
        gathered = chunk if gathered is None else gathered + chunk
    (call,) = gathered.tool_calls
    assert lookup(**call["args"]) == ANSWER


@feature
def forced_tool_calls() -> None:
    agent = CHAT.with_structured_output(Record, method="function_calling")
    assert agent.invoke(QUESTION) == RECORD


@feature
def structured_output() -> None:
    assert CHAT.with_structured_output(Record).invoke(QUESTION) == RECORD


@feature
def json_mode() -> None:
    biased = ChatOpenAI(**SERVER, logit_bias=empty_object_bias(), max_tokens=256)
    assert biased.with_structured_output(None, method="json_mode").invoke(QUESTION) == {}


@feature
def responses() -> None:
    assert ChatOpenAI(**SERVER, use_responses_api=True).invoke(QUESTION).text == ANSWER


@feature
def completions() -> None:
    completion = OpenAI(**SERVER, max_tokens=4, temperature=0)
    text = completion.invoke("C417 B42")
    assert text
    assert "".join(completion.stream("C417 B42")) == text
    result = OpenAI(**SERVER, max_tokens=4, n=2, best_of=2).generate(["C417", "C009"])
    assert [len(answers) for answers in result.generations] == [2, 2]


@feature
def embeddings() -> None:
    # The default needs OpenAI's tokenizer, and sends its token ids.
    model = OpenAIEmbeddings(**SERVER, check_embedding_ctx_length=False)
    vectors = model.embed_documents(["berth", "crane"])
    assert [len(vector) for vector in vectors] == [256, 256]
    short = OpenAIEmbeddings(**SERVER, check_embedding_ctx_length=False, dimensions=8)
    assert len(short.embed_query("berth")) == 8


@feature
def errors() -> None:
    try:
        ChatOpenAI(**{**SERVER, "model": "other"}).invoke(QUESTION)
    except NotFoundError:
        return
    raise AssertionError("there is no such model")


use_all("langchain-openai")
