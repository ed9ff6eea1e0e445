"""smolagents, whose agent ends a task by a call, too."""

import smolagents
from task import MODEL, QUESTION, TOOLS, URL, done

agent = smolagents.ToolCallingAgent(
    tools=[smolagents.tool(tool) for tool in TOOLS],
    model=smolagents.OpenAIModel(model_id=MODEL, api_base=f"{URL}/v1", api_key="none"),
    verbosity_level=0,
)
done("smolagents", agent.run(QUESTION))
