"""Where KV blocks live beyond the GPU, and how they move."""
