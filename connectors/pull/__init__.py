"""KV that another engine computed, pulled from its memory: prefill and decode apart.

The owner (prefill) keeps the blocks of an ended request under a lease; the reader (decode) copies
the missing ones. `nixl`, `mooncake`, `moriio` and `p2p_nccl` are transports of the same
connector.
"""
