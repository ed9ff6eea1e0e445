"""The KV cache of one rank: its plan, its buffer, and the tables that lead into it."""
