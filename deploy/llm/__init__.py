"""`LLM`: offline generation in Python."""
