"""The OpenAI-compatible front: HTTP, tokenizer, chat template, detokenizing, live streams."""
