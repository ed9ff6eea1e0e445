"""Offload tiers: which KV blocks are kept beyond the GPU, in which slots, and which are evicted."""
