"""OpenAI's Responses API, on the chat path: answers that can be stored, continued and awaited."""
