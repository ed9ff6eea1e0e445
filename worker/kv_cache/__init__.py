"""The KV cache of one rank: its plan, its buffer and its block tables."""
