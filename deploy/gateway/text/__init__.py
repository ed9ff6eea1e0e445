"""Text and audio input: tokenizer, chat templates, detokenizing, stop strings, audio decoding."""
