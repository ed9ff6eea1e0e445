"""Text: tokenizer, chat templates, detokenizing, stop strings."""
