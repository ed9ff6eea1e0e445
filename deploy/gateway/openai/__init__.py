"""The OpenAI-compatible API: endpoints, request bodies, responses."""
