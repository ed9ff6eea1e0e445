"""Attention over paged KV: the metadata of a step, and the backends that compute it."""
