"""The KV cache: block tables, block hashes, the prefix cache, the block pool, and holds."""
