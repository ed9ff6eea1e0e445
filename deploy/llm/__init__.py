"""`LLM`: offline generation from plain Python."""
