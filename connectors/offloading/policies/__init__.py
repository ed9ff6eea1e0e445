"""Eviction policies of offload tiers: the interface, the built-in ones, and loading by name."""
