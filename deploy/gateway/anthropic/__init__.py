"""Anthropic's Messages API, on the chat path of the OpenAI API."""
