"""Parsers of generated text: reasoning and tool calls in the formats of model families."""
