"""openai-agents, OpenAI's framework, with its default API."""

import agents
from openai import AsyncOpenAI
from task import MODEL, QUESTION, TOOLS, URL, done

agents.set_tracing_disabled(True)  # it would be sent to OpenAI
agents.set_default_openai_client(AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0))
agent = agents.Agent(
    name="clerk",
    instructions="You are a clerk.",
    model=MODEL,
    tools=[agents.function_tool(tool) for tool in TOOLS],
)
done("openai-agents", agents.Runner.run_sync(agent, QUESTION).final_output)
