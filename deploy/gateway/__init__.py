"""The OpenAI-compatible gateway: HTTP, tokenizer, chat templates, detokenizing, streams."""
