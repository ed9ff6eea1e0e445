"""Ask a server a question that its model answers with a tool. docs/tools.md explains it."""

import json
import os

from openai import OpenAI  # pip install openai

url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
client = OpenAI(base_url=url, api_key="none")
model = client.models.list().data[0].id
yard = {"C417": "C417 B42 red"}
tools = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "The record of a container",
            "parameters": {
                "type": "object",
                "properties": {"container": {"type": "string"}},
                "required": ["container"],
            },
        },
    }
]
messages = [{"role": "user", "content": "Where is C417?"}]
for _ in range(5):
    answer = client.chat.completions.create(model=model, messages=messages, tools=tools)
    message = answer.choices[0].message
    messages.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        container = json.loads(call.function.arguments)["container"]
        record = yard.get(container, f"{container} unknown")
        print(f"{call.function.name}({container}) = {record}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": record})
print(message.content)
