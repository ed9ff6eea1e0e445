"""KV connectors: where KV blocks are kept beyond the GPU, and how they are moved."""
