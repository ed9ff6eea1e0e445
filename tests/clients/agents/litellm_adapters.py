"""litellm, which translates: Anthropic's API and the Responses API to chats, and chats to both."""

import asyncio
import json
from typing import Any

import litellm
from task import MODEL, QUESTION, TOOLS, URL, call, done, schema_of


def by_chats(model: str, base: str) -> str:
    """A loop over chats, which are sent to /v1/messages or /v1/responses."""
    functions = [
        {"name": tool.__name__, "description": tool.__doc__, "parameters": schema_of(tool)}
        for tool in TOOLS
    ]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        answer = litellm.completion(
            model=model,
            api_base=base,
            api_key="none",
            messages=messages,
            tools=[{"type": "function", "function": function} for function in functions],
        )
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return str(message.content)
        for made in message.tool_calls:
            result = call(made.function.name, json.loads(made.function.arguments))
            messages.append({"role": "tool", "tool_call_id": made.id, "content": result})


async def by_messages() -> str:
    """A loop over messages of Anthropic's API, which are sent to /v1/chat/completions."""
    tools = [
        {"name": tool.__name__, "description": tool.__doc__, "input_schema": schema_of(tool)}
        for tool in TOOLS
    ]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        answer = await litellm.anthropic.messages.acreate(
            model=f"hosted_vllm/{MODEL}",
            api_base=f"{URL}/v1",
            api_key="none",
            max_tokens=1000,
            messages=messages,
            tools=tools,
        )
        messages.append({"role": "assistant", "content": answer["content"]})
        if answer["stop_reason"] != "tool_use":
            return "".join(block["text"] for block in answer["content"])
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block["id"],
                "content": call(block["name"], block["input"]),
            }
            for block in answer["content"]
            if block["type"] == "tool_use"
        ]
        messages.append({"role": "user", "content": results})


def by_responses(model: str) -> str:
    """A loop over responses, which are sent as they are or, by providers without this API, to
    /v1/chat/completions."""
    tools: list[Any] = [
        {
            "type": "function",
            "name": tool.__name__,
            "description": tool.__doc__,
            "parameters": schema_of(tool),
        }
        for tool in TOOLS
    ]
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        answer = litellm.responses(
            model=model, api_base=f"{URL}/v1", api_key="none", input=items, tools=tools, store=False
        )
        output = [item if isinstance(item, dict) else item.model_dump() for item in answer.output]
        items += output
        calls = [item for item in output if item["type"] == "function_call"]
        if not calls:
            message = output[-1]
            return "".join(part["text"] for part in message["content"])
        for made in calls:
            result = call(made["name"], json.loads(made["arguments"]))
            items.append(
                {"type": "function_call_output", "call_id": made["call_id"], "output": result}
            )


answers = {
    by_chats(f"anthropic/{MODEL}", URL),
    by_chats(f"openai/responses/{MODEL}", f"{URL}/v1"),
    asyncio.run(by_messages()),
    by_responses(f"openai/{MODEL}"),
    by_responses(f"lm_studio/{MODEL}"),
}
assert len(answers) == 1, answers
done("litellm", answers.pop())
