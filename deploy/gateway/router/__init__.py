"""Which engine gets a request: policies, loads, and an index of the engines' KV blocks."""
