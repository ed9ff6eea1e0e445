"""Attention over paged KV: what a step asks for, and the backends that compute it."""
