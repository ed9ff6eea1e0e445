"""The `tool_runner` of anthropic, Anthropic's own client."""

import anthropic
from task import MODEL, QUESTION, TOOLS, URL, done

with anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0) as client:
    last = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=1000,
        tools=[anthropic.beta_tool(tool) for tool in TOOLS],
        messages=[{"role": "user", "content": QUESTION}],
    ).until_done()
done("anthropic", "".join(block.text for block in last.content))
