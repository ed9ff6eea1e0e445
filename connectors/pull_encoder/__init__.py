"""Encoder outputs that another engine computed, pulled from its memory by content hash.

Each worker keeps outputs in slots of host memory, which a transport of `connectors.pull` registers.
A producer answers readers of these slots; a consumer asks its peers before it encodes.
"""
